//! The watchdog: detects collectives that fail or time out while their rank's thread is blocked.
//!
//! A rank that waits in a collective polls for failures itself ([`RunContext::poll`]). A thread that blocks in libtorch,
//! for example while it reads a loss, cannot poll. The watchdog's thread does it then. Follows the watchdog of PyTorch's
//! `ProcessGroupNCCL`.

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use crossbeam::select;

use super::RunContext;
use super::primitives::Mutex;

/// How often the watchdog checks. A rank that polls is much faster, so that its own report comes first.
const INTERVAL: Duration = Duration::from_secs(1);

/// The collectives that one rank has launched in one group, and that may still run on its device.
pub(crate) trait LaunchedWork: fmt::Debug + Send + Sync {
    /// Reports to `run` that a collective has failed or timed out, if the previous check has found the same.
    fn check(&self, run: &RunContext);
}

/// The launched work of the ranks of this process. `None` until a rank joins a group in which its thread may block.
#[derive(Debug, Default)]
pub(crate) struct Watchdog(Mutex<Option<Vec<Weak<dyn LaunchedWork>>>>);

impl RunContext {
    /// Has the watchdog check `work`, for as long as its rank keeps it. Starts the watchdog's thread with the first.
    ///
    /// The thread has no other task and nobody joins it: a check may block in the driver for as long as a rank does.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn watch(
        self: &Arc<Self>,
        work: &Arc<impl LaunchedWork + 'static>,
    ) -> io::Result<()> {
        let mut all = self.watchdog.0.lock();
        if all.is_none() {
            let (cancelled, run) = (self.cancel.tripped().clone(), Arc::downgrade(self));
            let check_until_the_end = move || {
                loop {
                    select! {
                        recv(cancelled) -> _ => return,
                        default(INTERVAL) => {}
                    }
                    let Some(run) = run.upgrade() else { return };
                    run.check_launched_work();
                }
            };
            thread::Builder::new().name("watchdog".into()).spawn(check_until_the_end)?;
        }
        let all = all.get_or_insert_default();
        all.retain(|work| work.strong_count() > 0);
        let work = Arc::downgrade(work);
        all.push(work);
        Ok(())
    }

    fn check_launched_work(&self) {
        let all: Vec<_> =
            self.watchdog.0.lock().iter().flatten().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|work| work.check(self));
    }
}
