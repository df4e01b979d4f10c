//! One parameter of a model, and the memory of its gradient.

use std::ffi::c_void;

use tch::{Kind, Tensor};

use super::ParamSpan;
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, adopt_grad, move_grad, remove_grad, shares_memory};
use crate::process_group::num_bytes;

/// The size of a cache line in bytes.
const CACHE_LINE: usize = 64;

/// The smallest gradient, in bytes, that stays where autograd has put it. Smaller gradients are copied into a flat
/// buffer, because it costs more to reduce many small tensors than to copy them.
const MIN_IN_PLACE_BYTES: usize = 64 << 10;

/// The memory of a gradient.
#[derive(Debug)]
enum GradMemory {
    /// A part of the flat buffer, to which the gradient is moved: a view in the parameter's shape, and the address of
    /// its data.
    InBuffer { view: Tensor, data: *const c_void },
    /// The memory that autograd has allocated for it. The tensor, of one dimension, shares that memory; it is empty
    /// while there is no gradient. Its handles in buckets and optimizers are the same tensor of libtorch, so that they follow
    /// it to new memory.
    KeptByAutograd(Tensor),
}

/// A parameter, and where its gradient is.
#[derive(Debug)]
pub(crate) struct ParamMemory {
    pub name: String,
    pub tensor: Tensor,
    gradient: GradMemory,
}

impl ParamMemory {
    /// Takes a parameter. With `in_place`, a large gradient stays where autograd puts it. Its parameter also stays where it
    /// is, unless it shares its memory with another tensor.
    pub(crate) fn new(name: &str, tensor: &Tensor, in_place: bool) -> Result<Self> {
        let mut tensor = tensor.shallow_clone();
        let bytes = num_bytes(tensor.kind(), tensor.numel());
        // A multiple of a cache line, so that kernels take the same vector paths as in a flat buffer: the same bits.
        let is_in_place = in_place
            && bytes >= MIN_IN_PLACE_BYTES
            && bytes.is_multiple_of(CACHE_LINE)
            && tensor.is_contiguous();
        if is_in_place && shares_memory(&tensor) {
            // After an earlier wrap with `OptimizerLayout::SharedModel`, the ranks still share this memory.
            let own = tensor.f_detach_copy().and_then(|own| tensor.f_set_data(&own));
            own.doing("copying a parameter")?;
        }
        let gradient = if is_in_place {
            GradMemory::KeptByAutograd(empty_like(&tensor)?)
        } else {
            GradMemory::InBuffer { view: Tensor::new(), data: std::ptr::null() }
        };
        Ok(Self { name: name.into(), tensor, gradient })
    }

    pub(crate) fn num_bytes(&self) -> usize {
        num_bytes(self.tensor.kind(), self.tensor.numel())
    }

    /// Returns the parameter's span if it starts at element `start`. `index` is the parameter's index in the model.
    pub(super) fn span(&self, index: usize, start: usize) -> ParamSpan {
        ParamSpan { name: self.name.clone(), index, start, shape: self.tensor.size() }
    }

    /// Returns the number of elements that the parameter takes in its buffer, with the gap behind it.
    ///
    /// Each parameter starts at a cache line, as if it were allocated alone. Kernels then take the same vector paths
    /// and give the same bits.
    pub(super) fn padded_numel(&self) -> usize {
        self.tensor.numel().next_multiple_of(cache_line_numel(self.tensor.kind()))
    }

    /// Returns a handle to the gradient's memory, of one dimension, if the gradient stays where autograd puts it. `None`
    /// if it is in the flat buffer.
    pub(super) fn in_place_memory(&self) -> Option<Tensor> {
        match &self.gradient {
            GradMemory::KeptByAutograd(flat) => Some(flat.shallow_clone()),
            GradMemory::InBuffer { .. } => None,
        }
    }

    /// Sets the gradient's part of the flat buffer: a view in the parameter's shape.
    pub(super) fn set_view(&mut self, view: Tensor) {
        self.gradient = GradMemory::InBuffer { data: view.data_ptr(), view };
    }

    /// Moves the gradient to its part of the buffer, or finds where autograd has put it; zeros if there is none.
    pub(crate) fn take_gradient(&self) -> Result<()> {
        match &self.gradient {
            GradMemory::KeptByAutograd(flat) => adopt_grad(&self.tensor, flat),
            GradMemory::InBuffer { view, data } if view.data_ptr().cast_const() == *data => {
                move_grad(&self.tensor, view)
            }
            GradMemory::InBuffer { .. } => Err(Error::usage(format!(
                "the gradient of `{}` is no longer a view of its bucket, so it cannot be averaged; leave its memory \
                 where it is, and zero gradients with ddp.zero_grad()",
                self.name
            ))),
        }
    }

    /// Removes the gradient. In a flat buffer its values stay behind, because the next gradient overwrites them.
    pub(crate) fn remove_gradient(&mut self) -> Result<()> {
        remove_grad(&self.tensor)?;
        let GradMemory::KeptByAutograd(flat) = &mut self.gradient else { return Ok(()) };
        let freed = flat.f_set_data(&empty_like(&self.tensor)?);
        freed.doing("freeing a gradient")
    }

    /// Removes the gradient and leaves zeros for the optimizer, whatever a communication hook has left there.
    pub(crate) fn clear_grad(&self) -> Result<()> {
        self.zero_gradient()?;
        remove_grad(&self.tensor)
    }

    /// Sets the gradient to zeros.
    pub(super) fn zero_gradient(&self) -> Result<()> {
        let flat = match &self.gradient {
            GradMemory::KeptByAutograd(flat) => {
                self.take_gradient()?;
                flat
            }
            GradMemory::InBuffer { view, .. } => view,
        };
        tch::no_grad(|| flat.shallow_clone().f_zero_().map(drop)).doing("zero_")
    }

    /// Returns the gradient in the parameter's shape.
    pub(crate) fn gradient(&self) -> Result<Tensor> {
        match &self.gradient {
            GradMemory::KeptByAutograd(flat) => flat.f_view(&self.tensor.size()[..]).doing("view"),
            GradMemory::InBuffer { view, .. } => Ok(view.shallow_clone()),
        }
    }

    /// Overwrites the gradient with `values`.
    pub(crate) fn restore_gradient(&self, values: &Tensor) -> Result<()> {
        let mut gradient = self.gradient()?;
        tch::no_grad(|| gradient.f_copy_(values)).doing("copying a gradient")
    }
}

/// Returns the number of elements in a cache line.
pub(super) fn cache_line_numel(dtype: Kind) -> usize {
    CACHE_LINE / dtype.elt_size_in_bytes()
}

/// Returns an empty tensor of the dtype and device of `tensor`.
fn empty_like(tensor: &Tensor) -> Result<Tensor> {
    Tensor::f_empty([0], (tensor.kind(), tensor.device())).doing("empty")
}
