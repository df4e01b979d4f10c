//! Clipping of gradients to a maximum norm.

use tch::{Device, Kind, Tensor};

use super::{FlatBuffer, GradState, average_gradients};
use crate::error::Result;
use crate::ffi::{TensorList, TorchResult, scale_all, total_norm};

/// Scales all gradients by the same factor, so that their total 2-norm is at most `max_norm`. Returns the norm before
/// scaling, as a tensor without dimensions on the device.
///
/// Follows `torch.nn.utils.clip_grad_norm_`. The norm is that of the parameters' norms in creation order, so it does
/// not depend on the buckets. On a CPU it equals PyTorch's to the bit. It is 0 without gradients. Does not wait for the
/// device. A collective where [`average_gradients`] is one.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch), and the errors of [`average_gradients`].
pub fn clip_grad_norm(buffers: &[FlatBuffer], max_norm: f64) -> Result<Tensor> {
    if buffers.iter().all(|buffer| buffer.layout.gradients() == GradState::Cleared) {
        let device = buffers.first().map_or(Device::Cpu, |buffer| buffer.gradients.device());
        return Tensor::f_zeros([0i64; 0], (Kind::Float, device)).doing("zeros");
    }
    average_gradients(buffers)?;
    let mut gradients = Vec::new();
    for buffer in buffers {
        for span in &*buffer.layout.get() {
            gradients.push((span.index, span.of(&buffer.gradients)?));
        }
    }
    gradients.sort_by_key(|(index, _)| *index);
    let gradients = TensorList::new(gradients.into_iter().map(|(_, it)| it).collect())?;
    let norm = total_norm(&gradients)?;
    let factor = || {
        // Uses Python's order of operations: `max_norm / x` is `x.reciprocal() * max_norm` there.
        norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max_norm)?.f_clamp_max_(1.0)
    };
    let factor = factor().doing("clipping the gradients")?;
    // Does not scale the gaps between gradients: a NaN factor would stay there.
    scale_all(&gradients, &factor)?;
    Ok(norm)
}
