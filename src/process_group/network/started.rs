//! An operation of Gloo that was started and may still run.

use std::time::{Duration, Instant};

use crate::ffi::GlooWork;
use crate::operation::OpId;

/// A Gloo operation that was started for a call.
pub(crate) struct Started {
    pub work: GlooWork,
    pub at: OpId,
    /// Global rank that waits for it.
    pub waiting: usize,
    pub began: Instant,
    pub timeout: Duration,
}

impl Started {
    /// Returns the time left until the deadline.
    pub(crate) fn time_left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}
