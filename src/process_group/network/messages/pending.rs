//! A guard for a message that is sent but not written: it keeps the rank from ending, and the connection open.

use std::convert::Infallible;
use std::sync::Arc;

use crossbeam::channel::Sender;

use crate::runtime::RunContext;

/// An open operation: its rank must not end before this is dropped.
pub(super) struct Pending {
    run: Arc<RunContext>,
    rank: usize,
    /// The channel closes with the last message of a group.
    _sending: Option<Sender<Infallible>>,
}

impl Pending {
    /// Registers an open operation of the global rank `rank`.
    pub(super) fn new(
        run: &Arc<RunContext>,
        rank: usize,
        sending: Option<Sender<Infallible>>,
    ) -> Self {
        run.begin_pending(rank);
        Self { run: run.clone(), rank, _sending: sending }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.run.end_pending(self.rank);
    }
}
