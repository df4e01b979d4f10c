//! The watchdog: detects collectives that fail or time out while their rank's thread is blocked, and ends them after a
//! failure.
//!
//! A rank that waits in a collective polls for failures itself ([`RunContext::poll`]). A thread that blocks in libtorch,
//! for example while it reads a loss, cannot poll. The watchdog's thread does it then. After a failure it aborts what
//! such a thread waits for, so that the thread comes back. Follows the watchdog of PyTorch's `ProcessGroupNCCL`.

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

/// The time from the failure to the abort. A rank that polls has long ended its collectives itself by then.
const UNTIL_ABORT: Duration = Duration::from_secs(1);

/// The collectives that one rank has launched in one group, and that may still run on its device.
pub(crate) trait LaunchedWork: fmt::Debug + Send + Sync {
    /// Reports to `run` that a collective has failed or timed out, if the previous check has found the same.
    fn check(&self, run: &RunContext);

    /// Ends the collectives. `run` has failed.
    fn abort(&self, run: &Arc<RunContext>);
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
                        recv(cancelled) -> _ => break,
                        default(INTERVAL) => {}
                    }
                    let Some(run) = run.upgrade() else { return };
                    run.launched_work().iter().for_each(|work| work.check(&run));
                }
                thread::sleep(UNTIL_ABORT);
                let Some(run) = run.upgrade() else { return };
                // Each on a thread of its own: an abort may wait for those of other ranks. Without a thread, the rank is
                // named when the grace period is over.
                for work in run.launched_work() {
                    let run = run.clone();
                    let abort = move || work.abort(&run);
                    let _ = thread::Builder::new().name("abort".into()).spawn(abort);
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

    fn launched_work(&self) -> Vec<Arc<dyn LaunchedWork>> {
        self.watchdog.0.lock().iter().flatten().filter_map(Weak::upgrade).collect()
    }
}
