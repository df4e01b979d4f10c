//! A barrier that can be cancelled and has a deadline, which `std::sync::Barrier` can't.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::Instant;

use crossbeam::utils::CachePadded;

use super::Run;
use crate::error::{Error, LateRank, Result};

/// Where all ranks of a process meet.
///
/// One word decides every round: either all ranks have arrived and the round is complete for
/// everybody, or a rank that gave up (cancelled, or past its deadline) has poisoned it and it is
/// complete for nobody, now and later. So a rank that leaves with an error knows that no other rank
/// goes on as if it were there: the shared-memory backend relies on that for its pointers.
#[derive(Debug)]
pub struct Barrier {
    /// Round (upper half), poison bit, and how many ranks have arrived (the lower bits).
    state: CachePadded<AtomicU64>,
    slots: Box<[CachePadded<Slot>]>,
    run: Arc<Run>,
    /// How often to look before parking; none where ranks outnumber cores.
    spins: u32,
}

#[derive(Debug, Default)]
struct Slot {
    /// How many rounds this rank has entered: tells who is missing.
    entered: AtomicU64,
    /// Whether the rank's thread sleeps, or is about to.
    parked: AtomicBool,
    thread: OnceLock<Thread>,
}

/// Why a wait ended without the others.
#[derive(Debug)]
pub(crate) enum Interrupted {
    Cancelled { by: usize },
    TimedOut { late: Vec<LateRank> },
    Left { rank: usize },
}

const ROUND: u64 = 1 << 32;
const POISON: u64 = 1 << 31;

/// About 50 microseconds of looking: longer than ranks that do equal work are apart, and a good
/// deal shorter than a rank's time slice.
const SPINS: u32 = 2000;

impl Barrier {
    /// A barrier for all ranks of `run`.
    pub fn new(run: Arc<Run>) -> Self {
        let world_size = run.activity.len();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            state: CachePadded::new(AtomicU64::new(0)),
            slots: (0..world_size).map(|_| CachePadded::default()).collect(),
            spins: if world_size <= cores { SPINS } else { 0 },
            run,
        }
    }

    /// Waits until every rank has come.
    ///
    /// Must always be called from the same thread for the same `rank`.
    pub(crate) fn wait(&self, rank: usize) -> Result<(), Interrupted> {
        if let Some(by) = self.run.cancel.cancelled_by() {
            // This rank has not been counted in, so the round cannot be complete.
            self.state.fetch_or(POISON, Ordering::SeqCst);
            return Err(Interrupted::Cancelled { by });
        }
        match self.arrive(rank)? {
            None => Ok(()),
            Some(round) => self.wait_for(rank, round, true),
        }
    }

    /// Waits until every rank has come, however long that takes, whatever happens.
    ///
    /// Only for the way out of a section in which no rank can fail or wait: there the others are
    /// still at work on memory of this rank, and leaving early would pull it from under them.
    pub(crate) fn wait_to_leave(&self, rank: usize) {
        if let Ok(Some(round)) = self.arrive(rank) {
            // Cannot be interrupted, so there is nothing to report.
            let _ = self.wait_for(rank, round, false);
        }
    }

    /// Counts this rank in. Returns the round to wait for, or `None` if it completed the round.
    fn arrive(&self, rank: usize) -> Result<Option<u64>, Interrupted> {
        let world_size = self.slots.len() as u64;
        let slot = &self.slots[rank];
        slot.entered.store(slot.entered.load(Ordering::Relaxed) + 1, Ordering::Release);
        let before = self.state.fetch_add(1, Ordering::SeqCst);
        if before & POISON != 0 {
            return Err(self.why_poisoned(rank));
        }
        if before % ROUND + 1 < world_size {
            return Ok(Some(before / ROUND));
        }
        // The last one: open the next round. Nobody can poison a full round, so a plain add is right.
        self.state.fetch_add(ROUND - world_size, Ordering::SeqCst);
        for other in &self.slots {
            if other.parked.load(Ordering::SeqCst)
                && let Some(thread) = other.thread.get()
            {
                thread.unpark();
            }
        }
        Ok(None)
    }

    fn wait_for(&self, rank: usize, round: u64, may_give_up: bool) -> Result<(), Interrupted> {
        for _ in 0..self.spins {
            if self.state.load(Ordering::Acquire) / ROUND != round {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let slot = &self.slots[rank];
        slot.thread.get_or_init(thread::current);
        slot.parked.store(true, Ordering::SeqCst);
        let result = self.sleep_until(rank, round, may_give_up);
        slot.parked.store(false, Ordering::SeqCst);
        result
    }

    fn sleep_until(&self, rank: usize, round: u64, may_give_up: bool) -> Result<(), Interrupted> {
        let began = Instant::now();
        loop {
            // In this order: a round that is complete is complete, whatever else has happened.
            if self.state.load(Ordering::SeqCst) / ROUND != round {
                return Ok(());
            }
            if !may_give_up {
                thread::park();
                continue;
            }
            let Some(left) = self.run.timeout.checked_sub(began.elapsed()) else {
                let late = self.missing(rank).into_iter().map(|r| self.run.late(r)).collect();
                return self.give_up(round, Interrupted::TimedOut { late });
            };
            if let Some(by) = self.run.cancel.cancelled_by() {
                return self.give_up(round, Interrupted::Cancelled { by });
            }
            if let Some(gone) = self.missing(rank).into_iter().find(|&r| self.run.is_done(r)) {
                return self.give_up(round, Interrupted::Left { rank: gone });
            }
            thread::park_timeout(left);
        }
    }

    /// Poisons the round, unless it has been completed meanwhile.
    fn give_up(&self, round: u64, why: Interrupted) -> Result<(), Interrupted> {
        let world_size = self.slots.len() as u64;
        let poisoned = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
            let complete = state / ROUND != round || state % ROUND == world_size;
            (!complete).then_some(state | POISON)
        });
        if poisoned.is_ok() { Err(why) } else { Ok(()) }
    }

    /// The ranks that have not entered the round that `rank` waits in.
    fn missing(&self, rank: usize) -> Vec<usize> {
        let mine = self.slots[rank].entered.load(Ordering::Acquire);
        (0..self.slots.len())
            .filter(|&other| self.slots[other].entered.load(Ordering::Acquire) < mine)
            .collect()
    }

    /// Somebody gave up before this rank came; that rank is about to fail, or has failed.
    fn why_poisoned(&self, rank: usize) -> Interrupted {
        match self.run.cancel.cancelled_by() {
            Some(by) => Interrupted::Cancelled { by },
            None => {
                // The one that gave up trips the token as soon as its function returns. Its error
                // is the cause and this one only an echo, whoever is first to report.
                let waits = |other: usize| {
                    self.slots[other].entered.load(Ordering::Acquire)
                        >= self.slots[rank].entered.load(Ordering::Acquire)
                };
                let by = (0..self.slots.len()).find(|&r| r != rank && waits(r)).unwrap_or(rank);
                Interrupted::Cancelled { by }
            }
        }
    }
}

impl Interrupted {
    /// The error that `rank` reports for the collective it was in.
    pub(crate) fn during(self, run: &Run, rank: usize) -> Error {
        let at = run.activity[rank].now();
        match self {
            Interrupted::Cancelled { by } => Error::Cancelled { by },
            Interrupted::Left { rank: left } => Error::Left { at, waiting: rank, left },
            Interrupted::TimedOut { late } => {
                Error::Timeout { at, waiting: rank, waited: run.timeout, late }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;

    fn on_threads(world_size: usize, timeout: Duration, f: impl Fn(usize, &Barrier) + Sync) {
        let run = Arc::new(Run::new(world_size, timeout, None));
        let barrier = Barrier::new(run.clone());
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
    fn nobody_passes_before_all_have_come() {
        for world_size in 1..=5 {
            let arrivals = AtomicUsize::new(0);
            on_threads(world_size, Duration::from_secs(60), |rank, barrier| {
                for round in 1..=500 {
                    arrivals.fetch_add(1, Ordering::SeqCst);
                    barrier.wait(rank).unwrap();
                    assert!(arrivals.load(Ordering::SeqCst) >= round * world_size);
                    barrier.wait_to_leave(rank);
                }
            });
            assert_eq!(arrivals.into_inner(), 500 * world_size);
        }
    }

    #[test]
    fn a_cancelled_wait_ends_and_stays_ended() {
        on_threads(3, Duration::from_secs(60), |rank, barrier| {
            if rank == 2 {
                barrier.run.cancel.cancel(2);
            }
            for _ in 0..3 {
                // The third rank comes late on purpose: nobody may go through with it.
                let result = barrier.wait(rank);
                assert!(matches!(result, Err(Interrupted::Cancelled { .. })), "{result:?}");
            }
        });
    }

    #[test]
    fn a_late_rank_is_named_and_cannot_complete_what_others_gave_up() {
        let (late_sender, late_receiver) = crossbeam::channel::bounded::<()>(1);
        on_threads(2, Duration::from_millis(20), |rank, barrier| {
            if rank == 0 {
                match barrier.wait(0) {
                    Err(Interrupted::TimedOut { late }) => assert_eq!(late[0].rank, 1),
                    other => panic!("{other:?}"),
                }
                late_sender.send(()).unwrap();
            } else {
                late_receiver.recv().unwrap();
                assert!(barrier.wait(1).is_err());
            }
        });
    }

    #[test]
    fn a_rank_that_has_ended_is_not_waited_for() {
        on_threads(2, Duration::from_secs(60), |rank, barrier| {
            if rank == 1 {
                barrier.run.finish(1);
            } else {
                assert!(matches!(barrier.wait(0), Err(Interrupted::Left { rank: 1 })));
            }
        });
    }
}
