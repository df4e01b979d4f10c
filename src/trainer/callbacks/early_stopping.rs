//! Early stopping: ends training when validations get no better.

use anyhow::Result;

use crate::runtime::StopReason;
use crate::trainer::{Callback, Epoch, TrainContext};

/// The most validations in a row that may not improve on the best one. All ranks see the same loss, so all decide
/// alike.
#[derive(Debug)]
pub(in crate::trainer) struct EarlyStopping {
    pub patience: u64,
}

impl EarlyStopping {
    fn check<M>(&self, context: &mut TrainContext<M>) {
        if context.state.validations_since_best as u64 >= self.patience {
            context.ended_by.get_or_insert(StopReason::NoProgress);
        }
    }
}

impl<M> Callback<M> for EarlyStopping {
    /// A resumed run may have no patience left.
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.check(context);
        Ok(())
    }

    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, _: &mut Epoch) -> Result<()> {
        self.check(context);
        Ok(())
    }
}
