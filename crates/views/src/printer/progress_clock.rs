//! When progress is shown: at growing intervals, because an epoch may be long.

use std::time::{Duration, Instant};

/// The time to the first sign. The later ones come ever more rarely.
const FIRST: Duration = Duration::from_secs(2);

/// The longest time between two signs.
const LONGEST: Duration = Duration::from_secs(60);

/// The time since training began, and until the next sign of progress.
#[derive(Debug)]
pub(super) struct ProgressClock {
    began: Instant,
    /// The time after `began` of the next sign.
    next: Duration,
    /// The steps that were made before this start of the run.
    done: u64,
}

impl ProgressClock {
    /// Begins at step `done`.
    pub(super) fn new(done: u64) -> Self {
        Self { began: Instant::now(), next: FIRST, done }
    }

    /// Returns the time since training began, if progress is to be shown now.
    pub(super) fn due(&self) -> Option<Duration> {
        Some(self.began.elapsed()).filter(|elapsed| *elapsed >= self.next)
    }

    /// Sets when the sign after that at `elapsed` comes. Progress is drawn, or printed.
    pub(super) fn set_next(&mut self, elapsed: Duration, is_drawn: bool) {
        self.next = elapsed + interval(elapsed, is_drawn);
    }

    /// Returns the seconds that the rest of `steps` steps will take, as known at `elapsed` and `step`.
    pub(super) fn time_left(&self, elapsed: Duration, step: u64, steps: u64) -> f64 {
        let each = elapsed.as_secs_f64() / step.saturating_sub(self.done).max(1) as f64;
        each * steps.saturating_sub(step) as f64
    }
}

impl Default for ProgressClock {
    fn default() -> Self {
        Self::new(0)
    }
}

/// Returns the time from a sign at `elapsed` to the next one. A bar is drawn more often than a line is printed.
fn interval(elapsed: Duration, is_drawn: bool) -> Duration {
    if is_drawn { FIRST / 4 } else { elapsed.clamp(FIRST, LONGEST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_come_after_two_seconds_and_then_more_rarely() {
        let [mut lines, mut draws] = [Vec::new(), Vec::new()];
        for (is_drawn, signs) in [(false, &mut lines), (true, &mut draws)] {
            let mut next = FIRST;
            for elapsed in (0..200).map(Duration::from_secs) {
                if elapsed >= next {
                    next = elapsed + interval(elapsed, is_drawn);
                    signs.push(elapsed.as_secs());
                }
            }
        }
        assert_eq!(lines, [2, 4, 8, 16, 32, 64, 124, 184]);
        assert!(draws.starts_with(&[2, 3, 4]) && draws.len() == 198, "{draws:?}");
    }
}
