//! How a run ended: for the report, the failure event, and the lines that rank 0 prints.

use crate::config::TrainingSection;
use engine::checkpoint::{CheckpointDir, TrainerState};
use engine::error::{Shown, counted};
use engine::launch::{SpawnError, StopReason};
use engine::records::ValidationMetrics;
use views::{Outcome, RunState, validation_text};

/// Returns how the run ended.
pub(super) fn outcome<T>(
    result: &Result<T, Box<SpawnError>>,
    stopped: Option<StopReason>,
    restarts: &[String],
) -> Outcome {
    let (kind, mut text) = match (result, stopped) {
        (Err(error), _) => (RunState::Failed, error.to_string()),
        (Ok(_), Some(reason)) => (RunState::Stopped, format!("stopped by {}", reason.name())),
        (Ok(_), None) => (RunState::Done, "done".into()),
    };
    for (number, reason) in (1..).zip(restarts) {
        text += &format!("; restart {number} was needed: {reason}");
    }
    Outcome { kind, text }
}

/// Returns a line about the best validation of a run, and where it is saved.
pub(super) fn best_message(best: &ValidationMetrics, dir: Option<&CheckpointDir>) -> String {
    let pointer = dir.map(|dir| dir.path().join("best")).filter(|pointer| pointer.exists());
    let path_text = pointer.map_or(String::new(), |path| format!(" ({})", path.shown()));
    format!("best: epoch {}, {}{path_text}", best.epoch, validation_text(best))
}

/// Returns a line about a run that has stopped.
pub(super) fn stopped_message(
    reason: StopReason,
    state: &TrainerState,
    dir: Option<&CheckpointDir>,
) -> String {
    let name = reason.name();
    let steps = counted(state.step, "step");
    match (dir, &state.best) {
        (_, Some(best)) if reason == StopReason::NoProgress => format!(
            "stopped by {name} after {steps}: the validation loss was smallest after epoch {} ({})",
            best.epoch,
            counted(best.step, "step")
        ),
        (Some(dir), _) => {
            let unless =
                if reason == StopReason::Steps { ", and raise or remove --max-steps" } else { "" };
            format!(
                "stopped by {name} after {steps}, saved in {}; to continue, add --resume auto{unless}",
                dir.path().shown()
            )
        }
        (None, _) => format!(
            "stopped by {name} after {steps}; nothing is saved, because there is no --checkpoint-dir"
        ),
    }
}

/// Returns a line about a run whose epochs ended before `--max-steps`; `None` for any other run.
pub(super) fn before_max_steps_message(
    state: &TrainerState,
    training: &TrainingSection,
) -> Option<String> {
    let steps = training.max_steps.filter(|max| *max > state.step)?;
    Some(format!(
        "the run has ended after {}, before --max-steps {steps}, because of --max-epochs {}",
        counted(state.step, "step"),
        training.max_epochs
    ))
}
