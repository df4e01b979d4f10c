//! The state of a group that the ranks of one process share: its exchange and its mailboxes.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::Tensor;

use super::barrier::Barrier;
use super::call_slot::CallSlot;
use super::exchange::Exchange;
use super::fingerprint::CollectiveFingerprint;
use super::mail::Mailboxes;
use super::once::OncePerProcess;
use crate::runtime::RunContext;

/// The state of a group in one process. One rank creates it and hands it to the others.
pub(crate) struct Shared {
    exchange: Arc<Exchange<CollectiveFingerprint>>,
    /// The mailboxes, where sent tensors wait to be received.
    pub(crate) mail: Arc<Mailboxes>,
    /// The run that the ranks belong to.
    pub(crate) run: Arc<RunContext>,
    /// Global ranks of the group's members, in group order.
    pub(crate) members: Arc<[usize]>,
    /// Group ranks of this process.
    pub(crate) here: Range<usize>,
    /// The tensors that one rank makes for all, by the sequence numbers of the calls.
    pub(crate) tensors: OncePerProcess<u64, SharedTensors>,
}

/// Tensors that one rank has made for all ranks of the process.
type SharedTensors = Arc<Mutex<Vec<Tensor>>>;

impl Shared {
    /// Creates the state for the ranks `members` of `run`. This process has those with the group ranks `here`.
    pub(crate) fn new(run: Arc<RunContext>, members: Arc<[usize]>, here: Range<usize>) -> Self {
        let barrier = Barrier::new(run.clone(), members[here.clone()].into());
        Self {
            exchange: Arc::new(Exchange::new(
                barrier,
                0..here.len(),
                CollectiveFingerprint::nothing,
            )),
            mail: Arc::new(Mailboxes::new(run.clone(), members.clone())),
            run,
            members,
            here,
            tensors: OncePerProcess::default(),
        }
    }

    /// Takes the slot of group rank `rank`, which must be in this process. Each slot can be taken once.
    pub(crate) fn slot(&self, rank: usize) -> CallSlot {
        CallSlot::of_process(rank - self.here.start, self.exchange.clone())
    }
}
