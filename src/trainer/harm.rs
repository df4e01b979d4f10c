//! Mistakes made on purpose in the midst of a step: `--fault`.

use tch::Tensor;
use tch::nn::ModuleT;

use super::Trainer;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::process_group::ReduceOp;
use crate::sync::FaultKind;

impl<M: ModuleT> Trainer<M> {
    /// What strikes this rank before it computes this step.
    pub(super) fn harm_batches(&self, batches: &mut [Batch]) -> Result<()> {
        let group = self.ddp.group();
        match group.harm(self.state.step) {
            Some(FaultKind::Nan) => {
                let Some(batch) = batches.first_mut() else { return Ok(()) };
                // The data itself stays as it is.
                let torch = || Error::torch("making a sample NaN");
                batch.inputs = batch.inputs.f_detach_copy().map_err(torch())?;
                let mut first = batch.inputs.f_narrow(0, 0, 1).map_err(torch())?;
                first.f_fill_(f64::NAN).map(drop).map_err(torch())
            }
            Some(FaultKind::WrongShape) => {
                let mut wrong = Tensor::f_zeros([7], (tch::Kind::Float, group.device()))
                    .map_err(Error::torch("zeros"))?;
                group.all_reduce(&mut wrong, ReduceOp::Sum)
            }
            _ => Ok(()),
        }
    }

    /// What strikes it after the optimizer.
    pub(super) fn harm_parameters(&self) -> Result<()> {
        if self.ddp.group().harm(self.state.step) != Some(FaultKind::Desync) {
            return Ok(());
        }
        let Some((_, parameter)) = self.ddp.state_dict().into_iter().next() else { return Ok(()) };
        tch::no_grad(|| parameter.shallow_clone().f_add_scalar_(0.001))
            .map(drop)
            .map_err(Error::torch("add_"))
    }
}
