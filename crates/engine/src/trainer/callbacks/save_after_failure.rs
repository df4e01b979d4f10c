//! The state of the last whole step, saved by a surviving rank when another has failed.

use std::sync::atomic::Ordering;

use serde_json::{Map, Value};
use tch::Device;

use crate::checkpoint::{CheckpointDir, Snapshot, TrainerState};
use crate::error::{Error, counted};
use crate::runtime::Deadline;
use crate::trainer::{Callback, TrainContext};

/// Saves the state of the last whole step if another rank fails. The first survivor that returns from its collective saves it:
/// it waits for no rank that hangs. Survivors differ by one step at most, and the later state counts.
#[derive(Debug)]
pub(in crate::trainer) struct SaveAfterFailure {
    pub dir: CheckpointDir,
    /// The configuration of the run: [`TrainerState::options`].
    pub options: Map<String, Value>,
}

impl<M> Callback<M> for SaveAfterFailure {
    fn on_failure(&mut self, context: &mut TrainContext<M>, error: &anyhow::Error) {
        let causes = || error.chain().filter_map(|cause| cause.downcast_ref());
        let has_survived = causes().any(Error::waited_in_vain);
        // The only rank has the whole state, too.
        let is_alone = context.group().world_size() == 1;
        let could_not_save = causes().any(|cause| matches!(cause, Error::Save { .. }));
        let is_on_cpu = context.group().device() == Device::Cpu;
        if is_on_cpu && (has_survived || is_alone && !could_not_save) {
            self.save(context);
        }
    }
}

impl SaveAfterFailure {
    /// Saves the state, unless a rank has saved it or a later one. Says which rank has saved, or why it cannot.
    fn save<M>(&self, context: &mut TrainContext<M>) {
        let (step, rank) = (context.state.step, context.group().rank());
        if !context.last_step.is_whole || self.dir.has_step(step) {
            return;
        }
        let claimed = &context.group().run().saved_after_failure;
        if claimed.fetch_max(step, Ordering::Relaxed) >= step {
            return;
        }
        let before = context.group().enter_save(step);
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
        context.group().leave_save(before);
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
