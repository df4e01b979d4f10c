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
    group: Rc<ProcessGroup>,
    /// The buckets in the buffer, in order. The length of each is a multiple of the number of ranks.
    buckets: Vec<Range<usize>>,
}

opaque_debug!(Partitions);

impl Partitions {
    /// Returns the partitions of a buffer with these buckets, for the ranks of `group`.
    pub(super) fn new(group: Rc<ProcessGroup>, buckets: Vec<Range<usize>>) -> Self {
        Self { group, buckets }
    }

    /// Returns this rank's partition of each bucket, as a range of the buffer.
    fn mine(&self) -> impl Iterator<Item = Range<usize>> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        self.buckets.iter().map(move |bucket| {
            let part = bucket.len() / ranks;
            let start = bucket.start + rank * part;
            start..start + part
        })
    }

    /// Returns whether this is rank 0.
    pub(super) fn is_on_rank_0(&self) -> bool {
        self.group.rank() == 0
    }

    /// Returns the number of elements in all of this rank's partitions.
    pub(super) fn numel(&self) -> usize {
        self.mine().map(|partition| partition.len()).sum()
    }

    /// Returns the parts of `range` that lie in this rank's partitions. Each is a range of the buffer, with the offset
    /// of its first element in a tensor of the optimizer's state. It contains this rank's partitions in sequence.
    pub(super) fn owned(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (from, to) = (range.start, range.end);
        let starts = self
            .mine()
            .scan(0, |end, partition| Some(std::mem::replace(end, *end + partition.len())));
        self.mine().zip(starts).filter_map(move |(partition, start)| {
            let part = partition.start.max(from)..partition.end.min(to);
            (part.start < part.end).then(|| (part.clone(), start + part.start - partition.start))
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

    /// Gathers all ranks' partitions of `state`, bucket by bucket, and passes the values of each bucket to `f` with the
    /// bucket's range in the buffer: on rank 0, or on all ranks with `on_all`. A collective.
    pub(super) fn gather_state(
        &self,
        state: &Tensor,
        on_all: bool,
        mut f: impl FnMut(&Range<usize>, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let doing = "gathering the optimizer's state";
        let (group, mut start) = (&self.group, 0);
        for bucket in &self.buckets {
            let len = (bucket.len() / group.world_size()) as i64;
            let mine = state.f_narrow(0, start, len).doing(doing)?;
            start += len;
            let whole = || Tensor::f_empty([bucket.len() as i64], (state.kind(), state.device()));
            if on_all {
                let mut whole = whole().doing(doing)?;
                group.all_gather_single(&mut whole, &mine)?;
                f(bucket, &whole)?;
            } else if group.rank() == 0 {
                let whole = whole().doing(doing)?;
                let mut parts = whole.f_split(len, 0).doing(doing)?;
                group.gather(&mine, Some(&mut parts), 0)?;
                group.synchronize()?;
                f(bucket, &whole)?;
            } else {
                group.gather(&mine, None, 0)?;
            }
        }
        Ok(())
    }
}
