//! The exchange before each collective: every rank announces its call, and all compare. After the work they leave together.

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use super::barrier::Barrier;
use super::conflict::{self, Memory};
use super::exchange::{Exchange, ExchangeSlot};
use super::fingerprint::{CollectiveFingerprint, Extras};
use super::host::{HostCalls, HostGroup};
use super::mismatch::{RankCall, mismatch, to_text};
use crate::error::Result;
use crate::operation::OpId;
use crate::process_group::call::Call;

/// A rank's slot among the ranks that share memory: those of this process, or those of all processes of its host.
pub(crate) struct CallSlot {
    /// The ranks of this process, which read each other's calls where they are.
    own: ExchangeSlot<CollectiveFingerprint>,
    /// The calls of all ranks of the host; `None` if they are all of this process.
    host: Option<Box<HostCalls>>,
}

impl CallSlot {
    /// Takes the slot of a rank whose group shares the memory of this process only.
    pub(super) fn of_process(rank: usize, exchange: Arc<Exchange<CollectiveFingerprint>>) -> Self {
        Self { own: ExchangeSlot::take(rank, exchange), host: None }
    }

    /// Takes the slot of the group rank `rank`, which must be in this process, in a group of several processes of a host.
    pub(crate) fn of_host(group: &Arc<HostGroup>, rank: usize) -> Self {
        let own = ExchangeSlot::take(rank - group.first, group.exchange.clone());
        let host = Some(Box::new(HostCalls::new(own.rank(), group.clone())));
        Self { own, host }
    }

    /// Returns this rank's index among the ranks that share memory.
    pub(crate) fn rank(&self) -> usize {
        self.own.rank()
    }

    /// Returns the barrier of the ranks that share memory.
    pub(crate) fn barrier(&self) -> &Barrier {
        self.own.barrier()
    }

    /// Returns the calls of all ranks in the last exchange, in rank order.
    pub(crate) fn published(
        &self,
    ) -> impl ExactSizeIterator<Item = &CollectiveFingerprint> + Clone {
        let call = |rank| match &self.host {
            None => self.own.published_by(rank),
            Some(host) => &host.published[rank],
        };
        (0..self.barrier().members().len()).map(call)
    }

    /// Returns this rank's call in the last exchange.
    pub(crate) fn announced(&self) -> &CollectiveFingerprint {
        self.own.announced()
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
        let result = self
            .exchange(first_group_rank, call, extras, true)
            .and_then(|()| self.check_conflicts(first_group_rank, call, memory));
        self.report_to_host(result)
    }

    /// Returns the number of elements of each tensor that one exchange of `call` can move, and the most elements that any
    /// tensor has; `None` if it moves all. All ranks get the same.
    pub(crate) fn pieces(&mut self, call: &Call, extras: Extras) -> Result<Option<(usize, usize)>> {
        let Some(host) = &self.host else { return Ok(None) };
        let first = host.group.first;
        if call.operation.has_own_sizes() {
            // Each rank knows its own sizes only.
            let sizes = self.exchange(first, call, extras, false);
            let checked = sizes.and_then(|()| self.check_conflicts(first, call, None));
            self.report_to_host(checked)?;
        }
        Ok(self.host.as_ref().and_then(|host| host.pieces(call)))
    }

    /// Announces this rank's call, and reads and compares those of all. With `moves`, makes its tensors available to the
    /// other processes of the host.
    fn exchange(
        &mut self,
        first_group_rank: usize,
        call: &Call,
        extras: Extras,
        moves: bool,
    ) -> Result<()> {
        if self.host.is_some() {
            // After a failure the others may still read what this rank has announced.
            self.check()?;
        }
        let Self { own, host } = self;
        let (rank, parity) = (own.rank(), own.parity());
        let timeout = timeout(own, call);
        own.exchange(call.at(), timeout, |announced| {
            announced.publish(call, first_group_rank + rank, extras)?;
            match host {
                Some(host) => host.announce(call, announced, parity, moves),
                None => Ok(()),
            }
        })?;
        match host {
            Some(host) => host.read(call, own, parity, moves),
            None => compare(own.published(), own.barrier().members(), call.sequence),
        }
    }

    /// Checks that the tensors of all ranks have matching sizes and, with `memory`, that no rank writes where another reads
    /// or writes.
    fn check_conflicts(
        &self,
        first_group_rank: usize,
        call: &Call,
        memory: Option<&mut Memory>,
    ) -> Result<()> {
        let spans = || self.published().map(|call| call.spans.len()).sum::<usize>();
        let conflict = match memory {
            None => conflict::sizes(self.published(), first_group_rank),
            Some(memory) if self.host.is_some() || spans() <= conflict::MAX_COMPARED_SPANS => {
                memory.conflict(self.published(), first_group_rank)
            }
            Some(memory) => {
                let first = self.own.published_by(0);
                if self.rank() == 0 {
                    first
                        .verdict
                        .get_or_init(|| memory.conflict(self.published(), first_group_rank));
                }
                let timeout = timeout(&self.own, call);
                self.barrier().wait_at_most(self.rank(), call.at(), timeout)?;
                first.verdict.get().copied().flatten()
            }
        };
        let Some(conflict) = conflict else { return Ok(()) };
        let members = self.barrier().members();
        Err(conflict.error(self.published(), members, first_group_rank, call.at()))
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
        let Some(host) = &self.host else { return self.own.and_leave_together(work) };
        let result = self.report_failure(work())?;
        let timeout = timeout(&self.own, call);
        self.barrier().wait_at_most(self.rank(), call.at(), timeout)?;
        host.take_results(self.announced());
        Ok(result)
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

    /// Reports like [`Self::report_failure`] if other processes of the host wait for this rank.
    fn report_to_host<T>(&self, result: Result<T>) -> Result<T> {
        if self.host.is_some() { self.report_failure(result) } else { result }
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

fn timeout(slot: &ExchangeSlot<CollectiveFingerprint>, call: &Call) -> Duration {
    call.timeout.unwrap_or(slot.barrier().run().timeout)
}

/// Compares the calls of this process's ranks, in rank order. `members` are their global ranks.
///
/// # Errors
/// [`Error::Mismatch`](crate::Error::Mismatch) if they differ. All ranks see the same calls, so all get the same
/// result.
fn compare<'a>(
    calls: impl ExactSizeIterator<Item = &'a CollectiveFingerprint> + Clone,
    members: &[usize],
    sequence: u64,
) -> Result<()> {
    let Some(first) = calls.clone().next() else { return Ok(()) };
    if calls.clone().skip(1).all(|other| other.agrees_with(first)) {
        return Ok(());
    }
    let called = members.iter().zip(calls.clone()).map(|(&rank, call)| RankCall::new(rank, call));
    Err(mismatch(sequence, &called.collect::<Vec<_>>()))
}
