//! The partitions of a model's optimizer: [`OptimizerLayout::Partitioned`](super::OptimizerLayout).
//!
//! Every rank has all parameters, but keeps the optimizer's state of its own partitions only. Each bucket has an equal
//! partition for each rank. A rank receives the averaged gradients of its partitions, updates their parameters, and
//! gathers the partitions that the other ranks have updated. This is stage 1 of ZeRO, as in PyTorch's
//! `ZeroRedundancyOptimizer`.

use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;

use crate::error::{Result, opaque_debug};
use crate::ffi::TorchResult;
use crate::process_group::ProcessGroup;

/// The partitions of a flat buffer.
pub(super) struct Partitions {
    pub group: Rc<ProcessGroup>,
    /// The buckets in the buffer, in order. The length of each is a multiple of the number of ranks.
    pub buckets: Vec<Range<usize>>,
}

opaque_debug!(Partitions);

impl Partitions {
    /// Returns this rank's partition of each bucket, as a range of the buffer.
    pub(super) fn mine(&self) -> impl Iterator<Item = Range<usize>> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        self.buckets.iter().map(move |bucket| {
            let part = bucket.len() / ranks;
            let start = bucket.start + rank * part;
            start..start + part
        })
    }

    /// Copies each rank's partitions of `flat`, a tensor of the buffer's length, to all ranks. A collective.
    pub(super) fn gather_in_place(&self, flat: &Tensor) -> Result<()> {
        for bucket in &self.buckets {
            let (start, len) = (bucket.start as i64, bucket.len() as i64);
            self.group.all_gather_in_place(&flat.f_narrow(0, start, len).doing("narrow")?)?;
        }
        Ok(())
    }
}
