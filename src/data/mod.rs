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
pub(crate) use loader::batches_of_all;
pub use loader::{Batch, Batches, DataLoader};
pub use sampler::DistributedSampler;
pub use subset::{Subset, random_split};
pub use text_dataset::TextDataset;

use crate::error::{Error, first_line};

impl Error {
    /// Converts a data set's error into one that names the samples.
    pub(crate) fn of_samples(indices: &[usize]) -> impl FnOnce(anyhow::Error) -> Error {
        let first: Vec<String> = indices.iter().take(4).map(usize::to_string).collect();
        let more = indices.len().saturating_sub(first.len());
        let samples = match (&first[..], more) {
            ([one], 0) => format!("sample {one}"),
            (some, 0) => format!("samples {}", some.join(", ")),
            (some, more) => format!("samples {} and {more} more", some.join(", ")),
        };
        move |error| Error::Data { samples, reason: first_line(&format!("{error:#}")) }
    }
}
