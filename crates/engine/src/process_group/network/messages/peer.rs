//! The messages with one other process that are under way, and the frames that wait to be written to it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice};
use std::net::TcpStream;
use std::sync::Arc;

use rustix::event::epoll::{self, EventData};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use tch::Tensor;

use super::Connections;
use super::frame::Frame;
use super::open::WRITES;
use crate::ffi::with_bytes;
use crate::operation::OpId;
use crate::process_group::local::{Completion, MessageEnd};
use crate::runtime::{Instant, RunContext};

/// The reason for the end of messages with a process that has closed its connection.
pub(super) const LEFT: &str = "it has left";

/// The most bytes of a tensor that are written at once, so that others need not wait long for the peer.
const PART_BYTES: usize = 1 << 20;

/// The messages with another process.
#[derive(Default)]
pub(super) struct Peer {
    /// The connection that this process has opened, to write, and the one that the other process has opened.
    pub writer: Option<TcpStream>,
    pub reader: Option<Arc<TcpStream>>,
    pub outbox: VecDeque<Outgoing>,
    /// How many bytes of the first frame in `outbox`, and of its tensor, are written.
    pub written: usize,
    pub next_id: u64,
    /// Messages sent and not yet taken by the receiver.
    pub sends: BTreeMap<u64, Side>,
    /// Offers whose bytes a receiver has asked for.
    pub receives: BTreeMap<u64, Side>,
    /// Where the other process listens.
    pub address: String,
    /// Since when nothing can be written, or nothing has come since, and why. There may still be something to read.
    pub unreachable: Option<(Instant, String)>,
    /// The reason for the end of all messages with this process.
    pub lost: Option<String>,
}

/// A frame to write, and the tensor of an offer that follows.
pub(super) struct Outgoing {
    head: Vec<u8>,
    tensor: Option<(u64, Tensor)>,
    /// Of an answer that could not be written at once.
    pub pending: Option<Pending>,
}

/// One side of a message that is under way. When it is dropped, the rank that waits for it stops waiting.
pub(super) struct Side {
    /// The tensor to fill; of a send, the one whose bytes the receiver has not asked for.
    pub tensor: Option<Tensor>,
    /// Group rank of the sender, and global rank of this side.
    pub source: usize,
    pub rank: usize,
    /// Of a send, until its bytes are written.
    pub pending: Option<Pending>,
    pub completion: Arc<Completion>,
    /// Global ranks of the other process.
    pub others: Vec<usize>,
}

impl Side {
    /// Ends this side as lost, unless it has ended.
    pub(super) fn lose(&self, reason: &str) {
        let (ranks, reason) = (self.others.clone(), reason.into());
        self.completion.complete(MessageEnd::Lost { ranks, reason });
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if !self.completion.is_completed() {
            self.lose("its messages have ended");
        }
    }
}

/// The operation `at` of a global rank, which does not end before this is dropped.
pub(super) struct Pending {
    run: Arc<RunContext>,
    pub rank: usize,
    pub at: OpId,
}

impl Pending {
    pub(super) fn new(run: &Arc<RunContext>, rank: usize, at: OpId) -> Self {
        run.begin_pending(rank);
        Self { run: run.clone(), rank, at }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.run.end_pending(self.rank);
    }
}

impl Peer {
    /// Returns whether this process has begun to connect, or need not.
    pub(super) fn has_begun(&self) -> bool {
        self.writer.is_some() || self.unreachable.is_some() || self.lost.is_some()
    }

    /// Writes nothing more: the connection has ended, with an error or because the other process has closed it.
    pub(super) fn give_up(&mut self, error: Option<&io::Error>) {
        let has_left = |error: &&io::Error| {
            matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
        };
        let reason = match error.filter(|error| !has_left(error)) {
            Some(error) => format!("{}: {error}", self.address),
            None => LEFT.into(),
        };
        self.unreachable.get_or_insert((Instant::now(), reason));
        self.outbox.clear();
    }

    /// Returns the operations whose messages are not written. Their ranks cannot end.
    pub(super) fn unwritten(&self) -> impl Iterator<Item = &Pending> {
        let answers = self.outbox.iter().filter_map(|it| it.pending.as_ref());
        self.sends.values().filter_map(|sent| sent.pending.as_ref()).chain(answers)
    }
}

impl Connections {
    /// Queues a frame for `process`, and the tensor of the offer with an id, and writes what the system takes.
    pub(super) fn put(
        &self,
        process: usize,
        peer: &mut Peer,
        frame: &Frame,
        tensor: Option<(u64, Tensor)>,
    ) {
        if peer.lost.is_none() && peer.unreachable.is_none() {
            let head = frame.to_bytes();
            peer.outbox.push_back(Outgoing { head, tensor, pending: None });
            self.flush(process, peer);
        }
    }

    /// Writes queued frames, but of a large tensor only a part. The thread goes on when the system takes more. It also sees
    /// whether the connection has ended.
    pub(super) fn flush(&self, process: usize, peer: &mut Peer) {
        while let (Some(stream), Some(first)) = (&peer.writer, peer.outbox.front()) {
            let Outgoing { head, tensor, .. } = first;
            let mut len = head.len();
            let mut write = |bytes: &[u8]| {
                len += bytes.len();
                let head_left = head.get(peer.written..).unwrap_or_default();
                let bytes_left = &bytes[peer.written.saturating_sub(head.len())..];
                let part = &bytes_left[..bytes_left.len().min(PART_BYTES)];
                let slices = [head_left, part].map(IoSlice::new);
                sendmsg(stream, &slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
            };
            // An empty tensor has no bytes.
            let of_tensor = tensor.as_ref().and_then(|(_, it)| with_bytes(it, &mut write).ok()?);
            match of_tensor.unwrap_or_else(|| write(&[])) {
                Ok(count) => peer.written += count,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return peer.give_up(Some(&error.into())),
            }
            if peer.written < len {
                let token = EventData::new_u64(process as u64);
                let _ = epoll::modify(&self.listener.epoll, stream, token, WRITES);
                return;
            }
            peer.written = 0;
            let sent = peer.outbox.pop_front().and_then(|it| it.tensor);
            if let Some(sent) = sent.and_then(|(id, _)| peer.sends.get_mut(&id)) {
                sent.pending = None;
            }
        }
    }
}
