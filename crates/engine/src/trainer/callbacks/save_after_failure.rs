//! The state of the last whole step, saved by a rank that is left when another has failed.

use std::sync::atomic::Ordering;

use serde_json::{Map, Value};

use crate::checkpoint::{CheckpointDir, Snapshot, TrainerState};
use crate::error::{Error, counted};
use crate::runtime::Deadline;
use crate::trainer::{Callback, TrainContext};

/// Saves the state of the last whole step if another rank fails. The first rank that comes back saves it: all ranks have the
/// same state, and no rank waits for one that hangs.
#[derive(Debug)]
pub(in crate::trainer) struct SaveAfterFailure {
    pub dir: CheckpointDir,
    /// The configuration of the run: [`TrainerState::options`].
    pub options: Map<String, Value>,
}

impl<M> Callback<M> for SaveAfterFailure {
    fn on_failure(&mut self, context: &mut TrainContext<M>, error: &anyhow::Error) {
        let causes = || error.chain().filter_map(|cause| cause.downcast_ref());
        let is_left = causes().any(Error::waited_in_vain);
        // The only rank has the whole state, too.
        let is_alone = context.group().world_size() == 1;
        if is_left || is_alone && !causes().any(|cause| matches!(cause, Error::Save { .. })) {
            self.save(context);
        }
    }
}

impl SaveAfterFailure {
    /// Saves the state, unless a rank has saved it or a later one, and says so.
    fn save<M>(&self, context: &mut TrainContext<M>) {
        let (step, rank) = (context.state.step, context.group().rank());
        let claimed = &context.group().run().saved_after_failure;
        if !context.last_step.is_whole || claimed.fetch_max(step, Ordering::Relaxed) >= step {
            return;
        }
        context.group().enter_save(step);
        let saved = context.restore_last_step().and_then(|state| {
            let state = TrainerState { after_failure: Some(rank), ..state };
            let state = context.with_run(state, &self.options);
            let deadline = Deadline::after(context.group().run().grace_period / 2);
            let saved = context.optimizer.state().and_then(|optimizer| {
                let snapshot = Snapshot::take(state, &context.ddp.state_dict(), optimizer)?;
                self.dir.write_after_failure(&snapshot, deadline)
            });
            saved.map_err(|error| error.to_string())
        });
        let steps = counted(step, "step");
        match saved {
            Ok(Some(_)) => {
                context.observers.warn(format!("rank {rank} has saved the state after {steps}"))
            }
            Ok(None) => {}
            Err(reason) => context
                .observers
                .warn(format!("rank {rank} cannot save the state after {steps}: {reason}")),
        }
    }
}
