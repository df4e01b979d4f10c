//! Losses and gradients that are infinite or NaN: ends the run, or skips the step.

use anyhow::Result;
use tch::nn::ModuleT;
use tch::{Device, Tensor};

use crate::ffi::TorchResult;
use crate::trainer::context::BufferSnapshot;
use crate::trainer::find_non_finite::{gradients_finite, is_finite};
use crate::trainer::{Callback, Step, TrainContext};

/// Guards parameters against values that are not finite.
#[derive(Debug, Default)]
pub(in crate::trainer) struct NonFiniteGuard {
    /// The buffers before the step; `None` if the step is never skipped.
    buffers: Option<BufferSnapshot>,
}

impl<M: ModuleT> Callback<M> for NonFiniteGuard {
    fn on_step_start(&mut self, context: &mut TrainContext<M>, _: &mut Step) -> Result<()> {
        if context.checks_gradients() {
            self.buffers = Some(BufferSnapshot::of(&context.ddp)?);
        }
        Ok(())
    }

    /// Refuses a loss that is not finite, or makes sure that its gradients are not finite either.
    fn on_before_backward(
        &mut self,
        context: &mut TrainContext<M>,
        step: &Step,
        batch: usize,
        loss: &mut Tensor,
    ) -> Result<()> {
        if context.checks_gradients() {
            *loss = poison_if_nonfinite(loss)?;
            return Ok(());
        }
        // On a GPU each check would wait for the device, so the sum of the losses is checked instead.
        let is_checked = loss.device() == Device::Cpu && !context.scaler.is_enabled();
        if is_checked && !is_finite(loss)? {
            return Err(context.nonfinite_loss(loss, batch, &step.batches[batch])?.into());
        }
        Ok(())
    }

    /// Skips the step if the averaged gradients are not finite. They are the same on all ranks, so all decide alike.
    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let Some(snapshot) = self.buffers.take() else { return Ok(()) };
        let buffers = context.ddp.flat_buffers().unwrap_or_default();
        if gradients_finite(&buffers, context.group())? {
            return Ok(());
        }
        if context.state.skipped_steps >= context.options.skip_nonfinite.unwrap_or(0) {
            return Err(context.find_cause(&step.batches, &buffers)?.into());
        }
        step.skip();
        Ok(snapshot.restore()?)
    }
}

/// Returns the loss from which to run backward: with gradients that are not finite if `loss` is not. Without this they
/// might be finite: the square of a number may overflow where its double does not. Then one rank alone would detect
/// the loss.
fn poison_if_nonfinite(loss: &Tensor) -> crate::error::Result<Tensor> {
    // Multiplies by 1, or by NaN. Reads nothing, so the host does not wait for a GPU.
    let pass_on = || {
        let value = loss.f_detach()?;
        loss.f_mul(&value.f_sub(&value)?.f_add_scalar(1.0)?)
    };
    pass_on().doing("looking for what is not finite")
}
