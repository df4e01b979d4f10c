//! Point-to-point messages: tensors from one rank to another.

use std::panic::Location;

use tch::Tensor;

use super::call::refuse;
use super::contiguous::Contiguous;
use super::local::{CommonStream, MessageTensor, P2pRequest};
use super::work::State;
use super::{ProcessGroup, Traffic, Work, num_bytes};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::operation::{OpId, Operation};
use crate::runtime::OpStart;

impl ProcessGroup {
    /// Sends `tensor` to rank `dst`, which receives it with [`ProcessGroup::recv`]. Returns when `dst` has received
    /// it.
    ///
    /// Follows `torch.distributed.send`. Any dtype and shape. Only the two ranks take part. Messages between two
    /// ranks with the same `tag` are received in the order in which they were sent; `nccl` ignores tags.
    ///
    /// Between ranks of one process, the tensor is copied once, by the rank that calls second. Between processes
    /// (`gloo`), it goes over the network: up to 64 KiB at once, more only when the receiver is ready. Either way,
    /// two ranks that both send before they receive wait for each other until they time out
    /// ([`Spawn::timeout`](crate::Spawn::timeout)). A rank whose message has another tag than the receiver expects
    /// waits just as long. Let one rank receive first, or use [`ProcessGroup::isend`].
    ///
    /// # Errors
    /// [`Error::SendMismatch`] if the receiver expects another dtype or shape (not with `nccl`),
    /// [`Error::Input`] for a tensor that is undefined or on another device and for a rank that does not exist
    /// or is this one, [`Error::Timeout`], [`Error::PeerExited`], [`Error::ConnectionLost`] and [`Error::Cancelled`] if
    /// the other rank does not take part, and the backend's own errors.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut tensor = Tensor::from_slice(&[7 * (1 - rank.rank() as i64)]);
    ///     if rank.rank() == 0 {
    ///         group.send(&tensor, 1, 0)?;
    ///     } else {
    ///         let source = group.recv(&mut tensor, Some(0), 0)?;
    ///         assert_eq!((tensor.int64_value(&[0]), source), (7, 0));
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, dst: usize, tag: u64) -> Result<()> {
        self.noted(&P2POp::isend(tensor, dst, tag)).map(drop)
    }

    /// Receives into `tensor` what rank `src` sends with [`ProcessGroup::send`]; with `None`, what any rank sends
    /// (not with `nccl`). Returns the rank that sent it.
    ///
    /// Follows `torch.distributed.recv`. `tensor` must have the dtype and shape of the sent tensor.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::send`], which has an example.
    #[track_caller]
    pub fn recv(&self, tensor: &mut Tensor, src: Option<usize>, tag: u64) -> Result<usize> {
        let source = self.noted(&P2POp::irecv(tensor, src, tag))?;
        Ok(source.or(src).unwrap_or(self.rank()))
    }

    /// Sends like [`ProcessGroup::send`], but returns at once. Don't change `tensor` before [`Work::wait`] has
    /// returned.
    ///
    /// Follows `torch.distributed.isend`. With `nccl`, the host waits here until the other rank starts its side, so
    /// ranks that send around a ring must use [`ProcessGroup::batch_isend_irecv`].
    ///
    /// The message is sent even if the [`Work`] and the group are dropped. Its timeout starts with [`Work::wait`],
    /// or at the end of the rank's function.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::send`]; [`Work::wait`] returns those that depend on the other rank.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// // Everybody passes a number on to the right.
    /// spawn(3, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let (me, ranks) = (rank.rank(), rank.world_size());
    ///     let mine = Tensor::from_slice(&[me as i64]);
    ///     let mut left = mine.zeros_like();
    ///     let sent = group.isend(&mine, (me + 1) % ranks, 0)?;
    ///     let received = group.irecv(&mut left, Some((me + ranks - 1) % ranks), 0)?;
    ///     sent.wait()?;
    ///     received.wait()?;
    ///     assert_eq!(left.int64_value(&[0]), ((me + ranks - 1) % ranks) as i64);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn isend(&self, tensor: &Tensor, dst: usize, tag: u64) -> Result<Work> {
        self.start(&P2POp::isend(tensor, dst, tag))
    }

    /// Receives like [`ProcessGroup::recv`], but returns at once. Don't use `tensor` before [`Work::wait`] has
    /// returned.
    ///
    /// Follows `torch.distributed.irecv`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::isend`], which has an example.
    pub fn irecv(&self, tensor: &mut Tensor, src: Option<usize>, tag: u64) -> Result<Work> {
        self.start(&P2POp::irecv(tensor, src, tag))
    }

    /// Starts several messages at once. The other ranks may start theirs in any order.
    ///
    /// Follows `torch.distributed.batch_isend_irecv`. With `nccl`, a rank needs this to send and receive at the
    /// same time: messages that are started one by one run one after the other.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::isend`]. If one message is wrong in itself, none is started.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, P2POp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let peer = 1 - rank.rank();
    ///     let mine = Tensor::from_slice(&[rank.rank() as i64]);
    ///     let mut theirs = mine.zeros_like();
    ///     let ops = [P2POp::isend(&mine, peer, 0), P2POp::irecv(&mut theirs, Some(peer), 0)];
    ///     for work in group.batch_isend_irecv(&ops)? {
    ///         work.wait()?;
    ///     }
    ///     assert_eq!(theirs.int64_value(&[0]), peer as i64);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn batch_isend_irecv(&self, p2p_op_list: &[P2POp]) -> Result<Vec<Work>> {
        for op in p2p_op_list {
            self.check(op)?;
        }
        self.post(p2p_op_list)
    }

    /// Sends or receives one message, waits for it, and records it as this rank's activity.
    #[track_caller]
    fn noted(&self, op: &P2POp) -> Result<Option<usize>> {
        let at = OpId { operation: op.operation(), sequence: self.messages.get() };
        let before = self.activity().enter(at.operation, at.sequence);
        self.check(op)?;
        let amount = num_bytes(op.tensor.kind(), op.tensor.numel()) as u64;
        let begin = OpStart { amount, ..OpStart::alone(at, Location::caller()) };
        self.recorded(before, begin, || self.post_one(op)?.wait_for_source())
    }

    fn start(&self, op: &P2POp) -> Result<Work> {
        self.check(op)?;
        self.post_one(op)
    }

    fn post_one(&self, op: &P2POp) -> Result<Work> {
        let mut works = self.post(std::slice::from_ref(op))?;
        let work = works.pop();
        Ok(work.unwrap_or_else(|| Work::new(State::Done, self.run().clone(), self.global_rank())))
    }

    /// Checks what can be checked without the other rank.
    fn check(&self, op: &P2POp) -> Result<()> {
        let operation = op.operation();
        self.common_kind(operation, std::slice::from_ref(&op.tensor), &[])?;
        if !op.is_send {
            self.check_output(operation, &op.tensor)?;
        }
        let Some(peer) = op.peer else {
            return if self.is_stream_ordered() {
                let backend = self.backend();
                refuse(operation, format!("backend {backend} receives from a named rank only"))
            } else if self.world_size() == 1 {
                refuse(operation, "there is nobody else in the group".into())
            } else {
                Ok(())
            };
        };
        self.check_rank(operation, if op.is_send { "dst" } else { "src" }, peer)?;
        if peer == self.rank() {
            return refuse(operation, format!("rank {peer} is this rank itself; copy the tensor"));
        }
        Ok(())
    }

    fn post(&self, ops: &[P2POp]) -> Result<Vec<Work>> {
        self.run().check(self.global_rank())?;
        for op in ops {
            let bytes = num_bytes(op.tensor.kind(), op.tensor.numel()) as u64;
            let sent = if op.is_send { bytes } else { 0 };
            self.traffic.add(Traffic { sent, received: bytes - sent });
        }
        if self.is_stream_ordered() {
            self.launch(ops)
        } else {
            ops.iter().map(|op| self.mail(op)).collect()
        }
    }

    fn mail(&self, op: &P2POp) -> Result<Work> {
        let sequence = self.messages.replace(self.messages.get() + 1);
        let at = OpId { operation: op.operation(), sequence };
        let is_here = |rank: usize| self.common.shared.here.contains(&rank);
        let messages = self.common.network.as_ref().and_then(|network| network.messages.as_ref());
        // The network is needed unless the peer is known to be in this process.
        let messages = messages.filter(|_| !op.peer.is_some_and(is_here));
        let destination = op.peer.filter(|_| op.is_send).unwrap_or(self.rank());
        let stream = CommonStream::of(self.device())?;
        if let Some(stream) = &stream {
            stream.wait_for_rank()?;
        }
        let posted = match messages {
            Some(messages) if op.is_send => {
                messages.send(&op.tensor, self.rank(), destination, op.tag, at)?
            }
            _ => {
                let request = P2pRequest {
                    is_send: op.is_send,
                    contents: MessageTensor::Here(op.tensor.shallow_clone()),
                    source: if op.is_send { Some(self.rank()) } else { op.peer },
                    tag: op.tag,
                    kind: op.tensor.kind(),
                    shape: op.tensor.size(),
                    device: self.device(),
                };
                let posted = self.common.shared.mail.post(request, destination);
                if let Some(messages) = messages {
                    messages.expect(op.peer)?;
                }
                posted
            }
        };
        let others = (0..self.world_size()).filter(|&rank| rank != self.rank());
        let peers = others.filter(|&rank| op.peer.is_none_or(|peer| peer == rank));
        let peers = peers.map(|rank| self.ranks()[rank]).collect();
        let network = messages.and_then(|_| self.common.network.clone());
        let shared = self.common.shared.clone();
        let state = State::Posted { posted, shared, destination, peers, network, at, stream };
        Ok(Work::new(state, self.run().clone(), self.global_rank()))
    }

    /// Launches the messages on the stream with NCCL, each with a contiguous tensor.
    fn launch(&self, ops: &[P2POp]) -> Result<Vec<Work>> {
        let contiguous = |op: &P2POp| Contiguous::new(op.operation(), &op.tensor);
        let contiguous = ops.iter().map(contiguous).collect::<Result<Vec<_>>>()?;
        let flat: Vec<P2POp> = ops
            .iter()
            .zip(&contiguous)
            .map(|(op, contiguous)| P2POp { tensor: contiguous.handle(), ..*op })
            .collect();
        self.side()?.backend.point_to_point(&flat)?;
        for (op, contiguous) in ops.iter().zip(&contiguous).filter(|(op, _)| !op.is_send) {
            contiguous.write_back(&op.tensor)?;
        }
        self.messages.set(self.messages.get() + ops.len() as u64);
        ops.iter().map(|_| self.launched()).collect()
    }
}

/// One message of [`ProcessGroup::batch_isend_irecv`]. Follows `torch.distributed.P2POp`.
#[derive(Debug)]
pub struct P2POp {
    /// Whether this rank sends. Otherwise it receives.
    pub(super) is_send: bool,
    pub(super) tensor: Tensor,
    /// The other rank. `None` to receive from any rank.
    pub(super) peer: Option<usize>,
    pub(super) tag: u64,
}

impl P2POp {
    /// Describes a message to send, as [`ProcessGroup::isend`] sends it.
    pub fn isend(tensor: &Tensor, dst: usize, tag: u64) -> Self {
        let tensor = tensor.shallow_clone();
        Self { is_send: true, tensor, peer: Some(dst), tag }
    }

    /// Describes a message to receive, as [`ProcessGroup::irecv`] receives it.
    pub fn irecv(tensor: &mut Tensor, src: Option<usize>, tag: u64) -> Self {
        let tensor = tensor.shallow_clone();
        Self { is_send: false, tensor, peer: src, tag }
    }

    pub(super) fn operation(&self) -> Operation {
        if self.is_send { Operation::Send } else { Operation::Recv }
    }
}
