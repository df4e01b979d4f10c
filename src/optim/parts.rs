//! The tensors of one kernel call: ranges of parameters, with their gradients and optimizer state.

use std::ops::Range;

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{TensorList, TorchResult};

/// Ranges of parameters, each with its gradient and its slots of optimizer state, as lists for a kernel.
#[derive(Debug)]
pub(super) struct Parts {
    pub parameters: Vec<Tensor>,
    pub gradients: Vec<Tensor>,
    /// For each of the optimizer's slots, in their order, the ranges of its values.
    pub slots: Vec<Vec<Tensor>>,
    pub parameter_list: TensorList,
    pub gradient_list: TensorList,
    pub slot_lists: Vec<TensorList>,
}

impl Parts {
    pub(super) fn new(
        parameters: Vec<Tensor>,
        gradients: Vec<Tensor>,
        slots: Vec<Vec<Tensor>>,
    ) -> Result<Self> {
        Ok(Self {
            parameter_list: TensorList::new(&parameters)?,
            gradient_list: TensorList::new(&gradients)?,
            slot_lists: slots.iter().map(|slot| TensorList::new(slot)).collect::<Result<_>>()?,
            parameters,
            gradients,
            slots,
        })
    }

    /// Returns the number of ranges.
    pub(super) fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Returns the elements `piece` of the range at `index`, with `gradient` instead of theirs, if given.
    pub(super) fn piece(
        &self,
        index: usize,
        piece: &Range<usize>,
        gradient: Option<&Tensor>,
    ) -> Result<Self> {
        let (start, len) = (piece.start as i64, piece.len() as i64);
        let cut = |tensor: &Tensor| tensor.f_narrow(0, start, len).doing("narrow");
        let gradient = match gradient {
            Some(gradient) => gradient.f_narrow(0, 0, len).doing("narrow"),
            None => cut(&self.gradients[index]),
        };
        let slots = self.slots.iter().map(|slot| Ok(vec![cut(&slot[index])?]));
        Self::new(
            vec![cut(&self.parameters[index])?],
            vec![gradient?],
            slots.collect::<Result<_>>()?,
        )
    }
}
