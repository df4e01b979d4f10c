//! [`BatchSource`]: the source of a rank's batches. The rank loads them, or rank 0 does for all.

use std::time::Duration;

use super::{Batch, DataLoader, ScatterLoader};
use crate::error::{Error, Result};

/// The source of a rank's batches.
#[derive(Debug)]
pub enum BatchSource {
    /// The rank loads its own batches.
    Own(DataLoader),
    /// Rank 0 loads the batches of all ranks.
    Scattered(ScatterLoader),
}

impl From<DataLoader> for BatchSource {
    fn from(loader: DataLoader) -> Self {
        BatchSource::Own(loader)
    }
}

impl From<ScatterLoader> for BatchSource {
    fn from(loader: ScatterLoader) -> Self {
        BatchSource::Scattered(loader)
    }
}

/// Calls the method of this name on either loader.
macro_rules! either {
    ($loader:expr, $method:ident($($argument:expr),*)) => {
        match $loader {
            BatchSource::Own(loader) => loader.$method($($argument),*),
            BatchSource::Scattered(loader) => loader.$method($($argument),*),
        }
    };
}

impl BatchSource {
    /// Returns the number of samples per batch. An epoch's last batch may have fewer.
    pub fn batch_size(&self) -> usize {
        either!(self, batch_size())
    }

    /// Returns the number of samples in the data set, for all ranks together.
    pub fn dataset_len(&self) -> usize {
        either!(self, dataset_len())
    }

    /// Returns the number of batches in an epoch, the same on every rank.
    pub fn num_batches(&self) -> usize {
        either!(self, num_batches())
    }

    /// Returns the total time this rank has waited for data.
    pub fn waited(&self) -> Duration {
        either!(self, waited())
    }

    /// Returns the number of batches left after all ranks together have had the first `start` samples.
    pub fn num_batches_from(&self, start: usize) -> usize {
        either!(self, num_batches_from(start))
    }

    /// Returns the number of samples that all ranks together have in the next `batches` batches: see
    /// [`DataLoader::dealt_in`]. `None` if rank 0 scatters them.
    pub(crate) fn dealt_in(&self, start: usize, batches: usize) -> Option<usize> {
        match self {
            BatchSource::Own(loader) => loader.dealt_in(start, batches),
            BatchSource::Scattered(_) => None,
        }
    }

    /// Returns the samples of this rank's batches: see [`DataLoader::samples`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if rank 0 scatters the batches: the other ranks do not know their samples.
    pub(crate) fn samples(
        &self,
        epoch: u64,
        start: usize,
        first: usize,
        count: usize,
    ) -> Result<Vec<usize>> {
        let own = match self {
            BatchSource::Own(loader) => Some(loader),
            BatchSource::Scattered(loader) => loader.loaders.first(),
        };
        let own = own.ok_or_else(|| Error::Unsupported("rank 0 knows the samples".into()))?;
        own.samples(epoch, start, first, count)
    }

    /// Returns this rank's batches of `epoch`.
    ///
    /// # Errors
    /// The errors of [`DataLoader::epoch`] and [`ScatterLoader::epoch`].
    pub fn epoch(&self, epoch: u64) -> Result<Box<dyn Iterator<Item = Result<Batch>>>> {
        self.epoch_from(epoch, 0)
    }

    /// Returns this rank's batches of `epoch` left after all ranks together have had the first `start` samples.
    ///
    /// # Errors
    /// As [`epoch`](Self::epoch).
    pub fn epoch_from(
        &self,
        epoch: u64,
        start: usize,
    ) -> Result<Box<dyn Iterator<Item = Result<Batch>>>> {
        Ok(match self {
            BatchSource::Own(loader) => Box::new(loader.epoch_from(epoch, start)?),
            BatchSource::Scattered(loader) => Box::new(loader.epoch_from(epoch, start)?),
        })
    }
}
