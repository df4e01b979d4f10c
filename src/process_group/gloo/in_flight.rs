//! Gloo's operations in the background, from when the processes have agreed on the call until Gloo has finished.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;

use super::Network;
use crate::error::Result;
use crate::ffi::GlooWork;
use crate::operation::OpId;

/// A Gloo operation that was started for a call.
pub(super) struct Started {
    pub work: GlooWork,
    pub at: OpId,
    /// Global rank that waits for it.
    pub waiting: usize,
    pub began: Instant,
    pub timeout: Duration,
}

impl Started {
    /// Returns the time left until the deadline.
    pub(super) fn time_left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}

/// An operation in the background. Its tensors must not be touched until [`InFlight::wait`] has returned.
pub(crate) struct InFlight {
    network: Arc<Network>,
    started: Started,
}

impl InFlight {
    pub(super) fn new(network: Arc<Network>, started: Started) -> Self {
        Self { network, started }
    }

    /// Returns the call.
    pub(crate) fn at(&self) -> OpId {
        self.started.at
    }

    /// Returns a channel that is ready once the operation has ended. Only [`InFlight::wait`] may receive from it.
    pub(crate) fn ended(&self) -> &Receiver<std::result::Result<(), String>> {
        self.started.work.ended()
    }

    /// Returns the time left until the deadline.
    pub(crate) fn time_left(&self) -> Duration {
        self.started.time_left()
    }

    /// Waits until the operation has ended.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout), [`Error::Cancelled`](crate::Error::Cancelled),
    /// [`Error::ConnectionLost`](crate::Error::ConnectionLost).
    pub(crate) fn wait(self) -> Result<()> {
        self.network.finish(&self.started)
    }
}
