//! Collectives that gradients flow through.

use std::rc::Rc;

use tch::Tensor;

use super::{ProcessGroup, ReduceOp};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::torch::self_adjoint;

/// The sum of `tensor` over all ranks, as a new tensor that gradients flow through. A collective.
///
/// Follows `torch.distributed.nn.functional.all_reduce` with its default, the sum. If the results of all
/// ranks go into one loss, the sum of their losses, then the gradient of each rank's `tensor` is the sum
/// over the ranks of the results' gradients: backward is an all_reduce as well. So every rank must go
/// backward through its result, if one does, and in the same order; a rank for which nothing depends on it
/// adds `0.0 * result` to its loss.
///
/// # Errors
/// As [`ProcessGroup::all_reduce`]. Those of backward come out of [`torch::backward`](crate::torch::backward)
/// and [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward) as they are; tch's
/// own `f_backward` makes a text of them. [`Error::Unsupported`] when backward runs on another thread.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::process_group::functional::all_reduce;
/// use ddp_mp::{Backend, spawn, torch};
/// use tch::{Kind, Tensor};
///
/// spawn(3, |rank| {
///     let group = rank.init_process_group(Backend::Threaded)?;
///     let mine = Tensor::from_slice(&[rank.rank() as f32]).set_requires_grad(true);
///     let sum = all_reduce(&mine, &group)?;
///     assert_eq!(sum.double_value(&[0]), 0.0 + 1.0 + 2.0);
///     // This rank's loss is sum^2: all three depend on `mine`, each with the gradient 2 * sum.
///     torch::backward(&sum.square().sum(Kind::Float))?;
///     assert_eq!(mine.grad().double_value(&[0]), 3.0 * (2.0 * 3.0));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn all_reduce(tensor: &Tensor, group: &Rc<ProcessGroup>) -> Result<Tensor> {
    let group = group.clone();
    self_adjoint(tensor, move |tensor| group.all_reduce(tensor, ReduceOp::Sum))
}
