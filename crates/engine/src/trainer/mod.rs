//! The training loop, from the epochs down to the batches: `train`, `run_epoch`, `run_step`, `run_batch`. All else that
//! happens during training is a [`Callback`].

mod amp;
mod builder;
mod built_in_models;
mod callback;
mod callbacks;
mod context;
mod criterion;
mod exact_mean;
mod find_non_finite;
mod last_step;
mod loss;
mod options;
mod own_step;
mod resume;
mod step;
mod summary;
mod warm_up;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tch::Device;

use crate::checkpoint::TrainerState;
use crate::data::Batch;
use crate::error::Result;
use crate::models::Forward;
use crate::operation::Operation;
use crate::runtime::panics;
use callbacks::{Callbacks, Order};
use own_step::Share;

pub use crate::events::Epoch;
pub use amp::Amp;
pub use callback::Callback;
pub use callbacks::compare_replicas;
pub use callbacks::{FingerprintOptions, KeepTensors, SaveEvery};
pub use context::TrainContext;
pub use criterion::{Criterion, LossParts};
pub use loss::Loss;
pub use options::TrainerOptions;
pub use step::Step;
pub use summary::Summary;

/// The training loop of one rank, in step with all other ranks.
#[derive(Debug)]
pub struct Trainer<M> {
    /// The model, the optimizer, the data and the progress: all that callbacks see.
    context: TrainContext<M>,
    callbacks: Callbacks<M>,
}

impl<M: Forward> Trainer<M> {
    /// Trains until `max_epochs` epochs (at least 1) are done or the run stops. A collective.
    ///
    /// # Errors
    /// The first error on any rank. A panic is an error, too.
    #[inline(never)] // for `built_in_models`
    pub fn train(&mut self, max_epochs: u64) -> anyhow::Result<Summary> {
        // Forward passes, which return no errors, throw them.
        let trained = catch_unwind(AssertUnwindSafe(|| self.train_to_the_end(max_epochs)))
            .unwrap_or_else(|panic| Err(panics::error(panic)));
        trained.inspect_err(|error| {
            let Self { context, callbacks } = self;
            callbacks.each_on_failure(|callback| callback.on_failure(context, error));
        })
    }

    fn train_to_the_end(&mut self, max_epochs: u64) -> anyhow::Result<Summary> {
        let context = &mut self.context;
        context.max_epochs = max_epochs.max(1);
        context.ended_by = None;
        if matches!(context.group().device(), Device::Cuda(_)) {
            context.warm_up()?;
        }
        let saves = [Order::Checkpoints, Order::SaveAfterFailure];
        context.begin_training(saves.iter().any(|order| self.callbacks.has(*order)))?;
        self.callbacks.each(|callback| callback.on_train_start(context))?;
        let (started, first_step) = (Instant::now(), context.state.step);
        let stopped = loop {
            if self.context.state.epoch >= self.context.max_epochs {
                break None;
            }
            // A state that was saved after a failure may be at the end of an epoch that is not ended.
            if !self.context.is_at_epoch_end()
                && let Some(reason) = self.context.stopped()
            {
                break Some(reason);
            }
            self.run_epoch()?;
        };
        let elapsed = started.elapsed();
        self.context.check_parameters()?;
        for (_, callback) in self.callbacks.0.iter_mut().rev() {
            callback.on_train_end(&mut self.context)?;
        }
        let context = &mut self.context;
        let (first_loss, last_loss) = match context.state.epoch_losses[..] {
            [] => {
                let loss = context.take_loss()?; // a collective
                (loss, loss)
            }
            [first, .., last] => (first, last),
            [only] => (only, only),
        };
        let TrainerState { step: steps, skipped_steps, .. } = context.state;
        let steps_now = steps - first_step;
        Ok(Summary { steps, steps_now, stopped, first_loss, last_loss, skipped_steps, elapsed })
    }

    /// Runs one pass over the rest of this rank's share of the data, or a part of it if the run stops.
    fn run_epoch(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        let Self { context, callbacks } = self;
        callbacks.each(|callback| callback.on_epoch_start(context))?;
        let (epoch, samples_seen) = (context.state.epoch, context.state.samples_seen);
        let mut batches = context.loader.epoch_from(epoch, samples_seen)?;
        let steps = context.steps_from(samples_seen);
        context.counted_here = 0;
        let mut samples = 0;
        for left in (0..steps).rev() {
            samples += self.run_step(&mut batches, left == 0)?;
            if left > 0 && self.context.stopped().is_some() {
                return Ok(());
            }
        }
        drop(batches); // frees their memory before the validation
        let Self { context, callbacks } = self;
        context.last_step.epoch_end = Some(context.state.clone());
        let mut epoch = context.end_epoch(samples, started)?;
        // A callback of the program may change the model.
        context.last_step.is_whole = !callbacks.has(Order::User);
        callbacks.each(|callback| callback.on_epoch_end(context, &mut epoch))?;
        context.last_step.is_whole = true;
        context.last_step.epoch_end = None;
        Ok(())
    }

    /// Runs one step on the next of `batches`: forward, backward, average the gradients over the ranks, step the
    /// parameters. Returns the number of this rank's samples.
    fn run_step(
        &mut self,
        batches: &mut dyn Iterator<Item = Result<Batch>>,
        ends_epoch: bool,
    ) -> anyhow::Result<usize> {
        let Self { context, callbacks } = self;
        let (epoch, index) = (context.state.epoch, context.state.step);
        if let Some(stop) = context.stop.as_ref().filter(|_| context.group().rank() == 0) {
            stop.decide(index);
        }
        context.group().enter_step(index)?;
        context.group().enter_phase(Operation::Data, index);
        let batches = batches.take(context.options.accumulate).collect::<Result<_>>()?;
        let mut step = Step::new(index, context.schedule.lr(epoch, index), batches, ends_epoch);
        context.begin_step()?;
        callbacks.each(|callback| callback.on_step_start(context, &mut step))?;
        context.count_batches(&mut step)?;
        context.count_step_of_all_ranks(&step)?;

        context.ddp.zero_grad()?;
        if let Some(generator) = &context.generator {
            generator.begin_step(index)?;
        }
        let averages = context.ddp.num_averages();
        context.has_run_backward = false;
        for batch in 0..step.batches.len() {
            self.run_batch(&mut step, batch)?;
        }
        let Self { context, callbacks } = self;
        if context.own_step.is_some() {
            context.check_own_step(averages)?;
        }
        callbacks.each(|callback| callback.on_after_backward(context, &mut step))?;
        if step.is_skipped() {
            context.take_back_losses(&step)?;
        } else {
            context.add_losses(&step)?;
            context.group().next_phase(Operation::Optimizer);
            context.scaler.unscale_()?;
            if let Some(max_norm) = context.options.max_grad_norm {
                step.grad_norm = Some(context.ddp.clip_grad_norm(max_norm)?);
            }
            callbacks.each(|callback| callback.on_before_optimizer_step(context, &step))?;
            context.last_step.is_whole = false;
            let stepped = context.scaler.step(&mut *context.optimizer, step.lr);
            // Ranks that share a model all step, or none does.
            context.last_step.is_whole = stepped.is_err() && context.ddp.steps_at_once();
            let has_stepped = stepped?;
            context.state.skipped_steps += u64::from(!has_stepped);
            context.scaler.update()?;
        }
        context.group().end_phase();

        context.count_step(&step);
        context.last_step.buffers = None;
        context.last_step.is_whole = !callbacks.has(Order::User);
        callbacks.each(|callback| callback.on_step_end(context, &step))?;
        context.last_step.is_whole = true;
        Ok(step.num_samples())
    }

    /// Runs forward and backward of one of the step's batches. Backward of the last batch averages the gradients that
    /// all batches have accumulated.
    fn run_batch(&mut self, step: &mut Step, batch: usize) -> anyhow::Result<()> {
        let Self { context, callbacks } = self;
        let is_last = batch + 1 == step.batches.len();
        let _no_sync = (!is_last).then(|| context.ddp.no_sync());
        context.share = Share {
            batches: step.batches.len(),
            count: step.count_of(batch),
            is_empty: step.batches[batch].is_empty(),
        };
        let own_step = context.own_step.clone();
        let loss = match &own_step {
            Some(own) => own.run(context, &step.batches[batch], batch)?, // with its backward
            None => context.loss_of(&step.batches[batch], Some(batch))?,
        };
        let mut loss = context.with_fault(&loss)?;
        context.check_loss(&loss, batch, &step.batches[batch])?;
        if own_step.is_none() {
            callbacks
                .each(|callback| callback.on_before_backward(context, step, batch, &mut loss))?;
        }
        context.makes_loss_nan = false;
        step.losses.push(loss);
        if is_last {
            context.record_losses(step)?;
        }
        if own_step.is_none() {
            context.backward(&step.losses[batch])?;
        }
        Ok(())
    }
}
