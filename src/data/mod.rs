//! The data set, which sample goes to which rank, and the batches of one rank.

mod dataset;
mod loader;
mod sampler;
mod scatter;

pub use dataset::{Dataset, Targets};
pub use loader::{Batch, DataLoader};
pub use sampler::DistributedSampler;
pub use scatter::{Loader, ScatterLoader};
