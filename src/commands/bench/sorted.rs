//! Measured values in order: their median, and how far they vary.

/// Values in ascending order.
#[derive(Debug, Clone)]
pub(super) struct Sorted(Vec<f64>);

impl Sorted {
    pub(super) fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_unstable_by(f64::total_cmp);
        Self(values)
    }

    /// Returns the value in the middle; of two, the larger one. NaN without values.
    pub(super) fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Returns the smallest value. NaN without values.
    pub(super) fn smallest(&self) -> f64 {
        self.0.first().copied().unwrap_or(f64::NAN)
    }

    /// Returns the largest value. NaN without values.
    pub(super) fn largest(&self) -> f64 {
        self.0.last().copied().unwrap_or(f64::NAN)
    }

    /// Returns how many times the smallest value the largest one is. NaN without values.
    pub(super) fn spread(&self) -> f64 {
        self.largest() / self.smallest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_a_measured_value() {
        let median = |values: &[f64]| Sorted::new(values.iter().copied()).median();
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 4.0);
        assert!(median(&[]).is_nan());
        assert_eq!(Sorted::new([2.0, 8.0, 4.0]).spread(), 4.0);
    }
}
