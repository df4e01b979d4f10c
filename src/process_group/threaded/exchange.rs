//! Where ranks announce something and then know what all have announced.

use std::time::Duration;

use crossbeam::utils::CachePadded;

use crate::error::Result;
use crate::operation::OpId;
use crate::runtime::Barrier;
use crate::runtime::primitives::{Arc, AtomicBool, Ordering, UnsafeCell};

/// What the ranks of one group share to meet.
#[derive(Debug)]
pub(crate) struct Exchange<T> {
    barrier: Barrier,
    slots: Box<[CachePadded<Slot<T>>]>,
}

/// A rank's announcements, at every other meeting.
///
/// Two, because a rank that is through with one meeting may announce the next while a slow rank still
/// reads the last; it cannot come to the one after that before the slow rank has moved on.
#[derive(Debug)]
struct Slot<T> {
    cells: [UnsafeCell<T>; 2],
    /// Whether the rank has come for its [`ExchangeSlot`].
    taken: AtomicBool,
}

// SAFETY: a slot is written by its own rank only (there is one `ExchangeSlot` for it), before that rank enters the barrier of the meeting, and
// read by others only after they have passed that barrier and before they enter the next one; the
// alternation of the two cells keeps the next write away from those reads (`ExchangeSlot::published`). `T` moves
// between threads only as far as references to it do, and the whole meeting may be dropped on any.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

impl<T> Exchange<T> {
    /// For all members of `barrier`.
    pub(crate) fn new(barrier: Barrier, nothing: impl Fn() -> T) -> Self {
        let slot = |_: &usize| {
            let cells = [nothing(), nothing()].map(UnsafeCell::new);
            CachePadded::new(Slot { cells, taken: AtomicBool::new(false) })
        };
        Self { slots: barrier.members().iter().map(slot).collect(), barrier }
    }
}

/// One rank's place in a meeting. There is one for each rank.
#[derive(Debug)]
pub(crate) struct ExchangeSlot<T> {
    rank: usize,
    exchange: Arc<Exchange<T>>,
    /// Which of the two cells is next. Turns with every meeting, so that it is the same on all ranks.
    parity: usize,
}

impl<T: Send + Sync> ExchangeSlot<T> {
    /// Takes the place of `rank`, which can be done once.
    pub(crate) fn take(rank: usize, meeting: Arc<Exchange<T>>) -> Self {
        let taken = meeting.slots[rank].taken.swap(true, Ordering::Relaxed);
        assert!(!taken, "the place of rank {rank} is taken");
        Self { rank, exchange: meeting, parity: 0 }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn barrier(&self) -> &Barrier {
        &self.exchange.barrier
    }

    /// Announces and waits until all have. `at` is what the rank does, for errors.
    ///
    /// # Errors
    /// That of `announce`, and as [`Barrier::wait`].
    pub(crate) fn exchange(
        &mut self,
        at: OpId,
        timeout: Duration,
        announce: impl FnOnce(&mut T) -> Result<()>,
    ) -> Result<()> {
        let cell = &self.exchange.slots[self.rank].cells[self.parity];
        // SAFETY: our own slot, before the barrier (see `Slot`); the reference ends here.
        cell.with_mut(|place| announce(unsafe { &mut *place }))?;
        self.exchange.barrier.wait_at_most(self.rank, at, timeout)?;
        self.parity = 1 - self.parity;
        Ok(())
    }

    /// What all ranks announced at the last meeting, in their order.
    pub(crate) fn published(&self) -> impl ExactSizeIterator<Item = &T> + Clone {
        let parity = 1 - self.parity;
        let slots = self.exchange.slots.iter();
        // SAFETY: nobody writes to these cells before this rank has entered the next meeting (see `Slot`),
        // for which the borrow of `self` must have ended.
        slots.map(move |slot| slot.cells[parity].with(|place| unsafe { &*place }))
    }

    /// Does `work`, and returns when all ranks have done theirs, also if it panics.
    pub(crate) fn and_leave_together<R>(&self, work: impl FnOnce() -> R) -> R {
        let _way_out = WayOut { barrier: &self.exchange.barrier, rank: self.rank };
        work()
    }
}

/// Meets all ranks again when it is dropped.
struct WayOut<'a> {
    barrier: &'a Barrier,
    rank: usize,
}

impl Drop for WayOut<'_> {
    fn drop(&mut self) {
        self.barrier.wait_to_leave(self.rank);
    }
}
