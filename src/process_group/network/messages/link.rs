//! The connection to one other process, for messages. The first of the two processes that needs it opens it.
//!
//! A sender makes an offer: dtype, shape, tag and the two ranks, with the bytes if they are few. The receiving process
//! posts the offer in the destination's mailbox, where a receive finds it, now or later. Then the receiver takes the
//! bytes, or asks for them. Ranks, tags and receives from any rank thus work as they do between threads. Large data
//! waits only in the sender's tensor.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use super::super::lost;
use super::context::{MessageContext, Pending};
use super::frame::{EAGER_MAX_BYTES, Frame, Offer};
use super::reader::{Outgoing, size};
use crate::error::Error;
use crate::ffi::TorchResult;
use crate::operation::OpId;
use crate::process_group::dtype::dtype_name;
use crate::process_group::local::{
    Carrier, Completion, Incoming, MessageEnd, MessageTensor, P2pRequest, describe,
};

/// One end of the connection to another process.
pub(super) struct Link {
    pub process: usize,
    pub context: Arc<MessageContext>,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    /// To the thread that writes. `None` once the connection is to end.
    outbox: Option<Sender<Outgoing>>,
    /// The other end of `outbox`, until the thread that writes takes it.
    queued: Option<Receiver<Outgoing>>,
    next_id: u64,
    /// Messages sent and not yet taken by the receiver.
    sends: HashMap<u64, Sent>,
    /// Offers whose bytes the receiver has asked for.
    receives: HashMap<u64, Expected>,
}

enum Stage {
    Idle,
    /// This process has begun to connect.
    Connecting,
    Open(Arc<TcpStream>),
    /// With the reason.
    Closed(String),
}

/// The decision about a new connection to the other process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Adoption {
    /// Both processes use it.
    Chosen,
    /// They use another one.
    Busy,
    /// Neither process uses it: the link has ended for this process.
    Closed,
}

/// A tensor on its way to the other process.
pub(super) struct Sent {
    pub tensor: Tensor,
    /// Group ranks of the sender and the receiver.
    pub source: usize,
    pub destination: usize,
    /// Global rank of the sender, and its operation.
    pub rank: usize,
    pub at: OpId,
    pub delivery: Arc<Completion>,
    /// Kept until the bytes are written.
    pub pending: Option<Pending>,
    /// Whether the thread that writes reads the tensor now. The send must not complete meanwhile: its rank may change the
    /// tensor then.
    pub is_writing: bool,
    /// The outcome, if it was known before the writing had ended.
    pub outcome: Option<MessageEnd>,
}

/// A tensor to be filled by the other process.
pub(super) struct Expected {
    pub into: Tensor,
    pub source: usize,
    /// Global rank of the receiver.
    pub rank: usize,
    pub delivery: Arc<Completion>,
}

impl Link {
    pub(super) fn new(process: usize, context: Arc<MessageContext>) -> Arc<Self> {
        let (outgoing_tx, outgoing_rx) = unbounded();
        let state = State {
            stage: Stage::Idle,
            outbox: Some(outgoing_tx),
            queued: Some(outgoing_rx),
            next_id: 0,
            sends: HashMap::new(),
            receives: HashMap::new(),
        };
        Arc::new(Self { process, context, state: Mutex::new(state) })
    }

    /// Notes that this process connects. Returns `false` if it does so already, or is connected.
    pub(super) fn begin_to_connect(&self) -> bool {
        let mut state = self.state.lock();
        let is_idle = matches!(state.stage, Stage::Idle);
        if is_idle {
            state.stage = Stage::Connecting;
        }
        is_idle
    }

    /// Makes `stream` the connection if both processes choose it. Of two connections opened at the same time, both
    /// choose that of the process with the lower number.
    pub(super) fn adopt(&self, stream: &Arc<TcpStream>, is_mine: bool) -> Adoption {
        let mut state = self.state.lock();
        match state.stage {
            Stage::Connecting if !is_mine && self.process > self.context.process_map.mine => {
                Adoption::Busy
            }
            Stage::Idle | Stage::Connecting => {
                state.stage = Stage::Open(stream.clone());
                Adoption::Chosen
            }
            Stage::Open(_) => Adoption::Busy,
            Stage::Closed(_) => Adoption::Closed,
        }
    }

    /// Returns whether the connection has ended, so that no rank needs to wait for the other process.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.state.lock().stage, Stage::Closed(_))
    }

    /// Returns the queue for the thread that writes. `None` from the second call on.
    pub(super) fn take_queue(&self) -> Option<Receiver<Outgoing>> {
        self.state.lock().queued.take()
    }

    /// Offers `sent` to its destination.
    pub(super) fn send(&self, mut sent: Sent, tag: u64) {
        let bytes = size(&sent.tensor);
        let mut state = self.state.lock();
        if let Stage::Closed(reason) = &state.stage {
            return sent.delivery.complete(self.lost(reason));
        }
        let id = state.next_id;
        state.next_id += 1;
        let offer = Frame::Offer(Offer {
            id,
            source: sent.source,
            destination: sent.destination,
            tag,
            kind: dtype_name(sent.tensor.kind()).into(),
            shape: sent.tensor.size(),
        });
        let bytes = (bytes <= EAGER_MAX_BYTES).then_some(id);
        sent.pending = Some(self.context.pending(sent.rank));
        state.sends.insert(id, sent);
        state.put(Outgoing { frame: offer, bytes });
    }

    /// Asks for the bytes of `id`, which fill the tensor of `expected`.
    pub(super) fn expect(&self, id: u64, expected: Expected) {
        let mut state = self.state.lock();
        if let Stage::Closed(reason) = &state.stage {
            return expected.delivery.complete(self.lost(reason));
        }
        state.receives.insert(id, expected);
        state.put(Outgoing { frame: Frame::Ready { id }, bytes: None });
    }

    pub(super) fn reply(&self, frame: Frame) {
        self.state.lock().put(Outgoing { frame, bytes: None });
    }

    /// Returns the tensor of `id`, to write its bytes. `None` once the message has ended.
    pub(super) fn begin_writing(&self, id: u64) -> Option<Writing<'_>> {
        let mut state = self.state.lock();
        let sent = state.sends.get_mut(&id).filter(|sent| !sent.is_writing)?;
        sent.is_writing = true;
        Some(Writing { link: self, id, tensor: sent.tensor.shallow_clone(), is_written: false })
    }

    fn end_writing(&self, id: u64, is_written: bool) {
        let mut state = self.state.lock();
        let Some(sent) = state.sends.get_mut(&id) else { return };
        sent.is_writing = false;
        if is_written {
            drop(sent.pending.take());
            // The receiver has asked for bytes that travel alone, so writing them completes the send. The receiver must
            // still take inline bytes.
            if size(&sent.tensor) > EAGER_MAX_BYTES {
                sent.outcome.get_or_insert(MessageEnd::From(sent.source));
            }
        }
        if let Some(outcome) = sent.outcome.take() {
            state.complete(id, outcome);
        }
    }

    /// Posts an offer of the other process in the destination's mailbox. `inline` has its bytes, if they came with it.
    pub(super) fn offered(self: &Arc<Self>, offer: Offer, kind: Kind, inline: Option<Tensor>) {
        let Offer { id, source, destination, tag, shape, .. } = offer;
        let link = self.clone();
        let contents = Box::new(Offered { link, id, source, destination, inline });
        let request = P2pRequest {
            is_send: true,
            contents: MessageTensor::Elsewhere(contents),
            source: Some(source),
            tag,
            kind,
            shape,
            device: Device::Cpu,
        };
        // Without a mailbox the group is gone, and no rank receives any more.
        if let Some(mail) = self.context.mail.upgrade() {
            mail.post(request, destination);
        }
    }

    /// Queues the bytes of `id`, which the receiver has asked for.
    pub(super) fn ready(&self, id: u64) -> Result<(), String> {
        let state = self.state.lock();
        if !state.sends.contains_key(&id) {
            return Err(not_sent(id));
        }
        state.put(Outgoing { frame: Frame::Data { id }, bytes: Some(id) });
        Ok(())
    }

    /// Completes the send of `id`, whose bytes the receiver has taken.
    pub(super) fn taken(&self, id: u64) -> Result<(), String> {
        let mut state = self.state.lock();
        let source = state.sends.get(&id).ok_or_else(|| not_sent(id))?.source;
        state.complete(id, MessageEnd::From(source));
        Ok(())
    }

    /// Fails the send of `id`, because the receiver expects another dtype or shape.
    pub(super) fn refused(&self, id: u64, expected: String) -> Result<(), String> {
        let mut state = self.state.lock();
        let sent = state.sends.get(&id).ok_or_else(|| not_sent(id))?;
        let (rank, at) = (sent.rank, sent.at);
        let error = Error::SendMismatch {
            source_rank: rank,
            destination: self.context.members[sent.destination],
            sent: describe(sent.tensor.kind(), &sent.tensor.size()),
            expected,
        };
        self.context.run.report_at(rank, Some(at), Some(&error), error.to_string());
        state.complete(id, MessageEnd::Reported);
        Ok(())
    }

    /// Returns the tensor that the bytes of `id` are for.
    pub(super) fn take_expected(&self, id: u64) -> Result<Expected, String> {
        self.state.lock().receives.remove(&id).ok_or_else(|| format!("nobody has asked for {id}"))
    }

    /// Fails the run if a rank has waited at its end for longer than the timeout, because a message that it sent has
    /// not gone. The rank itself does not wait for such a message.
    pub(super) fn check_deadlines(&self) {
        let run = &self.context.run;
        let is_overdue = |sent: &&Sent| sent.pending.is_some() && run.is_overdue(sent.rank);
        let overdue =
            self.state.lock().sends.values().find(is_overdue).map(|sent| (sent.rank, sent.at));
        if let Some((rank, at)) = overdue {
            let error = lost::timed_out(run, at, rank, self.ranks(), run.timeout);
            run.report_at(rank, Some(at), Some(&error), error.to_string());
        }
    }

    /// Returns the global ranks whose messages have not gone yet.
    pub(super) fn senders(&self) -> Vec<usize> {
        let state = self.state.lock();
        state.sends.values().filter(|sent| sent.pending.is_some()).map(|sent| sent.rank).collect()
    }

    /// Returns the global ranks of the other process.
    pub(super) fn ranks(&self) -> Vec<usize> {
        let ranks = self.context.process_map.processes[self.process].clone();
        ranks.map(|rank| self.context.members[rank]).collect()
    }

    /// Returns the outcome of messages with the other process when the connection has ended for this `reason`.
    pub(super) fn lost(&self, reason: &str) -> MessageEnd {
        MessageEnd::Lost { ranks: self.ranks(), reason: reason.into() }
    }

    /// Ends the link, because the other process cannot be reached. Does nothing if that process has connected
    /// meanwhile.
    pub(super) fn fail_to_connect(&self, reason: String) {
        let is_open = matches!(self.state.lock().stage, Stage::Open(_));
        if !is_open {
            self.lose(&reason);
        }
    }

    /// Ends the connection, for this `reason`. Messages that wait for the other process are lost. Fails each rank that
    /// has sent a message which has not gone, unless the connections are closing.
    pub(super) fn lose(&self, reason: &str) {
        // Kept until the failures are reported: the ranks, and the connections, end without them.
        let unsent = self.end(reason);
        let run = &self.context.run;
        if self.context.is_closing() {
            return;
        }
        for &(rank, at, _) in &unsent {
            let error = lost::connection_lost(run, at, rank, self.ranks(), reason.into());
            run.report_at(rank, Some(at), Some(&error), error.to_string());
        }
    }

    /// Ends the connection of a run that has failed or is about to, without reporting a failure.
    pub(super) fn close(&self, reason: &str) {
        drop(self.end(reason));
    }

    /// Ends the connection, and completes all its messages as lost; one whose tensor is being written, when that has
    /// ended. Returns the ranks and operations of the messages that have not gone, with their guards.
    fn end(&self, reason: &str) -> Vec<(usize, OpId, Pending)> {
        let unsent = {
            let mut state = self.state.lock();
            match &state.stage {
                Stage::Closed(_) => return Vec::new(),
                Stage::Open(stream) => drop(stream.shutdown(Shutdown::Both)),
                Stage::Idle | Stage::Connecting => {}
            }
            state.stage = Stage::Closed(reason.into());
            state.outbox = None;
            state.queued = None;
            let sends = state.sends.values_mut();
            let unsent = sends.filter_map(|sent| Some((sent.rank, sent.at, sent.pending.take()?)));
            let unsent = unsent.collect();
            let ids: Vec<u64> = state.sends.keys().copied().collect();
            ids.into_iter().for_each(|id| state.complete(id, self.lost(reason)));
            for expected in std::mem::take(&mut state.receives).into_values() {
                expected.delivery.complete(self.lost(reason));
            }
            unsent
        };
        self.fail_receives();
        unsent
    }

    /// Ends all receives that wait for the other process, if the connection has ended.
    pub(super) fn fail_receives(&self) {
        let reason = match &self.state.lock().stage {
            Stage::Closed(reason) => reason.clone(),
            _ => return,
        };
        if let Some(mail) = self.context.mail.upgrade() {
            mail.fail(self.context.process_map.processes[self.process].clone(), &reason);
        }
    }

    /// Lets the thread that writes end once its queue is empty.
    pub(super) fn finish(&self) {
        let mut state = self.state.lock();
        state.outbox = None;
        if !matches!(state.stage, Stage::Open(_)) {
            state.queued = None;
        }
    }
}

impl State {
    /// Completes the send of `id`; if its tensor is being written, when that has ended. The first outcome counts.
    fn complete(&mut self, id: u64, outcome: MessageEnd) {
        match self.sends.get_mut(&id) {
            Some(sent) if sent.is_writing => drop(sent.outcome.get_or_insert(outcome)),
            _ => {
                if let Some(sent) = self.sends.remove(&id) {
                    sent.delivery.complete(outcome);
                }
            }
        }
    }

    fn put(&self, outgoing: Outgoing) {
        if let Some(outbox) = &self.outbox {
            let _ = outbox.send(outgoing); // fails once the connection is closed
        }
    }
}

fn not_sent(id: u64) -> String {
    format!("nothing was sent as {id}")
}

/// A tensor whose bytes the thread that writes reads until this is dropped.
pub(super) struct Writing<'a> {
    link: &'a Link,
    id: u64,
    pub tensor: Tensor,
    /// Whether all bytes have been written.
    pub is_written: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.link.end_writing(self.id, self.is_written);
    }
}

impl Carrier for Link {
    fn cut(&self) {
        self.close("cancelled, because the run ends");
    }
}

/// An offer in the mailbox of the rank that it is for.
struct Offered {
    link: Arc<Link>,
    id: u64,
    source: usize,
    destination: usize,
    /// The bytes, if they came with the offer.
    inline: Option<Tensor>,
}

impl Incoming for Offered {
    fn accept(self: Box<Self>, mut into: Tensor, delivery: Arc<Completion>) {
        let Self { link, id, source, destination, inline } = *self;
        let rank = link.context.members[destination];
        if let Some(tensor) = inline {
            let copied = tch::no_grad(|| into.f_copy_(&tensor).map(drop));
            return match copied.doing("copy_") {
                Ok(()) => {
                    link.reply(Frame::Taken { id });
                    delivery.complete(MessageEnd::From(source));
                }
                Err(error) => {
                    link.context.run.report(rank, Some(&error), error.to_string());
                    delivery.complete(MessageEnd::Reported);
                }
            };
        }
        delivery.carried_by(link.clone());
        link.expect(id, Expected { into, source, rank, delivery });
    }

    fn refuse(self: Box<Self>, expected: &str) {
        self.link.reply(Frame::Refused { id: self.id, expected: expected.into() });
    }
}
