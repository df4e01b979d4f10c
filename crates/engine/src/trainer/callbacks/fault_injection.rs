//! `--inject-fault`: the faults within a training step, such as `nan` and `skip-sample`. `runtime/fault.rs` has the others.

use anyhow::Result;
use tch::{Kind, Tensor};

use crate::data::Batch;
use crate::error::Error;
use crate::ffi::TorchResult;
use crate::process_group::{ProcessGroup, ReduceOp, num_bytes};
use crate::runtime::{Fault, FaultKind, FlipPlace};
use crate::trainer::{Callback, Step, TrainContext};

/// The fault planned for a step of any rank.
#[derive(Debug)]
pub(in crate::trainer) struct FaultInjection(Fault);

impl FaultInjection {
    /// Returns the fault that is planned for a step; `None` if there is none.
    pub(in crate::trainer) fn planned(group: &ProcessGroup) -> Option<Self> {
        // One of several ranks that trains by itself has none: `verify` compares the others with it.
        let is_alone = group.world_size() == 1 && group.run().activity.len() > 1;
        let fault = group.run().fault.clone();
        fault.filter(|fault| fault.kind.needs_step() && !is_alone).map(Self)
    }

    /// Returns the fault to inject into `step` on this rank; `None` if there is none.
    fn here<M>(&self, context: &TrainContext<M>, step: &Step) -> Option<FaultKind> {
        let Fault { rank, step: planned, kind, .. } = self.0;
        (rank == context.group().global_rank() && planned == step.index).then_some(kind)
    }
}

impl<M> Callback<M> for FaultInjection {
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let here = self.here(context, step);
        if let FaultKind::Flip(bit, FlipPlace::Gradient) = self.0.kind
            && step.index == self.0.step
        {
            let parameters = context.ddp.trained_parameters().into_iter();
            let (flipped, bit) = find_bit(bit, &parameters.map(|(_, it)| it).collect::<Vec<_>>())?;
            let is_here = here.is_some();
            let observe = move |index, gradient: &mut Tensor| {
                if is_here && index == flipped { flip_bit(bit, gradient) } else { Ok(()) }
            };
            // All ranks observe theirs, as `DistributedDataParallel::observe_gradients` demands.
            context.ddp.observe_gradients(OBSERVER, Box::new(observe));
        }
        let Some(kind) = here else { return Ok(()) };
        // Changes copies: the data set itself stays unchanged.
        for batch in &mut step.batches {
            let copy = batch.map(batch.len() as i64, Tensor::f_detach_copy);
            *batch = copy.doing("copying a batch")?;
        }
        let mut samples = samples(&step.batches);
        match kind {
            FaultKind::Nan => {
                let Some(sample) = samples.next() else { return Ok(()) };
                let mut inputs = sample?.inputs;
                // The loss, where the sample cannot be: tokens are integers.
                context.makes_loss_nan = !inputs.is_floating_point();
                if !context.makes_loss_nan {
                    let _ = inputs.f_fill_(f64::NAN).doing("making a sample NaN")?;
                }
            }
            FaultKind::SkipSample => {
                let (Some(skipped), Some(next)) = (samples.next(), samples.next()) else {
                    return Err(Error::usage(ONE_SAMPLE.into()).into());
                };
                for (to, next) in skipped?.tensors().zip(next?.tensors()) {
                    to.shallow_clone().f_copy_(next).doing("taking a sample twice")?;
                }
            }
            FaultKind::WrongShape => {
                let group = context.group();
                let wrong = Tensor::f_zeros([7], (Kind::Float, group.device()));
                group.all_reduce(&mut wrong.doing("zeros")?, ReduceOp::Sum)?;
            }
            FaultKind::Flip(bit, FlipPlace::Batch) => {
                let tensors = step.batches.iter().flat_map(Batch::tensors);
                flip(bit, tensors.map(Tensor::shallow_clone))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        context.ddp.stop_observing(OBSERVER);
        if let Some(FaultKind::Flip(bit, FlipPlace::Average)) = self.here(context, step) {
            let parameters = context.ddp.trained_parameters().into_iter();
            let gradients = parameters.map(|(_, parameter)| parameter.grad());
            flip(bit, gradients.filter(Tensor::defined))?;
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        let ddp = &context.ddp;
        let (bit, tensors) = match self.here(context, step) {
            // The first value becomes another one, of a similar size.
            Some(FaultKind::Desync) => (22, ddp.trained_parameters()),
            Some(FaultKind::Flip(bit, FlipPlace::Parameter)) => (bit, ddp.trained_parameters()),
            Some(FaultKind::Flip(bit, FlipPlace::Buffer)) => (bit, ddp.untrained_tensors()),
            _ => return Ok(()),
        };
        Ok(flip(bit, tensors.into_iter().map(|(_, tensor)| tensor))?)
    }
}

/// The name of the fault among the observers of gradients.
const OBSERVER: &str = "fault";

const ONE_SAMPLE: &str = "--inject-fault skip-sample: a rank has one sample in the step, and no other one to take \
     instead; use a larger --batch-size, or another step";

/// Returns the samples of `batches`, each as a batch that shares its memory.
fn samples(batches: &[Batch]) -> impl Iterator<Item = crate::error::Result<Batch>> {
    batches.iter().flat_map(|batch| {
        let row =
            move |row| batch.map(1, |tensor| tensor.f_narrow(0, row, 1)).doing("taking a sample");
        (0..batch.len() as i64).map(row)
    })
}

/// Returns the number of the tensor that has bit `bit` of all `tensors` in sequence, and the number of the bit in it.
fn find_bit(bit: u64, tensors: &[Tensor]) -> crate::error::Result<(usize, u64)> {
    let mut all = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        let before = all;
        all += 8 * num_bytes(tensor.kind(), tensor.numel()) as u64;
        if bit < all {
            return Ok((index, bit - before));
        }
    }
    Err(Error::usage(format!(
        "--inject-fault flip={bit}: these tensors have {all} bits; use a smaller number, or another place (in=PLACE)"
    )))
}

/// Flips bit `bit` of `tensors`.
fn flip(bit: u64, tensors: impl Iterator<Item = Tensor>) -> crate::error::Result<()> {
    let tensors: Vec<Tensor> = tensors.collect();
    let (index, bit) = find_bit(bit, &tensors)?;
    flip_bit(bit, &tensors[index])
}

/// Flips bit `bit` of the values of `tensor`, which lie in sequence.
fn flip_bit(bit: u64, tensor: &Tensor) -> crate::error::Result<()> {
    let bytes = tensor.f_detach().and_then(|it| it.f_view(-1)?.f_view_dtype(Kind::Uint8));
    let byte = bytes.and_then(|bytes| bytes.f_narrow(0, (bit / 8) as i64, 1));
    byte.and_then(|mut byte| byte.f_bitwise_xor_(1_i64 << (bit % 8)))
        .map(drop)
        .doing("flipping a bit")
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
