//! The training loop: `train`, `run_epoch`, `run_batch`.

mod buffers;
mod checkpointing;
mod explainer;
mod fault_injection;
mod loss;
mod loss_sum;
mod metrics_window;
mod non_finite;
mod replicas;
mod validation;
mod warm_up;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::nn::ModuleT;
use tch::{Device, Kind, Tensor};

use crate::checkpoint::TrainerState;
use crate::data::{Batch, Loader};
use crate::ddp::Strategy;
use crate::error::{Error, Result};
use crate::ffi::{Autocast, Generator};
use crate::operation::Operation;
use crate::optim::{GradScaler, GradScalerOptions, Optimizer, Schedule};
use crate::process_group::rank_label;
use crate::runtime::{Stop, StopReason};
use crate::telemetry::Epoch;
use buffers::BufferSnapshot;
use checkpointing::Checkpointing;
use explainer::Explainer;
use loss_sum::LossSum;
use metrics_window::MetricsWindow;
use validation::Validation;

pub use checkpointing::SaveEvery;
pub use loss::Loss;

/// The dtype of forward passes, for the operations where it is precise enough: `--amp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Amp {
    /// The dtype of the parameters.
    Off,
    /// bfloat16.
    Bf16,
    /// float16, whose gradients need a [`GradScaler`].
    Fp16,
}

impl Amp {
    /// Enables autocast for forward pass and loss, until the returned guard is dropped. `None` with `Off`.
    pub(crate) fn autocast(self, device: Device) -> Result<Option<Autocast>> {
        let kind = match self {
            Amp::Off => return Ok(None),
            Amp::Bf16 => Kind::BFloat16,
            Amp::Fp16 => Kind::Half,
        };
        Autocast::new(device, kind).map(Some)
    }

    /// Returns the scaler for the gradients of `ddp`. Enabled for float16 only: bfloat16 has the range of float32.
    pub(crate) fn grad_scaler<M>(self, ddp: &Strategy<M>) -> Result<GradScaler> {
        let enabled = self == Amp::Fp16;
        if enabled && matches!(ddp, Strategy::Dp(_)) {
            return Err(Error::Input(
                "fp16 needs DistributedDataParallel: with DataParallel rank 0 alone would know which steps to \
                 skip, and by what losses are scaled"
                    .into(),
            ));
        }
        let options = GradScalerOptions { enabled, ..GradScalerOptions::default() };
        GradScaler::new(ddp.flat_buffers().unwrap_or_default(), ddp.group().clone(), options)
    }
}

/// The result of a training run; the same on every rank, except for the time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Steps that each rank made in the whole run.
    pub steps: u64,
    /// Steps that each rank made since this start; fewer than `steps` after a resume.
    pub steps_now: u64,
    /// Why training stopped before its last epoch; `None` if it did not.
    pub stopped: Option<StopReason>,
    /// The mean loss of the first epoch, over the samples of all ranks.
    pub first_loss: f64,
    /// The mean loss of the last completed epoch; if none is complete, of the samples seen so far.
    pub last_loss: f64,
    /// Steps that changed nothing because gradients were not finite; 0 without a [`GradScaler`] and
    /// [`Trainer::skip_nonfinite`].
    pub skipped_steps: u64,
    /// Duration of the training loop on this rank.
    pub elapsed: Duration,
}

/// The training loop of one rank, in step with all other ranks.
#[derive(Debug)]
pub struct Trainer<M> {
    /// `DistributedDataParallel`, or `DataParallel` for comparison.
    ddp: Strategy<M>,
    /// `None` on a rank that steps no parameters: with `DataParallel`, all ranks but rank 0.
    optimizer: Option<Box<dyn Optimizer>>,
    schedule: Schedule,
    max_grad_norm: Option<f64>,
    accumulate: usize,
    exact_mean: bool,
    amp: Amp,
    scaler: GradScaler,
    skip_nonfinite: Option<u64>,
    check_replicas: Option<u64>,
    generator: Option<Arc<Generator>>,
    loader: Loader,
    loss: Loss,
    loss_sum: LossSum,
    state: TrainerState,
    saving: Option<Checkpointing>,
    stop: Option<Arc<Stop>>,
    max_steps: Option<u64>,
    patience: Option<u64>,
    validation: Option<Validation>,
    recording: Option<MetricsWindow>,
    explaining: Option<Explainer>,
}

impl<M: ModuleT> Trainer<M> {
    /// Creates a trainer for `ddp`'s model on the batches of `loader`, with the learning rates of `schedule`.
    /// `optimizer` is `None` where [`Strategy::flat_buffers`] is `None`: such a rank steps no parameters.
    ///
    /// # Errors
    /// [`Error::Input`] when a rank that steps parameters has no optimizer, or the reverse. [`Error::Torch`] when the
    /// device is out of memory.
    pub fn new(
        ddp: impl Into<Strategy<M>>,
        optimizer: impl Into<Option<Box<dyn Optimizer>>>,
        schedule: Schedule,
        loader: impl Into<Loader>,
        loss: Loss,
    ) -> Result<Self> {
        let (ddp, optimizer, loader) = (ddp.into(), optimizer.into(), loader.into());
        if optimizer.is_some() != ddp.flat_buffers().is_some() {
            let rank = ddp.group().rank();
            let has = if optimizer.is_some() { "an optimizer" } else { "no optimizer" };
            return Err(Error::Input(format!(
                "rank {rank} has {has}: with DistributedDataParallel every rank needs one, with DataParallel \
                 rank 0 alone"
            )));
        }
        let loss_sum = LossSum::new(ddp.group().device())?;
        let max_grad_norm = None;
        let accumulate = 1;
        let amp = Amp::Off;
        let scaler = amp.grad_scaler(&ddp)?;
        Ok(Self {
            ddp,
            optimizer,
            schedule,
            max_grad_norm,
            accumulate,
            exact_mean: false,
            amp,
            scaler,
            skip_nonfinite: None,
            check_replicas: None,
            generator: None,
            loader,
            loss,
            loss_sum,
            state: TrainerState::default(),
            saving: None,
            stop: None,
            max_steps: None,
            patience: None,
            validation: None,
            recording: None,
            explaining: None,
        })
    }

    /// Scales gradients with a larger norm down to this norm before each step; see
    /// [`DistributedDataParallel::clip_grad_norm`](crate::DistributedDataParallel::clip_grad_norm).
    #[must_use]
    pub fn max_grad_norm(self, max_grad_norm: Option<f64>) -> Self {
        Self { max_grad_norm, ..self }
    }

    /// Accumulates the gradients of `batches` batches (at least 1) for each step, and averages them over the ranks
    /// once. The last step of an epoch may have fewer batches.
    #[must_use]
    pub fn accumulate(self, batches: usize) -> Self {
        Self { accumulate: batches.max(1), ..self }
    }

    /// Averages gradients over the samples of all ranks instead of over the ranks:
    /// [`DistributedDataParallel::backward_weighted`](crate::DistributedDataParallel::backward_weighted). For a loader
    /// that is [in step](crate::DataLoader::in_step), whose ranks have batches of different sizes.
    ///
    /// # Errors
    /// [`Error::Input`] with [`DataParallel`](crate::DataParallel).
    pub fn exact_mean(self, exact_mean: bool) -> Result<Self> {
        if exact_mean && matches!(self.ddp, Strategy::Dp(_)) {
            return Err(Error::Input(
                "an exact mean needs DistributedDataParallel: with DataParallel rank 0 gives every rank a batch of the \
                 same size"
                    .into(),
            ));
        }
        Ok(Self { exact_mean, ..self })
    }

    /// Runs the model and the loss in mixed precision, with a new [`GradScaler`] for float16. A step that the scaler
    /// skips counts as a step, also for the schedule.
    ///
    /// # Errors
    /// The errors of [`GradScaler::new`]; [`Error::Input`] for float16 with [`DataParallel`](crate::DataParallel).
    pub fn amp(self, amp: Amp) -> Result<Self> {
        Ok(Self { amp, scaler: amp.grad_scaler(&self.ddp)?, ..self })
    }

    /// Reseeds `generator`, from which the model draws, at the start of each step. Its random numbers then depend on
    /// the step, not on earlier draws.
    #[must_use]
    pub fn generator(self, generator: Arc<Generator>) -> Self {
        Self { generator: Some(generator), ..self }
    }

    /// Returns the loss scaler; enabled for float16 only.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// Returns the source of the batches.
    pub fn loader(&self) -> &Loader {
        &self.loader
    }

    /// Returns the model in its current state.
    pub fn ddp(&self) -> &Strategy<M> {
        &self.ddp
    }

    /// Trains until `max_epochs` epochs (at least 1) are done or the run stops. Calls `report` with each epoch's
    /// report. A collective.
    ///
    /// # Errors
    /// The first error on any rank.
    pub fn train(
        &mut self,
        max_epochs: u64,
        mut report: impl FnMut(Epoch) -> anyhow::Result<()>,
    ) -> anyhow::Result<Summary> {
        if matches!(self.ddp.group().device(), Device::Cuda(_)) {
            self.warm_up()?;
        }
        self.begin_explaining()?;
        let began = Instant::now();
        self.begin_recording(max_epochs.max(1))?;
        let steps_before = self.state.step;
        let mut stopped = None;
        while self.state.epoch < max_epochs.max(1) {
            stopped = self.stopped();
            if stopped.is_some() {
                break;
            }
            if let Some(mut done) = self.run_epoch()? {
                if let Some(validated) = self.validate_if_due(max_epochs)? {
                    self.record_validation(&validated)?;
                    done.validation = Some(validated.metrics);
                }
                report(done)?;
                self.save_if_due(true)?;
            }
        }
        let elapsed = began.elapsed();
        self.end_recording()?;
        self.save_at_end()?;
        self.end_explaining()?;
        let losses = match &self.state.epoch_losses[..] {
            [] => vec![self.take_loss()?],
            losses => losses.to_vec(),
        };
        Ok(Summary {
            steps: self.state.step,
            steps_now: self.state.step - steps_before,
            stopped,
            first_loss: losses[0],
            last_loss: losses[losses.len() - 1],
            skipped_steps: self.state.skipped_steps,
            elapsed,
        })
    }

    /// Returns the mean loss of the epoch so far, and resets it.
    fn take_loss(&mut self) -> Result<f64> {
        let group = self.ddp.group();
        // The number of all ranks' samples is the same on every rank, so rank 0 alone counts them.
        let counted = self.state.samples_seen - self.state.skipped_samples;
        self.loss_sum.count(if group.rank() == 0 { counted } else { 0 })?;
        self.check_loss_sum(self.loss_sum.sum(group)?)?;
        self.loss_sum.take_mean(group)
    }

    /// Runs one pass over the rest of this rank's share of the data. Returns `None` if the run stops before the end of
    /// the epoch.
    fn run_epoch(&mut self) -> Result<Option<Epoch>> {
        let began = Instant::now();
        let TrainerState { epoch, samples_seen, .. } = self.state;
        let rank = self.ddp.group().rank();
        let mut samples = 0;
        let mut batches = self.loader.epoch_from(epoch, samples_seen)?;
        let steps = self.loader.num_batches_from(samples_seen).div_ceil(self.accumulate);
        for left in (0..steps).rev() {
            if rank == 0
                && let Some(stop) = &self.stop
            {
                stop.decide(self.state.step);
            }
            self.ddp.group().enter_step(self.state.step)?;
            self.ddp.group().enter_phase(Operation::Data, self.state.step);
            let mut of_step = batches.by_ref().take(self.accumulate).collect::<Result<Vec<_>>>()?;
            let skipped = self.state.skipped_samples;
            self.inject_before_step(&mut of_step)?;
            self.run_step(&of_step, epoch)?;
            self.ddp.group().end_phase();
            self.inject_after_step()?;
            self.explain_step()?;
            let counts = self.state.skipped_samples == skipped;
            let of_rank: usize = of_step.iter().map(Batch::len).sum();
            let of_all = self.samples_of_all(&of_step);
            samples += of_rank;
            self.state.step += 1;
            self.state.epoch_steps += 1;
            self.state.samples_seen += of_all;
            self.check_replicas_if_due()?;
            self.record_step(of_rank, if counts { of_rank } else { 0 }, left == 0)?;
            if left > 0 {
                if self.stopped().is_some() {
                    return Ok(None);
                }
                self.save_if_due(false)?;
            }
        }
        let loss = self.take_loss()?;
        self.state.epoch_losses.truncate(1);
        self.state.epoch_losses.push(loss);
        let steps = self.state.epoch_steps;
        self.state.epoch += 1;
        (self.state.epoch_steps, self.state.samples_seen) = (0, 0);
        self.state.skipped_samples = 0;
        let group = self.ddp.group();
        Ok(Some(Epoch {
            rank: group.rank(),
            local_rank: group.local_rank(),
            device: rank_label(group.device(), group.local_rank()),
            epoch,
            batch_size: self.loader.batch_size(),
            steps,
            loss,
            samples_per_second: samples as f64 / began.elapsed().as_secs_f64(),
            validation: None,
        }))
    }

    /// Runs one step: forward, backward, average the gradients over the ranks, step the parameters.
    fn run_step(&mut self, batches: &[Batch], epoch: u64) -> Result<()> {
        self.ddp.begin_step()?;
        if let Some(generator) = &self.generator {
            generator.begin_step(self.state.step)?;
        }
        let buffers = self.checks_gradients().then(|| BufferSnapshot::of(&self.ddp)).transpose()?;
        let mut losses = Vec::with_capacity(batches.len());
        for (number, batch) in batches.iter().enumerate() {
            // Only the last batch's backward averages the gradients, which all batches have accumulated.
            let is_last = number + 1 == batches.len();
            let _no_sync = (!is_last).then(|| self.ddp.no_sync());
            losses.push(self.run_batch(batch, number, batches)?);
        }
        if self.should_skip_step(batches)? {
            return buffers.map_or(Ok(()), BufferSnapshot::restore);
        }
        for (loss, batch) in losses.iter().zip(batches) {
            self.loss_sum.add(loss, batch.len())?;
        }
        self.capture_gradients(&losses, batches)?;
        self.ddp.group().next_phase(Operation::Optimizer);
        let Some(optimizer) = &mut self.optimizer else { return Ok(()) };
        self.scaler.unscale_()?;
        if let Some(max_norm) = self.max_grad_norm {
            let norm = self.ddp.clip_grad_norm(max_norm)?;
            if let Some(recording) = &mut self.recording {
                recording.grad_norm = Some(norm);
            }
        }
        let stepped =
            self.scaler.step(&mut **optimizer, self.schedule.lr(epoch, self.state.step))?;
        self.state.skipped_steps += u64::from(!stepped);
        self.scaler.update()
    }

    /// Runs forward and backward of batch `number` of a step's `batches`; returns its loss.
    fn run_batch(&mut self, batch: &Batch, number: usize, batches: &[Batch]) -> Result<Tensor> {
        let loss = self.loss_of(batch)?;
        self.check_loss(&loss, number, batch)?;
        let scaled = self.scaler.scale(&self.poison_if_nonfinite(&loss)?)?;
        let samples = batches.iter().map(Batch::len).sum::<usize>();
        // The step's samples divided by this batch's: the number of batches if all have the same size.
        let divisor = match (self.exact_mean, batches.len()) {
            (_, 1) => 1.0,
            (false, count) => count as f64,
            (true, _) if samples == 0 => 1.0,
            (true, _) => samples as f64 / batch.len() as f64, // infinite for an empty batch
        };
        let share = match divisor {
            1.0 => scaled,
            divisor => scaled.f_div_scalar(divisor).map_err(Error::torch("div"))?,
        };
        if self.exact_mean {
            self.ddp.backward_part(&share, samples as f64)?;
        } else {
            self.ddp.backward(&share)?;
        }
        Ok(loss)
    }

    /// Returns the number of samples that all ranks together have in this step. `batches` are this rank's.
    fn samples_of_all(&self, batches: &[Batch]) -> usize {
        let here = batches.iter().map(Batch::len).sum::<usize>();
        // If the loader gives no count, every rank has the same number of samples.
        let dealt = self.loader.dealt_in(self.state.samples_seen, batches.len());
        dealt.unwrap_or(here * self.ddp.group().world_size())
    }

    /// Returns the loss of a batch, in mixed precision if enabled. Backward must run after this, outside of autocast.
    fn loss_of(&self, batch: &Batch) -> Result<Tensor> {
        let _autocast = self.amp.autocast(self.ddp.group().device())?;
        self.loss.of(&self.ddp.forward(&batch.inputs), &batch.targets)
    }
}
