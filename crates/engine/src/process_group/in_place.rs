//! Collectives on tensors in place, for gradients and parameters.
//!
//! Among threads, one collective reduces a whole list of tensors, which need not be copied into one tensor. Each rank
//! reduces an equal part of the list's elements, in whole cache lines.

use std::panic::Location;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::Tensor;

use super::call::{Call, NEXT_SHAPE, PieceFn};
use super::{ProcessGroup, ReduceOp};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::ffi::cuda::record_stream;
use crate::operation::Operation;

impl ProcessGroup {
    /// Returns whether the ranks read each other's tensors in memory, so that lists of tensors can be reduced in place. They
    /// do not over a simulated network, where buckets travel.
    pub(crate) fn reduces_in_place(&self) -> bool {
        self.common.backend.entry().reduces_in_place && self.simulated_cluster().is_none()
    }

    /// Reduces each of `tensors` in place, like [`all_reduce`](Self::all_reduce). They are contiguous,
    /// and `shapes` describes them all, as [`join_shapes`] returns it. Only for a group that
    /// [`reduces_in_place`](Self::reduces_in_place).
    #[track_caller]
    pub(crate) fn all_reduce_list(
        &self,
        tensors: &[Tensor],
        shapes: &[i64],
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::of(Operation::AllReduce, shapes, tensors, tensors);
        let call = self.check_call(Call { reduce_op: Some(op), ..call })?;
        self.run_call(call, Location::caller())
    }

    /// Reduces `tensors` over all ranks, and passes this rank's part of the result to `on_piece`. The part is a slice of
    /// all tensors in sequence; the ranks have equal slices. Each piece of it has at most the length of `scratch`, into
    /// which it is reduced while it is in the processor's cache. No rank leaves before every rank is done.
    ///
    /// `on_piece` gets the index of the tensor, the elements there, and whether `scratch` holds their result. If not, the
    /// tensor itself does: a single rank has its result already, and so have all ranks without an `op`.
    ///
    /// Only for a group that [`reduces_in_place`](Self::reduces_in_place), with contiguous tensors.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce) and of `on_piece`.
    #[track_caller]
    pub(crate) fn reduce_scatter_in_pieces(
        &self,
        tensors: &[Tensor],
        shapes: &[i64],
        scratch: &Tensor,
        op: Option<ReduceOp>,
        on_piece: &PieceFn<'_>,
    ) -> Result<()> {
        if !self.reduces_in_place() {
            return Err(Error::unsupported(format!(
                "backend {} cannot reduce in pieces",
                self.backend()
            )));
        }
        let output = std::slice::from_ref(scratch);
        let call = Call::of(Operation::ReduceScatter, shapes, tensors, output);
        let call = Call { reduce_op: op, on_piece: Some(on_piece), ..call };
        self.run_call(self.check_call(call)?, Location::caller())
    }

    /// Averages or sums `tensor` over all ranks, and writes this rank's part of the result into the same part of
    /// `tensor`. The parts are equal, one for each rank. The other parts of `tensor` then have unspecified values. The
    /// result has the bits of [`all_reduce`](Self::all_reduce), except with `nccl` and three ranks or more.
    #[track_caller]
    pub(crate) fn reduce_scatter_in_place(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        let op = match op {
            // The nccl backend has `PremulSum` only for all_reduce, which also multiplies the tensor first.
            ReduceOp::PremulSum(factor) if self.is_stream_ordered() => {
                multiply(tensor, factor)?;
                ReduceOp::Sum
            }
            op => op,
        };
        self.reduce_scatter_single(&mut self.my_part(tensor)?, tensor, op)
    }

    /// Copies this rank's part of `tensor` to the other ranks. The parts are equal, one for each rank.
    #[track_caller]
    pub(crate) fn all_gather_in_place(&self, tensor: &Tensor) -> Result<()> {
        self.all_gather_single(&mut tensor.shallow_clone(), &self.my_part(tensor)?)
    }

    /// Returns this rank's part of a tensor of one dimension, which has a part for each rank.
    fn my_part(&self, tensor: &Tensor) -> Result<Tensor> {
        let len = (tensor.numel() / self.world_size()) as i64;
        tensor.f_narrow(0, self.rank() as i64 * len, len).doing("narrow")
    }

    /// Returns the tensors that one rank of this process makes with `make`. All of the process's ranks get handles of
    /// their own to the same memory, which any of them may free last. A collective.
    ///
    /// # Errors
    /// The errors of [`barrier`](Self::barrier) and of `make`.
    pub(crate) fn share_tensors(
        &self,
        make: impl FnOnce() -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        self.barrier()?; // no rank uses the tensors any more that `make` reads
        let sequence = self.sequence()?;
        let ranks = self.local_world_size();
        let make = || Ok(Arc::new(Mutex::new(make()?)));
        let rank = self.global_rank();
        let tensors = self.common.shared.tensors.fetch(sequence, ranks, self.run(), rank, make)?;
        self.barrier()?; // on a GPU, the work of each rank follows that of `make`
        let tensors = tensors.lock();
        let share = |tensor: &Tensor| {
            record_stream(tensor)?;
            tensor.f_data().doing("sharing a tensor")
        };
        tensors.iter().map(share).collect()
    }
}

/// Multiplies the elements of `tensor` in place, without autograd.
pub(super) fn multiply(tensor: &Tensor, factor: f64) -> Result<()> {
    let multiply = || tensor.shallow_clone().f_mul_scalar_(factor).map(drop);
    tch::no_grad(multiply).doing("mul_")
}

/// Joins the shapes of several tensors into one list, for the ranks to compare.
pub(crate) fn join_shapes(shapes: impl Iterator<Item = Vec<i64>>) -> Vec<i64> {
    shapes.collect::<Vec<_>>().join(&NEXT_SHAPE)
}
