//! Deadlines of waits whose length the user chooses.

use std::time::{Duration, Instant};

/// The longest wait: a hundred years. A longer one may not fit into an [`Instant`].
pub(crate) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Returns the end of a wait of `patience`, or of [`LONGEST`] if that is shorter.
pub(crate) fn deadline(patience: Duration) -> Instant {
    Instant::now() + patience.min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_of_the_longest_duration_is_finite() {
        let now = Instant::now();
        let longest = deadline(Duration::MAX);
        assert!(longest >= now + LONGEST && longest <= Instant::now() + LONGEST);
        assert!(deadline(Duration::ZERO) <= Instant::now());
    }
}
