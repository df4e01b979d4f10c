//! One message of a batch.

use tch::Tensor;

#[cfg(doc)]
use super::ProcessGroup;
use super::local::Side;
use crate::operation::Operation;

/// One message of [`ProcessGroup::batch_isend_irecv`]. Follows `torch.distributed.P2POp`.
#[derive(Debug)]
pub struct P2POp {
    pub(super) side: Side,
    pub(super) tensor: Tensor,
    /// The other rank. `None` to receive from any rank.
    pub(super) peer: Option<usize>,
    pub(super) tag: u64,
}

impl P2POp {
    /// Describes a message to send, as [`ProcessGroup::isend`] sends it.
    pub fn isend(tensor: &Tensor, dst: usize, tag: u64) -> Self {
        let tensor = tensor.shallow_clone();
        Self { side: Side::Send, tensor, peer: Some(dst), tag }
    }

    /// Describes a message to receive, as [`ProcessGroup::irecv`] receives it.
    pub fn irecv(tensor: &mut Tensor, src: Option<usize>, tag: u64) -> Self {
        let tensor = tensor.shallow_clone();
        Self { side: Side::Receive, tensor, peer: src, tag }
    }

    pub(super) fn is_send(&self) -> bool {
        self.side == Side::Send
    }

    pub(super) fn operation(&self) -> Operation {
        if self.is_send() { Operation::Send } else { Operation::Recv }
    }
}
