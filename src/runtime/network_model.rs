//! The model of a network that is not here.

use std::fmt;
use std::time::Duration;

/// A model of how long collectives take on a network.
pub(crate) trait NetworkModel: fmt::Debug + Send + Sync {
    /// Returns the time of an all_reduce of `bytes` bytes by `ranks` ranks.
    fn all_reduce_time(&self, ranks: usize, bytes: usize) -> Duration;
}
