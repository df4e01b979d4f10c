//! Waiting for all ranks.

use std::time::Duration;

use super::ProcessGroup;
use super::arguments::Options;
use crate::error::Result;
use crate::operation::Operation;

impl ProcessGroup {
    /// Returns once every rank has called it.
    ///
    /// Follows `torch.distributed.barrier`.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.collective(Operation::Barrier, Options::default(), &[], &[], &[])
    }

    /// A barrier that waits no longer than `timeout`, and whose error names all ranks that have not come.
    ///
    /// Follows `torch.distributed.monitored_barrier` with `wait_all_ranks`. (Here every collective names
    /// the ranks it waited for in vain.)
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let options = Options { timeout: Some(timeout), ..Options::default() };
        self.collective(Operation::Barrier, options, &[], &[], &[])
    }
}
