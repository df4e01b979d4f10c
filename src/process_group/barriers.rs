//! Barriers: collectives that wait for all ranks.

use std::time::Duration;

use super::ProcessGroup;
use super::call::Options;
use crate::error::Result;
use crate::operation::Operation;

impl ProcessGroup {
    /// Waits until every rank has called this.
    ///
    /// Follows `torch.distributed.barrier`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.collective(Operation::Barrier, Options::default(), &[], &[], &[])
    }

    /// Waits like [`barrier`](Self::barrier), but for at most `timeout`. The error names all ranks that have not
    /// called it.
    ///
    /// Follows `torch.distributed.monitored_barrier` with `wait_all_ranks`. (Here, every collective names the ranks
    /// that it waited for in vain.)
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let options = Options { timeout: Some(timeout), ..Options::default() };
        self.collective(Operation::Barrier, options, &[], &[], &[])
    }
}
