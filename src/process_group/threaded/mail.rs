//! Tensors from one rank to another: whoever comes second copies.
//!
//! A send or receive that finds its counterpart copies at once, from the sender's memory into the
//! receiver's, on its own thread; otherwise it is left in the receiver's letter box and its rank goes on.
//! So nothing is copied twice, and an `isend` needs no thread of its own.
//!
//! A message from another process is left there as well, by the thread that reads from that process; the other side of
//! it then says what becomes of it ([`Incoming`]).

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};

use tch::{Kind, Tensor};

use super::super::dtype_name;
use crate::error::Error;
use crate::runtime::RunContext;

/// The letter boxes of a group's ranks.
#[derive(Debug)]
pub(crate) struct Mailboxes {
    boxes: Box<[Mutex<Mailbox>]>,
    run: Arc<RunContext>,
    members: Arc<[usize]>,
}

/// What has been sent to one rank and not received, and what that rank expects and has not been sent.
/// Never both with the same source and tag.
#[derive(Debug, Default)]
struct Mailbox {
    sent: Vec<Waiting>,
    expected: Vec<Waiting>,
}

/// One side of a message.
#[derive(Debug)]
pub(crate) struct P2pRequest {
    /// Which side.
    pub side: Side,
    /// To be read from, or to be written to.
    pub contents: Contents,
    /// For a send the rank that sends; for a receive the rank that must have sent, if not any.
    pub source: Option<usize>,
    /// Sends and receives of the same tag belong together.
    pub tag: u64,
    /// The kind of the tensor.
    pub kind: Kind,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The CUDA stream of the rank; 0 on a CPU.
    pub stream: usize,
}

/// The tensor of a message.
#[derive(Debug)]
pub(crate) enum Contents {
    /// In the memory of this process.
    Here(Tensor),
    /// In that of another process, which sends it.
    Elsewhere(Box<dyn Incoming>),
}

/// A message of a rank of another process.
pub(crate) trait Incoming: fmt::Debug + Send {
    /// Fills `into`, now or when the bytes have come, and completes `delivery` then.
    fn accept(self: Box<Self>, into: Tensor, delivery: Arc<Completion>);

    /// Reports to the sender that the receiver expects `expected` instead.
    fn refuse(self: Box<Self>, expected: &str);
}

/// The way on which messages come from another process, or go there.
pub(crate) trait Carrier: fmt::Debug + Send + Sync {
    /// Ends it, so that everything on it is completed at once.
    fn cut(&self);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

impl P2pRequest {
    fn belongs_to(&self, other: &P2pRequest) -> bool {
        let any = self.source.is_none() || other.source.is_none();
        self.tag == other.tag && (any || self.source == other.source)
    }

    fn describe(&self) -> String {
        let stream = match self.stream {
            0 => String::new(),
            stream => format!(" on stream {stream:#x}"),
        };
        describe(self.kind, &self.shape) + &stream
    }

    fn fits(&self, other: &P2pRequest) -> bool {
        self.kind == other.kind && self.stream == other.stream && self.shape == other.shape
    }
}

#[derive(Debug)]
struct Waiting {
    parcel: P2pRequest,
    delivery: Arc<Completion>,
}

/// A tensor as errors name it.
pub(in super::super) fn describe(kind: Kind, shape: &[i64]) -> String {
    format!("{} {shape:?}", dtype_name(kind))
}

/// What becomes of one side of a message.
#[derive(Debug)]
pub(crate) struct Completion {
    outcome: OnceLock<Outcome>,
    /// The thread that may wait for it.
    waiter: Thread,
    /// The way to the other side, if that is in another process.
    carrier: OnceLock<Arc<dyn Carrier>>,
}

/// What has become of it.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// It was handed over; the rank that sent.
    From(usize),
    /// It failed, and the run knows why.
    Reported,
    /// The connection to the other side is lost.
    Lost {
        /// The ranks of the process at its other end, by their numbers in the run.
        ranks: Vec<usize>,
        /// Why.
        reason: String,
    },
}

impl Completion {
    fn new() -> Arc<Self> {
        let (outcome, waiter) = (OnceLock::new(), thread::current());
        Arc::new(Self { outcome, waiter, carrier: OnceLock::new() })
    }

    /// Notes what has become of it, once, and wakes whoever waits for that.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let _ = self.outcome.set(outcome); // the first counts
        self.waiter.unpark();
    }

    /// Notes on which way it goes on. Whoever gives up waiting can cut that.
    pub(crate) fn carried_by(&self, carrier: Arc<dyn Carrier>) {
        let _ = self.carrier.set(carrier); // there is one
        self.waiter.unpark();
    }
}

/// One side of a message that has been handed over, or left to be.
#[derive(Debug)]
pub(crate) struct PostedOp(Arc<Completion>);

impl PostedOp {
    /// For the calling thread; and to be completed.
    pub(crate) fn new() -> (Self, Arc<Completion>) {
        let delivery = Completion::new();
        (Self(delivery.clone()), delivery)
    }

    /// Whether it is over, well or not.
    pub(crate) fn is_completed(&self) -> bool {
        self.0.outcome.get().is_some()
    }

    /// What has become of it, once it is over.
    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.0.outcome.get()
    }
}

impl Mailboxes {
    /// Takes one's own side back out of the box of `destination`; false if the other side has come, and then
    /// only after the tensor has been handed over. So nobody touches the tensor afterwards.
    pub(crate) fn cancel(&self, posted: &PostedOp, destination: usize) -> bool {
        let mine = |waiting: &Waiting| Arc::ptr_eq(&waiting.delivery, &posted.0);
        {
            let Mailbox { sent, expected } = &mut *lock(&self.boxes[destination]);
            let before = sent.len() + expected.len();
            sent.retain(|waiting| !mine(waiting));
            expected.retain(|waiting| !mine(waiting));
            if sent.len() + expected.len() < before {
                return true;
            }
        }
        // A copy is plain work, so this ends; whoever copies unparks this thread. What is on its way from or to another
        // process may never end by itself.
        while !posted.is_completed() {
            if let Some(carrier) = posted.0.carrier.get() {
                carrier.cut();
            }
            if !posted.is_completed() {
                thread::park();
            }
        }
        matches!(posted.outcome(), Some(Outcome::Lost { .. }))
    }

    /// Ends all receives that wait for one of the ranks at the places `sources`: these are lost, for this reason.
    pub(crate) fn fail(&self, sources: Range<usize>, reason: &str) {
        let is_lost = |waiting: &mut Waiting| {
            waiting.parcel.source.is_some_and(|source| sources.contains(&source))
        };
        for letter_box in &self.boxes {
            let lost: Vec<Waiting> = lock(letter_box).expected.extract_if(.., is_lost).collect();
            for waiting in lost {
                let ranks = self.members[sources.clone()].to_vec();
                waiting.delivery.complete(Outcome::Lost { ranks, reason: reason.into() });
            }
        }
    }

    pub(super) fn new(run: Arc<RunContext>, members: Arc<[usize]>) -> Self {
        Self { boxes: members.iter().map(|_| Mutex::default()).collect(), run, members }
    }

    /// Hands a tensor over to `destination`, or from somebody to it, or leaves it there until the other side
    /// comes. The calling thread is unparked when that has happened.
    pub(crate) fn post(&self, parcel: P2pRequest, destination: usize) -> PostedOp {
        let (posted, delivery) = PostedOp::new();
        let mine = Waiting { parcel, delivery };
        let is_send = mine.parcel.side == Side::Send;
        let (sent, expected) = {
            let letter_box = &mut *lock(&self.boxes[destination]);
            let Mailbox { sent, expected } = letter_box;
            let (same_side, other_side) = if is_send { (sent, expected) } else { (expected, sent) };
            let other = other_side.iter().position(|o| o.parcel.belongs_to(&mine.parcel));
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

    /// Copies, and has both sides learn that.
    fn hand_over(&self, sent: Waiting, expected: Waiting, destination: usize) {
        let Waiting { parcel: sent, delivery: sender } = sent;
        let Waiting { parcel: expected, delivery: receiver } = expected;
        // A send says where it comes from.
        let source = sent.source.unwrap_or(destination);
        let copied = if sent.fits(&expected) {
            match (sent.contents, expected.contents) {
                (Contents::Here(from), Contents::Here(mut into)) => {
                    tch::no_grad(|| into.f_copy_(&from).map(drop)).map_err(Error::torch("copy_"))
                }
                (Contents::Elsewhere(incoming), Contents::Here(into)) => {
                    return incoming.accept(into, receiver);
                }
                (_, Contents::Elsewhere(_)) => Ok(()), // a rank receives into memory of its own
            }
        } else {
            let (text, expected) = (sent.describe(), expected.describe());
            if let Contents::Elsewhere(incoming) = sent.contents {
                incoming.refuse(&expected);
            }
            let [source_rank, destination] = [source, destination].map(|it| self.members[it]);
            Err(Error::SendMismatch { source_rank, destination, sent: text, expected })
        };
        // The run learns of an error here, because neither side may be waiting.
        if let Err(error) = &copied {
            self.run.report(self.members[destination], Some(error), error.to_string());
        }
        for side in [sender, receiver] {
            side.complete(if copied.is_ok() { Outcome::From(source) } else { Outcome::Reported });
        }
    }
}

fn lock(letter_box: &Mutex<Mailbox>) -> MutexGuard<'_, Mailbox> {
    letter_box.lock().unwrap_or_else(PoisonError::into_inner)
}
