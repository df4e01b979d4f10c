//! Differentiable collectives: `torch.distributed.nn.functional`.
//!
//! Each function returns new tensors and does not change its arguments. The ranks' losses count as one loss, their
//! sum, and each tensor's gradient is that of this sum. So backward is a collective as well: if one rank goes
//! backward through its results, every rank must, in the same order. A rank whose loss does not depend on a result
//! adds `0.0 * result.sum(..)` to its loss. Any float dtype.
//!
//! The errors are those of the method of [`ProcessGroup`] with the same name. [`ffi::backward`](crate::ffi::backward) and
//! [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward) return the errors of backward unchanged;
//! tch's own `f_backward` turns them into text. [`Error::Input`](crate::Error::Input) if backward runs on
//! another thread.

use std::rc::Rc;

use tch::Tensor;

use super::contiguous::zeros;
use super::{ProcessGroup, ReduceOp};
use crate::error::Result;
use crate::ffi::{TorchResult, linear};

/// Returns the sum of `tensor` over all ranks. A collective.
///
/// Follows `torch.distributed.nn.functional.all_reduce` with its default, the sum. The gradient of each rank's
/// `tensor` is the sum of the results' gradients over all ranks.
///
/// # Errors
/// The errors of [`ProcessGroup::all_reduce`] and of the [module](self).
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::process_group::functional::all_reduce;
/// use ddp_mp::{Backend, ffi, spawn};
/// use tch::{Kind, Tensor};
///
/// spawn(3, |rank| {
///     let group = rank.init_process_group(Backend::Threaded)?;
///     let mine = Tensor::from_slice(&[rank.rank() as f32]).set_requires_grad(true);
///     let sum = all_reduce(&mine, &group)?;
///     assert_eq!(sum.double_value(&[0]), 0.0 + 1.0 + 2.0);
///     // This rank's loss is sum^2: all three depend on `mine`, each with the gradient 2 * sum.
///     ffi::backward(&sum.square().sum(Kind::Float))?;
///     assert_eq!(mine.grad().double_value(&[0]), 3.0 * (2.0 * 3.0));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn all_reduce(tensor: &Tensor, group: &Rc<ProcessGroup>) -> Result<Tensor> {
    let group = Rc::clone(group);
    linear(tensor, move |tensor, _| {
        let mut sum = zeros(&tensor.size(), tensor)?;
        sum.f_copy_(tensor).doing("copy_")?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum)
    })
}

/// Returns every rank's `tensor`, in rank order. A collective.
///
/// Follows `torch.distributed.nn.functional.all_gather`. The gradient of rank `i`'s `tensor` is the sum over the
/// ranks of the gradients of their `i`-th result.
///
/// # Errors
/// The errors of [`ProcessGroup::all_gather`] and of the [module](self).
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::process_group::functional::all_gather;
/// use ddp_mp::{Backend, ffi, spawn};
/// use tch::{Kind, Tensor};
///
/// spawn(2, |rank| {
///     let group = rank.init_process_group(Backend::Threaded)?;
///     let mine = Tensor::from_slice(&[rank.rank() as f32 + 1.0]).set_requires_grad(true);
///     let all = all_gather(&mine, &group)?;
///     // This rank's loss is the product of both numbers: 1 * 2.
///     ffi::backward(&(&all[0] * &all[1]).sum(Kind::Float))?;
///     // Each of two losses has the other number as its gradient.
///     assert_eq!(mine.grad().double_value(&[0]), [2.0 * 2.0, 2.0 * 1.0][rank.rank()]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn all_gather(tensor: &Tensor, group: &Rc<ProcessGroup>) -> Result<Vec<Tensor>> {
    let group = Rc::clone(group);
    let all = linear(tensor, move |tensor, transposed| {
        if transposed {
            let mut sum = zeros(&tensor.size()[1..], tensor)?;
            group.reduce_scatter_single(&mut sum, tensor, ReduceOp::Sum)?;
            return Ok(sum);
        }
        let mut all = group.room_for_all(tensor)?;
        group.all_gather_single(&mut all, tensor)?;
        Ok(all)
    })?;
    all.f_unbind(0).doing("unbind")
}
