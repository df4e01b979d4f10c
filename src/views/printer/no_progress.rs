//! No progress bar: the library without the feature `cli` shows none.

/// A bar that nobody can make.
#[derive(Debug)]
pub(super) enum Progress {}

impl Progress {
    /// Returns `None`.
    pub(super) fn new(_steps: u64, _done: u64) -> Option<Self> {
        None
    }

    pub(super) fn set(&mut self, _step: u64, _metrics: Option<String>) {
        match *self {}
    }

    pub(super) fn suspend<T>(&self, _print: impl FnOnce() -> T) -> T {
        match *self {}
    }
}
