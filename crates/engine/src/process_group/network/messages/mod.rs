//! Messages between processes: tensors from a rank of this process to a rank of another, and back.
//!
//! A sender makes an offer: dtype, shape, tag and the two ranks, with the bytes if they are few. The receiving process
//! posts the offer in the destination's mailbox, where a receive finds it, now or later. Then the receiver takes the
//! bytes, or asks for them. Ranks, tags and receives from any rank thus work as they do between threads. Large data
//! waits only in the sender's tensor.
//!
//! Each process has a connection to each process that it sends something to, also answers. It writes there and reads from
//! those of the others, so a connection has one direction: what a process has written arrives, even if it leaves at once.
//! Whoever has something to send writes at once what the system takes. A thread writes the rest, and never waits for
//! another process. Each connection that another process has opened has a thread that reads ([`thread`]). What ends
//! without an answer is lost, so no rank waits for ever.

mod frame;
mod open;
mod peer;
mod thread;

use std::mem;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use super::lost;
use super::process_map::ProcessMap;
use crate::error::{Error, Result};
use crate::ffi::{TcpStore, TorchResult};
use crate::operation::OpId;
use crate::process_group::contiguous::Contiguous;
use crate::process_group::dtype::{dtype_name, num_bytes, plain_kind};
use crate::process_group::local::{Completion, Mailboxes, MessageEnd, MessageTensor, P2pRequest};
use crate::runtime::{Instant, RunContext};
use frame::{EAGER_MAX_BYTES, Frame, Offer};
pub(super) use open::MessageListener;
use peer::{Peer, Pending, Side};

/// The reason for the end of messages when the run ends.
const CANCELLED: &str = "cancelled, because the run ends";

/// The messages of a group between this process and others. Dropping it ends the connections once all messages have
/// gone, or when the run fails. It does not wait for that; the ranks that have sent those messages do at their end.
pub(crate) struct Messages(Arc<Connections>);

/// A connection that has not greeted, and since when it is open.
type Stranger = (Instant, Arc<TcpStream>);

/// What the ranks of this process and the threads share.
struct Connections {
    run: Arc<RunContext>,
    store: TcpStore,
    members: Arc<[usize]>,
    processes: ProcessMap,
    /// The mailboxes in which the ranks of this process receive. They end with the group.
    mail: Weak<Mailboxes>,
    /// One for each process; the one of this process is never used.
    peers: Vec<Mutex<Peer>>,
    listener: MessageListener,
    /// Connections that have not greeted, the oldest first.
    strangers: Mutex<Vec<Stranger>>,
    /// Whether the thread that accepts and writes has started, and whether it ends once all messages have gone.
    has_started: AtomicBool,
    is_leaving: AtomicBool,
}

impl Messages {
    /// Creates the messages for the ranks of `processes`, which are `members` of `run`. Ranks of this process receive from
    /// `mail`. Other processes connect to `listener`, and left their addresses in `store`.
    pub(super) fn new(
        run: Arc<RunContext>,
        store: TcpStore,
        members: Arc<[usize]>,
        processes: ProcessMap,
        listener: MessageListener,
        mail: &Arc<Mailboxes>,
    ) -> Self {
        let connections = Connections {
            run,
            store,
            members,
            peers: processes.processes.iter().map(|_| Mutex::default()).collect(),
            processes,
            mail: Arc::downgrade(mail),
            listener,
            strangers: Mutex::default(),
            has_started: AtomicBool::default(),
            is_leaving: AtomicBool::default(),
        };
        Self(Arc::new(connections))
    }

    /// Starts a send of `tensor` from the group rank `source` to the group rank `destination` of another process. Once it
    /// is [completed](Completion::is_completed), the receiver has taken the tensor.
    ///
    /// # Errors
    /// [`Error::Input`] for a dtype that is more than its bytes (a quantized one), and if no thread can be started.
    pub(crate) fn send(
        &self,
        tensor: &Tensor,
        source: usize,
        destination: usize,
        tag: u64,
        at: OpId,
    ) -> Result<Arc<Completion>> {
        let me = &self.0;
        let (process, rank) = (me.processes.process_of(destination), me.members[source]);
        let kind = dtype_name(tensor.kind());
        if plain_kind(kind).is_none() {
            return Err(Error::unsupported(format!(
                "{}: rank {rank} cannot send a {kind} tensor to rank {} in another process; send its int_repr, scale and \
                 zero point, or convert it to a float dtype",
                at.operation, me.members[destination]
            )));
        }
        let tensor = Contiguous::new(at.operation, tensor)?.handle();
        me.start()?;
        me.open(process);
        let completion = Completion::new();
        let mut peer = me.peers[process].lock();
        let (id, kind, shape) = (peer.next_id, kind.into(), tensor.size());
        peer.next_id += 1;
        let is_small = num_bytes(tensor.kind(), tensor.numel()) <= EAGER_MAX_BYTES;
        let inline = is_small.then(|| (id, tensor.shallow_clone()));
        let side = Side {
            tensor: Some(tensor).filter(|_| !is_small),
            source,
            rank,
            pending: Some(Pending::new(&me.run, rank, at)),
            completion: completion.clone(),
            others: me.ranks(process),
        };
        match &peer.lost {
            Some(reason) => side.lose(reason),
            None => drop(peer.sends.insert(id, side)),
        }
        let offer = Frame::Offer(Offer { id, source, destination, tag, kind, shape });
        me.put(process, &mut peer, &offer, inline);
        Ok(completion)
    }

    /// Prepares for a posted receive: from the group rank `source`, or from any rank if `None`. If the process of `source`
    /// has left, the receive ends.
    ///
    /// # Errors
    /// [`Error::Input`] if no thread can be started.
    pub(crate) fn expect(&self, source: Option<usize>) -> Result<()> {
        self.0.start()?;
        let Some(source) = source else { return Ok(()) };
        let process = self.0.processes.process_of(source);
        self.0.open(process);
        let lost = self.0.peers[process].lock().lost.clone();
        lost.iter().for_each(|reason| self.0.fail_receives(process, reason));
        Ok(())
    }

    /// Ends all messages of a run that is about to fail, because a rank gives up waiting.
    pub(crate) fn cut(&self) {
        self.0.end(CANCELLED);
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.0.is_leaving.store(true, Ordering::Release);
        // The thread that writes looks at it. It may have ended.
        let _ = rustix::io::write(&self.0.listener.wake, &1u64.to_ne_bytes());
    }
}

impl Connections {
    fn first_rank(&self) -> usize {
        self.members[self.processes.here().start]
    }

    /// Returns the global ranks of a process.
    fn ranks(&self, process: usize) -> Vec<usize> {
        self.members[self.processes.processes[process].clone()].to_vec()
    }

    /// Fails the run, because this process cannot carry messages.
    fn fail(&self, error: &Error) {
        self.run.report(self.first_rank(), Some(error), error.to_string());
    }

    /// Posts an offer of `process` in the destination's mailbox. `inline` is its tensor, if that came with it.
    fn post(self: &Arc<Self>, process: usize, offer: Offer, kind: Kind, inline: Option<Tensor>) {
        let Offer { id, source, destination, tag, shape, .. } = offer;
        let me = self.clone();
        let accept = move |into, completion| {
            let (rank, others) = (me.members[destination], me.ranks(process));
            let side = Side { tensor: Some(into), source, rank, pending: None, completion, others };
            match inline {
                Some(tensor) => me.deliver(process, id, &tensor, side),
                None => me.ask(process, id, side),
            }
        };
        let request = P2pRequest {
            is_send: true,
            contents: MessageTensor::Elsewhere(Box::new(accept)),
            source: Some(source),
            tag,
            kind,
            shape,
            device: Device::Cpu,
        };
        // Without a mailbox the group is gone, and no rank receives any more.
        if let Some(mail) = self.mail.upgrade() {
            mail.post(request, destination);
        }
    }

    /// Asks `process` for the bytes of the offer `id`.
    fn ask(&self, process: usize, id: u64, side: Side) {
        let mut peer = self.peers[process].lock();
        match &peer.lost {
            Some(reason) => side.lose(reason),
            None => drop(peer.receives.insert(id, side)),
        }
        self.put(process, &mut peer, &Frame::Ready(id), None);
    }

    /// Hands over the tensor of the offer `id`, which has arrived.
    fn deliver(&self, process: usize, id: u64, tensor: &Tensor, mut side: Side) {
        let into = side.tensor.take().filter(|into| into.data_ptr() != tensor.data_ptr());
        let copied = match into {
            Some(mut into) => tch::no_grad(|| into.f_copy_(tensor).map(drop)),
            None => Ok(()),
        };
        let end = match copied.doing("copy_") {
            Ok(()) => {
                let mut peer = self.peers[process].lock();
                self.put(process, &mut peer, &Frame::Taken(id), None);
                // The sender fails if this process ends before the answer is written.
                if let Some(answer) = peer.outbox.back_mut() {
                    let at = self.run.activity[side.rank].now();
                    answer.pending = Some(Pending::new(&self.run, side.rank, at));
                }
                MessageEnd::From(side.source)
            }
            Err(error) => {
                self.run.report(side.rank, Some(&error), error.to_string());
                MessageEnd::Reported
            }
        };
        side.completion.complete(end);
    }

    /// Ends all receives that wait for `process`.
    fn fail_receives(&self, process: usize, reason: &str) {
        if let Some(mail) = self.mail.upgrade() {
            mail.fail(self.processes.processes[process].clone(), reason);
        }
    }

    /// Ends the messages with `process`: those under way are lost, for this `reason`. If it `is_failure`, fails each rank
    /// that has sent a message which has not gone.
    fn lose(&self, process: usize, reason: &str, is_failure: bool) {
        let mut peer = self.peers[process].lock();
        if peer.lost.is_some() {
            return;
        }
        let lost = Peer { lost: Some(reason.into()), ..Peer::default() };
        let mut ended = mem::replace(&mut *peer, lost);
        drop(peer);
        if let Some(stream) = ended.reader.take() {
            let _ = stream.shutdown(Shutdown::Both); // the thread that reads ends the receive whose tensor it fills
        }
        ended.sends.values().chain(ended.receives.values()).for_each(|side| side.lose(reason));
        self.fail_receives(process, reason);
        let unsent = ended.sends.values().filter_map(|sent| sent.pending.as_ref());
        for &Pending { rank, at, .. } in unsent.filter(|_| is_failure) {
            let ranks = self.ranks(process);
            let error = lost::connection_lost(&self.run, at, rank, ranks, reason.into());
            self.run.report_at(rank, Some(at), Some(&error), error.to_string());
        }
    }

    /// Ends the messages with all processes, without a failure.
    fn end(&self, reason: &str) {
        for (_, stranger) in self.strangers.lock().drain(..) {
            let _ = stranger.shutdown(Shutdown::Both); // it may have ended
        }
        (0..self.peers.len()).for_each(|process| self.lose(process, reason, false));
    }
}

#[cfg(test)]
mod tests;
