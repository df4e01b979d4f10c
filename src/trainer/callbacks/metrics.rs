//! Training metrics, reported every few steps.

use std::time::Instant;

use anyhow::Result;
use tch::Tensor;

use crate::ffi::TorchResult;
use crate::process_group::ReduceOp;
use crate::records::TrainMetrics;
use crate::telemetry::MetricsLogger;
use crate::trainer::{Callback, Epoch, Step, TrainContext};

/// Writes metrics every few steps of an epoch. Holds the totals since the last report.
#[derive(Debug)]
pub(in crate::trainer) struct Metrics {
    /// Steps between reports.
    every: u64,
    /// The writer of all ranks' metrics; `Some` on rank 0 only.
    logger: Option<MetricsLogger>,
    since: Instant,
    totals: Totals,
    /// This rank's sum of the epoch's losses at the last report.
    loss_sum: f64,
}

/// The totals of the steps since the last report.
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

impl Metrics {
    pub(in crate::trainer) fn new(every: u64, logger: Option<MetricsLogger>) -> Self {
        Self { every, logger, since: Instant::now(), totals: Totals::default(), loss_sum: 0.0 }
    }

    /// Writes the metrics of the steps since the last report, if there were any. A collective in that case.
    fn report<M>(&mut self, context: &TrainContext<M>) -> Result<()> {
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
        if let Some(logger) = &mut self.logger {
            logger.train(&metrics)?;
        }
        Ok(())
    }
}

impl<M> Callback<M> for Metrics {
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.loss_sum = context.loss_sum.sum(context.group())?;
        self.since = Instant::now();
        if let Some(logger) = &mut self.logger {
            logger.begin(context.total_steps(), context.state.step)?;
        }
        Ok(())
    }

    /// Counts the step. Writes metrics if due: a collective in that case.
    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
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
        let is_due = context.state.epoch_steps.is_multiple_of(self.every);
        if is_due || step.ends_epoch || context.stopped().is_some() {
            self.report(context)?;
        }
        if step.ends_epoch {
            self.loss_sum = 0.0;
        }
        Ok(())
    }

    /// Writes the metrics of the validation, if there was one.
    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        let Some(validation) = &epoch.validation else { return Ok(()) };
        self.since = Instant::now(); // time spent on validation is not part of a step
        if let Some(logger) = &mut self.logger {
            logger.validation(validation, &context.ddp.state_dict())?;
        }
        Ok(())
    }

    /// Writes the metrics of the last steps, if a callback that runs after this one has ended training.
    fn on_train_end(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.report(context)?;
        if let Some(logger) = &mut self.logger {
            logger.end()?;
        }
        Ok(())
    }
}
