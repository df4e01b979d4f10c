//! One rank's call of a collective: its arguments and its tensors, and the error that refuses them.

use std::fmt::Display;
use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::ops::Range;
use std::time::Duration;

use tch::{Kind, Tensor};
use xxhash_rust::xxh3::Xxh3Default;

use super::reduce_op::ReduceOp;
use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
use crate::runtime::CallSite;

/// The separator between the shapes of several tensors in [`Call::shape`].
pub(super) const NEXT_SHAPE: i64 = -1;

/// A function that receives a rank's slices of the result of a reduce_scatter, piece by piece. Its arguments: the index of
/// the input, the elements there, and whether they have been reduced into the output. If not, the input holds the result.
pub(super) type PieceFn<'a> = dyn Fn(usize, Range<usize>, bool) -> Result<()> + 'a;

/// One rank's call of a collective: its arguments and its tensors, which are contiguous for a backend.
///
/// The operation determines which tensors there are. A list has one tensor for each rank, in rank order.
pub(crate) struct Call<'a> {
    pub operation: Operation,
    /// The call's number in the order of this rank's collectives, from 0.
    pub sequence: u64,
    /// Set for reductions.
    pub reduce_op: Option<ReduceOp>,
    /// The source or the destination rank, for operations that have one.
    pub root: Option<usize>,
    /// The dtype of all tensors; `Uint8` if there are none.
    pub kind: Kind,
    /// The number of elements of all inputs, or of all outputs if they have more.
    pub numel: usize,
    /// Whether all tensors are contiguous.
    pub is_contiguous: bool,
    /// The shape that must be the same on all ranks.
    pub shape: &'a [i64],
    pub inputs: &'a [Tensor],
    pub outputs: &'a [Tensor],
    /// The timeout; `None` for the run's timeout.
    pub timeout: Option<Duration>,
    /// The call site in the program, for errors.
    pub call_site: Option<CallSite>,
    /// Receives the result of a reduce_scatter in place of tensors: see
    /// [`reduce_scatter_in_pieces`](super::ProcessGroup::reduce_scatter_in_pieces).
    pub on_piece: Option<&'a PieceFn<'a>>,
}

impl<'a> Call<'a> {
    /// Returns a call without tensors.
    pub(super) fn bare(operation: Operation) -> Self {
        Self {
            operation,
            sequence: 0,
            reduce_op: None,
            root: None,
            kind: Kind::Uint8,
            numel: 0,
            is_contiguous: true,
            shape: &[],
            inputs: &[],
            outputs: &[],
            timeout: None,
            call_site: None,
            on_piece: None,
        }
    }

    /// Returns whether the inputs are the outputs.
    pub(super) fn is_in_place(&self) -> bool {
        std::ptr::eq(self.inputs, self.outputs)
    }

    /// Returns the outputs that are not inputs as well.
    pub(super) fn further_outputs(&self) -> &[Tensor] {
        if self.is_in_place() { &[] } else { self.outputs }
    }

    /// Returns a call of `operation` with these tensors. `shape` must be the same on all ranks.
    pub(super) fn of(
        operation: Operation,
        shape: &'a [i64],
        inputs: &'a [Tensor],
        outputs: &'a [Tensor],
    ) -> Self {
        Self { shape, inputs, outputs, ..Self::bare(operation) }
    }

    /// Returns the operation and the number of the call, for errors.
    pub(super) fn at(&self) -> OpId {
        OpId { operation: self.operation, sequence: self.sequence }
    }

    /// Returns the reduction of an operation that always reduces.
    pub(super) fn op(&self) -> ReduceOp {
        self.reduce_op.unwrap_or(ReduceOp::Sum)
    }

    /// Returns a hash of what must be equal on all ranks.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3Default::new();
        discriminant(&self.operation).hash(&mut hash);
        if let Some(op) = self.reduce_op {
            discriminant(&op).hash(&mut hash);
            op.factor().to_bits().hash(&mut hash);
        }
        self.root.hash(&mut hash);
        discriminant(&self.kind).hash(&mut hash);
        self.shape.hash(&mut hash);
        hash.finish()
    }

    /// Returns the root rank of an operation that has one.
    pub(super) fn root(&self) -> usize {
        self.root.unwrap_or(0)
    }
}

/// Returns an error in the arguments of `operation`.
pub(super) fn refuse<T>(operation: impl Display + Copy, why: String) -> Result<T> {
    Err(Error::usage(format!("{operation}: {why}")))
}

/// Returns the error of a tensor that is undefined.
pub(super) fn undefined<T>(operation: impl Display + Copy) -> Result<T> {
    refuse(operation, "the tensor is undefined; make one first".into())
}
