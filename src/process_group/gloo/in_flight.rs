//! What goes on by itself, from when the processes have agreed on it until Gloo is through.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;

use super::Network;
use crate::error::Result;
use crate::ffi::GlooWork;
use crate::operation::OpId;

/// An operation of Gloo's that was started, for a call.
pub(super) struct Started {
    pub work: GlooWork,
    pub at: OpId,
    /// The rank of the run that waits for it.
    pub waiting: usize,
    pub began: Instant,
    pub timeout: Duration,
}

impl Started {
    /// Until its deadline.
    pub(super) fn time_left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}

/// One that its rank does not wait for now. Nobody may touch its tensors until [`InFlight::wait`] has returned.
pub(crate) struct InFlight {
    network: Arc<Network>,
    started: Started,
}

impl InFlight {
    pub(super) fn new(network: Arc<Network>, started: Started) -> Self {
        Self { network, started }
    }

    /// What it is.
    pub(crate) fn at(&self) -> OpId {
        self.started.at
    }

    /// Ready to receive from when it has ended; what is there is for [`InFlight::wait`].
    pub(crate) fn ended(&self) -> &Receiver<std::result::Result<(), String>> {
        self.started.work.ended()
    }

    /// Until its deadline.
    pub(crate) fn time_left(&self) -> Duration {
        self.started.time_left()
    }

    /// Waits until it is over.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout), [`Error::Cancelled`](crate::Error::Cancelled),
    /// [`Error::ConnectionLost`](crate::Error::Peer).
    pub(crate) fn wait(self) -> Result<()> {
        self.network.finish(&self.started)
    }
}
