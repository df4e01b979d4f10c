//! What the ranks of one run know of each other: who does what, who failed first, and whether to go on.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::utils::CachePadded;

use super::flight_recorder::RECORDS;
use super::primitives::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, Thread, current, park,
    park_timeout, yield_now,
};
use super::{CancelToken, Fault, FaultSite, FlightRecorder, RemoteSnapshots};
use crate::error::{Blame, Error, MissingRank, Result};
use crate::operation::{OpId, Operation};

/// What one rank does now, written by that rank alone and readable by all without a lock.
#[derive(Debug, Default)]
pub(crate) struct Activity(AtomicU64);

impl Activity {
    /// Notes that this rank now does `operation`, the `sequence`-th of its sort; returns what it
    /// did before, for [`Activity::restore`].
    pub(crate) fn enter(&self, operation: Operation, sequence: u64) -> OpId {
        let before = self.now();
        self.restore(OpId { operation, sequence });
        before
    }

    /// Goes back to what [`Activity::enter`] returned. Not called when the operation failed, so
    /// that the failure is reported with the operation it happened in.
    pub(crate) fn restore(&self, at: OpId) {
        self.0.store(at.packed(), Ordering::Release);
    }

    /// What the rank does, as far as it has said.
    pub(crate) fn now(&self) -> OpId {
        // What was packed can be unpacked.
        OpId::unpacked(self.0.load(Ordering::Acquire))
            .unwrap_or(OpId { operation: Operation::UserCode, sequence: 0 })
    }
}

/// A failure of a rank, as it was reported.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The rank to blame: the one that reported, or one that it waited for in vain.
    pub rank: usize,
    /// All ranks that may be the wrong one, if nothing tells which; else empty.
    pub tied: Vec<usize>,
    /// What that rank was doing.
    pub at: OpId,
    /// Why.
    pub error: String,
    /// Whether it was reported by a rank that waited in vain, or met another one in another call.
    pub waited: bool,
}

/// What can be known of ranks in other processes.
pub(crate) trait PeerStatus: fmt::Debug + Send + Sync {
    /// Asks what each such rank does: [`RunContext::activity`] and [`RunContext::remote_snapshots`] have it then, as far as it can be known.
    /// Returns those that do not answer any more. Takes a moment, unless the run is cancelled.
    fn refresh(&self, run: &RunContext) -> Vec<MissingRank>;

    /// Asks once, and does not mind whether the run is cancelled.
    fn poll(&self, run: &RunContext);
}

/// The ranks that a rank waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peers<'a> {
    pub ranks: &'a [usize],
    /// Whether some of them are in other processes: what they have done before they ended may still be on its way.
    pub are_elsewhere: bool,
    /// For how long at most, if not until the run's timeout.
    pub limit: Option<Duration>,
}

/// Shared by all ranks of one run.
#[derive(Debug)]
pub(crate) struct RunContext {
    /// Tripped with the first failure, and never without one.
    pub cancel: CancelToken,
    /// One entry per rank.
    pub activity: Box<[CachePadded<Activity>]>,
    /// What the ranks of this process do and have done.
    pub flight_recorder: FlightRecorder,
    /// What those of other processes do, as far as they were asked: [`RunContext::look`].
    pub remote_snapshots: RemoteSnapshots,
    /// Which ranks each group has, by its number in the timeline.
    groups: Mutex<BTreeMap<u32, Arc<[usize]>>>,
    /// How many of the ranks are on this machine.
    pub ranks_here: usize,
    /// What is known of the ranks of other processes, if there are any.
    pub elsewhere: Option<Arc<dyn PeerStatus>>,
    /// How long a rank waits for the others before it gives up.
    pub timeout: Duration,
    /// A rank that is to fail.
    pub fault: Option<Fault>,
    /// Whether backends that need not compare what the ranks call do so all the same.
    pub check_collectives: bool,
    /// In the order of time.
    failures: Mutex<Vec<Failure>>,
    /// The ranks that were told to stop: whatever they report from then on follows from that.
    told: Box<[AtomicBool]>,
    /// For each rank how many operations it has handed to its communication threads and that are not over.
    pending: Box<[AtomicUsize]>,
    /// When each rank has begun to wait for all of that, at the end of its function.
    ending: Box<[OnceLock<Instant>]>,
    /// Each rank's own thread.
    threads: Box<[Mutex<Option<Thread>>]>,
}

impl RunContext {
    /// A run of `world_size` ranks, none of which does anything yet.
    pub(crate) fn new(world_size: usize, timeout: Duration, fault: Option<Fault>) -> Self {
        Self {
            cancel: CancelToken::default(),
            activity: (0..world_size).map(|_| CachePadded::default()).collect(),
            flight_recorder: FlightRecorder::new(world_size, RECORDS),
            remote_snapshots: RemoteSnapshots::default(),
            groups: Mutex::default(),
            ranks_here: world_size,
            elsewhere: None,
            timeout,
            fault,
            check_collectives: false,
            failures: Mutex::default(),
            told: (0..world_size).map(|_| AtomicBool::default()).collect(),
            pending: (0..world_size).map(|_| AtomicUsize::default()).collect(),
            ending: (0..world_size).map(|_| OnceLock::new()).collect(),
            threads: (0..world_size).map(|_| Mutex::default()).collect(),
        }
    }

    /// Notes which ranks the group of this number has.
    pub(crate) fn register_group(&self, group: u32, members: &Arc<[usize]>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.entry(group).or_insert_with(|| members.clone());
    }

    /// The ranks of the group of this number, as far as this process has joined it; number 0 has all.
    pub(crate) fn members(&self, group: u32) -> Option<Arc<[usize]>> {
        if group == 0 {
            return Some((0..self.activity.len()).collect());
        }
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.get(&group).cloned()
    }

    /// The ranks of all groups that this process has joined, but for the group of all.
    pub(crate) fn known_groups(&self) -> BTreeMap<u32, Arc<[usize]>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that the calling thread is that of `rank`.
    pub(crate) fn start(&self, rank: usize) {
        *self.threads[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(current());
        self.cancel.register();
    }

    /// Fails here if `rank` is to fail at this place.
    pub(crate) fn fault_point(&self, rank: usize, at: FaultSite, step: u64) -> Result<()> {
        self.fault.map_or(Ok(()), |fault| fault.trigger(rank, at, step))
    }

    /// Tells `rank` to stop, if another rank has failed.
    ///
    /// # Errors
    /// [`Error::Cancelled`] with the rank that failed first.
    pub(crate) fn check(&self, rank: usize) -> Result<()> {
        let Some(by) = self.cancel.cancelled_by() else { return Ok(()) };
        self.told[rank].store(true, Ordering::Relaxed);
        let cause = self.failures().first().map_or_else(String::new, |f| f.error.clone());
        Err(Error::Cancelled { by, cause })
    }

    /// Notes that `reporter` failed, unless that is an echo of another failure, and has everybody stop.
    ///
    /// `cause` is this crate's error behind it, if it is one; `text` is what to show.
    pub(crate) fn report(&self, reporter: usize, cause: Option<&Error>, text: String) {
        self.report_at(reporter, None, cause, text);
    }

    /// As [`RunContext::report`], for a failure in something else than what the rank itself does now.
    pub(crate) fn report_at(
        &self,
        reporter: usize,
        at: Option<OpId>,
        cause: Option<&Error>,
        text: String,
    ) {
        let echo = self.told[reporter].load(Ordering::Relaxed)
            || matches!(cause, Some(Error::Cancelled { .. }));
        let blamed = cause.and_then(Error::blames);
        let waited = matches!(cause, Some(Error::Timeout { .. }))
            || blamed.is_some() && !matches!(cause, Some(Error::ReplicasDiverged { .. }));
        let blames = blamed.is_some();
        let Blame { rank, tied, at } =
            blamed.unwrap_or_else(|| Blame { rank: reporter, tied: Vec::new(), at });
        let at = at.unwrap_or_else(|| self.activity[rank].now());
        let failure = Failure { rank, tied, at, error: text, waited };
        self.note_failure(reporter, failure, echo, blames);
    }

    /// Notes a failure of another process that its process has told, and has everybody stop.
    pub(crate) fn report_told(&self, failure: Failure) {
        let echo = self.told[failure.rank].load(Ordering::Relaxed);
        self.note_failure(failure.rank, failure, echo, false);
    }

    fn note_failure(&self, reporter: usize, failure: Failure, echo: bool, blames: bool) {
        let mut failures = self.failures();
        if !echo || failures.is_empty() {
            // Ranks that wait in vain for the same one tell the same story, each in its words.
            let known =
                |it: &Failure| it.error == failure.error || (blames && it.rank == failure.rank);
            if !failures.iter().any(known) {
                failures.push(failure);
            }
        }
        // What the reporter says next, this same error in other words for one, follows from this.
        self.told[reporter].store(true, Ordering::Relaxed);
        let by = failures[0].rank;
        drop(failures);
        self.cancel.cancel(by);
    }

    /// All failures so far, the earliest first.
    pub(crate) fn failures(&self) -> MutexGuard<'_, Vec<Failure>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that `rank` has handed an operation to a communication thread.
    pub(crate) fn begin_pending(&self, rank: usize) {
        self.pending[rank].fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that such an operation is over.
    pub(crate) fn end_pending(&self, rank: usize) {
        if self.pending[rank].fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(thread) =
                &*self.threads[rank].lock().unwrap_or_else(PoisonError::into_inner)
        {
            thread.unpark();
        }
    }

    /// Waits until all that `rank` has handed to its communication threads is over. On its own thread, which
    /// they unpark.
    pub(crate) fn wait_until_idle(&self, rank: usize) {
        self.ending[rank].get_or_init(Instant::now);
        // Each of it ends: done, cancelled, or past its deadline.
        while self.pending[rank].load(Ordering::Acquire) > 0 {
            park();
        }
    }

    /// Whether `rank` has waited in [`RunContext::wait_until_idle`] for longer than the timeout.
    pub(crate) fn is_overdue(&self, rank: usize) -> bool {
        self.ending[rank].get().is_some_and(|since| since.elapsed() >= self.timeout)
    }

    /// Notes that `rank` has ended its function, and lets those who wait for it see that.
    pub(crate) fn finish(&self, rank: usize) {
        self.activity[rank].enter(Operation::ShutDown, 0);
        self.cancel.wake_all();
    }

    /// Whether `rank` has ended its function.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        matches!(self.activity[rank].now().operation, Operation::ShutDown | Operation::Done)
    }

    /// Waits until another rank has done what `is_done` looks for, and has then unparked this thread.
    ///
    /// `peers` are those that can do it. `waiting` is the rank that waits, `at` what it does. Before this
    /// gives up, `cancel` sees to it that they no longer can; it says false if they have. Returns false if
    /// `peers.limit` has passed, and nothing else has happened.
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
            // In this order: a rank that has ended may have done it just before.
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
                let mut late = if are_elsewhere { self.look() } else { Vec::new() };
                if self.cancel.cancelled_by().is_some() {
                    continue; // the failure of another process, which tells more
                }
                late.retain(|late| ranks.contains(&late.rank));
                if late.is_empty() {
                    late = self.late(ranks.to_vec());
                }
                break Error::Timeout { at, waiting, waited: self.timeout, late };
            };
            let until_limit = limit.map(|limit| limit.saturating_sub(began.elapsed()));
            if until_limit.is_some_and(|it| it.is_zero()) {
                return Ok(false);
            }
            park_timeout(until_limit.map_or(time_left, |it| it.min(time_left)));
        };
        if !withdraw() {
            return Ok(true);
        }
        self.report(waiting, Some(&error), error.to_string());
        Err(error)
    }

    /// Returns the timeout of rank `waiting`, which has waited for `missing`, ranks of other processes that it alone
    /// has to meet. Asks first what these do.
    pub(crate) fn not_come(&self, waiting: usize, missing: Vec<usize>) -> Error {
        let silent = self.look();
        let is_silent = |rank: usize| silent.iter().any(|it| it.rank == rank);
        let seen = |rank: usize| MissingRank {
            rank,
            last_seen: self.activity[rank].now(),
            silent: is_silent(rank),
        };
        let late = missing.into_iter().map(seen).collect();
        let at = self.activity[waiting].now();
        Error::Timeout { at, waiting, waited: self.timeout, late }
    }

    /// Names the ranks of other processes that are not where `waiting` is, those first that wait for nobody. Asks what
    /// they do, which takes a moment.
    fn late_elsewhere(&self, waiting: usize) -> Vec<MissingRank> {
        let silent = self.look();
        if !silent.is_empty() {
            return silent;
        }
        let at = self.activity[waiting].now();
        let is_elsewhere = |rank: &usize| {
            self.threads[*rank].lock().unwrap_or_else(PoisonError::into_inner).is_none()
        };
        let all = || (0..self.activity.len()).filter(is_elsewhere);
        let mine = self.flight_recorder.seen(waiting);
        let mut missing: Vec<usize> =
            all().filter(|rank| self.remote_snapshots.is_behind(*rank, &mine)).collect();
        if missing.is_empty() {
            missing = all().filter(|rank| self.activity[*rank].now() != at).collect();
        }
        if self.elsewhere.is_none() || missing.is_empty() {
            return Vec::new();
        }
        let mut late = self.late(missing);
        late.sort_by_key(|it| it.last_seen.operation.may_wait());
        late
    }

    /// Asks `is_done` until it is, the run is cancelled, or the timeout has passed. `waiting` is the rank that waits
    /// for NCCL or its device.
    ///
    /// Neither NCCL nor CUDA offers an event that a cancel could also wake, so this asks again and
    /// again: at once for the first while, then after short parks, which a cancel does cut short.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; [`Error::Timeout`], which names the ranks of other processes that are late. NCCL does not
    /// tell, but they do. All ranks of this process have met before the launch: if no other is late, the device is slow,
    /// or hangs, and nobody is blamed.
    pub(crate) fn poll(&self, waiting: usize, is_done: impl Fn() -> Result<bool>) -> Result<()> {
        if self.poll_at_most(waiting, self.timeout, is_done)? {
            return Ok(());
        }
        let late = self.late_elsewhere(waiting);
        self.check(waiting)?; // another process may have told why meanwhile
        let at = self.activity[waiting].now();
        Err(Error::Timeout { at, waiting, waited: self.timeout, late })
    }

    /// The same for no longer than `limit`; false if it has passed.
    pub(crate) fn poll_at_most(
        &self,
        waiting: usize,
        limit: Duration,
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<bool> {
        const AT_ONCE: Duration = Duration::from_millis(1);
        const PARK: Duration = Duration::from_micros(200);
        let began = Instant::now();
        loop {
            self.check(waiting)?;
            if is_done()? {
                return Ok(true);
            }
            let waited = began.elapsed();
            if waited >= limit {
                return Ok(false);
            }
            if waited < AT_ONCE { yield_now() } else { park_timeout(PARK) }
        }
    }

    /// Asks what ranks of other processes do, as [`PeerStatus::refresh`].
    pub(crate) fn look(&self) -> Vec<MissingRank> {
        self.elsewhere.as_ref().map_or(Vec::new(), |elsewhere| elsewhere.refresh(self))
    }

    /// Asks the same once, also when the run has failed.
    pub(crate) fn ask(&self) {
        if let Some(elsewhere) = &self.elsewhere {
            elsewhere.poll(self);
        }
    }

    /// Names `missing`, the ranks that are waited for, with what they were last seen doing.
    ///
    /// If all of them are in collectives or messages themselves, somebody else keeps them: those who are in
    /// code of their own come first then.
    pub(crate) fn late(&self, missing: Vec<usize>) -> Vec<MissingRank> {
        let mut late = self.last_seen(missing);
        if late.iter().all(|late| late.last_seen.operation.may_wait()) {
            let mut keepers = self.last_seen(0..self.activity.len());
            keepers.retain(|rank| rank.last_seen.operation.is_compute());
            late.splice(0..0, keepers);
        }
        late
    }

    /// Returns `ranks` with what they were last seen doing.
    pub(crate) fn last_seen(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<MissingRank> {
        let seen = |rank| MissingRank { rank, last_seen: self.activity[rank].now(), silent: false };
        ranks.into_iter().map(seen).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
