//! Tensors from one rank to another: whoever comes second copies.
//!
//! A send or receive that finds its counterpart copies at once, from the sender's memory into the
//! receiver's, on its own thread; otherwise it is left in the receiver's letter box and its rank goes on.
//! So nothing is copied twice, and an `isend` needs no thread of its own.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};

use tch::{Kind, Tensor};

use super::super::kind_name;
use crate::error::Error;
use crate::sync::Run;

/// The letter boxes of a group's ranks.
#[derive(Debug)]
pub(crate) struct Mail {
    boxes: Box<[Mutex<LetterBox>]>,
    run: Arc<Run>,
    members: Arc<[usize]>,
}

/// What has been sent to one rank and not received, and what that rank expects and has not been sent.
/// Never both with the same source and tag.
#[derive(Debug, Default)]
struct LetterBox {
    sent: Vec<Waiting>,
    expected: Vec<Waiting>,
}

/// One side of a message.
#[derive(Debug)]
pub(crate) struct Parcel {
    /// Which side.
    pub side: Side,
    /// To be read from, or to be written to.
    pub tensor: Tensor,
    /// For a send the rank that sends; for a receive the rank that must have sent, if not any.
    pub source: Option<usize>,
    /// Sends and receives of the same tag belong together.
    pub tag: u64,
    /// The kind of the tensor.
    pub kind: Kind,
    /// The CUDA stream of the rank; 0 on a CPU.
    pub stream: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

impl Parcel {
    fn belongs_to(&self, other: &Parcel) -> bool {
        let any = self.source.is_none() || other.source.is_none();
        self.tag == other.tag && (any || self.source == other.source)
    }

    fn describe(&self) -> String {
        let stream = match self.stream {
            0 => String::new(),
            stream => format!(" on stream {stream:#x}"),
        };
        format!("{} {:?}{stream}", kind_name(self.kind), self.tensor.size())
    }

    fn fits(&self, other: &Parcel) -> bool {
        self.kind == other.kind
            && self.stream == other.stream
            && self.tensor.size() == other.tensor.size()
    }
}

#[derive(Debug)]
struct Waiting {
    parcel: Parcel,
    delivery: Arc<Delivery>,
}

/// What becomes of one side of a message.
#[derive(Debug)]
struct Delivery {
    /// The rank that sent; nobody if the two sides did not fit.
    source: OnceLock<Option<usize>>,
    /// The thread that may wait for it.
    waiter: Thread,
}

/// One side of a message that has been handed over, or left to be.
#[derive(Debug)]
pub(crate) struct Posted(Arc<Delivery>);

impl Posted {
    /// Whether it has been handed over.
    pub(crate) fn is_completed(&self) -> bool {
        self.0.source.get().is_some()
    }

    /// The rank that sent, once it has been handed over.
    pub(crate) fn source(&self) -> Option<usize> {
        self.0.source.get().copied().flatten()
    }
}

impl Mail {
    /// Takes one's own side back out of the box of `destination`; false if the other side has come, and then
    /// only after the tensor has been handed over. So nobody touches the tensor afterwards.
    pub(crate) fn withdraw(&self, posted: &Posted, destination: usize) -> bool {
        let mine = |waiting: &Waiting| Arc::ptr_eq(&waiting.delivery, &posted.0);
        {
            let LetterBox { sent, expected } = &mut *lock(&self.boxes[destination]);
            let before = sent.len() + expected.len();
            sent.retain(|waiting| !mine(waiting));
            expected.retain(|waiting| !mine(waiting));
            if sent.len() + expected.len() < before {
                return true;
            }
        }
        // A copy is plain work, so this ends; whoever copies unparks this thread.
        while !posted.is_completed() {
            thread::park();
        }
        false
    }

    pub(super) fn new(run: Arc<Run>, members: Arc<[usize]>) -> Self {
        Self { boxes: members.iter().map(|_| Mutex::default()).collect(), run, members }
    }

    /// Hands a tensor over to `destination`, or from somebody to it, or leaves it there until the other side
    /// comes. The calling thread is unparked when that has happened.
    pub(crate) fn post(&self, parcel: Parcel, destination: usize) -> Posted {
        let delivery = Arc::new(Delivery { source: OnceLock::new(), waiter: thread::current() });
        let posted = Posted(delivery.clone());
        let mine = Waiting { parcel, delivery };
        let is_send = mine.parcel.side == Side::Send;
        let (sent, expected) = {
            let letter_box = &mut *lock(&self.boxes[destination]);
            let LetterBox { sent, expected } = letter_box;
            let (same_side, other_side) = if is_send { (sent, expected) } else { (expected, sent) };
            let other = other_side.iter().position(|o| o.parcel.belongs_to(&mine.parcel));
            let Some(other) = other else {
                same_side.push(mine);
                return posted;
            };
            let other = other_side.remove(other);
            if is_send { (mine, other) } else { (other, mine) }
        };
        self.hand_over(&sent, &expected, destination);
        posted
    }

    /// Copies, and tells both sides.
    fn hand_over(&self, sent: &Waiting, expected: &Waiting, destination: usize) {
        // A send says where it comes from.
        let source = sent.parcel.source.unwrap_or(destination);
        let copied = if sent.parcel.fits(&expected.parcel) {
            let mut into = expected.parcel.tensor.shallow_clone();
            tch::no_grad(|| into.f_copy_(&sent.parcel.tensor).map(drop))
                .map_err(Error::torch("copy_"))
        } else {
            Err(Error::SendMismatch {
                source_rank: self.members[source],
                destination: self.members[destination],
                sent: sent.parcel.describe(),
                expected: expected.parcel.describe(),
            })
        };
        // The run learns of an error here, because neither side may be waiting.
        if let Err(error) = &copied {
            self.run.report(self.members[destination], Some(error), error.to_string());
        }
        for side in [sent, expected] {
            // Set once, because whoever came second has taken it out of the box.
            let _ = side.delivery.source.set(copied.is_ok().then_some(source));
            side.delivery.waiter.unpark();
        }
    }
}

fn lock(letter_box: &Mutex<LetterBox>) -> MutexGuard<'_, LetterBox> {
    letter_box.lock().unwrap_or_else(PoisonError::into_inner)
}
