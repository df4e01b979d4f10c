//! The program's own step, in place of forward, loss and backward of each batch.

use std::cell::RefCell;
use std::rc::Rc;

use tch::{Kind, Tensor};

use super::{Amp, LossParts, TrainContext};
use crate::data::Batch;
use crate::ddp::DistributedDataParallel;
use crate::error::{Error, Result, opaque_debug};
use crate::ffi::{Autocast, TorchResult};
use crate::runtime::panics;

/// The program's own step: [`Trainer::step`](super::Trainer::step).
pub(super) struct OwnStep<M>(Rc<RefCell<Run<M>>>);

type Run<M> = dyn FnMut(&mut TrainContext<M>, &Batch) -> anyhow::Result<LossParts>;

opaque_debug!(OwnStep<M>, M);

impl<M> Clone for OwnStep<M> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<M> OwnStep<M> {
    pub(super) fn new<L: Into<LossParts>>(
        mut step: impl FnMut(&mut TrainContext<M>, &Batch) -> anyhow::Result<L> + 'static,
    ) -> Self {
        let run =
            move |context: &mut TrainContext<M>, batch: &Batch| Ok(step(context, batch)?.into());
        Self(Rc::new(RefCell::new(run)))
    }

    /// Runs the step for `batch`, which has this `index` in the step, and returns its loss. The step runs backward.
    pub(super) fn run(
        &self,
        context: &mut TrainContext<M>,
        batch: &Batch,
        index: usize,
    ) -> anyhow::Result<Tensor> {
        let result = panics::in_closure("the step", || (self.0.borrow_mut())(context, batch));
        let parts = result.map_err(|error| context.with_samples(error, Some(index)))??;
        let checked = parts.check().map_err(|error| context.with_samples(error, Some(index)));
        let loss = checked?.into_loss().f_detach().doing("detach")?;
        // The loss of no samples counts for nothing, and may be no number.
        Ok(if batch.is_empty() { loss.f_zeros_like().doing("zeros_like")? } else { loss })
    }
}

/// A batch's share of its step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Share {
    /// The number of this rank's batches in the step.
    pub batches: usize,
    /// What the batch counts as.
    pub count: usize,
    /// Whether the batch has no samples: its loss counts for nothing, and may be no number.
    pub is_empty: bool,
}

impl<M> TrainContext<M> {
    /// Returns the model in its current state, for your own step: see [`Trainer::step`](super::Trainer::step).
    pub fn ddp_mut(&mut self) -> &mut DistributedDataParallel<M> {
        &mut self.ddp
    }

    /// Enables mixed precision for forward pass and loss, until the returned guard is dropped, as `amp` says. `None`
    /// without. Backward must run after that.
    ///
    /// # Errors
    /// Those of [`Autocast::new`].
    pub fn autocast(&self) -> Result<Option<Autocast>> {
        let dtype = match self.options.amp {
            Amp::Off => return Ok(None),
            Amp::Bf16 => Kind::BFloat16,
            Amp::Fp16 => Kind::Half,
        };
        Autocast::new(self.group().device(), dtype).map(Some)
    }

    /// Runs backward of `loss`, the mean loss of the current batch, as the trainer itself does: scaled for float16, with
    /// the batch's share of an accumulated step, and with `exact_mean` of all ranks' samples. Averages the gradients,
    /// unless within [`no_sync`](crate::DistributedDataParallel::no_sync). With `skip_nonfinite`, a loss that is not finite
    /// has gradients that are not finite either, so all ranks skip the step. A collective.
    ///
    /// # Errors
    /// Those of [`DistributedDataParallel::backward`].
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        let mut loss = self.with_fault(loss)?;
        if self.checks_gradients() && !self.share.is_empty {
            // Makes the gradients of a loss that is not finite so too. Without this they might be finite: the square of
            // a number may overflow where its double does not. Then one rank alone would detect the loss. Multiplies by
            // 1, or by NaN. Reads nothing, so the host does not wait for a GPU.
            let pass_on = || {
                let value = loss.f_detach()?;
                loss.f_mul(&value.f_sub(&value)?.f_add_scalar(1.0)?)
            };
            loss = pass_on().doing("looking for values that are not finite")?;
        }
        let scaled = self.scaler.scale(&loss)?; // for float16
        let Share { batches, count, .. } = self.share;
        let ranks = self.group().world_size();
        let share = match &mut self.step_count {
            Some(all) => all.divide(&scaled, count, ranks)?,
            None if batches == 1 => scaled,
            None => scaled.f_div_scalar(batches as f64).doing("div")?,
        };
        self.has_run_backward = true;
        self.ddp.backward(&share)
    }

    /// Checks that the program's own step has averaged the gradients once since there were `before` averages, and over the
    /// samples if all count alike.
    pub(super) fn check_own_step(&self, before: u32) -> Result<()> {
        let problem = match self.ddp.num_averages().wrapping_sub(before) {
            0 => {
                "the step has not averaged the gradients, so the ranks would train different models; call \
                 TrainContext::backward once in each step, outside of no_sync"
            }
            1 if self.options.exact_mean && !self.has_run_backward => {
                "the step has averaged the gradients over the ranks, and exact_mean averages them over the samples; call \
                 TrainContext::backward in place of the backward of ddp_mut, or leave exact_mean out"
            }
            1 => return Ok(()),
            _ => {
                "the step has averaged the gradients more than once; hold no_sync during all calls of backward but the \
                 last"
            }
        };
        Err(Error::usage(problem.into()))
    }
}
