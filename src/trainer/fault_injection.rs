//! `--inject-fault`: faults injected on purpose into a training step.

use tch::Tensor;
use tch::nn::ModuleT;

use super::Trainer;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::process_group::ReduceOp;
use crate::runtime::FaultKind;

impl<M: ModuleT> Trainer<M> {
    /// Injects the fault planned for this rank before it computes the step, if any.
    pub(super) fn inject_before_step(&self, batches: &mut [Batch]) -> Result<()> {
        let group = self.ddp.group();
        match group.planned_fault(self.state.step) {
            Some(FaultKind::Nan) => {
                let Some(batch) = batches.iter_mut().find(|it| !it.is_empty()) else {
                    return Ok(());
                };
                // A copy: the data set itself stays unchanged.
                let torch = || Error::torch("making a sample NaN");
                batch.inputs = batch.inputs.f_detach_copy().map_err(torch())?;
                let mut first = batch.inputs.f_narrow(0, 0, 1).map_err(torch())?;
                first.f_fill_(f64::NAN).map(drop).map_err(torch())
            }
            Some(FaultKind::SkipSample) => skip_sample(batches, self.state.step),
            Some(FaultKind::WrongShape) => {
                let mut wrong = Tensor::f_zeros([7], (tch::Kind::Float, group.device()))
                    .map_err(Error::torch("zeros"))?;
                group.all_reduce(&mut wrong, ReduceOp::Sum)
            }
            _ => Ok(()),
        }
    }

    /// Injects the fault planned for this rank after the optimizer, if any.
    pub(super) fn inject_after_step(&self) -> Result<()> {
        if self.ddp.group().planned_fault(self.state.step) != Some(FaultKind::Desync) {
            return Ok(());
        }
        let Some((_, parameter)) = self.ddp.state_dict().into_iter().next() else { return Ok(()) };
        tch::no_grad(|| parameter.shallow_clone().f_add_scalar_(0.001))
            .map(drop)
            .map_err(Error::torch("add_"))
    }
}

/// Replaces the step's first sample by its second, so that the number of samples stays the same.
fn skip_sample(batches: &mut [Batch], step: u64) -> Result<()> {
    let torch = || Error::torch("taking a sample twice");
    let take = |batch: &Batch, row: i64| -> Result<[Tensor; 2], tch::TchError> {
        Ok([batch.inputs.f_narrow(0, row, 1)?, batch.targets.f_narrow(0, row, 1)?])
    };
    let next = match batches {
        [first, ..] if first.len() > 1 => take(first, 1),
        [_, second, ..] => take(second, 0),
        _ => {
            return Err(Error::Input(format!(
                "--inject-fault skip-sample: a rank has one sample in step {step}, and no other one to take instead; use a \
                 larger --batch-size, or another step"
            )));
        }
    };
    let [inputs, targets] = next.map_err(torch())?;
    let first = &mut batches[0];
    let put = |to: &mut Tensor, from: &Tensor| -> Result<(), tch::TchError> {
        // A copy: the data set itself stays unchanged.
        *to = to.f_detach_copy()?;
        to.f_narrow(0, 0, 1)?.f_copy_(from).map(drop)
    };
    put(&mut first.inputs, &inputs)
        .and_then(|()| put(&mut first.targets, &targets))
        .map_err(torch())
}
