//! The order in which models reduce their buckets, where one backward goes through several.

use std::cell::Cell;
use std::rc::Rc;

/// One model's place in the order. A model that is alone has the first, and its turn has come.
#[derive(Debug, Clone, Default)]
pub(super) struct Turn {
    place: usize,
    /// The place whose turn it is.
    current: Rc<Cell<usize>>,
}

impl Turn {
    /// Returns the turn of the model at `place`, in the same order.
    pub(super) fn of(&self, place: usize) -> Self {
        Self { place, current: self.current.clone() }
    }

    /// Whether all models before this one have reduced their buckets.
    pub(super) fn has_come(&self) -> bool {
        self.current.get() == self.place
    }

    /// Lets the next model reduce its buckets.
    pub(super) fn pass_on(&self) {
        self.current.set(self.place + 1);
    }
}
