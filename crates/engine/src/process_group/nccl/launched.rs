//! The collectives that a rank has launched in one communicator, for the watchdog.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::communicator::Communicator;
use crate::error::{Error, Result, opaque_debug};
use crate::ffi::cuda;
use crate::operation::{OpId, Operation};
use crate::runtime::{Instant, LaunchedWork, RunContext};

/// A communicator and the collectives that may still run in it.
///
/// Until the rank leaves the communicator, its thread holds the lock during each NCCL call. The watchdog skips its check
/// while the lock is taken. So the watchdog never waits for NCCL, and the rank waits for one check at most.
///
/// After a failure a rank aborts its communicator itself. If its thread is blocked in libtorch, the watchdog does.
pub(super) struct LaunchedOps {
    /// The rank's number in the run.
    rank: usize,
    gpu: usize,
    /// The communicator's ranks, by their numbers in the run.
    members: Arc<[usize]>,
    pub(super) state: Mutex<State>,
}

/// The state that [`LaunchedOps`] guards.
pub(super) struct State {
    pub communicator: Communicator,
    /// The collectives that may still run, the oldest first.
    running: VecDeque<Running>,
    /// Events of collectives that have ended, for the next ones.
    spare: Vec<cuda::CudaEvent>,
    /// When the collective began that the last check has found to be failed or late.
    suspect: Option<Instant>,
}

/// A collective that may still run.
struct Running {
    at: OpId,
    since: Instant,
    /// The event that is recorded after the collective.
    ended: cuda::CudaEvent,
}

impl State {
    /// Forgets the collectives that have ended.
    fn forget_ended(&mut self) -> Result<()> {
        while let Some(oldest) = self.running.front()
            && oldest.ended.is_done()?
        {
            self.spare.extend(self.running.pop_front().map(|ended| ended.ended));
        }
        Ok(())
    }
}

impl LaunchedOps {
    pub(super) fn new(
        rank: usize,
        gpu: usize,
        members: Arc<[usize]>,
        communicator: Communicator,
    ) -> Self {
        let state = Mutex::new(State {
            communicator,
            running: VecDeque::new(),
            spare: Vec::new(),
            suspect: None,
        });
        Self { rank, gpu, members, state }
    }

    /// Notes that `at` has been launched on the current stream.
    pub(super) fn note(&self, at: OpId) -> Result<()> {
        let spare = {
            let mut state = self.state.lock();
            state.forget_ended()?;
            state.spare.pop()
        };
        let ended = spare.map_or_else(cuda::CudaEvent::new, Ok)?;
        ended.record(self.gpu)?; // without the lock: this blocks while the GPU's queue is full
        self.state.lock().running.push_back(Running { at, since: Instant::now(), ended });
        Ok(())
    }

    /// Takes the communicator to end it, and leaves `none`. The rank's thread frees the events: on another thread, CUDA
    /// might start a context on another GPU.
    pub(super) fn take(&self, none: Communicator) -> Communicator {
        let mut state = self.state.lock();
        state.running.clear();
        state.spare.clear();
        std::mem::replace(&mut state.communicator, none)
    }

    /// Returns the oldest collective that has not ended, and its error if it has failed or timed out, if the previous
    /// check has found the same. Then a rank that polls would have reported it.
    fn failure(&self, run: &RunContext) -> Option<(OpId, Error)> {
        let mut state = self.state.try_lock()?;
        // A rank that does not compute is in a wait of its own, with the same timeout, that may have begun later.
        let computes = run.activity[self.rank].now().operation.is_compute();
        let limit = if computes { run.timeout } else { run.timeout.saturating_mul(2) };
        let is_late = |running: &Running| running.since.elapsed() >= limit;
        let before = state.suspect.take();
        let failed =
            state.running.front().and_then(|_| state.communicator.check("a collective").err());
        if failed.is_none() && !state.running.front().is_some_and(is_late) {
            return None;
        }
        // A query on a thread without a device would start a context on the first GPU. If it fails, so does the wait of
        // the rank.
        cuda::set_device(self.gpu).and_then(|()| state.forget_ended()).ok()?;
        let oldest = state.running.front().filter(|oldest| failed.is_some() || is_late(oldest))?;
        let (since, at) = (oldest.since, oldest.at);
        state.suspect = Some(since);
        if before != Some(since) {
            return None;
        }
        drop(state);
        Some((at, failed.unwrap_or_else(|| self.timeout(run, at))))
    }

    fn timeout(&self, run: &RunContext, at: OpId) -> Error {
        let is_message = matches!(at.operation, Operation::Send | Operation::Recv);
        let missing = run.behind_in_others(&self.members, (!is_message).then_some(at.sequence));
        Error::Timeout { at, waiting: self.rank, waited: run.timeout, missing }
    }
}

impl LaunchedWork for LaunchedOps {
    fn check(&self, run: &RunContext) {
        if run.cancel.cancelled_by().is_none()
            && let Some((at, error)) = self.failure(run)
            && run.cancel.cancelled_by().is_none()
        {
            run.report_at(self.rank, Some(at), Some(&error), error.to_string());
        }
    }

    fn abort(&self, run: &Arc<RunContext>) {
        // NCCL sets the thread's device back afterwards. On a thread without one, that would start a context on the
        // first GPU.
        if cuda::set_device(self.gpu).is_err() {
            return;
        }
        let none = Communicator::new(run.clone());
        // Only taken under the lock: the abort may wait for other ranks.
        let taken = std::mem::replace(&mut self.state.lock().communicator, none);
        drop(taken);
    }
}

opaque_debug!(LaunchedOps);
