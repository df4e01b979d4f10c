//! Deadlines of waits whose length the user chooses, with `--timeout` and `--grace-period` (`config/launch.rs`).

use std::time::{Duration, Instant};

/// The longest wait: a hundred years. A longer one may not fit into an [`Instant`].
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Returns the end of a wait of `wait`, or of [`MAX_WAIT`] if that is shorter.
pub(crate) fn deadline(wait: Duration) -> Instant {
    Instant::now() + wait.min(MAX_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_of_the_longest_duration_is_finite() {
        let now = Instant::now();
        let longest = deadline(Duration::MAX);
        assert!(longest >= now + MAX_WAIT && longest <= Instant::now() + MAX_WAIT);
        assert!(deadline(Duration::ZERO) <= Instant::now());
    }
}
