//! The exchange before each collective: every rank of the process announces its call, and all compare.

use super::conflict::{self, Memory};
use super::exchange::ExchangeSlot;
use super::fingerprint::{CollectiveFingerprint, Extras};
use super::mismatch::{RankCall, mismatch};
use crate::error::Result;
use crate::process_group::call::Call;

/// Exchanges the calls of the ranks of this process: see [`CallSlot::exchange_calls`](super::CallSlot::exchange_calls).
pub(crate) fn exchange_calls(
    slot: &mut ExchangeSlot<CollectiveFingerprint>,
    first_group_rank: usize,
    call: &Call,
    extras: Extras,
    memory: Option<&mut Memory>,
) -> Result<()> {
    let timeout = call.timeout.unwrap_or(slot.barrier().run().timeout);
    let group_rank = first_group_rank + slot.rank();
    slot.exchange(call.at(), timeout, |announced| announced.publish(call, group_rank, extras))?;
    let members = slot.barrier().members();
    compare(slot.published(), members, call.sequence)?;
    let spans = slot.published().map(|call| call.spans.len()).sum::<usize>();
    let conflict = match memory {
        None => conflict::sizes(slot.published(), first_group_rank),
        Some(memory) if spans <= conflict::MAX_COMPARED_SPANS => {
            memory.conflict(slot.published(), first_group_rank)
        }
        Some(memory) => {
            let Some(first) = slot.published().next() else { return Ok(()) };
            if slot.rank() == 0 {
                first.verdict.get_or_init(|| memory.conflict(slot.published(), first_group_rank));
            }
            slot.barrier().wait_at_most(slot.rank(), call.at(), timeout)?;
            first.verdict.get().copied().flatten()
        }
    };
    let Some(conflict) = conflict else { return Ok(()) };
    Err(conflict.error(slot.published(), members, first_group_rank, call.at()))
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
