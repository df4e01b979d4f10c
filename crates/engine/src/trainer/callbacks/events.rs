//! Tells the observers of a run what happens in training.

use std::time::Instant;

use anyhow::Result;
use tch::{Kind, Tensor};

use crate::events::{Event, TrainingStart};
use crate::ffi::TorchResult;
use crate::process_group::ReduceOp;
use crate::records::TrainMetrics;
use crate::trainer::{Callback, Epoch, Step, TrainContext};

/// Tells the observers each step, the metrics of every few steps, each validation and each epoch.
#[derive(Debug)]
pub(in crate::trainer) struct Events {
    /// Steps between metrics.
    every: u64,
    /// Whether the ranks measure metrics, which an observer of rank 0 wants.
    measures: bool,
    since: Instant,
    totals: Totals,
    /// This rank's sum of the epoch's losses at the last metrics.
    loss_sum: f64,
}

/// The totals of the steps since the last metrics.
#[derive(Debug, Default)]
struct Totals {
    steps: u64,
    samples: usize,
    /// What all batches count as: their samples, unless the criterion says otherwise.
    counted: usize,
    /// The same for the loss: without skipped steps.
    counted_for_loss: usize,
    /// The norm of the last step's gradients; `None` if it was not measured.
    grad_norm: Option<Tensor>,
    /// The learning rate of the last step.
    lr: f64,
}

impl Events {
    pub(in crate::trainer) fn new(every: u64) -> Self {
        let totals = Totals::default();
        Self { every, measures: false, since: Instant::now(), totals, loss_sum: 0.0 }
    }

    /// Tells the metrics of the steps since the last ones, if there were any. A collective in that case.
    fn measure<M>(&mut self, context: &TrainContext<M>) -> Result<()> {
        if self.totals.steps == 0 {
            return Ok(());
        }
        let group = context.group();
        let loss_sum = context.loss_sum.sum(group)?;
        context.check_loss_sum(loss_sum)?;
        let loss_here = loss_sum - self.loss_sum;
        let Totals { steps, samples, counted, counted_for_loss, grad_norm, lr } =
            std::mem::take(&mut self.totals);
        let mut mine = vec![loss_here, counted_for_loss as f64, samples as f64];
        if context.criterion.has_count() {
            mine.push(counted as f64);
        }
        let doing = "reducing the metrics";
        let mut totals = group.to_device(&Tensor::from_slice(&mine))?;
        group.all_reduce(&mut totals, ReduceOp::Sum)?;
        let totals = Vec::<f64>::try_from(group.to_host(&totals)?).doing(doing)?;
        let grad_norm = grad_norm.map(|norm| norm.f_double_value(&[]));
        let grad_norm = grad_norm.transpose().doing(doing)?;
        let seconds = self.since.elapsed().as_secs_f64();
        let samples_per_second = totals[2] / seconds;
        let counted = totals.get(3).copied().unwrap_or_default();
        let metrics = TrainMetrics {
            step: context.state.step,
            epoch: context.state.epoch,
            loss: totals[0] / totals[1],
            skipped_steps: context.counts_skipped_steps().then_some(context.state.skipped_steps),
            lr,
            grad_norm,
            step_us: seconds * 1e6 / steps as f64,
            samples_per_second,
            tokens_per_second: context.tokens_per_second(samples_per_second, counted / seconds),
        };
        self.loss_sum = loss_sum;
        self.since = Instant::now();
        context.tell_on_rank_0(|| Event::Metrics(metrics))
    }

    /// Counts a step that was made or skipped.
    fn count(&mut self, step: &Step) {
        let totals = &mut self.totals;
        totals.steps += 1;
        totals.samples += step.num_samples();
        totals.counted += step.count();
        if !step.is_skipped() {
            totals.counted_for_loss += step.count();
        }
        if let Some(norm) = &step.grad_norm {
            totals.grad_norm = Some(norm.shallow_clone());
        }
        totals.lr = step.lr;
    }
}

impl<M> Callback<M> for Events {
    /// Agrees with all ranks on whether they measure metrics, and tells that training begins. A collective.
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        let group = context.group();
        let mut measures = vec![context.observers.wants().metrics];
        if group.spans_processes() {
            group.broadcast_object_list(&mut measures, 0)?;
        }
        self.measures = measures == [true];
        if self.measures {
            self.loss_sum = context.loss_sum.sum(group)?;
        }
        context.tell_on_rank_0(|| Event::Training(context.training_start()))
    }

    /// Begins to measure: what lies between two epochs, such as a validation, is no part of a step.
    fn on_epoch_start(&mut self, _: &mut TrainContext<M>) -> Result<()> {
        self.since = Instant::now();
        Ok(())
    }

    /// Tells the step, and metrics if they are due: a collective in that case.
    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if self.measures {
            self.count(step);
            let is_due = context.state.epoch_steps.is_multiple_of(self.every);
            if is_due || step.ends_epoch || context.stopped().is_some() {
                self.measure(context)?;
            }
            if step.ends_epoch {
                self.loss_sum = 0.0;
            }
        }
        context.tell_on_rank_0(|| Event::Step {
            step: context.state.step,
            steps: context.total_steps(),
        })
    }

    /// Tells the validation, if there was one, and the epoch.
    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        if let Some(validation) = &epoch.validation {
            context.tell_tensors()?;
            context.tell_on_rank_0(|| Event::Validation(validation.clone()))?;
        }
        if context.observers.is_empty() {
            return Ok(());
        }
        context.observers.tell(&Event::Epoch(epoch.clone()))
    }

    /// Tells the metrics of the last steps, if a callback that runs after this one has ended training.
    fn on_train_end(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        if self.measures { self.measure(context) } else { Ok(()) }
    }
}

impl<M> TrainContext<M> {
    /// Tells the observers of rank 0 an event, which is made only if there are any.
    pub(super) fn tell_on_rank_0(&self, event: impl FnOnce() -> Event) -> Result<()> {
        if self.group().rank() > 0 || self.observers.is_empty() {
            return Ok(());
        }
        self.observers.tell(&event())
    }

    /// Tells the values of the model's tensors on rank 0, if an observer wants them.
    fn tell_tensors(&self) -> Result<()> {
        if self.group().rank() > 0 || !self.observers.wants().tensors {
            return Ok(());
        }
        for (name, tensor) in self.ddp.state_dict() {
            let values = tensor.f_to_kind(Kind::Float).and_then(|tensor| tensor.f_flatten(0, -1));
            let values = values.and_then(Vec::<f32>::try_from).doing("flatten")?;
            self.observers.tell(&Event::Tensor { step: self.state.step, name, values })?;
        }
        Ok(())
    }

    /// Returns the state in which training begins.
    fn training_start(&self) -> TrainingStart {
        TrainingStart {
            epoch: self.state.epoch,
            step: self.state.step,
            samples_seen: self.state.samples_seen,
            steps: self.total_steps(),
            parameters: self.ddp.described_parameters(),
            bucket_bytes: self.ddp.statistics().bucket_bytes,
        }
    }
}
