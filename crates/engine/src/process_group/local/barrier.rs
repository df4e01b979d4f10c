//! A barrier with cancellation and a timeout, which `std::sync::Barrier` lacks.

use std::any::Any;
use std::ops::Deref;
use std::ptr::NonNull;
use std::time::Duration;

use crossbeam::utils::CachePadded;

use crate::error::{Error, Result};
use crate::operation::OpId;
use crate::runtime::primitives::{Arc, AtomicBool, AtomicU64, Event, Ordering, yield_now};
use crate::runtime::{Instant, Notify, RunContext};

/// A barrier for the ranks of a group that share memory: threads of this process, or of several processes of a host.
///
/// `rank` here is a rank of the group. The run and the errors use global ranks.
///
/// Each rank counts its arrivals in a word of its own, which the others read. Either all ranks have arrived and the round
/// is complete for all of them. Or a rank that gave up (cancelled, or past its deadline) has poisoned the word of a
/// missing rank. That rank can never arrive, so no rank ever completes the round. After an error no other rank continues
/// as if this one had arrived. The shared-memory backend relies on that for its pointers.
///
/// A common word for all ranks would take longer. They would write it one after the other, and read it once more.
#[derive(Debug)]
pub(crate) struct Barrier {
    states: Arc<RankStates>,
    run: Arc<RunContext>,
    /// The global rank of each rank of the group.
    members: Arc<[usize]>,
    /// The number of checks before parking; 0 where ranks outnumber cores, which yield instead.
    spins: u32,
}

/// One rank's part of a barrier. Memory of zeros is a valid one.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct RankState {
    arrival: CachePadded<Arrival>,
    spinning: CachePadded<Spinning>,
}

/// A value whose memory another object owns.
#[derive(Debug)]
pub(crate) struct InMemory<T> {
    value: NonNull<T>,
    _memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a reference to the value, as `Arc` gives it.
unsafe impl<T: Send + Sync> Send for InMemory<T> {}
// SAFETY: likewise.
unsafe impl<T: Send + Sync> Sync for InMemory<T> {}

impl<T: Send + Sync + 'static> InMemory<T> {
    /// Returns the value in the memory of an `Arc`.
    pub(crate) fn of(value: Arc<T>) -> Self {
        Self { value: NonNull::from(&*value), _memory: value }
    }

    /// Returns the value at `value`.
    ///
    /// # Safety
    /// There is a valid `T`, for as long as `memory` exists, and it is changed through its atomics only.
    pub(crate) unsafe fn at(value: NonNull<T>, memory: Arc<dyn Any + Send + Sync>) -> Self {
        Self { value, _memory: memory }
    }
}

impl<T> Deref for InMemory<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value exists as long as `_memory`.
        unsafe { self.value.as_ref() }
    }
}

/// The states of all ranks, in group order.
#[derive(Debug)]
struct RankStates(Box<[InMemory<RankState>]>);

impl Notify for RankStates {
    fn notify(&self) {
        // Wakes every rank: a check of who waits could miss one that has just begun to.
        self.0.iter().for_each(|state| state.arrival.event.notify());
    }
}

impl RankState {
    fn has_arrived(&self, round: u64) -> bool {
        self.arrival.word.load(Ordering::SeqCst) / ARRIVAL >= round
    }
}

/// The state of a rank that the others read.
#[derive(Debug, Default)]
#[repr(C)]
struct Arrival {
    /// Twice the number of rounds in which this rank has arrived, plus one if another rank has poisoned the next.
    word: AtomicU64,
    /// Whether a thread waits for `event` for this rank, or is about to.
    waits: AtomicBool,
    event: Event,
}

impl Arrival {
    /// Wakes the rank if it waits for others to arrive.
    fn wake_if_waiting(&self) {
        if self.waits.load(Ordering::SeqCst) {
            self.event.notify();
        }
    }
}

/// One arrival in [`Arrival::word`].
const ARRIVAL: u64 = 2;
const POISON: u64 = 1;

/// The state of a rank that only its own thread uses. It has its own cache line, which the others do not take away.
#[derive(Debug, Default)]
#[repr(C)]
struct Spinning {
    /// The number of next waits that do not spin.
    pause: AtomicU64,
    /// The value of `pause` after the last spin without success.
    last_pause: AtomicU64,
}

/// About 50 microseconds of checks. Longer than the gap between ranks with equal work, and a good deal shorter than a
/// time slice. For a model checker one check is enough.
const SPINS: u32 = if cfg!(loom) { 1 } else { 2000 };

/// The number of yields before a rank parks, where ranks outnumber cores.
const YIELDS: u32 = if cfg!(loom) { 1 } else { 50 };

impl Barrier {
    /// Returns a barrier for the ranks `members` of `run`.
    pub(crate) fn new(run: Arc<RunContext>, members: Arc<[usize]>) -> Self {
        let states = members.iter().map(|_| InMemory::of(Arc::<RankState>::default())).collect();
        let cores = run.cores;
        Self::of(states, cores, run, members)
    }

    /// Returns a barrier with these `states`, for the ranks `members` of `run`, which may use this many cores together.
    pub(crate) fn of(
        states: Box<[InMemory<RankState>]>,
        cores: usize,
        run: Arc<RunContext>,
        members: Arc<[usize]>,
    ) -> Self {
        let states = Arc::new(RankStates(states));
        let events: Arc<dyn Notify> = states.clone();
        run.cancel.register_events(Arc::downgrade(&events));
        // Ranks of other groups count too: they may be running meanwhile.
        let spins = if run.ranks_here <= cores { SPINS } else { 0 };
        Self { states, run, members, spins }
    }

    /// Returns the run of these ranks.
    pub(crate) fn run(&self) -> &Arc<RunContext> {
        &self.run
    }

    /// Returns the global rank of each rank of the group.
    pub(crate) fn members(&self) -> &Arc<[usize]> {
        &self.members
    }

    /// Waits until every rank has arrived. `at` is this rank's operation, for errors. Only one thread at a time may
    /// call it for one `rank`.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; [`Error::Timeout`] and [`Error::PeerExited`], which this function reports to the run
    /// before it returns. So the first rank to give up is recorded as the cause, whatever its caller does with the
    /// error.
    pub(crate) fn wait(&self, rank: usize, at: OpId) -> Result<()> {
        self.wait_at_most(rank, at, self.run.timeout)
    }

    /// Waits like [`Barrier::wait`], with its own timeout.
    pub(crate) fn wait_at_most(&self, rank: usize, at: OpId, timeout: Duration) -> Result<()> {
        // This rank is not counted then, so the others cannot complete the round.
        self.run.check(self.members[rank])?;
        match self.arrive(rank)? {
            None => Ok(()),
            Some(round) => self.wait_for(rank, round, Some((at, timeout))),
        }
    }

    /// Waits until every rank has arrived, without a timeout or cancellation.
    ///
    /// Only for the end of a section in which no rank can fail or wait. The others still use memory of this rank there,
    /// which an early return would free.
    pub(crate) fn wait_to_leave(&self, rank: usize) {
        if let Ok(Some(round)) = self.arrive(rank) {
            // The wait cannot be interrupted, so there is no error to report.
            let _ = self.wait_for(rank, round, None);
        }
    }

    /// Counts this rank as arrived. Returns the round to wait for, from 1; `None` if the round is complete.
    fn arrive(&self, rank: usize) -> Result<Option<u64>> {
        let word = &self.states.0[rank].arrival.word;
        let before = word.load(Ordering::Relaxed) & !POISON;
        let counted =
            word.compare_exchange(before, before + ARRIVAL, Ordering::SeqCst, Ordering::SeqCst);
        if counted.is_err() {
            return Err(self.wait_for_the_cause(rank));
        }
        let round = before / ARRIVAL + 1;
        if !self.is_complete(round) {
            return Ok(Some(round));
        }
        // At least the last of the ranks gets here, and wakes those that found it missing.
        self.states.0.iter().for_each(|state| state.arrival.wake_if_waiting());
        Ok(None)
    }

    /// Returns whether all ranks have arrived in `round`.
    fn is_complete(&self, round: u64) -> bool {
        self.states.0.iter().all(|state| state.has_arrived(round))
    }

    /// Spins for a while. Returns true if the round is complete.
    ///
    /// Spinning fails when another thread needs the core, or when the others are simply later. After each failure the
    /// next one, two, up to four waits do not spin. The limit is low because two ranks on one core that never spin look
    /// idle to the system, which then leaves them there.
    fn spin(&self, rank: usize, round: u64) -> bool {
        if self.spins == 0 {
            return self.give_way(round);
        }
        let Spinning { pause, last_pause } = &*self.states.0[rank].spinning;
        let pauses = pause.load(Ordering::Relaxed);
        if pauses > 0 {
            pause.store(pauses - 1, Ordering::Relaxed);
            return false;
        }
        for _ in 0..self.spins {
            if self.is_complete(round) {
                last_pause.store(0, Ordering::Relaxed);
                return true;
            }
            std::hint::spin_loop();
        }
        let pauses = (last_pause.load(Ordering::Relaxed) * 2).clamp(1, 4);
        last_pause.store(pauses, Ordering::Relaxed);
        pause.store(pauses, Ordering::Relaxed);
        false
    }

    /// Yields the core to other threads, which may include the missing rank. Returns true if the round is complete.
    /// Measured with `ddp-mp bench step` on 2 cores: 4 ranks take 85 us per step instead of 200, and 16 ranks take 460
    /// us instead of 590. Where each rank has a core, parking is better. Two ranks that share a core would hand it to
    /// each other, and the system would not separate them.
    fn give_way(&self, round: u64) -> bool {
        for _ in 0..YIELDS {
            if self.is_complete(round) {
                return true;
            }
            yield_now();
        }
        false
    }

    /// Waits for `round` to complete. Without a `limit` it never gives up.
    fn wait_for(&self, rank: usize, round: u64, limit: Option<(OpId, Duration)>) -> Result<()> {
        if self.spin(rank, round) {
            return Ok(());
        }
        let waits = &self.states.0[rank].arrival.waits;
        waits.store(true, Ordering::SeqCst);
        let result = self.sleep_until(rank, round, limit);
        waits.store(false, Ordering::SeqCst);
        result
    }

    fn sleep_until(&self, rank: usize, round: u64, limit: Option<(OpId, Duration)>) -> Result<()> {
        let (began, event) = (Instant::now(), &self.states.0[rank].arrival.event);
        loop {
            let seen = event.count();
            // The order matters: a complete round counts, whatever else has happened. And a rank that has ended may
            // have done so because it failed.
            if self.is_complete(round) {
                return Ok(());
            }
            let Some((at, timeout)) = limit else {
                event.wait(seen, None);
                continue;
            };
            let waiting = self.members[rank];
            let gone = self.missing(round).into_iter().find(|&other| self.run.is_done(other));
            if self.run.cancel.cancelled_by().is_some() {
                return if self.poison(round) { self.run.check(waiting) } else { Ok(()) };
            }
            if let Some(left) = gone {
                return self.give_up(round, waiting, || Error::PeerExited { at, waiting, left });
            }
            let Some(time_left) = timeout.checked_sub(began.elapsed()) else {
                let waited = timeout;
                return self.give_up(round, waiting, || {
                    let missing = self.run.missing_or_silent(self.missing(round));
                    Error::Timeout { at, waiting, waited, missing }
                });
            };
            event.wait(seen, Some(time_left));
        }
    }

    /// Poisons the round, reports the error of `why` to the run and returns it. Does nothing if the round is complete. `why`
    /// may take a while. A rank that arrives meanwhile must not complete the round: it would wait in vain in the next one.
    fn give_up(&self, round: u64, waiting: usize, why: impl FnOnce() -> Error) -> Result<()> {
        if !self.poison(round) {
            return Ok(());
        }
        let error = why();
        self.run.report(waiting, Some(&error), error.to_string());
        Err(error)
    }

    /// Prevents the round from completing: poisons the word of a missing rank, if no other rank has. Returns false if the
    /// round is complete.
    fn poison(&self, round: u64) -> bool {
        // In round 3, for example, the word of a missing rank is 4, poisoned 5, and 6 once it arrives.
        let not_arrived = (round - 1) * ARRIVAL;
        self.states.0.iter().any(|state| {
            let poisoned = not_arrived | POISON;
            let word = state.arrival.word.compare_exchange(
                not_arrived,
                poisoned,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
            // A lower word was poisoned in an earlier round, which this rank gave up as well.
            word.map_or_else(|found| found <= poisoned, |_| true)
        })
    }

    /// Returns the members that have not arrived in `round`.
    fn missing(&self, round: u64) -> Vec<usize> {
        let ranks = self.states.0.iter().zip(&*self.members);
        ranks.filter(|(state, _)| !state.has_arrived(round)).map(|(_, &rank)| rank).collect()
    }

    /// Waits for the cause after another rank gave up before this one arrived. That rank is about to report, which
    /// wakes all.
    fn wait_for_the_cause(&self, rank: usize) -> Error {
        let Arrival { waits, event, .. } = &*self.states.0[rank].arrival;
        waits.store(true, Ordering::SeqCst);
        let cancelled = loop {
            let seen = event.count();
            if let Err(cancelled) = self.run.check(self.members[rank]) {
                break cancelled;
            }
            event.wait(seen, None);
        };
        waits.store(false, Ordering::SeqCst);
        cancelled
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;
    use crate::operation::Operation;

    const AT: OpId = OpId { operation: Operation::Barrier, sequence: 0 };

    fn on_threads(world_size: usize, timeout: Duration, f: impl Fn(usize, &Barrier) + Sync) {
        let run = Arc::new(RunContext::new(world_size, timeout, None));
        let barrier = Barrier::new(run.clone(), (0..world_size).collect());
        thread::scope(|scope| {
            for rank in 0..world_size {
                let (f, barrier, run) = (&f, &barrier, &run);
                scope.spawn(move || {
                    run.cancel.register();
                    f(rank, barrier);
                });
            }
        });
    }

    #[test]
    fn barrier_holds_until_all_ranks_have_arrived() {
        for world_size in 1..=5 {
            let arrivals = AtomicUsize::new(0);
            on_threads(world_size, Duration::from_secs(60), |rank, barrier| {
                for round in 1..=500 {
                    arrivals.fetch_add(1, Ordering::SeqCst);
                    barrier.wait(rank, AT).unwrap();
                    assert!(arrivals.load(Ordering::SeqCst) >= round * world_size);
                    barrier.wait_to_leave(rank);
                }
            });
            assert_eq!(arrivals.into_inner(), 500 * world_size);
        }
    }

    #[test]
    fn cancelled_barrier_fails_and_stays_failed() {
        on_threads(3, Duration::from_secs(60), |rank, barrier| {
            if rank == 2 {
                barrier.run.report(2, None, "the cause".into());
            }
            for _ in 0..3 {
                // The third rank is late on purpose: no rank may complete the round with it.
                let result = barrier.wait(rank, AT);
                assert!(matches!(result, Err(Error::Cancelled { by: 2, .. })), "{result:?}");
            }
        });
    }

    #[test]
    fn late_rank_is_named_and_cannot_complete_the_round() {
        let (late_sender, late_receiver) = crossbeam::channel::bounded::<()>(1);
        on_threads(2, Duration::from_millis(20), |rank, barrier| {
            if rank == 0 {
                match barrier.wait(0, AT) {
                    Err(Error::Timeout { missing, .. }) => assert_eq!(missing[0].rank, 1),
                    other => panic!("{other:?}"),
                }
                // The failure is already recorded, so the other rank's error is an echo.
                assert_eq!(barrier.run.failures()[0].rank, 1);
                late_sender.send(()).unwrap();
            } else {
                late_receiver.recv().unwrap();
                assert!(matches!(barrier.wait(1, AT), Err(Error::Cancelled { by: 1, .. })));
            }
        });
    }

    #[test]
    fn finished_rank_is_not_waited_for() {
        on_threads(2, Duration::from_secs(60), |rank, barrier| {
            if rank == 1 {
                barrier.run.finish(1);
            } else {
                assert!(matches!(barrier.wait(0, AT), Err(Error::PeerExited { left: 1, .. })));
            }
        });
    }

    #[test]
    fn rank_that_arrives_during_the_diagnosis_does_not_complete_the_round() {
        on_threads(2, Duration::from_secs(60), |rank, barrier| {
            if rank == 1 {
                return;
            }
            assert_eq!(barrier.arrive(0).unwrap(), Some(1));
            let diagnosis = || {
                let is_poisoned = barrier.states.0[1].arrival.word.load(Ordering::SeqCst) == POISON;
                assert!(is_poisoned, "it could arrive");
                Error::PeerExited { at: AT, waiting: 0, left: 1 }
            };
            assert!(barrier.give_up(1, 0, diagnosis).is_err());
        });
    }

    #[test]
    fn round_after_a_poisoned_one_is_not_complete() {
        let run = Arc::new(RunContext::new(2, Duration::from_secs(60), None));
        let barrier = Barrier::new(run, (0..2).collect());
        for round in 1..=2 {
            assert_eq!(barrier.arrive(0).unwrap(), Some(round));
            assert!(barrier.poison(round) && barrier.missing(round) == [1]);
        }
    }

    /// A timeout while the last rank arrives fails the round for all ranks or for none, and always with a rank to
    /// blame.
    #[test]
    fn barrier_round_completes_for_all_or_for_none() {
        for attempt in 0..300 {
            let timeout = Duration::from_micros(attempt);
            let passed = AtomicUsize::new(0);
            on_threads(2, timeout, |rank, barrier| {
                for _ in 0..20 {
                    if let Err(error) = barrier.wait(rank, AT) {
                        let blames_somebody = barrier.run.blamed(&error).is_some();
                        assert!(blames_somebody || matches!(error, Error::Cancelled { .. }));
                        return;
                    }
                    passed.fetch_add(1, Ordering::SeqCst);
                }
            });
            assert_eq!(passed.into_inner() % 2, 0, "timeout {timeout:?}");
        }
    }
}
