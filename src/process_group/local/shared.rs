//! The state of a group that the ranks of one process share: its exchange and its mailboxes.

use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tch::Tensor;

use super::barrier::Barrier;
use super::compare::exchange_calls;
use super::conflict::Memory;
use super::exchange::{Exchange, ExchangeSlot};
use super::fingerprint::{CollectiveFingerprint, Extras};
use super::host::{HostGroup, HostSlot};
use super::mail::Mailboxes;
use super::mismatch::to_text;
use super::once::OncePerProcess;
use crate::error::Result;
use crate::operation::OpId;
use crate::process_group::call::Call;
use crate::runtime::RunContext;

/// A rank's slot in the exchange of calls.
pub(crate) struct CallSlot(Ranks);

/// The ranks that share memory.
enum Ranks {
    /// Those of this process.
    OfProcess(ExchangeSlot<CollectiveFingerprint>),
    /// Those of several processes of this host.
    OfHost(Box<HostSlot>),
}

impl CallSlot {
    /// Takes the slot of the group rank `rank`, which must be in this process, in a group on one host.
    pub(crate) fn of_host(group: &Arc<HostGroup>, rank: usize) -> Self {
        Self(Ranks::OfHost(Box::new(group.slot(rank))))
    }

    /// Returns this rank's index among the ranks that share memory.
    pub(crate) fn rank(&self) -> usize {
        match &self.0 {
            Ranks::OfProcess(slot) => slot.rank(),
            Ranks::OfHost(slot) => slot.rank(),
        }
    }

    /// Returns the barrier of the ranks that share memory.
    pub(crate) fn barrier(&self) -> &Barrier {
        match &self.0 {
            Ranks::OfProcess(slot) => slot.barrier(),
            Ranks::OfHost(slot) => slot.barrier(),
        }
    }

    /// Returns the calls of all ranks in the last exchange, in rank order.
    pub(crate) fn published(
        &self,
    ) -> impl ExactSizeIterator<Item = &CollectiveFingerprint> + Clone {
        let call = |rank| match &self.0 {
            Ranks::OfProcess(slot) => slot.published_by(rank),
            Ranks::OfHost(slot) => &slot.published()[rank],
        };
        (0..self.barrier().members().len()).map(call)
    }

    /// Returns this rank's call in the last exchange.
    pub(crate) fn announced(&self) -> &CollectiveFingerprint {
        match &self.0 {
            Ranks::OfProcess(slot) => slot.announced(),
            Ranks::OfHost(slot) => slot.announced(),
        }
    }

    /// Announces this rank's call, waits for the others' and compares them.
    ///
    /// On success all ranks make the same call, with tensors of matching sizes. With `memory`, no rank writes where
    /// another reads or writes. With [`Extras::device`], all tensors are also on one device. `first_group_rank` is the
    /// group rank of the first of these ranks.
    pub(crate) fn exchange_calls(
        &mut self,
        first_group_rank: usize,
        call: &Call,
        extras: Extras,
        memory: Option<&mut Memory>,
    ) -> Result<()> {
        match &mut self.0 {
            Ranks::OfProcess(slot) => exchange_calls(slot, first_group_rank, call, extras, memory),
            Ranks::OfHost(slot) => {
                let result = slot.exchange(call, extras, memory, true);
                self.report_failure(result)
            }
        }
    }

    /// Returns the number of elements of each tensor that one exchange of `call` can move, and the most elements that any
    /// tensor has; `None` if it moves all. All ranks get the same.
    pub(crate) fn pieces(&mut self, call: &Call, extras: Extras) -> Result<Option<(usize, usize)>> {
        match &mut self.0 {
            Ranks::OfProcess(_) => Ok(None),
            Ranks::OfHost(slot) => {
                let pieces = slot.pieces(call, extras);
                self.report_failure(pieces)
            }
        }
    }

    /// Runs `work`, then waits until all ranks have finished theirs.
    ///
    /// # Errors
    /// The error of `work`. Among processes those of [`Barrier::wait`]; threads wait until all have finished, even if
    /// `work` panics.
    pub(crate) fn and_leave_together<R>(
        &self,
        call: &Call,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        match &self.0 {
            Ranks::OfProcess(slot) => slot.and_leave_together(work),
            Ranks::OfHost(slot) => {
                let result = self.report_failure(work())?;
                slot.leave(call).map(|()| result)
            }
        }
    }

    /// Returns this rank's number in the run.
    pub(crate) fn global_rank(&self) -> usize {
        self.barrier().members()[self.rank()]
    }

    /// Returns an error if the run is cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        self.barrier().run().check(self.global_rank())
    }

    /// Reports the failure in `result`, if it is one, to the run. Returns `result`; if another rank has failed before,
    /// returns that failure and reports nothing.
    ///
    /// The report is made at once: other ranks may wait for this one without a timeout, and the caller may ignore the
    /// error and take part in the wrong exchanges.
    pub(crate) fn report_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.check()?; // a failure of another rank is not this rank's
            self.barrier().run().report(self.global_rank(), Some(error), error.to_string());
        }
        result
    }

    /// Runs `work` on the process's first rank. All ranks of the process must call it, and return once it is done. If
    /// `work` fails, the first rank returns its error; the report of it ends the wait of the others.
    pub(crate) fn on_leader(&self, at: OpId, work: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.rank() == 0 {
            self.report_failure(work())?;
        }
        // No timeout: the first rank's work has one.
        self.barrier().wait_at_most(self.rank(), at, Duration::MAX)
    }

    /// Returns the call that these ranks have exchanged as text for others. The first of them calls it. It knows no call
    /// sites of other processes.
    pub(crate) fn call_text(&self) -> String {
        to_text(iter::once(self.announced()).chain(self.published().skip(1)))
    }
}

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
            exchange: Arc::new(Exchange::new(barrier, CollectiveFingerprint::nothing)),
            mail: Arc::new(Mailboxes::new(run.clone(), members.clone())),
            run,
            members,
            here,
            tensors: OncePerProcess::default(),
        }
    }

    /// Takes the exchange slot of group rank `rank`, which must be in this process. Each slot can be taken once.
    pub(crate) fn slot(&self, rank: usize) -> CallSlot {
        CallSlot(Ranks::OfProcess(ExchangeSlot::take(
            rank - self.here.start,
            self.exchange.clone(),
        )))
    }
}
