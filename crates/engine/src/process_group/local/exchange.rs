//! An exchange in shared memory: each rank announces a value, then reads those of all ranks.

use std::ops::Range;
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::barrier::Barrier;
use crate::error::Result;
use crate::operation::OpId;
use crate::runtime::primitives::{Arc, AtomicBool, Ordering, UnsafeCell};

/// The barrier of ranks that share memory, and the slots of those in this process.
#[derive(Debug)]
pub(crate) struct Exchange<T> {
    barrier: Barrier,
    /// The index of the first rank of this process among the barrier's members.
    first: usize,
    slots: Box<[CachePadded<Slot<T>>]>,
}

/// A rank's announcements in alternating exchanges.
///
/// Two cells, because a fast rank may announce for the next exchange while a slow rank still reads the last one. The
/// fast rank cannot enter the exchange after that one before the slow rank has entered the next.
#[derive(Debug)]
struct Slot<T> {
    cells: [CachePadded<UnsafeCell<T>>; 2],
    /// `true` once the rank has taken its [`ExchangeSlot`].
    taken: AtomicBool,
}

// SAFETY: only its own rank writes a slot (each has one `ExchangeSlot`), before that rank enters the barrier of the
// exchange. Others read it only after they have passed that barrier and before they enter the next one. The alternation
// of the two cells keeps the next write away from those reads (`ExchangeSlot::published`). Other threads access `T` by
// reference (`Sync`), and any thread may drop the exchange (`Send`).
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

impl<T> Exchange<T> {
    /// Creates the exchange for the members `here` of `barrier`, which are in this process.
    pub(crate) fn new(barrier: Barrier, here: Range<usize>, nothing: impl Fn() -> T) -> Self {
        let slot = |_| {
            let cells =
                [nothing(), nothing()].map(|value| CachePadded::new(UnsafeCell::new(value)));
            CachePadded::new(Slot { cells, taken: AtomicBool::new(false) })
        };
        Self { barrier, first: here.start, slots: here.map(slot).collect() }
    }

    pub(crate) fn barrier(&self) -> &Barrier {
        &self.barrier
    }

    fn slot(&self, rank: usize) -> &Slot<T> {
        &self.slots[rank - self.first]
    }
}

/// One rank's handle to an exchange. Each rank has exactly one.
#[derive(Debug)]
pub(crate) struct ExchangeSlot<T> {
    rank: usize,
    exchange: Arc<Exchange<T>>,
    /// Index of the cell to write next. It flips with every exchange, so it is the same on all ranks.
    parity: usize,
}

impl<T: Send + Sync> ExchangeSlot<T> {
    /// Takes the slot of `rank`. Panics if it is already taken.
    pub(crate) fn take(rank: usize, exchange: Arc<Exchange<T>>) -> Self {
        let taken = exchange.slot(rank).taken.swap(true, Ordering::Relaxed);
        assert!(!taken, "the slot of rank {rank} is taken");
        Self { rank, exchange, parity: 0 }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn barrier(&self) -> &Barrier {
        &self.exchange.barrier
    }

    /// Returns the index of the cell that the next exchange writes.
    pub(crate) fn parity(&self) -> usize {
        self.parity
    }

    /// Announces, and waits until all ranks have announced. `at` is the rank's operation, for errors.
    ///
    /// # Errors
    /// The error of `publish`, and those of [`Barrier::wait`].
    pub(crate) fn exchange(
        &mut self,
        at: OpId,
        timeout: Duration,
        publish: impl FnOnce(&mut T) -> Result<()>,
    ) -> Result<()> {
        let cell = &self.exchange.slot(self.rank).cells[self.parity];
        // SAFETY: our own slot, before the barrier (see `Slot`); the reference ends here.
        cell.with_mut(|value| publish(unsafe { &mut *value }))?;
        self.exchange.barrier.wait_at_most(self.rank, at, timeout)?;
        self.parity = 1 - self.parity;
        Ok(())
    }

    /// Returns what the ranks of this process have published in the last exchange, in rank order.
    pub(crate) fn published(&self) -> impl ExactSizeIterator<Item = &T> + Clone {
        let first = self.exchange.first;
        (first..first + self.exchange.slots.len()).map(|rank| self.published_by(rank))
    }

    /// Returns what `rank` has published in the last exchange.
    pub(crate) fn published_by(&self, rank: usize) -> &T {
        let cell = &self.exchange.slot(rank).cells[1 - self.parity];
        // SAFETY: no rank writes this cell before this rank has entered the next exchange (see `Slot`), for which the
        // borrow of `self` must have ended.
        cell.with(|value| unsafe { &*value })
    }

    /// Returns what this rank has published in the last exchange.
    pub(crate) fn announced(&self) -> &T {
        self.published_by(self.rank)
    }

    /// Runs `work`, then waits until all ranks have finished theirs. Also waits if `work` panics.
    pub(crate) fn and_leave_together<R>(&self, work: impl FnOnce() -> R) -> R {
        let _exit = CommonExit { barrier: &self.exchange.barrier, rank: self.rank };
        work()
    }
}

/// Waits for all ranks when dropped.
struct CommonExit<'a> {
    barrier: &'a Barrier,
    rank: usize,
}

impl Drop for CommonExit<'_> {
    fn drop(&mut self) {
        self.barrier.wait_to_leave(self.rank);
    }
}
