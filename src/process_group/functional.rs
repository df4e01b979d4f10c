//! Differentiable collectives: `torch.distributed.nn.functional`.
//!
//! Each function returns new tensors and does not change its arguments. The ranks' losses count as one loss, their
//! sum, and each tensor's gradient is that of this sum. So backward is a collective as well: if one rank goes
//! backward through its results, every rank must, in the same order. A rank whose loss does not depend on a result
//! adds `0.0 * result.sum(..)` to its loss. Reductions are sums, because the gradient of a maximum or a product
//! needs more than the gradient of the result. Any float dtype.
//!
//! The errors are those of the method of [`ProcessGroup`] with the same name. [`ffi::backward`](crate::ffi::backward) and
//! [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward) return the errors of backward unchanged;
//! tch's own `f_backward` turns them into text. [`Error::Unsupported`](crate::Error::Unsupported) if backward runs on
//! another thread.

use std::rc::Rc;

use tch::Tensor;

use super::call::refuse;
use super::contiguous::zeros;
use super::{ProcessGroup, ReduceOp};
use crate::error::Result;
use crate::ffi::{TorchResult, linear};
use crate::operation::Operation;

type Group = Rc<ProcessGroup>;

/// Returns the sum of `tensor` over all ranks. A collective.
///
/// Follows `torch.distributed.nn.functional.all_reduce` with its default, the sum. The gradient of each rank's
/// `tensor` is the sum of the results' gradients over all ranks.
///
/// # Errors
/// The errors of [`ProcessGroup::all_reduce`] and of the [module](self).
///
/// ```
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
    with_gradient(tensor, group, move |tensor, _, group| summed(tensor, group))
}

/// Returns rank `src`'s `tensor`, on every rank. A collective.
///
/// Follows `torch.distributed.nn.functional.broadcast`. The gradient of rank `src`'s `tensor` is the sum of all
/// ranks' gradients; the gradients of the other ranks' tensors are zeros.
///
/// # Errors
/// The errors of [`ProcessGroup::broadcast`] and of the [module](self).
pub fn broadcast(tensor: &Tensor, src: usize, group: &Rc<ProcessGroup>) -> Result<Tensor> {
    with_gradient(tensor, group, move |tensor, transposed, group| {
        if !transposed {
            return broadcasted(tensor, src, group);
        }
        let sum = reduced(tensor, src, group)?;
        if group.rank() == src { Ok(sum) } else { zeros(&sum.size(), &sum) }
    })
}

/// Returns the sum of `tensor` over all ranks on rank `dst`, and a copy of the rank's own tensor elsewhere. A
/// collective.
///
/// Follows `torch.distributed.nn.functional.reduce` with its default, the sum. The gradient of each rank's `tensor` is
/// that of rank `dst`'s result.
///
/// # Errors
/// The errors of [`ProcessGroup::reduce`] and of the [module](self).
pub fn reduce(tensor: &Tensor, dst: usize, group: &Rc<ProcessGroup>) -> Result<Tensor> {
    with_gradient(tensor, group, move |tensor, transposed, group| {
        if transposed { broadcasted(tensor, dst, group) } else { reduced(tensor, dst, group) }
    })
}

/// Returns every rank's `tensor`, in rank order, on rank `dst`; zeros of the same shapes elsewhere. A collective.
///
/// Follows `torch.distributed.nn.functional.gather`. The gradient of rank `i`'s `tensor` is that of rank `dst`'s `i`-th
/// result.
///
/// # Errors
/// The errors of [`ProcessGroup::gather`] and of the [module](self).
pub fn gather(tensor: &Tensor, dst: usize, group: &Rc<ProcessGroup>) -> Result<Vec<Tensor>> {
    let all = with_gradient(tensor, group, move |tensor, transposed, group| {
        if transposed { scattered(tensor, dst, group) } else { gathered(tensor, dst, group) }
    })?;
    rows(&all)
}

/// Returns this rank's tensor from rank `src`'s list `tensors`. A collective.
///
/// Follows `torch.distributed.nn.functional.scatter`. Every rank passes a list with a tensor for each rank, all of
/// one shape and dtype. Only the values of rank `src`'s list matter. The gradient of rank `src`'s `i`-th tensor is
/// that of rank `i`'s result; the gradients of the other ranks' lists are zeros.
///
/// # Errors
/// The errors of [`ProcessGroup::scatter`] and of the [module](self).
pub fn scatter(tensors: &[Tensor], src: usize, group: &Rc<ProcessGroup>) -> Result<Tensor> {
    let all = stacked(Operation::Scatter, tensors, group)?;
    with_gradient(&all, group, move |tensor, transposed, group| {
        if transposed { gathered(tensor, src, group) } else { scattered(tensor, src, group) }
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
    rows(&gathered_by_all(tensor, group)?)
}

/// Returns the ranks' tensors in one tensor, joined along the first dimension in rank order. A collective.
///
/// Follows `torch.distributed.nn.functional._all_gather_base`, which has a gradient with NCCL only; the name is that of
/// `_functional_collectives`. See [`all_gather`].
///
/// # Errors
/// The errors of [`ProcessGroup::all_gather_single`] and of the [module](self).
pub fn all_gather_single(tensor: &Tensor, group: &Rc<ProcessGroup>) -> Result<Tensor> {
    let mut shape = tensor.size();
    match shape.first_mut() {
        Some(first) => *first *= group.world_size() as i64,
        None => shape.push(group.world_size() as i64),
    }
    gathered_by_all(tensor, group)?.f_reshape(shape).doing("reshape")
}

/// Another name of [`all_gather_single`], PyTorch's before 2.13.
pub use self::all_gather_single as all_gather_into_tensor;

/// Returns the sum over the ranks of their tensors for this rank in `input_list`. A collective.
///
/// Follows `torch.distributed.nn.functional.reduce_scatter` with its default, the sum. The list has a tensor for
/// each rank, all of one shape and dtype. The gradient of each rank's `i`-th tensor is that of rank `i`'s result.
///
/// # Errors
/// The errors of [`ProcessGroup::reduce_scatter`] and of the [module](self).
pub fn reduce_scatter(input_list: &[Tensor], group: &Rc<ProcessGroup>) -> Result<Tensor> {
    let all = stacked(Operation::ReduceScatter, input_list, group)?;
    with_gradient(&all, group, move |tensor, transposed, group| {
        if transposed { all_rows(tensor, group) } else { sum_of_rows(tensor, group) }
    })
}

/// Returns each rank's tensor for this rank in its `input_list`, in rank order. A collective.
///
/// Follows `torch.distributed.nn.functional.all_to_all`. The list has a tensor for each rank, of any shape;
/// `output_shapes` are the shapes of the tensors that this rank receives. The gradient of rank `i`'s `j`-th tensor
/// is that of rank `j`'s `i`-th result.
///
/// # Errors
/// The errors of [`ProcessGroup::all_to_all`] and of the [module](self).
pub fn all_to_all(
    output_shapes: &[&[i64]],
    input_list: &[Tensor],
    group: &Rc<ProcessGroup>,
) -> Result<Vec<Tensor>> {
    group.check_list(Operation::AllToAll, input_list, None)?;
    if output_shapes.len() != group.world_size() {
        return refuse(
            Operation::AllToAll,
            format!(
                "output_shapes has {} shapes, but there are {} ranks; pass one for each",
                output_shapes.len(),
                group.world_size()
            ),
        );
    }
    let doing = "joining tensors";
    let flat = input_list.iter().map(|tensor| tensor.f_reshape([-1]));
    let flat = flat.collect::<Result<Vec<_>, _>>().doing(doing)?;
    let sent: Vec<i64> = input_list.iter().map(|tensor| tensor.numel() as i64).collect();
    let received: Vec<i64> = output_shapes.iter().map(|shape| shape.iter().product()).collect();
    let input = Tensor::f_cat(&flat, 0).doing(doing)?;
    let output = all_to_all_single(&input, Some(&received), Some(&sent), group)?;
    let parts = output.f_split_with_sizes(&received, 0).doing("split")?;
    let shaped = parts.iter().zip(output_shapes).map(|(part, shape)| part.f_reshape(*shape));
    shaped.collect::<Result<_, _>>().doing("reshape")
}

/// Returns each rank's rows for this rank in its `input`, one rank after the other. A collective.
///
/// Follows `torch.distributed.nn.functional.all_to_all_single`. The splits count rows, one number for each rank;
/// without them, the parts are equal. The gradient goes back to the rank that sent the values.
///
/// # Errors
/// The errors of [`ProcessGroup::all_to_all_single`] and of the [module](self).
pub fn all_to_all_single(
    input: &Tensor,
    output_split_sizes: Option<&[i64]>,
    input_split_sizes: Option<&[i64]>,
    group: &Rc<ProcessGroup>,
) -> Result<Tensor> {
    let output_splits = output_split_sizes.map(<[i64]>::to_vec);
    let input_splits = input_split_sizes.map(<[i64]>::to_vec);
    let shape = input.size();
    with_gradient(input, group, move |tensor, transposed, group| {
        let to = if transposed { &input_splits } else { &output_splits };
        let from = if transposed { &output_splits } else { &input_splits };
        let mut shape = shape.clone();
        if let (Some(rows), Some(splits)) = (shape.first_mut(), to) {
            *rows = splits.iter().sum();
        }
        let mut output = zeros(&shape, tensor)?;
        group.all_to_all_single(&mut output, tensor, to.as_deref(), from.as_deref())?;
        Ok(output)
    })
}

/// Gathers like [`all_gather`] into one tensor with a row for each rank.
fn gathered_by_all(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    with_gradient(tensor, group, move |tensor, transposed, group| {
        if transposed { sum_of_rows(tensor, group) } else { all_rows(tensor, group) }
    })
}

/// Stacks a list with a tensor for each rank into the rows of one tensor, under autograd.
fn stacked(operation: Operation, list: &[Tensor], group: &Group) -> Result<Tensor> {
    group.common_kind(operation, list, &[])?;
    let shape = list.first().map(Tensor::size);
    group.check_list(operation, list, shape.as_deref())?;
    Tensor::f_stack(list, 0).doing("stack")
}

/// Returns the rows of a tensor, under autograd.
fn rows(all: &Tensor) -> Result<Vec<Tensor>> {
    all.f_unbind(0).doing("unbind")
}

/// Returns a contiguous copy.
fn copy(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = zeros(&tensor.size(), tensor)?;
    copy.f_copy_(tensor).doing("copy_")?;
    Ok(copy)
}

/// Applies [`linear`] with the group.
fn with_gradient(
    input: &Tensor,
    group: &Group,
    f: impl Fn(&Tensor, bool, &Group) -> Result<Tensor> + 'static,
) -> Result<Tensor> {
    let group = group.clone();
    linear(input, move |tensor, transposed| f(tensor, transposed, &group))
}

// The collectives outside of autograd; each returns new tensors.

fn summed(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    let mut sum = copy(tensor)?;
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum)
}

fn broadcasted(tensor: &Tensor, src: usize, group: &Group) -> Result<Tensor> {
    let mut received = copy(tensor)?;
    group.broadcast(&mut received, src)?;
    Ok(received)
}

fn reduced(tensor: &Tensor, dst: usize, group: &Group) -> Result<Tensor> {
    let mut sum = copy(tensor)?;
    group.reduce(&mut sum, dst, ReduceOp::Sum)?;
    Ok(sum)
}

/// Returns a row for each rank on `dst`, zeros on the other ranks.
fn gathered(tensor: &Tensor, dst: usize, group: &Group) -> Result<Tensor> {
    let all = group.room_for_all(tensor)?;
    let mut list = rows(&all)?;
    group.gather(tensor, (group.rank() == dst).then_some(&mut list[..]), dst)?;
    Ok(all)
}

/// Returns rank `src`'s row for this rank.
fn scattered(all: &Tensor, src: usize, group: &Group) -> Result<Tensor> {
    let mut mine = zeros(&all.size()[1..], all)?;
    let list = rows(all)?;
    group.scatter(&mut mine, (group.rank() == src).then_some(&list[..]), src)?;
    Ok(mine)
}

/// Returns a row for each rank.
fn all_rows(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    let mut all = group.room_for_all(tensor)?;
    group.all_gather_single(&mut all, tensor)?;
    Ok(all)
}

/// Returns the sum over all ranks of their rows for this rank.
fn sum_of_rows(all: &Tensor, group: &Group) -> Result<Tensor> {
    let mut mine = zeros(&all.size()[1..], all)?;
    group.reduce_scatter_single(&mut mine, all, ReduceOp::Sum)?;
    Ok(mine)
}
