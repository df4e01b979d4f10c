//! The result of a training run.

use std::time::Duration;

use crate::runtime::StopReason;

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
    /// Steps without the optimizer's, because gradients were not finite or a callback skipped them.
    pub skipped_steps: u64,
    /// Duration of the training loop on this rank.
    pub elapsed: Duration,
}
