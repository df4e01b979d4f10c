//! How long the parts of backward passes took.

use std::time::Duration;

/// How long the parts of backward passes took on this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BackwardTimings {
    /// How many these are.
    pub count: u32,
    /// From the beginning of backward to the end of the last bucket.
    pub total: Duration,
    /// In which this rank was busy with reducing, or waited for it.
    pub communication: Duration,
    /// That part of `communication` that passed before backward was through.
    pub overlapped: Duration,
    /// How long others carried on with reducing while this rank was still at backward.
    pub beside: Duration,
}
