//! Resuming a run from a checkpoint.

use super::{TrainContext, Trainer};
use crate::checkpoint::{Checkpoint, TrainerState};
use crate::error::{Error, Result, Shown};
use crate::models::Forward;

impl<M: Forward> Trainer<M> {
    /// Resumes from `checkpoint`, at the sample after the last one seen. Call on all ranks, with models from
    /// [`Checkpoint::load_model`], after [`options`](Self::options) and [`checkpoints`](Self::checkpoints). A collective.
    ///
    /// The run continues as if it had never ended if the number of ranks is the same. Otherwise the rest of the epoch's
    /// samples is divided among the present ranks.
    ///
    /// Checkpoints in this run's folder that are newer than `checkpoint` are [set
    /// aside](crate::CheckpointDir::set_aside_after), as they no longer belong to it.
    ///
    /// # Errors
    /// [`Error::Input`] when the checkpoint is of another model, optimizer or scaler, or of a run with another
    /// number of samples or another batch size. Also when it was saved within an epoch that has a
    /// [count](crate::trainer::Criterion::count) and this run has none, or the reverse, and when the folder of this run
    /// holds other checkpoints.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let Self { context, callbacks } = self;
        context.check_same_data(checkpoint)?;
        context.check_same_count(checkpoint)?;
        callbacks.each(|callback| callback.on_load_checkpoint(context, checkpoint))?;
        Ok(context.load(checkpoint)?)
    }
}

impl<M> TrainContext<M> {
    /// Checks that a position in the epoch means the same in `checkpoint` and in this run.
    fn check_same_data(&self, checkpoint: &Checkpoint) -> Result<()> {
        let saved = checkpoint.state();
        let (samples, batch_size) = (self.loader.dataset_len(), self.loader.batch_size());
        let differs = |saved: usize, mine: usize| saved != 0 && saved != mine;
        if differs(saved.num_samples, samples) || differs(saved.batch_size, batch_size) {
            return Err(Error::mismatch(format!(
                "checkpoint {}: its run has {} samples in batches of {}, and this run has {samples} in batches of \
                 {batch_size}, so the place in the epoch differs; use the same data and batch size, or load only the \
                 parameters (Checkpoint::load_model)",
                checkpoint.path().shown(),
                saved.num_samples,
                saved.batch_size,
            )));
        }
        saved.check(samples).map_err(|problem| {
            let path = checkpoint.path().shown();
            Error::mismatch(format!("checkpoint {path}: {problem}; use another checkpoint"))
        })
    }

    /// Checks that the losses of the epoch so far, if `checkpoint` has some, weigh as this run's losses do.
    fn check_same_count(&self, checkpoint: &Checkpoint) -> Result<()> {
        let saved = checkpoint.state();
        let had_count = !saved.counts.is_empty();
        let has_count = self.criterion.has_count();
        if saved.samples_seen == 0 || had_count == has_count {
            return Ok(());
        }
        let what =
            |is_count| if is_count { "by the count of a criterion" } else { "by its samples" };
        Err(Error::mismatch(format!(
            "checkpoint {}: its run weighs each batch {}, and this run {}, so the mean loss of the epoch would be wrong; \
             use the same Criterion::count, a checkpoint of the end of an epoch, or load only the parameters \
             (Checkpoint::load_model)",
            checkpoint.path().shown(),
            what(had_count),
            what(has_count),
        )))
    }

    /// Loads all state but the model's.
    fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.load_optimizer(&mut *self.optimizer)?;
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
        self.counted = match &saved.counts[..] {
            counts if counts.len() == group.world_size() => counts[group.rank()],
            _ if group.rank() > 0 => 0,
            counts => counts.iter().fold(0, |sum, count| sum.saturating_add(*count)),
        };
        let data_files = std::mem::take(&mut self.state.data_files);
        let (loss_sums, counts, after_failure) = (Vec::new(), Vec::new(), None);
        self.state = TrainerState { data_files, loss_sums, counts, after_failure, ..saved.clone() };
        Ok(())
    }
}
