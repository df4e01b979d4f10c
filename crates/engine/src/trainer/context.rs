//! The state of a training run: what the loop works on and callbacks see.

use std::cell::OnceCell;
use std::rc::Rc;
use std::slice;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::exact_mean::StepCount;
use super::last_step::LastStep;
use super::loss::LossSum;
use super::own_step::{OwnStep, Share};
use super::{Criterion, Epoch, Step, TrainerOptions};
use crate::checkpoint::TrainerState;
use crate::data::{Batch, DataLoader};
use crate::ddp::DistributedDataParallel;
use crate::error::{Error, Result};
use crate::events::Observers;
use crate::ffi::{Generator, TorchResult};
use crate::models::Forward;
use crate::optim::{GradScaler, Optimizer, Schedule};
use crate::process_group::ProcessGroup;
use crate::runtime::{RecordedLosses, StopReason, StopRequest};

/// The state of one rank's training run.
#[derive(Debug)]
pub struct TrainContext<M> {
    pub(super) ddp: DistributedDataParallel<M>,
    pub(super) optimizer: Box<dyn Optimizer>,
    pub(super) schedule: Schedule,
    pub(super) loader: DataLoader,
    pub(super) criterion: Criterion,
    /// The program's own step; `None` for the forward pass and the criterion.
    pub(super) own_step: Option<OwnStep<M>>,
    /// The share of the batch that the step is at.
    pub(super) share: Share,
    /// What all ranks' batches of the step count as, with `exact_mean`.
    pub(super) step_count: Option<StepCount>,
    /// Whether this step has called [`TrainContext::backward`].
    pub(super) has_run_backward: bool,
    /// Whether an injected fault makes the loss of the next batch NaN.
    pub(super) makes_loss_nan: bool,
    pub(super) options: TrainerOptions,
    pub(super) scaler: GradScaler,
    pub(super) generator: Option<Arc<Generator>>,
    /// Epochs of the whole run.
    pub(super) max_epochs: u64,
    pub(super) stop: Option<Arc<StopRequest>>,
    /// Who is told what happens.
    pub(super) observers: Observers,
    /// Why a callback ended training on all ranks alike; `None` if none has.
    pub(super) ended_by: Option<StopReason>,
    pub(super) state: TrainerState,
    pub(super) loss_sum: LossSum,
    /// What can be saved if another rank fails.
    pub(super) last_step: LastStep,
    /// What this rank's batches of the epoch that count for its loss count as, if the criterion counts.
    pub(super) counted: u64,
    /// What this rank's batches since the start of the epoch, or of its rest, count as.
    pub(super) counted_here: usize,
    /// Tokens in each sample, which the first step counts; `None` unless samples are sequences of tokens.
    pub(super) tokens_per_sample: OnceCell<Option<usize>>,
}

impl<M> TrainContext<M> {
    /// Returns the model in its current state.
    pub fn ddp(&self) -> &DistributedDataParallel<M> {
        &self.ddp
    }

    /// Returns the group of ranks that train the model.
    pub fn group(&self) -> &Rc<ProcessGroup> {
        self.ddp.group()
    }

    /// Returns the source of the batches.
    pub fn loader(&self) -> &DataLoader {
        &self.loader
    }

    /// Returns the loss scaler; enabled for float16 only.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// Returns the progress of the run, as a checkpoint stores it.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Returns how many steps an epoch has after its first `samples_seen` samples.
    pub(super) fn steps_from(&self, samples_seen: usize) -> u64 {
        self.loader.num_batches_from(samples_seen).div_ceil(self.options.accumulate) as u64
    }

    /// Returns whether all steps of the epoch are made, and the epoch is not ended.
    pub(super) fn is_at_epoch_end(&self) -> bool {
        let TrainerState { epoch_steps, samples_seen, .. } = self.state;
        epoch_steps > 0 && self.steps_from(samples_seen) == 0
    }

    /// Returns how many steps the whole run has, if nothing ends it early.
    pub(super) fn total_steps(&self) -> u64 {
        let TrainerState { epoch, step, samples_seen, .. } = self.state;
        let steps = match self.max_epochs.saturating_sub(epoch) {
            0 => step,
            epochs => (epochs - 1)
                .saturating_mul(self.steps_from(0))
                .saturating_add(step + self.steps_from(samples_seen)),
        };
        self.options.max_steps.map_or(steps, |max| max.min(steps))
    }

    /// Ends training after this step or epoch. All ranks must call this alike: because of an epoch's loss, for example,
    /// which is equal on all ranks.
    pub fn end_training(&mut self) {
        self.ended_by.get_or_insert(StopReason::Callback);
    }

    /// Asks all ranks to stop, from any one of them. Rank 0 sees the request before its next step, or
    /// across processes before the one after it. All ranks end training after that step.
    ///
    /// # Errors
    /// [`Error::Input`] without [`Trainer::share_stop`](super::Trainer::share_stop), which connects the ranks.
    pub fn request_stop(&self) -> Result<()> {
        let Some(stop) = &self.stop else {
            return Err(Error::usage(
                "a callback requests a stop, but the ranks share no StopRequest; call Trainer::share_stop on all ranks"
                    .into(),
            ));
        };
        stop.ask(StopReason::Callback);
        Ok(())
    }

    /// Returns why the run stops before its last epoch; `None` if it goes on. Equal on all ranks after the same step.
    pub(super) fn stopped(&self) -> Option<StopReason> {
        let steps = self.state.step;
        if self.options.max_steps.is_some_and(|max| steps >= max) {
            return Some(StopReason::Steps);
        }
        // All ranks see the same validation loss. A resumed run may have no patience left.
        let since_best = self.state.validations_since_best as u64;
        let is_over = self.options.patience.is_some_and(|patience| since_best >= patience.max(1));
        let no_progress = is_over.then_some(StopReason::NoProgress);
        self.ended_by.or(no_progress).or_else(|| self.stop.as_ref()?.after(steps))
    }

    /// Returns this rank's samples in `count` batches of this step from batch `first`, by their indices in the data.
    pub(super) fn samples(&self, first: usize, count: usize) -> Result<Vec<usize>> {
        self.loader.samples(self.state.epoch, self.state.samples_seen, first, count)
    }

    /// Counts the batches of a step as the criterion says.
    pub(super) fn count_batches(&self, step: &mut Step) -> Result<()> {
        if self.criterion.has_count() {
            let count = |(index, batch)| {
                let count = self.criterion.count_of(batch);
                count.map_err(|error| self.with_samples(error, Some(index)))
            };
            step.counts = step.batches.iter().enumerate().map(count).collect::<Result<_>>()?;
        }
        Ok(())
    }

    /// Counts a step that has just been made or skipped.
    pub(super) fn count_step(&mut self, step: &Step) {
        // If the loader does not know all ranks' samples, every rank has the same number.
        let dealt = self.loader.dealt_in(self.state.samples_seen, step.batches.len());
        let samples = dealt.unwrap_or(step.num_samples() * self.group().world_size());
        self.tokens_per_sample
            .get_or_init(|| step.batches.first().and_then(Batch::tokens_per_sample));
        if step.is_skipped() {
            self.state.skipped_steps += 1;
            self.state.skipped_samples += samples;
        }
        self.counted_here += step.count();
        self.state.step += 1;
        self.state.epoch_steps += 1;
        self.state.samples_seen += samples;
    }

    /// Counts an epoch that has just been completed, with `samples` samples on this rank since `started`. A
    /// collective.
    pub(super) fn end_epoch(&mut self, samples: usize, started: Instant) -> Result<Epoch> {
        let loss = self.take_loss()?;
        let state = &mut self.state;
        state.epoch_losses.truncate(1);
        state.epoch_losses.push(loss);
        let (epoch, steps) = (state.epoch, state.epoch_steps);
        state.epoch += 1;
        state.epoch_steps = 0;
        state.samples_seen = 0;
        state.skipped_samples = 0;
        let group = self.group();
        let seconds = started.elapsed().as_secs_f64();
        let samples_per_second = samples as f64 / seconds;
        let counted = self.counted_here as f64 / seconds;
        Ok(Epoch {
            rank: group.rank(),
            local_rank: group.local_rank(),
            device: group.label().into(),
            epoch,
            batch_size: self.loader.batch_size(),
            steps,
            loss,
            samples_per_second,
            tokens_per_second: self.tokens_per_second(samples_per_second, counted),
            validation: None,
            local_world_size: group.local_world_size(),
        })
    }

    /// Returns the tokens per second: `counted`, the rate of what the criterion counts, or the tokens in `samples`, a rate
    /// of samples. `None` unless samples are sequences of tokens.
    pub(super) fn tokens_per_second(&self, samples: f64, counted: f64) -> Option<f64> {
        if self.criterion.has_count() {
            return Some(counted);
        }
        let tokens = self.tokens_per_sample.get().copied().flatten();
        tokens.map(|tokens| samples * tokens as f64)
    }

    /// Returns the mean loss of the epoch so far, and resets it. A collective.
    pub(super) fn take_loss(&mut self) -> Result<f64> {
        let group = self.ddp.group();
        let counted = if self.criterion.has_count() {
            self.counted as usize
        } else if group.rank() == 0 {
            // The number of all ranks' samples is the same on every rank, so rank 0 alone counts them.
            self.state.samples_seen - self.state.skipped_samples
        } else {
            0
        };
        self.loss_sum.count(counted)?;
        self.counted = 0;
        self.last_step.losses = RecordedLosses::default();
        self.check_loss_sum(self.loss_sum.sum(group)?)?;
        self.loss_sum.take_mean(group)
    }
}

impl<M: Forward> TrainContext<M> {
    /// Returns the loss of a batch, in mixed precision if enabled. Backward must run after this, outside of autocast.
    /// `index` is the batch's index in the step; `None` outside of one.
    pub(super) fn loss_of(&self, batch: &Batch, index: Option<usize>) -> Result<Tensor> {
        let _autocast = self.autocast()?;
        let loss = self.criterion.loss(&self.forward(batch, true), batch);
        loss.map_err(|error| self.with_samples(error, index))
    }

    /// Runs the model's own forward pass on the inputs of `batch`, in training or evaluation mode.
    pub fn forward(&self, batch: &Batch, train: bool) -> Tensor {
        let first = slice::from_ref(&batch.inputs);
        if batch.more_inputs.is_empty() {
            return self.ddp.forward_inputs(first, train);
        }
        let all = first.iter().chain(&batch.more_inputs).map(Tensor::shallow_clone);
        self.ddp.forward_inputs(&all.collect::<Vec<_>>(), train)
    }
}

/// A model's buffers, which a forward pass in training changes, such as the running statistics of batch norms: pairs of
/// a copy of the former value and the buffer itself.
#[derive(Debug)]
pub(super) struct BufferSnapshot(Vec<(Tensor, Tensor)>);

impl BufferSnapshot {
    /// Copies the buffers of `ddp`'s model.
    pub(super) fn of<M>(ddp: &DistributedDataParallel<M>) -> Result<Self> {
        let copy = |buffer: &Tensor| Ok((buffer.f_detach_copy()?, buffer.shallow_clone()));
        ddp.buffers().map(copy).collect::<Result<_, _>>().map(Self).doing("copying buffers")
    }

    /// Copies the former values back.
    pub(super) fn restore(self) -> Result<()> {
        tch::no_grad(|| self.0.into_iter().try_for_each(|(copy, mut buffer)| buffer.f_copy_(&copy)))
            .doing("restoring buffers")
    }
}
