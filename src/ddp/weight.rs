//! The weight of a rank's gradients: its number of samples.

use tch::Tensor;

use crate::error::Result;
use crate::ffi::TorchResult;

/// The number of samples in the gradients of this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weight {
    /// The samples of all batches since the last backward that averaged.
    pub samples: f64,
    /// The samples of the first of these batches that has any. Its loss is not scaled. Each other loss is multiplied by
    /// the ratio of its samples to this number.
    pub unit: f64,
    /// Whether this backward has a weight. A backward without one must not average gradients that have weights.
    pub is_called: bool,
}

impl Weight {
    /// Returns the factor for the loss of a batch of `samples` samples.
    pub(super) fn factor(&self, samples: f64) -> f64 {
        match self.unit {
            _ if samples == 0.0 => 0.0, // no weight, even as the first batch
            0.0 => 1.0,
            unit => samples / unit,
        }
    }

    /// Adds a batch of `samples` samples.
    pub(super) fn add(&mut self, samples: f64) {
        self.samples += samples;
        self.is_called = true;
        if self.unit == 0.0 {
            self.unit = samples;
        }
    }

    /// Returns the weight of a whole step of `samples` samples, whose losses are already multiplied.
    pub(super) fn whole(samples: f64) -> Self {
        Self { samples, unit: samples, is_called: true }
    }

    /// Scales the `gradients` of all batches to their mean over the samples. Sets them to zero without samples, even if
    /// they are not finite.
    pub(super) fn apply(self, gradients: &mut Tensor) -> Result<()> {
        let scale = || match self.unit / self.samples {
            _ if self.samples == 0.0 => gradients.f_zero_().map(drop),
            1.0 => Ok(()),
            factor => gradients.f_mul_scalar_(factor).map(drop),
        };
        tch::no_grad(scale).doing("weighting gradients")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_batches_get_factor_one() {
        let mut weight = Weight::default();
        let mut factors = |samples: &[f64]| -> Vec<f64> {
            weight = Weight::default();
            let mut add = |&samples: &f64| {
                let factor = weight.factor(samples);
                weight.add(samples);
                factor
            };
            samples.iter().map(&mut add).collect()
        };
        assert_eq!(factors(&[7.0; 3]), [1.0; 3]);
        assert_eq!(factors(&[0.0, 4.0, 1.0, 0.0]), [0.0, 1.0, 0.25, 0.0]);
        assert_eq!((weight.samples, weight.unit), (5.0, 4.0));
    }
}
