//! The order in which several models of one backward reduce their buckets.

use std::cell::Cell;
use std::rc::Rc;

/// One model's place in the order. With a single model it is always its turn.
#[derive(Debug, Clone, Default)]
pub(super) struct Turn {
    place: usize,
    /// The place whose turn it is; `None` with a single model.
    current: Option<Rc<Cell<usize>>>,
}

impl Turn {
    /// Returns the turn before those of `models` models.
    pub(super) fn order_of(models: usize) -> Self {
        let current = (models > 1).then(|| Rc::new(Cell::new(1)));
        Self { place: 0, current }
    }

    /// Returns the turn of the next model.
    pub(super) fn following(&mut self) -> Self {
        self.place += 1;
        self.clone()
    }

    /// Returns whether all models before this one have reduced their buckets.
    pub(super) fn has_come(&self) -> bool {
        self.current.as_ref().is_none_or(|current| current.get() == self.place)
    }

    /// Lets the next model reduce its buckets.
    pub(super) fn pass_on(&self) {
        if let Some(current) = &self.current {
            current.set(self.place + 1);
        }
    }
}
