//! The report of each epoch.

use std::sync::Arc;

use anyhow::Result;

use crate::telemetry::Printer;
use crate::trainer::{Callback, Epoch, TrainContext};

/// Prints each epoch, once for all ranks of the process.
#[derive(Debug)]
pub(in crate::trainer) struct EpochReport {
    pub printer: Arc<Printer>,
}

impl<M> Callback<M> for EpochReport {
    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        let local_ranks = context.group().local_world_size();
        Ok(self.printer.epoch(epoch.clone(), local_ranks)?)
    }
}
