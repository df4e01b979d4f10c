//! Gradients that are not longer than a limit.

use tch::Tensor;

use super::{FlatBuffer, Place};
use crate::error::{Error, Result};
use crate::torch::{TensorList, total_norm};

/// Scales all gradients by the same factor, so that their 2-norm, all together, is `max_norm` or less.
/// Returns the norm that they had: a tensor without dimensions, on the device.
///
/// Follows `torch.nn.utils.clip_grad_norm_`. The norm is that of the parameters' norms in the order of
/// their creation, so it does not depend on how they lie in buckets, and on a CPU it is PyTorch's to the
/// bit. Nothing waits for the device.
///
/// # Errors
/// [`Error::Torch`].
pub fn clip_grad_norm(buffers: &[FlatBuffer], max_norm: f64) -> Result<Tensor> {
    let layout: Vec<_> = buffers.iter().map(|buffer| buffer.places.get()).collect();
    let mut places: Vec<(&Place, &Tensor)> = buffers
        .iter()
        .zip(&layout)
        .flat_map(|(buffer, places)| places.iter().map(|place| (place, &buffer.gradients)))
        .collect();
    places.sort_by_key(|(place, _)| place.index);
    let gradients =
        places.iter().map(|(place, flat)| place.of(flat)).collect::<Result<Vec<_>>>()?;
    let norm = total_norm(&TensorList::new(&gradients)?)?;
    let clip = || {
        // In Python's order of operations: `max_norm / x` is `x.reciprocal() * max_norm` there.
        let mut factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max_norm)?;
        let _ = factor.f_clamp_max_(1.0)?;
        for buffer in buffers {
            let _ = buffer.gradients.shallow_clone().f_mul_(&factor)?;
        }
        Ok(())
    };
    clip().map_err(Error::torch("clipping the gradients"))?;
    Ok(norm)
}
