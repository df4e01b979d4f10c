//! Losses and gradients that are infinite or NaN: ends the run, or skips the step.

use anyhow::Result;

use crate::models::Forward;
use crate::optim::{FlatBuffer, GradState, average_gradients};
use crate::trainer::find_non_finite::first_nonfinite;
use crate::trainer::{Callback, Step, TrainContext};

/// Guards parameters against values that are not finite.
#[derive(Debug)]
pub(in crate::trainer) struct NonFiniteGuard;

impl<M: Forward> Callback<M> for NonFiniteGuard {
    /// Skips the step if the averaged gradients are not finite. They are the same on all ranks, so all decide alike.
    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        if !context.checks_gradients() {
            return Ok(());
        }
        let buffers = context.ddp.flat_buffers();
        average_gradients(&buffers)?;
        context.group().await_launched()?; // with `nccl`, this wait ends if another rank fails; so do those below
        let has_gradients = |it: &FlatBuffer| it.layout.gradients() != GradState::Cleared;
        if !buffers.iter().any(has_gradients)
            || first_nonfinite(&buffers, |buffer| &buffer.gradients)?.is_none()
        {
            return Ok(());
        }
        if context.state.skipped_steps >= context.options.skip_nonfinite.unwrap_or(0) {
            return Err(context.find_cause(&step.batches, &buffers)?.into());
        }
        step.skip();
        match context.last_step.buffers.take() {
            Some(buffers) => Ok(buffers.restore()?),
            None => Ok(()),
        }
    }
}
