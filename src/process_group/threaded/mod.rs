//! The `threaded` backend: ranks that are threads read and write each other's tensors directly.
//!
//! For CPU tensors, and for CUDA tensors of ranks that share one GPU. Every collective has the same
//! shape:
//!
//! 1. announce: each rank writes what it calls, and where its tensors lie, into its own slot;
//! 2. meet: from here on every rank knows every call, so all find the same differences, or none;
//! 3. work: each rank writes what it is to have, reading from the others; in `all_reduce` each rank
//!    reduces one slice and writes it to all, so every element is read once and written once per rank, and
//!    reduced by one rank in the order of the ranks;
//! 4. meet again: nobody leaves while another still works on its memory.
//!
//! Only the first meeting can be cancelled or time out; between the two no rank waits for anything.

mod announced;
mod element;
mod work;

use std::cell::UnsafeCell;
use std::sync::Arc;

use crossbeam::utils::CachePadded;

use super::{Backend, Call};
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::sync::{Barrier, Run};
use announced::{Announced, Memory};

/// What all ranks of the group share. Rank 0 makes it and hands it to the others.
pub(crate) struct Shared {
    run: Arc<Run>,
    barrier: Barrier,
    slots: Box<[CachePadded<Slot>]>,
}

/// A rank's announcements, for every other collective.
///
/// Two, because a rank that is through with one collective may announce the next while a slow rank
/// still reads the last; it cannot come to the one after that before the slow rank has moved on.
struct Slot([UnsafeCell<Announced>; 2]);

// SAFETY: a slot is written by its own rank only, before that rank enters the barrier of the call, and
// read by others only after they have passed that barrier and before they enter the next one; the
// alternation of the two cells keeps the next write away from those reads. The pointers in it are
// followed under the rules of `Threaded::meet`.
unsafe impl Sync for Slot {}
// SAFETY: as above; the pointers are plain data.
unsafe impl Send for Slot {}

impl Shared {
    pub(crate) fn new(run: Arc<Run>) -> Self {
        let slot = |_| {
            CachePadded::new(Slot(
                [Announced::nothing(), Announced::nothing()].map(UnsafeCell::new),
            ))
        };
        Self {
            slots: run.activity.iter().map(slot).collect(),
            barrier: Barrier::new(run.clone()),
            run,
        }
    }
}

/// One rank's side of the backend.
pub(crate) struct Threaded {
    rank: usize,
    shared: Arc<Shared>,
    /// Which of the two announcements is next. Turns with every meeting, so that it is the same on all
    /// ranks (a count of calls is not: a call may fail before it comes to meet).
    parity: usize,
    /// The memory of all ranks' tensors in this collective; kept to be filled again without allocating.
    memory: Memory,
    /// Lists of places for the work, likewise.
    places: work::Places,
}

impl Threaded {
    /// Joins the group; returns once all ranks have.
    pub(crate) fn join(rank: usize, shared: Arc<Shared>) -> Result<Self> {
        shared.barrier.wait(rank)?;
        let (memory, places) = (Memory::default(), work::Places::default());
        Ok(Self { rank, shared, parity: 0, memory, places })
    }

    /// Steps 1 and 2: announces this rank's call, waits for the others' and compares.
    ///
    /// On success all ranks call the same, with tensors that fit each other, and nobody writes where
    /// another reads or writes. Their tensors stay where they are until every rank has dropped its
    /// [`WayOut`]: their owners are in this collective and hold them.
    fn meet(&mut self, call: &Call) -> Result<()> {
        let shared = &self.shared;
        // SAFETY: our own slot, before the barrier (see `Slot`); the reference ends here.
        unsafe { &mut *shared.slots[self.rank].0[self.parity].get() }.announce(call)?;
        shared.barrier.wait_at_most(self.rank, call.timeout.unwrap_or(shared.run.timeout))?;
        let parity = self.parity;
        self.parity = 1 - parity;

        let calls = calls(shared, parity);
        if !announced::all_agree(&calls) {
            let (calls, odd) = announced::describe(calls);
            return Err(Error::Mismatch { sequence: call.sequence, calls, odd });
        }
        self.memory.check(calls)
    }

    /// Steps 3 and 4. The second meeting is when this returns, also when the work has panicked.
    fn work(&mut self, call: &Call) -> Result<()> {
        let _way_out = WayOut { barrier: &self.shared.barrier, rank: self.rank };
        // The announcements of the collective that this rank has just met the others in.
        let calls = calls(&self.shared, 1 - self.parity);
        // SAFETY: between `meet` and the way out, which is what the work asks for.
        unsafe { work::run(call, self.rank, calls, &mut self.places) }
    }
}

/// What the ranks have announced, in their order.
///
/// To be used after the barrier of the call and before the next one.
fn calls(shared: &Shared, parity: usize) -> impl ExactSizeIterator<Item = &Announced> + Clone {
    // SAFETY: nobody writes to these cells between those two barriers (see `Slot`).
    shared.slots.iter().map(move |slot| unsafe { &*slot.0[parity].get() })
}

impl Backend for Threaded {
    fn name(&self) -> &'static str {
        "threaded"
    }

    fn run(&mut self, call: &Call) -> Result<()> {
        self.meet(call)?;
        if call.operation == Operation::Barrier {
            return Ok(()); // all have come
        }
        self.work(call)
    }

    fn synchronize(&mut self) -> Result<()> {
        // CPU work is done when it returns, and no CUDA work of this backend waits for another rank.
        self.shared.run.check(self.rank)
    }

    fn shut_down(&mut self) {}
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
