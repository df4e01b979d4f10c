//! Saving, stopping and resuming a trainer.

use std::sync::Arc;

use serde_json::{Map, Value};
use tch::nn::ModuleT;

use super::Trainer;
use crate::checkpoint::{Checkpoint, CheckpointDir, Snapshot, TrainerState, Writer};
use crate::error::{Error, Result};
use crate::runtime::{Stop, StopReason};

/// Intervals between checkpoints. The end of training is always saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveEvery {
    /// Number of steps between saves; `None` for no saves by steps.
    pub steps: Option<u64>,
    /// Number of epochs between saves; `None` for no saves by epochs.
    pub epochs: Option<u64>,
}

/// The state of saving.
#[derive(Debug)]
pub(super) struct Checkpointing {
    every: SaveEvery,
    options: Map<String, Value>,
    /// `Some` on rank 0 only.
    writer: Option<Writer>,
    /// The step of the last save; `None` before the first.
    saved_at: Option<u64>,
}

impl<M: ModuleT> Trainer<M> {
    /// Saves into `dir` at the intervals of `every`, after the best validation so far, and when training ends or stops.
    /// Call on all ranks alike; rank 0 alone, which writes, needs `dir`. Before each save the parameters of all ranks
    /// are compared. Training ends with [`Error::ReplicasDiverged`] if they differ, so the newest checkpoint holds
    /// equal replicas.
    ///
    /// `options` is stored as [`TrainerState::options`]. A program that resumes can compare it with its own options, as
    /// `ddp-mp` does. [`resume`](Self::resume) itself compares only parameters, optimizer, number of samples and batch
    /// size.
    #[must_use]
    pub fn checkpoints(
        self,
        dir: impl Into<Option<CheckpointDir>>,
        every: SaveEvery,
        options: Map<String, Value>,
    ) -> Self {
        let writer = dir.into().map(Writer::new);
        Self { saving: Some(Checkpointing { every, options, writer, saved_at: None }), ..self }
    }

    /// Stops training after the same step on all ranks when `stop` is requested. Call on all ranks alike.
    #[must_use]
    pub fn stop(self, stop: Arc<Stop>) -> Self {
        self.ddp.group().share_stop(&stop);
        Self { stop: Some(stop), ..self }
    }

    /// Stops after `max_steps` steps of the whole run; `None` for no limit.
    #[must_use]
    pub fn max_steps(self, max_steps: Option<u64>) -> Self {
        Self { max_steps, ..self }
    }

    /// Resumes from `checkpoint`, at the sample after the last one seen. Call on all ranks, with models from
    /// [`Checkpoint::load_model`], after [`amp`](Self::amp) and [`checkpoints`](Self::checkpoints). A collective.
    ///
    /// The run continues as if it had never ended if the number of ranks is the same. Otherwise the rest of the epoch's
    /// samples is divided among the present ranks.
    ///
    /// Checkpoints in this run's folder that are newer than `checkpoint` are [set
    /// aside](CheckpointDir::set_aside_after), as they no longer belong to it.
    ///
    /// # Errors
    /// [`Error::Input`] when the checkpoint is of another model, optimizer or scaler, or of a run with another number
    /// of samples or another batch size. Also when the folder of this run holds other checkpoints.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.check_data_of(checkpoint)?;
        let is_saved_here = self.make_room_after(checkpoint)?;
        if let Some(optimizer) = &mut self.optimizer {
            checkpoint.load_optimizer(&mut **optimizer)?;
        }
        self.ddp.load_comm_hook_state(checkpoint.comm_hook()?.as_ref())?;
        let saved = checkpoint.state();
        if let Some(scaler) = &saved.scaler {
            self.scaler.load_state(scaler)?;
        }
        let group = self.ddp.group();
        self.loss_sum.set_sum(match &saved.loss_sums[..] {
            sums if sums.len() == group.world_size() => sums[group.rank()],
            sums if group.rank() == 0 => sums.iter().sum(),
            _ => 0.0,
        })?;
        self.state = saved.clone();
        if let Some(saving) = &mut self.saving
            && is_saved_here
        {
            saving.saved_at = Some(saved.step);
        }
        Ok(())
    }

    /// Returns whether `checkpoint` is in the folder of this run. If so, sets newer ones aside. A collective.
    fn make_room_after(&self, checkpoint: &Checkpoint) -> Result<bool> {
        let (Some(saving), group) = (&self.saving, self.ddp.group()) else { return Ok(false) };
        let mut is_saved_here = Vec::new();
        if group.rank() == 0
            && let Some(dir) = saving.writer.as_ref().map(Writer::dir)
        {
            let is_here = dir.contains(checkpoint);
            if is_here && dir.has_newer_than(checkpoint.state().step)? {
                dir.set_aside_after(checkpoint)?;
            } else if !is_here && let Some(newest) = dir.newest()? {
                return Err(Error::Input(format!(
                    "this run continues from {}, but the folder to save in has other checkpoints already, the newest \
                     is {}; save in the folder of its own checkpoints, or in a new one",
                    checkpoint.path().display(),
                    newest.display()
                )));
            }
            is_saved_here.push(is_here);
        }
        group.broadcast_object_list(&mut is_saved_here, 0)?;
        Ok(is_saved_here == [true])
    }

    /// Checks that a position in the epoch means the same in `checkpoint` and in this run.
    fn check_data_of(&self, checkpoint: &Checkpoint) -> Result<()> {
        let saved = checkpoint.state();
        let (samples, batch_size) = (self.loader.dataset_len(), self.loader.batch_size());
        let differs = |saved: usize, mine: usize| saved != 0 && saved != mine;
        if differs(saved.num_samples, samples) || differs(saved.batch_size, batch_size) {
            return Err(Error::Input(format!(
                "checkpoint {}: it is of a run on {} samples in batches of {}, and this run has {samples} in batches \
                 of {batch_size}, so the place in the epoch differs; use the same data and batch size, or only its \
                 parameters (Checkpoint::load_model)",
                checkpoint.path().display(),
                saved.num_samples,
                saved.batch_size,
            )));
        }
        Ok(())
    }

    /// Returns the progress of the run, as a checkpoint stores it.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Returns why the run stops before its last epoch; `None` if it goes on. Equal on all ranks after the same step.
    pub(super) fn stopped(&self) -> Option<StopReason> {
        let steps = self.state.step;
        if self.max_steps.is_some_and(|max| steps >= max) {
            return Some(StopReason::Steps);
        }
        if self.patience.is_some_and(|max| self.state.validations_since_best as u64 >= max) {
            return Some(StopReason::NoProgress);
        }
        self.stop.as_ref()?.after(steps)
    }

    /// Saves a checkpoint if one is due. A collective, like the functions below.
    pub(super) fn save_if_due(&mut self, epoch_has_ended: bool) -> Result<()> {
        let is_best = epoch_has_ended && self.is_best();
        let Some(Checkpointing { every, writer, .. }) = &mut self.saving else { return Ok(()) };
        writer.as_mut().map_or(Ok(()), Writer::check)?;
        let due = |every: Option<u64>, count: u64| every.is_some_and(|n| count.is_multiple_of(n));
        let of_epochs = epoch_has_ended && due(every.epochs, self.state.epoch);
        if of_epochs || is_best || due(every.steps, self.state.step) { self.save() } else { Ok(()) }
    }

    /// Saves the final state if its parameters are finite, and waits until it is written.
    pub(super) fn save_at_end(&mut self) -> Result<()> {
        self.check_parameters()?;
        self.save()?;
        let writer = self.saving.as_mut().and_then(|saving| saving.writer.as_mut());
        let (Some(writer), group) = (writer, self.ddp.group()) else { return Ok(()) };
        group.enter_save(self.state.step);
        writer.finish()?;
        group.end_phase();
        Ok(())
    }

    /// Copies the state. Rank 0 writes the copy while training continues.
    fn save(&mut self) -> Result<()> {
        let step = self.state.step;
        if self.saving.as_ref().is_none_or(|saving| saving.saved_at == Some(step)) {
            return Ok(());
        }
        // Checked before this checkpoint replaces an older, usable one.
        let group = self.ddp.group();
        let loss_sum = self.loss_sum.sum(group)?;
        self.check_loss_sum(loss_sum)?;
        self.check_parameters()?;
        self.check_replicas_to_save()?;
        let loss_sums = group.gather_object(&loss_sum, 0)?;
        let comm_hook = self.ddp.comm_hook_state()?;
        group.enter_save(step);
        let Some(saving) = &mut self.saving else { return Ok(()) };
        saving.saved_at = Some(step);
        let (Some(loss_sums), Some(writer)) = (loss_sums, &mut saving.writer) else {
            group.end_phase();
            return Ok(());
        };
        let state = TrainerState {
            loss_sums,
            world_size: group.world_size(),
            num_samples: self.loader.dataset_len(),
            batch_size: self.loader.batch_size(),
            scaler: self.scaler.state(),
            options: saving.options.clone(),
            ..self.state.clone()
        };
        let optimizer = self.optimizer.as_ref().map_or(Ok(Vec::new()), |it| it.state())?;
        let snapshot = Snapshot::take(state, &self.ddp.state_dict(), &optimizer)?;
        writer.save(snapshot.with_comm_hook(comm_hook.as_ref())?)?;
        group.end_phase();
        Ok(())
    }
}
