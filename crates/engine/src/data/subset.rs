//! A data set that is a part of another, and random splits.

use std::sync::Arc;

use tch::Tensor;

use super::Dataset;
use super::sampler::randperm;
use crate::error::{Error, Result};

/// Some of the samples of another data set, in any order. Follows `torch.utils.data.Subset`.
#[derive(Debug)]
pub struct Subset {
    dataset: Arc<dyn Dataset>,
    indices: Vec<usize>,
}

impl Subset {
    /// Creates a data set of the samples `indices` of `dataset`.
    pub fn new(dataset: Arc<dyn Dataset>, indices: Vec<usize>) -> Self {
        Self { dataset, indices }
    }

    /// Splits the samples of `dataset` at random into two parts. The second has `fraction` of them. No data is copied.
    /// The parts are those of [`random_split`].
    ///
    /// # Errors
    /// As [`random_split`].
    pub fn split(dataset: Arc<dyn Dataset>, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        let (first, second) = random_split(dataset.len(), fraction, seed)?;
        Ok((Self::new(dataset.clone(), first), Self::new(dataset, second)))
    }

    /// Returns the index in the whole data set.
    fn whole_index(&self, index: usize) -> anyhow::Result<usize> {
        let len = self.indices.len();
        let whole = self.indices.get(index).copied();
        whole.ok_or_else(|| anyhow::anyhow!("there is no sample {index}: this subset has {len}"))
    }

    fn whole_indices(&self, indices: &[usize]) -> anyhow::Result<Vec<usize>> {
        indices.iter().map(|&index| self.whole_index(index)).collect()
    }
}

impl Dataset for Subset {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        self.dataset.get(self.whole_index(index)?)
    }

    fn source_index(&self, index: usize) -> usize {
        self.whole_index(index).map_or(index, |index| self.dataset.source_index(index))
    }

    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        self.dataset.batch(&self.whole_indices(indices)?)
    }

    fn more_inputs(&self, indices: &[usize]) -> anyhow::Result<Vec<Tensor>> {
        self.dataset.more_inputs(&self.whole_indices(indices)?)
    }
}

/// Splits `len` samples at random. Returns the samples of the first part, and of the second, which has `fraction` of
/// them.
///
/// Follows `torch.utils.data.random_split(range(len), [1 - fraction, fraction], generator)` with a generator seeded
/// with `manual_seed(seed)`: the same samples in the same order.
///
/// # Errors
/// [`Error::Input`] if a part would have no samples, or if there is no memory for the order.
pub fn random_split(len: usize, fraction: f64, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
    let first = size_of_first_part(len, fraction)?;
    let mut order = randperm(len, seed)?;
    let rest = order.split_off(first);
    Ok((order, rest))
}

/// Returns the number of samples in the first of two parts of `len` samples. The second has `fraction` of them.
///
/// # Errors
/// [`Error::Input`] if a part would have no samples.
pub(super) fn size_of_first_part(len: usize, fraction: f64) -> Result<usize> {
    let refuse = |problem: &str| {
        Err(Error::usage(format!("a fraction of {fraction:?} of {len} samples {problem}")))
    };
    if !(fraction > 0.0 && fraction < 1.0) {
        return refuse("does not make two parts; use a number between 0 and 1");
    }
    // As in PyTorch, both sizes are rounded down. The rest goes to the first part, then to the second.
    let mut first = (len as f64 * (1.0 - fraction)).floor() as usize;
    let second = (len as f64 * fraction).floor() as usize;
    first += len.saturating_sub(first + second).div_ceil(2);
    if first == 0 || first >= len {
        return refuse("leaves a part without samples; use another fraction, or more samples");
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded from PyTorch 2.11.
    #[test]
    fn random_split_matches_pytorch() {
        let split = |len, fraction, seed| random_split(len, fraction, seed).unwrap();
        assert_eq!(split(10, 0.2, 0), (vec![4, 1, 7, 5, 3, 9, 0, 8], vec![6, 2]));
        assert_eq!(split(7, 0.5, 3), (vec![5, 3, 4, 6], vec![0, 2, 1]));
        assert_eq!(split(3, 0.34, 1), (vec![1, 2], vec![0]));
        let (training, validation) = split(1797, 0.2, 0);
        assert_eq!((training.len(), &training[..3]), (1438, &[362, 1568, 1440][..]));
        let sum: usize = validation.iter().enumerate().map(|(i, sample)| i * sample).sum();
        assert_eq!((validation.len(), sum), (359, 56_844_314));
    }

    #[test]
    fn empty_split_is_refused() {
        let error = |len, fraction| random_split(len, fraction, 0).unwrap_err().to_string();
        assert!(
            error(5, 0.01).starts_with("a fraction of 0.01 of 5 samples leaves a part without")
        );
        assert!(error(5, 1e-300).starts_with("a fraction of 1e-300 of 5 samples leaves"));
        for fraction in [0.0, 1.0, -0.5, f64::NAN] {
            assert!(error(5, fraction).contains("use a number between 0 and 1"), "{fraction}");
        }
    }
}
