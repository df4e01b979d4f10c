//! The last whole step of a rank: what the rank keeps while it makes the next one, and the state that it can save if another
//! rank fails meanwhile.

use std::mem;

use tch::Device;

use super::TrainContext;
use super::context::BufferSnapshot;
use super::find_non_finite::first_nonfinite;
use super::step::Step;
use crate::checkpoint::TrainerState;
use crate::error::{Error, Result};
use crate::process_group::InMemory;
use crate::runtime::{LossRecord, RecordedLosses};

/// What a rank keeps of its last whole step.
#[derive(Debug, Default)]
pub(super) struct LastStep {
    /// Where this rank records its losses; `None` unless its state can be saved after a failure.
    record: Option<InMemory<LossRecord>>,
    /// Whether parameters and optimizer are those after the steps that [`TrainContext::state`] counts. They are not while
    /// the optimizer steps.
    pub is_whole: bool,
    /// The buffers before the next step, whose forward pass changes them.
    pub buffers: Option<BufferSnapshot>,
    /// This rank's losses of the epoch so far, as a number on the host.
    pub losses: RecordedLosses,
    /// The losses before the next step, once those of that step are added.
    before: Option<RecordedLosses>,
    /// The number of steps after the newest one that was skipped.
    skipped: Option<u64>,
    /// The progress before the end of the epoch that is being ended.
    pub epoch_end: Option<TrainerState>,
}

impl<M> TrainContext<M> {
    /// Prepares this rank to save its state if another rank fails. `saves`: whether there are checkpoints.
    pub(super) fn begin_training(&mut self, saves: bool) -> Result<()> {
        let group = self.ddp.group();
        // Each rank with a partition of the optimizer has a part of the state only.
        let can_save = saves && group.device() == Device::Cpu && !self.ddp.partitions_optimizer();
        let mut last_step = LastStep { is_whole: true, ..LastStep::default() };
        if can_save {
            let record = group.loss_record(group.rank())?;
            last_step.losses = self.losses()?;
            record.clear();
            record.write(self.state.step, last_step.losses);
            last_step.record = Some(record);
        }
        self.last_step = last_step;
        Ok(())
    }

    /// Keeps what the next step changes before its end.
    pub(super) fn begin_step(&mut self) -> Result<()> {
        if self.last_step.record.is_some() || self.checks_gradients() {
            self.last_step.buffers = Some(BufferSnapshot::of(&self.ddp)?);
        }
        self.last_step.before = None;
        Ok(())
    }

    /// Adds the losses of a step to the losses of the epoch, unless [`record_losses`](Self::record_losses) has added them.
    pub(super) fn add_losses(&mut self, step: &Step) -> Result<()> {
        if self.last_step.before.is_some() {
            return Ok(());
        }
        self.counted += step.count() as u64;
        for (batch, loss) in step.losses.iter().enumerate() {
            self.loss_sum.add(loss, step.count_of(batch))?;
        }
        Ok(())
    }

    /// Adds the losses of a step before its gradients are averaged, and records the sum: if this rank fails, those who have
    /// the averages need it.
    pub(super) fn record_losses(&mut self, step: &Step) -> Result<()> {
        if self.last_step.record.is_none() {
            return Ok(());
        }
        self.add_losses(step)?;
        let losses = self.losses()?;
        let LastStep { record, losses: now, before, .. } = &mut self.last_step;
        *before = Some(mem::replace(now, losses));
        record.iter().for_each(|record| record.write(step.index + 1, losses));
        Ok(())
    }

    /// Takes back the losses of a step that is skipped, if they are added.
    pub(super) fn take_back_losses(&mut self, step: &Step) -> Result<()> {
        let LastStep { record, losses, before, skipped, .. } = &mut self.last_step;
        let Some(before) = *before else { return Ok(()) };
        (*losses, *skipped) = (before, Some(step.index + 1));
        record.iter().for_each(|record| record.write(step.index + 1, before));
        self.counted = before.counted;
        self.loss_sum.set_sum(before.sum)
    }

    /// Returns this rank's losses of the epoch so far. Its device is the CPU.
    fn losses(&self) -> Result<RecordedLosses> {
        Ok(RecordedLosses { sum: self.loss_sum.value()?, counted: self.counted })
    }

    /// Returns the progress after the last whole step, with the losses of all ranks, to be saved after the failure of another
    /// rank. The parameters, the optimizer and, after this, the buffers are of that step.
    ///
    /// # Errors
    /// The reason why it cannot be saved.
    pub(super) fn restore_last_step(&mut self) -> Result<TrainerState, String> {
        let text = |error: Error| error.to_string();
        if self.ddp.partitions_optimizer() {
            return Err(
                "with --zero each rank has only its own partition of the optimizer's state".into(),
            );
        }
        if self.group().rank() > 0 && self.ddp.has_own_buffers() {
            return Err("only rank 0 has the buffers that checkpoints have".into());
        }
        let mut state = self.last_step.epoch_end.take().unwrap_or_else(|| self.state.clone());
        let (mut loss_sums, mut counts) = (Vec::new(), Vec::new());
        for rank in 0..self.group().world_size() {
            let losses = self.losses_of(rank, &state).map_err(text)?.ok_or_else(|| {
                format!(
                    "this rank does not know the losses of rank {rank}, which belong to the state"
                )
            })?;
            loss_sums.push(losses.sum);
            counts.push(losses.counted);
        }
        state.loss_sums = loss_sums;
        state.counts = if self.criterion.has_count() { counts } else { Vec::new() };
        let parameters = first_nonfinite(&self.ddp.flat_buffers(), |buffer| &buffer.parameters);
        if let Some(name) = parameters.map_err(text)? {
            return Err(format!("the parameter `{name}` is not finite"));
        }
        if let Some(buffers) = self.last_step.buffers.take() {
            buffers.restore().map_err(text)?;
        }
        Ok(state)
    }

    /// Returns the losses of `rank` up to `state`; `None` if they are not known.
    fn losses_of(&self, rank: usize, state: &TrainerState) -> Result<Option<RecordedLosses>> {
        if state.epoch_steps == 0 {
            return Ok(Some(RecordedLosses::default()));
        }
        // The record may still have the losses of a step that another rank was to skip.
        if rank != self.group().rank() && self.last_step.skipped == Some(state.step) {
            return Ok(None);
        }
        Ok(self.group().loss_record(rank)?.read(state.step))
    }
}
