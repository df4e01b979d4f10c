//! The memory of tensors, and what can be wrong with that of two ranks.

use smallvec::SmallVec;

/// A tensor's memory: its address and its number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub data: *mut u8,
    pub numel: usize,
}

/// The tensors of one side of a call, in place if it is one.
pub(crate) type Places = SmallVec<[Place; 1]>;

// SAFETY: the address is only a number. The functions that dereference it state who may do so, and when.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

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
pub(super) enum Conflict {
    /// One rank writes memory that the other touches. The first is not above the second.
    Memory(usize, usize),
    /// `from` sends another number of elements than `to` expects.
    Sizes { from: usize, to: usize },
}
