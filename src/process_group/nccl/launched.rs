//! The collectives that a rank has launched in one communicator, for the watchdog.

use std::fmt;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use super::communicator::Communicator;
use crate::error::{Error, Result};
use crate::ffi::cuda;
use crate::operation::OpId;
use crate::runtime::{LaunchedWork, RunContext};

/// A communicator and the newest collective in it.
///
/// The rank's thread holds the lock during each NCCL call. The watchdog skips its check while the lock is taken. So the
/// watchdog never waits for NCCL, and the rank waits for one check at most.
pub(super) struct Launched {
    /// The rank's number in the run.
    rank: usize,
    gpu: usize,
    state: Mutex<State>,
}

/// What [`Launched`] guards.
pub(super) struct State {
    pub communicator: Communicator,
    /// The newest collective, and when it was launched. `None` before the first, and after the rank has left the
    /// communicator.
    newest: Option<(OpId, Instant)>,
    /// The event that is recorded after the newest collective.
    ended: cuda::Event,
}

impl Launched {
    pub(super) fn new(rank: usize, gpu: usize, communicator: Communicator) -> Result<Self> {
        let state = State { communicator, newest: None, ended: cuda::Event::new()? };
        Ok(Self { rank, gpu, state: Mutex::new(state) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Notes that `at` has been launched on the current stream.
    pub(super) fn note(&self, at: OpId) -> Result<()> {
        let mut state = self.state.lock();
        state.ended.record(self.gpu)?;
        state.newest = Some((at, Instant::now()));
        Ok(())
    }

    /// Takes the communicator to end it, and leaves `none`.
    pub(super) fn take(&self, none: Communicator) -> Communicator {
        let mut state = self.state.lock();
        state.newest = None;
        std::mem::replace(&mut state.communicator, none)
    }

    /// Returns the collective that has failed, or run for longer than the timeout, and its error. `None` if there is
    /// none, or if the lock is taken.
    fn failure(&self, run: &RunContext) -> Option<(OpId, Error)> {
        let state = self.state.try_lock()?;
        let (at, since) = state.newest?;
        if let Err(error) = state.communicator.check("a collective") {
            return Some((at, error));
        }
        if since.elapsed() < run.timeout {
            return None;
        }
        // The watchdog's thread has no device yet; a query would start a context on the first one.
        let is_done = cuda::set_device(self.gpu).and_then(|()| state.ended.is_done());
        drop(state);
        match is_done {
            Ok(true) => None,
            Ok(false) => {
                let missing = run.missing_elsewhere(self.rank);
                Some((at, Error::Timeout { at, waiting: self.rank, waited: run.timeout, missing }))
            }
            Err(error) => Some((at, error)),
        }
    }
}

impl LaunchedWork for Launched {
    fn check(&self, run: &RunContext) {
        // In an operation that waits, the rank polls itself, and reports more.
        let polls = || !run.activity[self.rank].now().operation.is_compute();
        if polls() {
            return;
        }
        if let Some((at, error)) = self.failure(run)
            && !polls()
            && run.cancel.cancelled_by().is_none()
        {
            run.report_at(self.rank, Some(at), Some(&error), error.to_string());
        }
    }
}

impl fmt::Debug for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launched").field("rank", &self.rank).finish_non_exhaustive()
    }
}
