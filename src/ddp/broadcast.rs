//! Broadcasts of one rank's parameters and buffers to all ranks: at construction, at the end of `join`, and of the
//! buffers with each backward that averages.

use tch::Tensor;

use crate::error::Result;
use crate::models::NamedTensor;
use crate::optim::FlatBuffer;
use crate::process_group::ProcessGroup;

/// Copies the parameters, which are in `flat_buffers`, and the buffers of rank `src` to all ranks. A collective, which
/// ends before this returns: otherwise the caller's next copy between host and GPU would wait behind it. Follows
/// `_sync_module_states`.
pub(super) fn sync_module_states(
    flat_buffers: &[FlatBuffer],
    tensors: &[NamedTensor],
    group: &ProcessGroup,
    src: usize,
) -> Result<()> {
    let trained = flat_buffers.iter().map(|buffer| &buffer.parameters);
    // Includes parameters that are not trained.
    let rest = tensors.iter().filter(|named| !named.trainable && !named.is_ignored);
    broadcast(trained.chain(rest.map(|named| &named.tensor)), group, src)?;
    group.await_launched()
}

/// Copies the buffers of rank `src` to all ranks. A collective. Follows `_sync_buffers`.
pub(super) fn sync_buffers(
    tensors: &[NamedTensor],
    group: &ProcessGroup,
    src: usize,
) -> Result<()> {
    let buffers = tensors.iter().filter(|named| named.is_buffer && !named.is_ignored);
    broadcast(buffers.map(|named| &named.tensor), group, src)
}

fn broadcast<'a>(
    tensors: impl Iterator<Item = &'a Tensor>,
    group: &ProcessGroup,
    src: usize,
) -> Result<()> {
    tch::no_grad(|| {
        for tensor in tensors {
            group.broadcast(&mut tensor.shallow_clone(), src)?;
        }
        Ok(())
    })
}
