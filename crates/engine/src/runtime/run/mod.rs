//! The shared state of one run: what each rank does, which rank failed first, and whether to continue.

mod missing;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::flight_recorder::ENTRIES;
use super::primitives::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, Thread, available_parallelism,
    current, park, park_timeout, yield_now,
};
use super::{
    CancelToken, Deadline, Failure, Fault, FlightRecorder, Instant, LossRecord, PeerStatus,
    RemoteSnapshots, SimulatedCluster, Watchdog,
};
use crate::error::{Error, MissingRank, Result, Suspects};
use crate::operation::{OpId, Operation};

/// The most bytes of an error's text that a failure keeps: other processes take it in one piece.
const MAX_ERROR: usize = 16 << 10;

/// The current operation of one rank, read by all ranks without a lock. Only that rank writes it; for a remote rank,
/// the code that receives its state does.
#[derive(Debug, Default)]
pub(crate) struct Activity(AtomicU64);

impl Activity {
    /// Records that this rank now does `operation`, the `sequence`-th of its kind. Returns the previous operation, for
    /// [`Activity::restore`].
    pub(crate) fn enter(&self, operation: Operation, sequence: u64) -> OpId {
        let before = self.now();
        self.restore(OpId { operation, sequence });
        before
    }

    /// Restores the operation that [`Activity::enter`] returned. Not called after a failure, so that the failure is
    /// reported with the operation in which it happened.
    pub(crate) fn restore(&self, at: OpId) {
        self.0.store(at.into(), Ordering::Release);
    }

    /// Records what a heartbeat says, unless the rank has ended: that is newer.
    pub(crate) fn restore_unless_done(&self, at: OpId) {
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |packed| {
            let now = OpId::try_from(packed).map(|now| now.operation);
            (!now.is_ok_and(is_end)).then(|| at.into())
        });
    }

    /// Returns the operation that the rank recorded last.
    pub(crate) fn now(&self) -> OpId {
        // A packed value can always be unpacked.
        OpId::try_from(self.0.load(Ordering::Acquire))
            .unwrap_or(OpId { operation: Operation::UserCode, sequence: 0 })
    }
}

/// Returns whether a rank in `operation` has ended its function.
fn is_end(operation: Operation) -> bool {
    matches!(operation, Operation::ShutDown | Operation::Done)
}

/// The ranks that a rank waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peers<'a> {
    pub ranks: &'a [usize],
    /// Whether some are in other processes. The results of an ended rank may then still be in transit.
    pub are_elsewhere: bool,
    /// The longest wait; `None` for the run's timeout.
    pub limit: Option<Duration>,
}

/// The state that all ranks of one run share.
#[derive(Debug)]
pub(crate) struct RunContext {
    /// Tripped by the first failure, and only by a failure.
    pub cancel: CancelToken,
    /// One entry per rank.
    pub activity: Box<[CachePadded<Activity>]>,
    /// The losses of this process's ranks, which outlive a rank's failure. One entry per rank of the run.
    pub loss_records: Box<[Arc<LossRecord>]>,
    /// The number of steps in the newest state that a rank of this process saves, or has saved, after a failure.
    pub saved_after_failure: AtomicU64,
    /// The operations of this process's ranks.
    pub flight_recorder: FlightRecorder,
    /// The operations of other processes' ranks, as of the last [`RunContext::refresh_peers`].
    pub remote_snapshots: RemoteSnapshots,
    /// The ranks of each group, by its id in the flight recorder.
    groups: Mutex<BTreeMap<u32, Arc<[usize]>>>,
    /// The ranks of this process.
    pub local_ranks: Range<usize>,
    /// The number of ranks on this machine, and of the CPU cores that they may use. A bound rank would count its own.
    pub ranks_here: usize,
    pub cores: usize,
    /// The source of the state of other processes' ranks; `None` without other processes.
    pub peer_status: Option<Arc<dyn PeerStatus>>,
    /// Whether somebody watches all ranks, so that the heartbeats of all are read all the time.
    pub is_watched: bool,
    /// The cluster whose network the ranks simulate; `None` for none.
    pub simulated_cluster: Option<SimulatedCluster>,
    /// Collectives that a rank's thread may block on: [`RunContext::watch`].
    pub(super) watchdog: Watchdog,
    /// The timeout of a rank's wait for other ranks.
    pub timeout: Duration,
    /// How long ranks may take to end after a failure.
    pub grace_period: Duration,
    /// The planned fault, if any.
    pub fault: Option<Fault>,
    /// Whether to compare the ranks' calls even with backends that do not require it.
    pub check_collectives: bool,
    /// All failures, oldest first.
    failures: Mutex<Vec<Failure>>,
    /// Whether each rank was cancelled or has reported a failure. Its later reports are consequences.
    notified: Box<[AtomicBool]>,
    /// For each rank the number of unfinished operations on its communication threads.
    pending: Box<[AtomicUsize]>,
    /// The time at which each rank began to wait for those operations, at the end of its function.
    waiting_since: Box<[OnceLock<Instant>]>,
    /// Each rank's own thread.
    threads: Box<[Mutex<Option<Thread>>]>,
}

impl RunContext {
    /// Returns a run of `world_size` ranks, all of them still idle.
    pub(crate) fn new(world_size: usize, timeout: Duration, fault: Option<Fault>) -> Self {
        Self {
            cancel: CancelToken::default(),
            activity: (0..world_size).map(|_| CachePadded::default()).collect(),
            loss_records: (0..world_size).map(|_| Arc::default()).collect(),
            saved_after_failure: AtomicU64::default(),
            flight_recorder: FlightRecorder::new(world_size, ENTRIES),
            remote_snapshots: RemoteSnapshots::default(),
            groups: Mutex::new(BTreeMap::from([(0, (0..world_size).collect())])),
            local_ranks: 0..world_size,
            ranks_here: world_size,
            cores: available_parallelism().map_or(1, usize::from),
            peer_status: None,
            is_watched: false,
            simulated_cluster: None,
            watchdog: Watchdog::default(),
            timeout,
            grace_period: timeout,
            fault,
            check_collectives: false,
            failures: Mutex::default(),
            notified: (0..world_size).map(|_| AtomicBool::default()).collect(),
            pending: (0..world_size).map(|_| AtomicUsize::default()).collect(),
            waiting_since: (0..world_size).map(|_| OnceLock::new()).collect(),
            threads: (0..world_size).map(|_| Mutex::default()).collect(),
        }
    }

    /// Records the ranks of the group with this number.
    pub(crate) fn register_group(&self, group: u32, members: &Arc<[usize]>) {
        self.groups.lock().entry(group).or_insert_with(|| members.clone());
    }

    /// Returns the ranks of a group; `None` if this process has not joined it. Group 0 has all ranks.
    pub(crate) fn members(&self, group: u32) -> Option<Arc<[usize]>> {
        self.groups.lock().get(&group).cloned()
    }

    /// Returns the ranks of all groups that this process has joined.
    pub(crate) fn known_groups(&self) -> BTreeMap<u32, Arc<[usize]>> {
        self.groups.lock().clone()
    }

    /// Records that the calling thread is that of `rank`.
    pub(crate) fn start(&self, rank: usize) {
        *self.threads[rank].lock() = Some(current());
        self.cancel.register();
    }

    /// Returns whether `rank` is of another process, or has not started.
    pub(crate) fn is_elsewhere(&self, rank: usize) -> bool {
        self.threads[rank].lock().is_none()
    }

    /// Triggers the planned fault if it is for `rank` at this operation.
    pub(crate) fn fault_point(&self, rank: usize, at: Operation, step: u64) -> Result<()> {
        match &self.fault {
            Some(fault) => fault.trigger(rank, at, step),
            None => Ok(()),
        }
    }

    /// Returns an error if a rank has failed, so that `rank` stops.
    ///
    /// # Errors
    /// [`Error::Cancelled`] with the rank that failed first.
    pub(crate) fn check(&self, rank: usize) -> Result<()> {
        let Some(by) = self.cancel.cancelled_by() else { return Ok(()) };
        self.notified[rank].store(true, Ordering::Relaxed);
        let cause = self.failures().first().map_or_else(String::new, |f| f.error.clone());
        Err(Error::Cancelled { by, cause })
    }

    /// Records that `reporter` failed, unless its error follows from another failure, and cancels the run.
    ///
    /// `cause` is this crate's error, if it is one; `text` is the message to show.
    pub(crate) fn report(&self, reporter: usize, cause: Option<&Error>, text: String) {
        self.report_at(reporter, None, cause, text);
    }

    /// Reports like [`RunContext::report`], for a failure in the operation `at` instead of the rank's current one.
    pub(crate) fn report_at(
        &self,
        reporter: usize,
        at: Option<OpId>,
        cause: Option<&Error>,
        text: String,
    ) {
        let echo = self.notified[reporter].load(Ordering::Relaxed)
            || matches!(cause, Some(Error::Cancelled { .. }));
        let blamed = cause.and_then(|cause| self.blamed(cause));
        let blames = blamed.is_some();
        let mut failure = blamed.unwrap_or_else(|| self.failure_of(reporter, at));
        failure.waited = matches!(cause, Some(Error::Timeout { .. }))
            || blames && !matches!(cause, Some(Error::ReplicasDiverged { .. }));
        failure.error = text;
        self.record_failure(reporter, failure, echo, blames);
    }

    /// Returns the failure that `error` blames on other ranks, without its text. `None` if it blames the rank that
    /// reports it.
    pub(crate) fn blamed(&self, error: &Error) -> Option<Failure> {
        // If more than half of the ranks agree, one of the others is named alone.
        let among = |suspects: &Suspects, rank: usize, at: Option<OpId>| {
            let tied = if suspects.has_majority { Vec::new() } else { suspects.ranks.clone() };
            Failure { tied, ..self.failure_of(rank, at) }
        };
        match error {
            Error::Timeout { missing, .. } => {
                let first = missing.first()?;
                Some(self.failure_of(first.rank, Some(first.last_seen)))
            }
            Error::PeerExited { left, .. } => Some(self.failure_of(*left, None)),
            Error::ConnectionLost { lost, step, .. } => {
                let first = lost.first()?;
                let step = step.map(|sequence| OpId { operation: Operation::Step, sequence });
                Some(self.failure_of(first.rank, step.or(Some(first.last_seen))))
            }
            Error::Mismatch { suspects, outlier, called, sequence, .. } => {
                let at = OpId { operation: *called, sequence: *sequence };
                Some(among(suspects, *outlier, Some(at)))
            }
            Error::SendMismatch { source_rank, destination, .. } => {
                let suspects = Suspects::tied(vec![*source_rank, *destination]);
                Some(among(&suspects, *destination, None))
            }
            Error::OverlappingTensors { first, second } => {
                Some(among(&Suspects::tied(vec![*first, *second]), *second, None))
            }
            Error::ReplicasDiverged { suspects, step, compared, .. } => {
                let at = OpId { operation: compared.operation(), sequence: *step };
                Some(among(suspects, *suspects.ranks.first()?, Some(at)))
            }
            _ => None,
        }
    }

    /// Returns the failure of `rank` in the operation `at`, or in its current one.
    fn failure_of(&self, rank: usize, at: Option<OpId>) -> Failure {
        Failure::new(rank, at.unwrap_or_else(|| self.activity[rank].now()), String::new())
    }

    /// Records a failure that is known in full, such as that of another process, and cancels the run.
    pub(crate) fn report_failure(&self, failure: Failure) {
        let echo = self.notified[failure.rank].load(Ordering::Relaxed);
        self.record_failure(failure.rank, failure, echo, false);
    }

    fn record_failure(&self, reporter: usize, mut failure: Failure, echo: bool, blames: bool) {
        let error = &mut failure.error;
        if let Some(end) = (error.len() > MAX_ERROR).then_some(MAX_ERROR) {
            let is_boundary = |end: &usize| error.is_char_boundary(*end);
            error.truncate((0..=end).rev().find(is_boundary).unwrap_or_default());
            error.push_str(" ...");
        }
        let mut failures = self.failures();
        if !echo || failures.is_empty() {
            // Several ranks that wait in vain for the same one report the same failure in different words.
            let known = |other: &Failure| {
                other.error == failure.error || (blames && other.rank == failure.rank)
            };
            if !failures.iter().any(known) {
                failures.push(failure);
            }
        }
        // Later reports of this rank, such as the same error in other words, follow from this one.
        self.notified[reporter].store(true, Ordering::Relaxed);
        let by = failures[0].rank;
        drop(failures);
        self.cancel.cancel(by);
    }

    /// Returns all failures so far, oldest first.
    pub(crate) fn failures(&self) -> MutexGuard<'_, Vec<Failure>> {
        self.failures.lock()
    }

    /// Records that `rank` has passed an operation to a communication thread.
    pub(crate) fn begin_pending(&self, rank: usize) {
        self.pending[rank].fetch_add(1, Ordering::AcqRel);
    }

    /// Records that such an operation has ended.
    pub(crate) fn end_pending(&self, rank: usize) {
        if self.pending[rank].fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(thread) = &*self.threads[rank].lock()
        {
            thread.unpark();
        }
    }

    /// Waits until all operations on the communication threads of `rank` have ended. Must be called on the rank's own
    /// thread, which they unpark.
    pub(crate) fn wait_until_idle(&self, rank: usize) {
        self.waiting_since[rank].get_or_init(Instant::now);
        // Each operation ends: done, cancelled, or past its deadline.
        while self.pending[rank].load(Ordering::Acquire) > 0 {
            park();
        }
    }

    /// Returns whether `rank` has been in [`RunContext::wait_until_idle`] for longer than the timeout.
    pub(crate) fn is_overdue(&self, rank: usize) -> bool {
        self.waiting_since[rank].get().is_some_and(|since| since.elapsed() >= self.timeout)
    }

    /// Records that `rank` has ended its function, and wakes all waiting threads.
    pub(crate) fn finish(&self, rank: usize) {
        self.activity[rank].enter(Operation::ShutDown, 0);
        self.cancel.wake_all();
    }

    /// Returns whether `rank` has ended its function.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        is_end(self.activity[rank].now().operation)
    }

    /// Waits until `is_done` returns true. The rank that makes it true must then unpark this thread.
    ///
    /// `peers` are the ranks that can make it true. `waiting` is the rank that waits, `at` its operation. Before an
    /// error, `withdraw` prevents `peers` from completing; it returns false if they already have. Returns false if
    /// `peers.limit` has passed first.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; [`Error::Timeout`] and [`Error::PeerExited`], which have been reported.
    pub(crate) fn wait_for_peers(
        &self,
        waiting: usize,
        peers: Peers,
        at: OpId,
        is_done: impl Fn() -> bool,
        withdraw: impl Fn() -> bool,
    ) -> Result<bool> {
        let began = Instant::now();
        let Peers { ranks, are_elsewhere, limit } = peers;
        let error = loop {
            // The order matters: a rank that has ended may have completed it just before.
            let left = !are_elsewhere && ranks.iter().all(|&peer| self.is_done(peer));
            let cancelled = self.cancel.cancelled_by().is_some();
            if is_done() {
                return Ok(true);
            }
            if cancelled {
                return if withdraw() { self.check(waiting).map(|()| true) } else { Ok(true) };
            }
            if left && let Some(&left) = ranks.first() {
                break Error::PeerExited { at, waiting, left };
            }
            let Some(time_left) = self.timeout.checked_sub(began.elapsed()) else {
                let mut missing = if are_elsewhere { self.refresh_peers() } else { Vec::new() };
                if self.cancel.cancelled_by().is_some() {
                    continue; // the other process's failure says more than this timeout
                }
                missing.retain(|missing| ranks.contains(&missing.rank));
                if missing.is_empty() {
                    missing = self.missing_ranks(ranks.to_vec());
                }
                break Error::Timeout { at, waiting, waited: self.timeout, missing };
            };
            let until_limit = limit.map(|limit| limit.saturating_sub(began.elapsed()));
            if until_limit.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            park_timeout(until_limit.map_or(time_left, |limit| limit.min(time_left)));
        };
        if !withdraw() {
            return Ok(true);
        }
        self.report(waiting, Some(&error), error.to_string());
        Err(error)
    }

    /// Polls `is_done` until it returns true, the run is cancelled, or the timeout has passed. `waiting` is the rank
    /// that waits for NCCL or its device.
    ///
    /// Neither NCCL nor CUDA offers an event that a cancel could also wake. So this polls without a pause at first,
    /// then after short parks, which a cancel cuts short.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; [`Error::Timeout`], which names the missing ranks of other processes. Those processes
    /// report it, since NCCL does not. All ranks of this process entered the call before the launch. If no other rank
    /// is missing, the device is slow or hangs, and no rank is blamed.
    pub(crate) fn poll(&self, waiting: usize, is_done: impl Fn() -> Result<bool>) -> Result<()> {
        if self.poll_at_most(waiting, self.timeout, is_done)? {
            return Ok(());
        }
        let missing = self.missing_in_others(waiting);
        self.check(waiting)?; // another process may have reported the cause
        let at = self.activity[waiting].now();
        Err(Error::Timeout { at, waiting, waited: self.timeout, missing })
    }

    /// Polls like [`RunContext::poll`] for at most `limit`. Returns false if it has passed.
    pub(crate) fn poll_at_most(
        &self,
        waiting: usize,
        limit: Duration,
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<bool> {
        const AT_ONCE: Duration = Duration::from_millis(1);
        const PARK: Duration = Duration::from_micros(200);
        let (began, deadline) = (std::time::Instant::now(), Deadline::after(limit));
        loop {
            self.check(waiting)?;
            if is_done()? {
                return Ok(true);
            }
            if began.elapsed() < AT_ONCE.min(limit) {
                yield_now();
            } else if deadline.is_over() {
                return Ok(false);
            } else {
                park_timeout(PARK);
            }
        }
    }

    /// Refreshes the state of other processes' ranks: [`PeerStatus::refresh`].
    pub(crate) fn refresh_peers(&self) -> Vec<MissingRank> {
        self.peer_status.as_ref().map_or(Vec::new(), |peers| peers.refresh(self))
    }

    /// Refreshes that state once, even if the run has failed.
    pub(crate) fn poll_peers(&self) {
        if let Some(peers) = &self.peer_status {
            peers.poll(self);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
