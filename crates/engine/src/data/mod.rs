//! Data sets, the sampler that deals samples to ranks, and the loader that makes a rank's batches.

mod dataset;
mod files;
mod gathered_batches;
mod loader;
mod sampler;
mod staging;
mod subset;
mod text_dataset;

pub use dataset::{Dataset, Targets, TensorDataset};
pub use files::{DatasetSpec, FileDataset, TargetKind};
pub use loader::batches_of_all;
pub use loader::{Batch, Batches, DataLoader};
pub use sampler::DistributedSampler;
pub use subset::{Subset, random_split};
pub use text_dataset::TextDataset;

use crate::error::{Error, first_line, first_of};

impl Error {
    /// Converts a data set's error into one that names the samples.
    #[doc(hidden)]
    pub fn of_samples(indices: &[usize]) -> impl FnOnce(anyhow::Error) -> Error {
        let samples = list_samples(indices, 4);
        move |error| Error::Data { samples, reason: first_line(&format!("{error:#}")) }
    }
}

/// Lists the first `most` of `samples`, for a message.
pub(crate) fn list_samples(samples: &[usize], most: usize) -> String {
    let what = if samples.len() == 1 { "sample" } else { "samples" };
    format!("{what} {}", first_of(samples, most))
}
