//! Where parameters and their gradients lie in flat buffers.

use std::cell::RefCell;
use std::rc::Rc;

use tch::Tensor;

use crate::error::{Error, Result};

/// Parameters and their gradients as an optimizer sees them: two one-dimensional tensors of the same
/// length and kind, handles to the memory that the model uses.
#[derive(Debug)]
pub struct FlatBuffer {
    /// The parameters' values, one parameter after the other.
    pub parameters: Tensor,
    /// Their gradients, likewise. Gaps between parameters are zero.
    pub gradients: Tensor,
    /// Which parameters these are.
    pub places: ParamLayout,
}

/// Where the parameters of a buffer lie in it, in their order, and which have no gradient: known to all who
/// have a handle. The first changes once, when buckets are put together anew; the second with the model's use
/// of its parameters.
#[derive(Debug, Clone)]
pub struct ParamLayout(Rc<RefCell<Arrangement>>);

/// What the gradients in a [`FlatBuffer`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradState {
    /// Those of an earlier step: they have been zeroed since, and there has been no backward.
    Old,
    /// This rank's own: the last backward was within `no_sync`.
    Local,
    /// The mean over all ranks.
    Averaged,
}

#[derive(Debug)]
struct Arrangement {
    places: Rc<[ParamSpan]>,
    unused: Rc<[usize]>,
    gradients: GradState,
    /// The model's own tensors, each at its [`ParamSpan::index`], which lie in the buffer's memory and are no views of it.
    tensors: Rc<[Tensor]>,
}

impl Default for ParamLayout {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl From<Vec<ParamSpan>> for ParamLayout {
    fn from(places: Vec<ParamSpan>) -> Self {
        let arrangement = Arrangement {
            places: places.into(),
            unused: Rc::new([]),
            gradients: GradState::Averaged,
            tensors: Rc::new([]),
        };
        Self(Rc::new(RefCell::new(arrangement)))
    }
}

impl ParamLayout {
    /// As it is now.
    pub fn get(&self) -> Rc<[ParamSpan]> {
        self.0.borrow().places.clone()
    }

    /// The [`index`](ParamSpan::index) of each parameter that no rank has had a gradient for since `zero_grad`: one
    /// whose `grad` is `None` in PyTorch, where optimizers pass it by. Sorted; those of other buffers too.
    pub fn unused(&self) -> Rc<[usize]> {
        self.0.borrow().unused.clone()
    }

    /// What the gradients in the buffer are.
    pub fn gradients(&self) -> GradState {
        self.0.borrow().gradients
    }

    /// Says what the gradients in the buffer are: for whoever fills it by other means than a backward.
    pub fn set_gradients(&self, gradients: GradState) {
        self.0.borrow_mut().gradients = gradients;
    }

    /// Whether these very places are still those of now.
    pub(super) fn is(&self, places: &Rc<[ParamSpan]>) -> bool {
        Rc::ptr_eq(&self.0.borrow().places, places)
    }

    /// Whether these very parameters are still those that are unused.
    pub(super) fn are_unused(&self, unused: &Rc<[usize]>) -> bool {
        Rc::ptr_eq(&self.0.borrow().unused, unused)
    }

    /// The model's own tensor of the parameter at `index`, if the buffer is a model's.
    pub(super) fn tensor(&self, index: usize) -> Option<Tensor> {
        self.0.borrow().tensors.get(index).map(Tensor::shallow_clone)
    }

    pub(crate) fn set_tensors(&self, tensors: Rc<[Tensor]>) {
        self.0.borrow_mut().tensors = tensors;
    }

    pub(crate) fn set(&self, places: Vec<ParamSpan>) {
        self.0.borrow_mut().places = places.into();
    }

    pub(crate) fn set_unused(&self, unused: &[usize]) {
        let known = &mut self.0.borrow_mut().unused;
        if **known != *unused {
            *known = unused.into();
        }
    }
}

/// Where a parameter lies in its buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpan {
    /// The parameter's name.
    pub name: String,
    /// Its place among all parameters of the model, in the order of their creation.
    pub index: usize,
    /// Where it starts in the buffer, in elements.
    pub start: usize,
    /// Its shape.
    pub shape: Vec<i64>,
}

impl ParamSpan {
    /// How many elements the parameter has.
    pub fn numel(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    /// Whether this is a weight, and not a bias or a parameter of a norm: those have one dimension, or
    /// `bias` for a name. What weight decay is usually for.
    pub fn is_weight(&self) -> bool {
        let name = self.name.rsplit('.').next();
        self.shape.len() > 1 && name != Some("bias")
    }

    /// The parameter's part of `flat`, in its shape.
    pub(crate) fn of(&self, flat: &Tensor) -> Result<Tensor> {
        let part = flat.f_narrow(0, self.start as i64, self.numel() as i64);
        part.and_then(|part| part.f_view(&self.shape[..])).map_err(Error::torch("view"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_has_two_dimensions_and_is_no_bias() {
        let is_weight = |name: &str, shape: &[i64]| {
            ParamSpan { name: name.into(), index: 0, start: 0, shape: shape.into() }.is_weight()
        };
        assert!(is_weight("0.weight", &[3, 2]) && is_weight("unbiased", &[3, 2]));
        assert!(!is_weight("norm.weight", &[3]) && !is_weight("scale", &[]));
        assert!(!is_weight("bias", &[1, 3]) && !is_weight("attention.bias", &[1, 3]));
    }
}
