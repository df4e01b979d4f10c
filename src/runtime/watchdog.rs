//! The watchdog: detects collectives that fail or time out while their rank's thread is blocked.
//!
//! A rank that waits in a collective polls for failures itself ([`RunContext::poll`]). A thread that blocks in libtorch,
//! for example while it reads a loss, cannot poll. The supervisor's thread does it then. Follows the watchdog of
//! PyTorch's `ProcessGroupNCCL`.

use std::fmt;
use std::sync::{Arc, Weak};

use super::RunContext;
use super::primitives::Mutex;

/// The collectives that one rank has launched in one group, and that may still run on its device.
pub(crate) trait LaunchedWork: fmt::Debug + Send + Sync {
    /// Reports to `run` that the work has failed, or that it has run for longer than the timeout. Does nothing while
    /// the rank itself polls.
    fn check(&self, run: &RunContext);
}

/// The launched work of all ranks of a run in this process.
#[derive(Debug, Default)]
pub(crate) struct Watchdog(Mutex<Vec<Weak<dyn LaunchedWork>>>);

impl Watchdog {
    /// Adds `work`, which is checked for as long as its rank keeps it.
    pub(crate) fn watch(&self, work: &Arc<impl LaunchedWork + 'static>) {
        let work = Arc::downgrade(work);
        self.0.lock().push(work);
    }

    /// Checks all work. The supervisor calls this repeatedly.
    pub(crate) fn check(&self, run: &RunContext) {
        let mut all = Vec::new();
        self.0.lock().retain(|work| work.upgrade().map(|work| all.push(work)).is_some());
        all.iter().for_each(|work| work.check(run));
    }
}
