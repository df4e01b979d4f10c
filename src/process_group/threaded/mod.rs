//! The `threaded` backend: ranks that are threads read and write each other's tensors directly.
//!
//! It serves CPU tensors, and CUDA tensors of ranks that share one GPU. Every collective has the same steps:
//!
//! 1. announce: each rank writes its call and the addresses of its tensors into its own slot;
//! 2. exchange: after a barrier every rank can read every call, so all ranks find the same mismatches, or none;
//! 3. work: each rank writes its own results and reads from the others. In `all_reduce` each rank reduces one slice, in
//!    rank order, and writes it to all ranks. Every element is read once and written once per rank;
//! 4. leave together: a second barrier holds every rank until no other rank uses its memory.
//!
//! With very many tensors, the first rank alone looks for conflicts, and one more barrier publishes its verdict. Only
//! the barriers before the work can be cancelled or time out. During the work no rank waits for another.

mod conflict;
mod element;
mod exchange;
mod fingerprint;
mod kernels;
mod mail;
mod shared;

use super::{Backend, Call, P2POp, Traffic, weights};
use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
pub(super) use conflict::Memory;
pub(super) use element::{Kinds, Reduction, reduce as reduce_elements};
pub(super) use exchange::ExchangeSlot;
pub(super) use fingerprint::{CollectiveFingerprint, Place};
pub(super) use kernels::my_slice;
pub(super) use mail::{
    Carrier, Completion, Contents, Incoming, Mailboxes, Outcome, P2pRequest, PostedOp, Side,
    describe,
};
pub(super) use shared::{Shared, SubgroupKey};

/// One rank's side of the backend.
pub(super) struct Threaded {
    slot: ExchangeSlot<CollectiveFingerprint>,
    /// Memory of all ranks' tensors in this collective. Reused, to avoid allocating.
    memory: Memory,
    /// Pointer lists for the work, reused likewise.
    places: kernels::SpanScratch,
}

impl Threaded {
    /// Joins the group. Returns once all ranks have joined.
    pub(super) fn join(seat: ExchangeSlot<CollectiveFingerprint>) -> Result<Self> {
        let at = OpId { operation: Operation::Init, sequence: 0 };
        seat.barrier().wait(seat.rank(), at)?;
        Ok(Self { slot: seat, memory: Memory::default(), places: kernels::SpanScratch::default() })
    }
}

/// Runs steps 1 and 2: announces this rank's call, waits for the others' and compares them.
///
/// On success all ranks make the same call, with tensors of matching sizes. With `memory`, no rank writes where another
/// reads or writes. With `on_one_device`, all tensors are also on one device. `first_place` is the group rank of the
/// first rank of this process.
pub(super) fn exchange(
    seat: &mut ExchangeSlot<CollectiveFingerprint>,
    first_place: usize,
    call: &Call,
    on_one_device: bool,
    memory: Option<&mut Memory>,
) -> Result<()> {
    let timeout = call.timeout.unwrap_or(seat.barrier().run().timeout);
    let place = first_place + seat.rank();
    seat.exchange(call.at(), timeout, |announced| announced.publish(call, place, on_one_device))?;
    let members = seat.barrier().members();
    fingerprint::compare(seat.published(), members, call.sequence)?;
    let spans = seat.published().map(|it| it.spans.len()).sum::<usize>();
    let conflict = match memory {
        None => conflict::sizes(seat.published(), first_place),
        Some(memory) if spans <= conflict::MAX_COMPARED_SPANS => {
            memory.conflict(seat.published(), first_place)
        }
        Some(memory) => {
            let Some(first) = seat.published().next() else { return Ok(()) };
            if seat.rank() == 0 {
                first.verdict.get_or_init(|| memory.conflict(seat.published(), first_place));
            }
            seat.barrier().wait_at_most(seat.rank(), call.at(), timeout)?;
            first.verdict.get().copied().flatten()
        }
    };
    let Some(conflict) = conflict else { return Ok(()) };
    Err(conflict.error(seat.published(), members, first_place, call.sequence))
}

impl Backend for Threaded {
    fn name(&self) -> &'static str {
        "threaded"
    }

    fn is_stream_ordered(&self) -> bool {
        false
    }

    fn run(&mut self, call: &Call) -> Result<()> {
        let Self { slot: seat, memory, places } = self;
        exchange(seat, 0, call, true, Some(memory))?;
        if matches!(call.operation, Operation::Barrier | Operation::NewGroup) {
            return Ok(()); // the exchange is the barrier
        }
        // All tensors stay valid: their owners are in this collective, hold them, and leave it together.
        seat.and_leave_together(|| {
            // SAFETY: the exchange and the common exit establish all that `kernels::run` requires.
            unsafe { kernels::run(call, seat.rank(), seat.published(), places) }
        })
    }

    fn traffic(&self, call: &Call) -> Traffic {
        let members = self.slot.barrier().members().len();
        kernels::traffic(call, self.slot.rank(), members)
    }

    fn mean_weight(&self) -> f64 {
        weights::mean(self.slot.published().map(|it| (it.weight.unwrap_or(0.0), 1)))
    }

    fn synchronize(&mut self, _: &dyn Fn()) -> Result<()> {
        // CPU work is complete on return, and no CUDA work of this backend waits for another rank.
        let barrier = self.slot.barrier();
        barrier.run().check(barrier.members()[self.slot.rank()])
    }

    fn point_to_point(&mut self, _: &[P2POp]) -> Result<()> {
        // Messages go through `Mailboxes`, which does not wait for the rank's collectives.
        Err(Error::Unsupported("backend threaded launches no messages".into()))
    }

    fn shut_down(&mut self) {}
}
