//! Checkpoints: saved during training and at its end.

use anyhow::Result;
use serde_json::{Map, Value};

use super::replica_check::compare_replicas;
use crate::checkpoint::{Checkpoint, Snapshot, TrainerState, Writer};
use crate::error::{Compared, Error, Shown};
use crate::events::Event;
use crate::trainer::{Callback, Epoch, Step, TrainContext};

/// Intervals between checkpoints. The end of training is always saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveEvery {
    /// Number of steps between saves; `None` for no saves by steps.
    pub steps: Option<u64>,
    /// Number of epochs between saves; `None` for no saves by epochs.
    pub epochs: Option<u64>,
}

/// Saves the state of the run. Rank 0 writes.
#[derive(Debug)]
pub(in crate::trainer) struct Checkpoints {
    pub every: SaveEvery,
    pub options: Map<String, Value>,
    /// `Some` on rank 0 only.
    pub writer: Option<Writer>,
    /// The step of the last save; `None` before the first.
    pub saved_at: Option<u64>,
}

impl<M> Callback<M> for Checkpoints {
    /// Sets newer checkpoints aside if `checkpoint` is in the folder of this run. A collective.
    fn on_load_checkpoint(
        &mut self,
        context: &mut TrainContext<M>,
        checkpoint: &Checkpoint,
    ) -> Result<()> {
        let group = context.group();
        let mut is_saved_here = Vec::new();
        if group.rank() == 0
            && let Some(dir) = self.writer.as_ref().map(|writer| &writer.dir)
        {
            let is_here = dir.contains(checkpoint);
            if is_here {
                dir.set_aside_after(checkpoint)?;
            } else if let Some(newest) = dir.newest()? {
                return Err(Error::usage(format!(
                    "this run continues from {}, but the folder to save in has other checkpoints already, the newest \
                     is {}; save in the folder of its own checkpoints, or in a new one",
                    checkpoint.path().shown(),
                    newest.shown()
                ))
                .into());
            }
            is_saved_here.push(is_here);
        }
        group.broadcast_object_list(&mut is_saved_here, 0)?;
        // At the end of an epoch that is not ended the state changes without a step.
        let state = checkpoint.state();
        let is_whole = state.epoch_steps == 0 || context.steps_from(state.samples_seen) > 0;
        self.saved_at = (is_saved_here == [true] && is_whole).then_some(state.step);
        Ok(())
    }

    /// Saves if due, unless the epoch or the run ends with this step.
    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if !step.ends_epoch && context.stopped().is_none() {
            self.save_if(false, context)?;
        }
        Ok(())
    }

    /// Saves if due, or if this epoch's validation is the best so far.
    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, _: &mut Epoch) -> Result<()> {
        let state = &context.state;
        let is_best = state.best.as_ref().is_some_and(|best| best.step == state.step);
        self.save_if(is_best || is_due(self.every.epochs, state.epoch), context)
    }

    /// Completes the checkpoint that is being written.
    fn on_failure(&mut self, _: &mut TrainContext<M>, _: &anyhow::Error) {
        if let Some(writer) = &mut self.writer {
            let _ = writer.finish(); // the run's own error is the one to report
        }
    }

    /// Saves the final state, and waits until it is written.
    fn on_train_end(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.save(context)?;
        if let Some(writer) = &mut self.writer {
            context.group().enter_save(context.state.step);
            writer.finish()?;
            context.group().end_phase();
        }
        Ok(())
    }
}

/// Returns whether `count` steps or epochs complete another interval.
fn is_due(every: Option<u64>, count: u64) -> bool {
    every.is_some_and(|every| count.is_multiple_of(every))
}

impl Checkpoints {
    /// Saves a checkpoint if `due`, or if one is due after this step. A collective in that case.
    fn save_if<M>(&mut self, due: bool, context: &TrainContext<M>) -> Result<()> {
        if let Some(writer) = &mut self.writer {
            writer.check()?;
        }
        if due || is_due(self.every.steps, context.state.step) {
            self.save(context)?;
        }
        Ok(())
    }

    /// Copies the state, unless that of this step is saved already. Rank 0 writes the copy while training continues. A
    /// collective.
    fn save<M>(&mut self, context: &TrainContext<M>) -> Result<()> {
        let (group, step) = (context.group(), context.state.step);
        if self.saved_at == Some(step) {
            return Ok(());
        }
        // Checked before this checkpoint replaces an older, usable one.
        let loss_sum = context.loss_sum.sum(group)?;
        context.check_loss_sum(loss_sum)?;
        context.check_parameters()?;
        if group.world_size() > 1 {
            compare_replicas(&context.ddp, false, step, Compared::BeforeSave)?;
        }
        let loss_sums = group.gather_object(&loss_sum, 0)?;
        let counts = if context.criterion.has_count() {
            group.gather_object(&context.counted, 0)?.unwrap_or_default()
        } else {
            Vec::new()
        };
        group.enter_save(step);
        self.saved_at = Some(step);
        // A collective if the ranks partition the optimizer. Ranks other than 0 get no tensors then.
        let is_needed = group.rank() == 0 || context.ddp.partitions_optimizer();
        let optimizer = if is_needed { context.optimizer.state()? } else { Vec::new() };
        if let (Some(loss_sums), Some(writer)) = (loss_sums, &mut self.writer) {
            let state = TrainerState { loss_sums, counts, ..context.state.clone() };
            let state = context.with_run(state, &self.options);
            writer.save(Snapshot::take(state, &context.ddp.state_dict(), optimizer)?)?;
            context.tell_on_rank_0(|| Event::Checkpoint { step })?;
        }
        group.end_phase();
        Ok(())
    }
}

impl<M> TrainContext<M> {
    /// Returns `state` with what is the same for the whole run.
    pub(super) fn with_run(
        &self,
        state: TrainerState,
        options: &Map<String, Value>,
    ) -> TrainerState {
        TrainerState {
            world_size: self.group().world_size(),
            num_samples: self.loader.dataset_len(),
            batch_size: self.loader.batch_size(),
            max_epochs: self.max_epochs.max(state.epoch),
            total_steps: self.total_steps().max(state.step),
            scaler: self.scaler.state(),
            options: options.clone(),
            ..state
        }
    }
}
