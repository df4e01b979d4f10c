//! One copy of a model for all ranks of a process: [`OptimizerLayout::SharedModel`](super::OptimizerLayout).
//!
//! The ranks have the same parameters and the same optimizer state in every step. As threads they can have the same
//! memory, too. Each rank then updates one slice of the parameters, for all ranks. It works piece by piece: it adds up
//! the ranks' gradients and updates the parameters from their mean. Averaged gradients are not written back, and no
//! rank repeats another's update. ZeRO also gives each rank a part of the step, but its ranks must gather the parameters
//! afterwards.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use tch::{Kind, Tensor};

use crate::error::{Error, Result, opaque_debug};
use crate::ffi::TorchResult;
use crate::process_group::{ProcessGroup, ReduceOp};

/// Elements per piece: 128 KiB of float32. Small, so that the mean can stay in a cache until the optimizer reads it;
/// large, so that the kernel calls cost little. 16 Ki to 128 Ki elements take the same time within 5 %. A multiple of a
/// cache line, so that kernels give the same bits as on a whole tensor.
const PIECE_NUMEL: i64 = 32 << 10;

/// One rank's side of a model that all ranks of its process share.
pub(crate) struct SharedModel {
    /// The ranks that share the model.
    pub(super) group: Rc<ProcessGroup>,
    /// How the optimizer is to average the ranks' own gradients as it steps, while they are [`GradState::LeftToStep`].
    /// `None` if it is not to.
    pub(super) average: Cell<Option<ReduceOp>>,
    /// Memory for a piece of averaged gradients: a tensor for each dtype.
    scratch: RefCell<Vec<Rc<Tensor>>>,
}

opaque_debug!(SharedModel);

impl SharedModel {
    /// Returns this rank's side of a model that all ranks of this process share. `None` if this process has one rank, with
    /// a GPU of its own. A collective of `group`.
    ///
    /// # Errors
    /// [`Error::Input`] if this process has several ranks, each with a GPU of its own.
    pub(super) fn of(group: &Rc<ProcessGroup>) -> Result<Option<Self>> {
        // With one rank, which has a GPU of its own, the process shares its model with nobody.
        if group.is_stream_ordered() && group.local_world_size() == 1 {
            return Ok(None);
        }
        if group.is_stream_ordered() {
            return Err(Error::unsupported(format!(
                "SharedModel: with backend {} each rank has its own GPU, and GPUs do not share memory; use another \
                 OptimizerLayout, or start the ranks on the CPU or on one GPU",
                group.backend()
            )));
        }
        let group =
            if group.spans_processes() { Rc::new(group.new_local_group()?) } else { group.clone() };
        let (average, scratch) = (Cell::new(None), RefCell::new(Vec::new()));
        Ok(Some(Self { group, average, scratch }))
    }

    /// Averages this rank's slice of `gradients`, which have one dtype and these `shapes`, and calls `on_piece` for each
    /// piece of it. Does not average if `is_averaged`. Returns once all ranks are done.
    ///
    /// `on_piece` gets the index of the gradient, the elements in it, and their mean. The mean is `None` if the
    /// gradient itself holds it.
    pub(super) fn for_my_slice(
        &self,
        gradients: &[Tensor],
        shapes: &[i64],
        is_averaged: bool,
        on_piece: impl Fn(usize, Range<usize>, Option<&Tensor>) -> Result<()>,
    ) -> Result<()> {
        let Some(first) = gradients.first() else { return Ok(()) };
        let scratch = self.scratch(first.kind())?;
        let average = if is_averaged { None } else { self.average.get() };
        let on_piece = |index, piece, is_in_scratch: bool| {
            on_piece(index, piece, is_in_scratch.then_some(&*scratch))
        };
        self.group.reduce_scatter_in_pieces(gradients, shapes, &scratch, average, &on_piece)
    }

    fn scratch(&self, kind: Kind) -> Result<Rc<Tensor>> {
        let mut scratch = self.scratch.borrow_mut();
        if let Some(known) = scratch.iter().find(|known| known.kind() == kind) {
            return Ok(known.clone());
        }
        let made = Tensor::f_zeros([PIECE_NUMEL], (kind, self.group.device())).doing("zeros")?;
        let made = Rc::new(made);
        scratch.push(made.clone());
        Ok(made)
    }
}
