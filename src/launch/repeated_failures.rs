//! Failures in a row at the same place.

use crate::telemetry::Failure;

/// Counts failures in a row at the same place. A run that fails again where it failed before has made no progress.
#[derive(Debug, Default)]
pub(super) struct RepeatedFailures {
    place: Option<String>,
    count: usize,
}

impl RepeatedFailures {
    /// Counts `failure`. Returns how many failures in a row there have been at its place; `None` if it is the first
    /// there.
    pub(super) fn count(&mut self, failure: &Failure) -> Option<usize> {
        let place = failure.place();
        self.count = if place.is_some() && place == self.place { self.count + 1 } else { 1 };
        self.place = place;
        (self.count > 1).then_some(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_count_restarts_at_another_step() {
        let mut in_a_row = RepeatedFailures::default();
        let mut count = |step: Option<u64>| {
            let operation = Some("step".into());
            in_a_row.count(&Failure { operation, sequence: step, ..Failure::default() })
        };
        let steps =
            [None, None, Some(3), Some(3), Some(3), Some(4), Some(3), Some(3), None, Some(3)];
        let counts = steps.map(&mut count);
        let expected = [None, None, None, Some(2), Some(3), None, None, Some(2), None, None];
        assert_eq!(counts, expected);
    }
}
