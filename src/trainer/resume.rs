//! Resuming a run from a checkpoint.

use tch::nn::ModuleT;

use super::{TrainContext, Trainer};
use crate::checkpoint::{Checkpoint, TrainerState};
use crate::error::{Error, Result, Shown};

impl<M: ModuleT> Trainer<M> {
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
    /// [`Error::InvalidInput`] when the checkpoint is of another model, optimizer or scaler, or of a run with another
    /// number of samples or another batch size. Also when the folder of this run holds other checkpoints.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let Self { context, callbacks } = self;
        context.check_same_data(checkpoint)?;
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
            return Err(Error::InvalidInput(format!(
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
            Error::InvalidInput(format!("checkpoint {path}: {problem}; use another checkpoint"))
        })
    }

    /// Loads all state but the model's.
    fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
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
        let data_files = std::mem::take(&mut self.state.data_files);
        self.state = TrainerState { data_files, ..saved.clone() };
        Ok(())
    }
}
