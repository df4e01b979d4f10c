//! Gloo's operations in the background, from when the processes have agreed on the call until Gloo has finished.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Receiver;

use super::super::backend;
use super::super::network::{Network, Started};
use crate::error::Result;
use crate::operation::OpId;

/// An operation in the background.
pub(super) struct InFlight {
    pub network: Arc<Network>,
    pub started: Started,
}

impl backend::InFlight for InFlight {
    fn at(&self) -> OpId {
        self.started.at
    }

    fn ended(&self) -> &Receiver<std::result::Result<(), String>> {
        self.started.work.ended()
    }

    fn time_left(&self) -> Duration {
        self.started.time_left()
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.network.finish(&self.started)
    }
}
