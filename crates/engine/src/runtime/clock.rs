//! The ends of waits. Time in which the system suspends the process does not count.

use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError};

#[cfg(not(loom))]
pub(crate) use super::running_clock::Instant;
#[cfg(loom)]
pub(crate) use std::time::Instant;

/// The longest wait: a hundred years. A longer one may not fit into the system's times.
pub const MAX_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The end of a wait whose length the user chooses, with `--timeout` and `--grace-period` (`config/launch.rs`).
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    began: Instant,
    wait: Duration,
}

impl Deadline {
    /// Returns the end of a wait of `wait` that begins now.
    pub fn after(wait: Duration) -> Self {
        Self { began: Instant::now(), wait }
    }

    /// Returns the time left, at most [`MAX_WAIT`]; zero at the end.
    pub(crate) fn left(&self) -> Duration {
        self.wait.saturating_sub(self.began.elapsed()).min(MAX_WAIT)
    }

    /// Receives from `channel` until then.
    ///
    /// # Errors
    /// If nothing has come until then, or if the channel is closed.
    pub fn recv<T>(&self, channel: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        loop {
            match channel.recv_timeout(self.left()) {
                Err(RecvTimeoutError::Timeout) if !self.is_over() => {} // the process was suspended
                received => return received,
            }
        }
    }

    /// Returns whether the wait is over.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn deadline_of_any_duration_is_finite() {
        assert!(Deadline::after(Duration::ZERO).is_over());
        let longest = Deadline::after(Duration::MAX);
        assert!(longest.left() <= MAX_WAIT && !longest.is_over());
    }
}
