//! Training metrics, reported every few steps.

use std::time::Instant;

use tch::Tensor;
use tch::nn::ModuleT;

use super::Trainer;
use super::validation::Validated;
use crate::error::{Error, Result};
use crate::process_group::ReduceOp;
use crate::telemetry::{MetricsLogger, TrainMetrics};

/// The totals since the last report.
#[derive(Debug)]
pub(super) struct MetricsWindow {
    every: u64,
    /// The writer of all ranks' metrics; `Some` on rank 0 only.
    recorder: Option<MetricsLogger>,
    since: Instant,
    steps: u64,
    samples: usize,
    /// Samples that count for the loss: all except those of skipped steps.
    counted: usize,
    /// This rank's sum of the epoch's losses at the last report.
    loss_sum: f64,
    /// The norm of the last step's gradients; `None` if it was not measured.
    pub grad_norm: Option<Tensor>,
}

impl<M: ModuleT> Trainer<M> {
    /// Writes metrics to `recorder` after every `every` steps of an epoch (at least 1), and at its end. Call on all
    /// ranks alike, because they reduce their numbers first. Rank 0 alone needs a recorder.
    #[must_use]
    pub fn record(self, every: u64, recorder: Option<MetricsLogger>) -> Self {
        let recording = MetricsWindow {
            every: every.max(1),
            recorder,
            since: Instant::now(),
            steps: 0,
            samples: 0,
            counted: 0,
            loss_sum: 0.0,
            grad_norm: None,
        };
        Self { recording: Some(recording), ..self }
    }

    /// Starts the metrics of a run that trains until `max_epochs` are done.
    pub(super) fn begin_recording(&mut self, max_epochs: u64) -> Result<()> {
        let steps_per_epoch = self.loader.num_batches().div_ceil(self.accumulate) as u64;
        let steps = max_epochs.saturating_mul(steps_per_epoch);
        let Some(recording) = &mut self.recording else { return Ok(()) };
        recording.loss_sum = self.loss_sum.sum(self.ddp.group())?;
        recording.since = Instant::now();
        if let Some(recorder) = &recording.recorder {
            let steps = self.max_steps.map_or(steps, |max| max.min(steps));
            recorder.begin(steps, self.state.step);
        }
        Ok(())
    }

    /// Adds a step with `samples` samples on this rank, `counted` of which count for the loss. Writes metrics if due; a
    /// collective in that case.
    pub(super) fn record_step(
        &mut self,
        samples: usize,
        counted: usize,
        is_last: bool,
    ) -> Result<()> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        recording.steps += 1;
        recording.samples += samples;
        recording.counted += counted;
        if !is_last && !self.state.epoch_steps.is_multiple_of(recording.every) {
            return Ok(());
        }
        let group = self.ddp.group();
        let loss_sum = self.loss_sum.sum(group)?;
        let (added, samples) = (loss_sum - recording.loss_sum, recording.samples as f64);
        self.check_loss_sum(loss_sum)?;
        let skipped_steps = self.counts_skipped_steps().then_some(self.state.skipped_steps);
        let Some(recording) = &mut self.recording else { return Ok(()) };
        let mine = [added, recording.counted as f64, samples];
        let wrong = || Error::torch("reducing what is told");
        let mut totals = Tensor::from_slice(&mine).f_to_device(group.device()).map_err(wrong())?;
        group.all_reduce(&mut totals, ReduceOp::Sum)?;
        group.synchronize()?;
        let totals = Vec::<f64>::try_from(totals).map_err(wrong())?;
        let grad_norm = recording.grad_norm.take().map(|norm| norm.f_double_value(&[]));
        let grad_norm = grad_norm.transpose().map_err(wrong())?;
        let seconds = recording.since.elapsed().as_secs_f64();
        let metrics = TrainMetrics {
            step: self.state.step,
            epoch: self.state.epoch,
            loss: totals[0] / totals[1],
            skipped_steps,
            lr: self.schedule.lr(self.state.epoch, self.state.step - 1),
            grad_norm,
            step_us: seconds * 1e6 / recording.steps as f64,
            samples_per_second: totals[2] / seconds,
        };
        recording.loss_sum = if is_last { 0.0 } else { loss_sum };
        (recording.steps, recording.samples, recording.counted) = (0, 0, 0);
        recording.since = Instant::now();
        recording.recorder.as_mut().map_or(Ok(()), |recorder| recorder.train(&metrics))
    }

    /// Returns whether samples of the validation are shown.
    pub(super) fn shows_samples(&self) -> bool {
        let recorder = self.recording.as_ref().and_then(|recording| recording.recorder.as_ref());
        recorder.is_some_and(MetricsLogger::shows_samples)
    }

    /// Writes the metrics of a validation.
    pub(super) fn record_validation(&mut self, validated: &Validated) -> Result<()> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        recording.since = Instant::now(); // time spent on validation is not part of a step
        let Some(recorder) = &mut recording.recorder else { return Ok(()) };
        recorder.validation(&validated.metrics, &validated.samples, &self.ddp.state_dict())
    }

    /// Ends the metrics of a run.
    pub(super) fn end_recording(&mut self) -> Result<()> {
        let recorder = self.recording.as_mut().and_then(|recording| recording.recorder.as_mut());
        recorder.map_or(Ok(()), MetricsLogger::end)
    }
}
