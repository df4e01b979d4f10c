//! Snapshots of buffers: a forward pass in training changes the running statistics of batch norms.

use tch::Tensor;

use crate::ddp::Strategy;
use crate::error::Result;
use crate::ffi::TorchResult;

/// A model's buffers: pairs of a copy of the former value and the buffer itself.
#[derive(Debug)]
pub(super) struct BufferSnapshot(Vec<(Tensor, Tensor)>);

impl BufferSnapshot {
    /// Copies the buffers of `ddp`'s model.
    pub(super) fn of<M>(ddp: &Strategy<M>) -> Result<Self> {
        let buffers = ddp.state_dict().into_iter().filter(|(_, tensor)| !tensor.requires_grad());
        let copy = |(_, tensor): (String, Tensor)| Ok((tensor.f_detach_copy()?, tensor));
        buffers.map(copy).collect::<Result<_, _>>().map(Self).doing("copying buffers")
    }

    /// Copies the former values back.
    pub(super) fn restore(self) -> Result<()> {
        tch::no_grad(|| self.0.into_iter().try_for_each(|(copy, mut buffer)| buffer.f_copy_(&copy)))
            .doing("restoring buffers")
    }
}
