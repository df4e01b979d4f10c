//! A guard for a message that has been sent and not written: the rank does not end meanwhile, and the connection stays.

use std::convert::Infallible;
use std::sync::Arc;

use crossbeam::channel::Sender;

use crate::runtime::RunContext;

/// Something that a rank must not end before. It is over when this is dropped.
pub(super) struct Pending {
    run: Arc<RunContext>,
    rank: usize,
    /// Closes with the last message of a group.
    _sending: Option<Sender<Infallible>>,
}

impl Pending {
    /// Of `rank`, by its number in the run.
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
