//! Gradients that are complete on every rank, in each layout of the optimizer.

use std::rc::Rc;

use tch::Tensor;

use super::{FlatBuffer, GradState};
use crate::error::Result;
use crate::process_group::join_shapes;

/// Averages all gradients in `buffers`, on every rank. A collective if some are not averaged yet; otherwise it does
/// nothing.
///
/// Where the ranks [share the model](super::OptimizerLayout::SharedModel), it averages gradients that the optimizer's step
/// would otherwise average. Where they [partition the optimizer](super::OptimizerLayout::Partitioned), it gathers the
/// averages of the other ranks' partitions.
///
/// Clipping and the gradient scaler call it. So must other code that reads averaged gradients before the optimizer's
/// step.
///
/// # Errors
/// The errors of [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
pub fn average_gradients(buffers: &[FlatBuffer]) -> Result<()> {
    for FlatBuffer { gradients, layout, .. } in buffers {
        if layout.gradients() == GradState::Partitioned
            && let Some(partitions) = &layout.now().partitions
        {
            partitions.gather_in_place(gradients)?;
            layout.set_gradients(GradState::Averaged);
        }
    }
    let is_left = |buffer: &&FlatBuffer| buffer.layout.gradients() == GradState::LeftToStep;
    while let Some(first) = buffers.iter().find(is_left) {
        let Some(shared) = first.layout.now().shared.clone() else { return Ok(()) };
        let Some(op) = shared.average.get() else { return Ok(()) };
        let is_like_first = |buffer: &&FlatBuffer| {
            let other = buffer.layout.now().shared.clone();
            other.is_some_and(|other| Rc::ptr_eq(&other, &shared))
                && buffer.parameters.kind() == first.parameters.kind()
        };
        let alike: Vec<_> = buffers.iter().filter(is_left).filter(is_like_first).collect();
        let gradients: Vec<Tensor> =
            alike.iter().map(|buffer| buffer.gradients.shallow_clone()).collect();
        let shapes = join_shapes(gradients.iter().map(Tensor::size));
        shared.group.all_reduce_list(&gradients, &shapes, op)?;
        alike.iter().for_each(|buffer| buffer.layout.set_gradients(GradState::Averaged));
    }
    Ok(())
}
