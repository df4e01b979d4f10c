//! The memory of tensors, and conflicts between the tensors that the ranks of a process have announced: memory that one
//! rank writes and another touches, and the sizes on which two ranks disagree where each pair of ranks has its own.

use smallvec::SmallVec;

use super::fingerprint::CollectiveFingerprint;
use super::mismatch::sizes_differ;
use crate::error::Error;
use crate::operation::OpId;
use crate::runtime::format_call_site;

impl TensorConflict {
    /// Returns the error for this conflict. `members` are the global ranks of the process. `first_group_rank` is the
    /// group rank of its first rank.
    pub(super) fn error<'a>(
        self,
        calls: impl Iterator<Item = &'a CollectiveFingerprint> + Clone,
        members: &[usize],
        first_group_rank: usize,
        call_at: OpId,
    ) -> Error {
        let (from, to) = match self {
            TensorConflict::Memory(first, second) => {
                return Error::OverlappingTensors {
                    first: members[first],
                    second: members[second],
                };
            }
            TensorConflict::Sizes { from, to } => (from, to),
        };
        let call = |rank| calls.clone().nth(rank);
        let sent = call(from).map_or(0, |call| call.inputs[first_group_rank + to].numel);
        let expected = call(to).map_or(0, |call| call.outputs[first_group_rank + from].numel);
        let [at, there] =
            [from, to].map(|rank| format_call_site(call(rank).and_then(|call| call.call_site)));
        let [from, to] =
            [(from, at), (to, there)].map(|(rank, line)| (&members[rank..=rank], line));
        sizes_differ(call_at, from, to, [sent, expected])
    }
}

/// Returns the first pair of ranks that disagree on a size, in a collective in which each pair has its own. `None` for
/// other operations: what their ranks have agreed on determines the sizes.
pub(super) fn sizes<'a>(
    calls: impl Iterator<Item = &'a CollectiveFingerprint> + Clone,
    first_group_rank: usize,
) -> Option<TensorConflict> {
    if !calls.clone().next()?.operation.has_own_sizes() {
        return None;
    }
    let differs = |(from, sender): (usize, &CollectiveFingerprint)| {
        let mut receivers = calls.clone().enumerate();
        let to = receivers.find(|(to, receiver)| {
            sender.inputs[first_group_rank + to].numel
                != receiver.outputs[first_group_rank + from].numel
        });
        to.map(|(to, _)| TensorConflict::Sizes { from, to })
    };
    calls.clone().enumerate().find_map(differs)
}

/// Above this number of spans, only the first rank of the process looks for conflicts, and it publishes its verdict.
/// Otherwise, in an all_to_all of a large group, each rank would look at as many spans as there are pairs of ranks.
pub(super) const MAX_COMPARED_SPANS: usize = 4096;

/// All memory that a collective reads and writes: start, end, rank, and whether it is written. Reused, to avoid
/// allocating.
#[derive(Debug, Default)]
pub(crate) struct Memory(Vec<(usize, usize, usize, bool)>);

impl Memory {
    /// Returns the first conflict. All ranks see the same calls, so they find the same one.
    pub(super) fn conflict<'a>(
        &mut self,
        calls: impl Iterator<Item = &'a CollectiveFingerprint> + Clone,
        first_group_rank: usize,
    ) -> Option<TensorConflict> {
        sizes(calls.clone(), first_group_rank).or_else(|| self.overlap(calls))
    }

    /// Returns two ranks of which one writes where the other reads or writes.
    fn overlap<'a>(
        &mut self,
        calls: impl Iterator<Item = &'a CollectiveFingerprint>,
    ) -> Option<TensorConflict> {
        self.0.clear();
        for (rank, call) in calls.enumerate() {
            self.0.extend(call.spans.iter().map(|span| (span.start, span.end, rank, span.written)));
        }
        self.0.sort_unstable();
        // The furthest end so far and its rank, of all memory and of written memory.
        let mut furthest: Option<(usize, usize)> = None;
        let mut furthest_written: Option<(usize, usize)> = None;
        let mut found = None;
        for &(start, end, rank, written) in &self.0 {
            let before = if written { furthest } else { furthest_written };
            if let Some((_, other)) = before.filter(|&(before_end, _)| before_end > start) {
                found = Some(TensorConflict::Memory(rank.min(other), rank.max(other)));
                break;
            }
            let later = |known: Option<(usize, usize)>| known.max(Some((end, rank)));
            furthest = later(furthest);
            if written {
                furthest_written = later(furthest_written);
            }
        }
        if self.0.len() > MAX_COMPARED_SPANS {
            self.0 = Vec::new(); // a list of this size is rarely needed
        }
        found
    }
}

/// A tensor's memory: its address and its number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorMemory {
    pub data: *mut u8,
    pub numel: usize,
}

/// The tensors of one side of a call, in place if it is one.
pub(crate) type TensorMemories = SmallVec<[TensorMemory; 1]>;

// SAFETY: the address is only a number. The functions that dereference it state who may do so, and when.
unsafe impl Send for TensorMemory {}
// SAFETY: as above.
unsafe impl Sync for TensorMemory {}

/// The memory of a call, in place if it is one span.
pub(super) type Spans = SmallVec<[Span; 1]>;

/// Memory that a call reads or writes: the addresses `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub start: usize,
    pub end: usize,
    pub written: bool,
}

impl Span {
    /// Appends this span to `spans`, unless it is empty. Extends the last span if this one continues it.
    pub(super) fn join(self, spans: &mut Spans) {
        match spans.last_mut() {
            _ if self.end == self.start => {}
            Some(last) if last.end == self.start && last.written == self.written => {
                last.end = self.end;
            }
            _ => spans.push(self),
        }
    }
}

/// Two ranks whose tensors do not fit, by their positions in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorConflict {
    /// One rank writes memory that the other touches. The first is not above the second.
    Memory(usize, usize),
    /// `from` sends another number of elements than `to` expects.
    Sizes { from: usize, to: usize },
}
