//! `--inject-fault`: the faults within a training step, such as `nan` and `skip-sample`. `runtime/fault.rs` has the others.

use anyhow::Result;
use tch::Tensor;

use crate::data::Batch;
use crate::error::Error;
use crate::ffi::TorchResult;
use crate::process_group::{ProcessGroup, ReduceOp};
use crate::runtime::FaultKind;
use crate::trainer::{Callback, Step, TrainContext};

/// The fault planned for this rank.
#[derive(Debug)]
pub(in crate::trainer) struct FaultInjection {
    kind: FaultKind,
    /// The step of the run, from 0.
    step: u64,
}

impl FaultInjection {
    /// Returns the fault that is planned for a step of this rank; `None` if there is none.
    pub(in crate::trainer) fn planned(group: &ProcessGroup) -> Option<Self> {
        group.planned_fault().map(|(kind, step)| Self { kind, step })
    }
}

impl<M> Callback<M> for FaultInjection {
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        if step.number != self.step {
            return Ok(());
        }
        match self.kind {
            FaultKind::Nan => {
                make_sample_nan(&mut step.batches)?;
                // The loss, where the sample cannot be: tokens are integers.
                context.makes_loss_nan =
                    step.batches.iter().any(|batch| !batch.inputs.is_floating_point());
            }
            FaultKind::SkipSample => skip_sample(&mut step.batches, step.number)?,
            FaultKind::WrongShape => {
                let group = context.group();
                let mut wrong =
                    Tensor::f_zeros([7], (tch::Kind::Float, group.device())).doing("zeros")?;
                group.all_reduce(&mut wrong, ReduceOp::Sum)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if step.number == self.step
            && self.kind == FaultKind::Desync
            && let Some((_, mut parameter)) = context.ddp.state_dict().into_iter().next()
        {
            let _ = tch::no_grad(|| parameter.f_add_scalar_(0.001)).doing("add_")?;
        }
        Ok(())
    }
}

impl<M> TrainContext<M> {
    /// Returns the `loss` of the current batch; NaN if the fault says so.
    pub(in crate::trainer) fn with_fault(&self, loss: &Tensor) -> crate::error::Result<Tensor> {
        if self.makes_loss_nan {
            return loss.f_mul_scalar(f64::NAN).doing("making a loss NaN");
        }
        Ok(loss.shallow_clone())
    }
}

/// Overwrites the step's first sample with NaN. Integers, which have no NaN, stay.
fn make_sample_nan(batches: &mut [Batch]) -> crate::error::Result<()> {
    let Some(batch) = batches.iter_mut().find(|batch| !batch.is_empty()) else { return Ok(()) };
    if !batch.inputs.is_floating_point() {
        return Ok(());
    }
    // A copy: the data set itself stays unchanged.
    let doing = "making a sample NaN";
    batch.inputs = batch.inputs.f_detach_copy().doing(doing)?;
    let mut first = batch.inputs.f_narrow(0, 0, 1).doing(doing)?;
    first.f_fill_(f64::NAN).map(drop).doing(doing)
}

/// Replaces the step's first sample by its second, so that the number of samples stays the same.
fn skip_sample(batches: &mut [Batch], step: u64) -> crate::error::Result<()> {
    let doing = "taking a sample twice";
    let (other, row) = match batches {
        [first, ..] if first.len() > 1 => (&*first, 1),
        [_, second, ..] => (&*second, 0),
        _ => {
            return Err(Error::InvalidInput(format!(
                "--inject-fault skip-sample: a rank has one sample in step {step}, and no other one to take instead; use a \
                 larger --batch-size, or another step"
            )));
        }
    };
    let all = [&other.inputs, &other.targets].into_iter().chain(&other.more_inputs);
    let next: Result<Vec<Tensor>, _> = all.map(|tensor| tensor.f_narrow(0, row, 1)).collect();
    let next = next.doing(doing)?;
    let Batch { inputs, targets, more_inputs, .. } = &mut batches[0];
    for (to, next) in [inputs, targets].into_iter().chain(more_inputs).zip(next) {
        // A copy: the data set itself stays unchanged.
        *to = to.f_detach_copy().doing(doing)?;
        let put = to.f_narrow(0, 0, 1).and_then(|mut first| first.f_copy_(&next).map(drop));
        put.doing(doing)?;
    }
    Ok(())
}
