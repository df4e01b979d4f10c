//! A data set that is a part of another.

use std::sync::Arc;

use tch::Tensor;

use super::Dataset;

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

    /// Returns the index in the whole data set.
    fn whole_index(&self, index: usize) -> anyhow::Result<usize> {
        let len = self.indices.len();
        let whole = self.indices.get(index).copied();
        whole.ok_or_else(|| anyhow::anyhow!("there is no sample {index}: this subset has {len}"))
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
        let indices = indices.iter().map(|&index| self.whole_index(index));
        self.dataset.batch(&indices.collect::<anyhow::Result<Vec<_>>>()?)
    }
}
