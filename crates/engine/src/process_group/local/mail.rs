//! Messages between ranks: the side that comes second copies the tensor.
//!
//! A send or receive that finds its counterpart copies at once, on its own thread, from the sender's memory into the
//! receiver's. Otherwise it stays in the receiver's mailbox, and its rank continues. Nothing is copied twice, and an
//! `isend` needs no thread of its own.
//!
//! The thread that reads from another process posts its messages here too.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};

use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use super::common_stream::CommonStream;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::ffi::cuda::record_stream;
use crate::process_group::device_name;
use crate::process_group::dtype::dtype_name;
use crate::runtime::RunContext;

/// The mailboxes of a group's ranks.
pub(crate) struct Mailboxes {
    boxes: Box<[Mutex<Mailbox>]>,
    run: Arc<RunContext>,
    members: Arc<[usize]>,
}

/// Unmatched sends to one rank, and unmatched receives of that rank. Never both with the same source and tag.
#[derive(Default)]
struct Mailbox {
    sent: Vec<Waiting>,
    expected: Vec<Waiting>,
}

/// One side of a message.
pub(crate) struct P2pRequest {
    /// Whether this side sends. Otherwise it receives.
    pub is_send: bool,
    /// The tensor to read from or to write to.
    pub contents: MessageTensor,
    /// Group rank of the sender. For a receive, `None` accepts any sender.
    pub source: Option<usize>,
    /// Sends match receives of the same tag.
    pub tag: u64,
    /// Dtype of the tensor.
    pub kind: Kind,
    /// Shape of the tensor.
    pub shape: Vec<i64>,
    /// Device of the tensor.
    pub device: Device,
}

/// The tensor of a message.
pub(crate) enum MessageTensor {
    /// In the memory of this process.
    Here(Tensor),
    /// In the memory of another process, which sends it.
    Elsewhere(Box<Accept>),
}

/// Fills a tensor with a message from another process, now or when the bytes arrive, and then completes the receive.
pub(crate) type Accept = dyn FnOnce(Tensor, Arc<Completion>) + Send;

impl P2pRequest {
    fn belongs_to(&self, other: &P2pRequest) -> bool {
        let any = self.source.is_none() || other.source.is_none();
        self.tag == other.tag && (any || self.source == other.source)
    }

    fn describe(&self) -> String {
        let device = match self.device {
            Device::Cpu => String::new(),
            device => format!(" on {}", device_name(device)),
        };
        describe(self.kind, &self.shape) + &device
    }

    fn fits(&self, other: &P2pRequest) -> bool {
        self.kind == other.kind && self.device == other.device && self.shape == other.shape
    }
}

struct Waiting {
    request: P2pRequest,
    delivery: Arc<Completion>,
}

/// Returns a tensor's dtype and shape as errors show them.
pub(crate) fn describe(kind: Kind, shape: &[i64]) -> String {
    format!("{} {shape:?}", dtype_name(kind))
}

/// The outcome of one side of a message, once it is known.
pub(crate) struct Completion {
    outcome: OnceLock<MessageEnd>,
    /// Thread that may wait for the outcome.
    waiter: Thread,
}

/// The result of one side of a message.
#[derive(Debug, Clone)]
pub(crate) enum MessageEnd {
    /// The tensor was handed over. The field is the sender's group rank.
    From(usize),
    /// It failed, and the failure has been reported to the run.
    Reported,
    /// The connection to the other side is lost.
    Lost {
        /// Global ranks of the process at the other end.
        ranks: Vec<usize>,
        /// Reason for the loss.
        reason: String,
    },
}

impl Completion {
    /// Creates the completion of a message for which the calling thread may wait.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: OnceLock::new(), waiter: thread::current() })
    }

    /// Returns whether this side has ended, successfully or not.
    pub(crate) fn is_completed(&self) -> bool {
        self.outcome.get().is_some()
    }

    /// Returns the outcome. `None` until this side has ended.
    pub(crate) fn outcome(&self) -> Option<&MessageEnd> {
        self.outcome.get()
    }

    /// Records the outcome, unless there is one already, and wakes the waiting thread.
    pub(crate) fn complete(&self, outcome: MessageEnd) {
        let _ = self.outcome.set(outcome); // the first outcome counts
        self.waiter.unpark();
    }
}

impl Mailboxes {
    /// Withdraws this rank's own side from the mailbox of `destination`. Returns `true` if it was withdrawn or its
    /// connection is lost, `false` if the other side came first. No other thread uses the tensor afterwards. `cut` ends
    /// the messages with other processes, if there are any.
    pub(crate) fn cancel(
        &self,
        posted: &Arc<Completion>,
        destination: usize,
        cut: impl FnOnce() -> bool,
    ) -> bool {
        let mine = |waiting: &Waiting| Arc::ptr_eq(&waiting.delivery, posted);
        {
            let Mailbox { sent, expected } = &mut *self.boxes[destination].lock();
            let before = sent.len() + expected.len();
            sent.retain(|waiting| !mine(waiting));
            expected.retain(|waiting| !mine(waiting));
            if sent.len() + expected.len() < before {
                return true;
            }
        }
        // A copy between threads always ends, and its thread unparks this one. A transfer from or to another process
        // may never end by itself.
        let is_cut = !posted.is_completed() && cut();
        while !posted.is_completed() {
            thread::park();
        }
        is_cut || matches!(posted.outcome(), Some(MessageEnd::Lost { .. }))
    }

    /// Ends all receives that wait for a rank of `sources` (group ranks). They are lost, for this `reason`.
    pub(crate) fn fail(&self, sources: Range<usize>, reason: &str) {
        let is_lost = |waiting: &mut Waiting| {
            waiting.request.source.is_some_and(|source| sources.contains(&source))
        };
        for mailbox in &self.boxes {
            let lost: Vec<Waiting> = mailbox.lock().expected.extract_if(.., is_lost).collect();
            for waiting in lost {
                let ranks = self.members[sources.clone()].to_vec();
                waiting.delivery.complete(MessageEnd::Lost { ranks, reason: reason.into() });
            }
        }
    }

    pub(super) fn new(run: Arc<RunContext>, members: Arc<[usize]>) -> Self {
        Self { boxes: members.iter().map(|_| Mutex::default()).collect(), run, members }
    }

    /// Posts one side of a message to `destination`. If the other side is already there, hands the tensor over.
    /// Otherwise leaves this side in the mailbox. The calling thread is unparked on completion.
    pub(crate) fn post(&self, request: P2pRequest, destination: usize) -> Arc<Completion> {
        let posted = Completion::new();
        let mine = Waiting { request, delivery: posted.clone() };
        let is_send = mine.request.is_send;
        let (sent, expected) = {
            let Mailbox { sent, expected } = &mut *self.boxes[destination].lock();
            let (same_side, other_side) = if is_send { (sent, expected) } else { (expected, sent) };
            let other = other_side.iter().position(|o| o.request.belongs_to(&mine.request));
            let Some(other) = other else {
                same_side.push(mine);
                return posted;
            };
            let other = other_side.remove(other);
            if is_send { (mine, other) } else { (other, mine) }
        };
        self.hand_over(sent, expected, destination);
        posted
    }

    /// Copies the tensor, and completes both sides.
    fn hand_over(&self, sent: Waiting, expected: Waiting, destination: usize) {
        let Waiting { request: sent, delivery: sender } = sent;
        let Waiting { request: expected, delivery: receiver } = expected;
        // A send always has a source.
        let source = sent.source.unwrap_or(destination);
        let copied = if sent.fits(&expected) {
            match (sent.contents, expected.contents) {
                (MessageTensor::Here(from), MessageTensor::Here(into)) => copy(&from, into),
                (MessageTensor::Elsewhere(accept), MessageTensor::Here(into)) => {
                    return accept(into, receiver);
                }
                (_, MessageTensor::Elsewhere(_)) => Ok(()), // a rank receives into memory of its own
            }
        } else {
            let (text, expected) = (sent.describe(), expected.describe());
            let [source_rank, destination] = [source, destination].map(|rank| self.members[rank]);
            Err(Error::SendMismatch { source_rank, destination, sent: text, expected })
        };
        // The error is reported to the run here, because neither side may be waiting.
        if let Err(error) = &copied {
            self.run.report(self.members[destination], Some(error), error.to_string());
        }
        for side in [sender, receiver] {
            side.complete(if copied.is_ok() {
                MessageEnd::From(source)
            } else {
                MessageEnd::Reported
            });
        }
    }
}

/// Copies a message, for ranks that share a GPU on their common stream. Both may free their tensors before the copy runs.
fn copy(from: &Tensor, mut into: Tensor) -> Result<()> {
    let copy = |into: &mut Tensor| {
        tch::no_grad(|| into.f_copy_(from).map(drop)).doing("copying a message")
    };
    let Some(stream) = CommonStream::of(from.device())? else { return copy(&mut into) };
    stream.with(|| {
        record_stream(from)?;
        record_stream(&into)?;
        copy(&mut into)
    })
}
