//! The ranges of parameters that a kernel steps, with their gradients and the optimizer's state.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{TensorList, TorchResult, set_view};

/// The parameters that one kernel call steps.
#[derive(Debug)]
pub(super) struct Group {
    /// Whether weight decay applies to them.
    pub decays: bool,
    /// The number of steps that they have made.
    pub steps: u64,
    pub parts: Parts,
    /// The number of steps on the device, if the optimizer counts all.
    pub count: Option<Count>,
    /// The indices of the parameters.
    pub members: Vec<usize>,
    /// The model's own tensors of the parameters.
    pub tensors: TensorList,
}

/// A number of steps on the device, where the kernel reads it.
#[derive(Debug)]
pub(super) struct Count {
    pub steps: Tensor,
    /// One copy of the handle `steps` per tensor of the group, as the kernel requires.
    pub list: TensorList,
    /// A single copy, for a piece of a tensor.
    pub one: TensorList,
}

impl Count {
    /// Returns the count `steps` for a group of `len` ranges.
    pub(super) fn new(steps: u64, len: usize, device: Device) -> Result<Self> {
        let steps = Tensor::f_full([0i64; 0], steps as f64, (Kind::Float, device));
        let steps = steps.doing("making the optimizer's state")?;
        let list = |len| TensorList::new((0..len).map(|_| steps.shallow_clone()).collect());
        Ok(Self { list: list(len)?, one: list(1)?, steps })
    }
}

/// Ranges of parameters, each with its gradient and its tensors of optimizer state, as lists for a kernel.
#[derive(Debug)]
pub(super) struct Parts {
    pub parameters: TensorList,
    pub gradients: TensorList,
    /// For each of the optimizer's state tensors, in their order, its ranges.
    pub state: Vec<TensorList>,
}

impl Parts {
    pub(super) fn new(
        parameters: Vec<Tensor>,
        gradients: Vec<Tensor>,
        state: Vec<Vec<Tensor>>,
    ) -> Result<Self> {
        Ok(Self {
            parameters: TensorList::new(parameters)?,
            gradients: TensorList::new(gradients)?,
            state: state.into_iter().map(TensorList::new).collect::<Result<_>>()?,
        })
    }

    /// Returns the number of ranges.
    pub(super) fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Returns empty parts of one range, for [`show`](Self::show).
    pub(super) fn window(&self) -> Result<Self> {
        let empty =
            |tensor: &Tensor| Tensor::f_empty([0], (tensor.kind(), tensor.device())).doing("empty");
        let one = |tensors: &[Tensor]| -> Result<Vec<Tensor>> {
            tensors.iter().take(1).map(empty).collect()
        };
        let state = self.state.iter().map(|tensors| one(tensors)).collect::<Result<Vec<_>>>()?;
        Self::new(one(&self.parameters)?, one(&self.gradients)?, state)
    }

    /// Makes this window the elements `piece` of the range of `parts` at `index`, with `gradient` instead of theirs, if
    /// given.
    pub(super) fn show(
        &self,
        parts: &Self,
        index: usize,
        piece: &Range<usize>,
        gradient: Option<&Tensor>,
    ) -> Result<()> {
        set_view(&self.parameters[0], &parts.parameters[index], piece.clone())?;
        match gradient {
            Some(gradient) => set_view(&self.gradients[0], gradient, 0..piece.len())?,
            None => set_view(&self.gradients[0], &parts.gradients[index], piece.clone())?,
        }
        let state = self.state.iter().zip(&parts.state);
        for (window, tensors) in state {
            set_view(&window[0], &tensors[index], piece.clone())?;
        }
        Ok(())
    }
}
