//! `--inject-fault`: the faults within a training step, such as `nan` and `skip-sample`. `runtime/fault.rs` has the others.

use anyhow::Result;
use tch::Tensor;

use crate::data::Batch;
use crate::ddp::DistributedDataParallel;
use crate::error::Error;
use crate::ffi::TorchResult;
use crate::models::bytes_of;
use crate::process_group::{ProcessGroup, ReduceOp, num_bytes};
use crate::runtime::{Fault, FaultKind, Flip, FlipPlace};
use crate::trainer::{Callback, Step, TrainContext};

/// The fault planned for a step of a rank.
#[derive(Debug)]
pub(in crate::trainer) struct FaultInjection {
    kind: FaultKind,
    /// The step of the run, from 0.
    step: u64,
    /// Whether it is planned for this rank.
    is_here: bool,
}

impl FaultInjection {
    /// Returns the fault that is planned for a step; `None` if there is none.
    pub(in crate::trainer) fn planned(group: &ProcessGroup) -> Option<Self> {
        let Fault { kind, step, rank, .. } = group.planned_fault()?;
        Some(Self { kind, step, is_here: rank == group.global_rank() })
    }

    /// Flips a bit of a gradient. All ranks observe theirs, as [`DistributedDataParallel::observe_gradients`] demands.
    fn flip_gradient<M>(&self, bit: u64, ddp: &DistributedDataParallel<M>) -> Result<()> {
        let is_here = self.is_here;
        let parameters = ddp.trained_parameters();
        let (flipped, bit) = find_bit(bit, parameters.iter().map(|(_, it)| it))?;
        let observe = move |index, gradient: &mut Tensor| {
            if is_here && index == flipped { flip_bit(bit, gradient) } else { Ok(()) }
        };
        ddp.observe_gradients(OBSERVER, Box::new(observe));
        Ok(())
    }
}

impl<M> Callback<M> for FaultInjection {
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        if step.index != self.step {
            return Ok(());
        }
        if let FaultKind::Flip(Flip { bit, place: FlipPlace::Gradient }) = self.kind {
            self.flip_gradient(bit, &context.ddp)?;
        }
        if !self.is_here {
            return Ok(());
        }
        match self.kind {
            FaultKind::Nan => {
                make_sample_nan(&mut step.batches)?;
                // The loss, where the sample cannot be: tokens are integers.
                context.makes_loss_nan =
                    step.batches.iter().any(|batch| !batch.inputs.is_floating_point());
            }
            FaultKind::SkipSample => skip_sample(&mut step.batches, step.index)?,
            FaultKind::WrongShape => {
                let group = context.group();
                let mut wrong =
                    Tensor::f_zeros([7], (tch::Kind::Float, group.device())).doing("zeros")?;
                group.all_reduce(&mut wrong, ReduceOp::Sum)?;
            }
            FaultKind::Flip(Flip { bit, place: FlipPlace::Batch }) => {
                flip_in_batches(bit, &mut step.batches)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let (FaultKind::Flip(Flip { bit, place }), ddp) = (self.kind, &context.ddp) else {
            return Ok(());
        };
        if step.index != self.step {
            return Ok(());
        }
        ddp.stop_observing(OBSERVER);
        if place == FlipPlace::Average && self.is_here {
            let parameters = ddp.trained_parameters().into_iter();
            let gradients = parameters.map(|(_, parameter)| parameter.grad());
            flip_in(bit, &mut gradients.filter(Tensor::defined).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if step.index != self.step || !self.is_here {
            return Ok(());
        }
        if self.kind == FaultKind::Desync
            && let Some((_, mut parameter)) = context.ddp.state_dict().into_iter().next()
        {
            let _ = tch::no_grad(|| parameter.f_add_scalar_(0.001)).doing("add_")?;
        }
        if let FaultKind::Flip(Flip { bit, place }) = self.kind {
            let ddp = &context.ddp;
            let tensors = match place {
                FlipPlace::Parameter => ddp.trained_parameters(),
                FlipPlace::Buffer => ddp.untrained_tensors(),
                _ => return Ok(()),
            };
            flip_in(bit, &mut tensors.into_iter().map(|(_, it)| it).collect::<Vec<_>>())?;
        }
        Ok(())
    }
}

/// The name of the fault among the observers of gradients.
const OBSERVER: &str = "fault";

/// Returns the number of the tensor that has bit `bit` of all `tensors` in sequence, and the number of the bit in it.
fn find_bit<'a>(
    bit: u64,
    tensors: impl Iterator<Item = &'a Tensor>,
) -> crate::error::Result<(usize, u64)> {
    let mut left = bit;
    let mut all = 0;
    for (index, tensor) in tensors.enumerate() {
        let bits = 8 * num_bytes(tensor.kind(), tensor.numel()) as u64;
        if left < bits {
            return Ok((index, left));
        }
        left -= bits;
        all += bits;
    }
    Err(Error::usage(format!(
        "--inject-fault flip={bit}: these tensors have {all} bits; use a smaller number, or another place (in=PLACE)"
    )))
}

/// Flips bit `bit` of `tensors`.
fn flip_in(bit: u64, tensors: &mut [Tensor]) -> crate::error::Result<()> {
    let (index, bit) = find_bit(bit, tensors.iter())?;
    flip_bit(bit, &mut tensors[index])
}

/// Flips bit `bit` of the inputs and targets of `batches`.
fn flip_in_batches(bit: u64, batches: &mut [Batch]) -> crate::error::Result<()> {
    let (flipped, bit) = find_bit(bit, batches.iter().flat_map(Batch::tensors))?;
    let mut tensors = batches.iter_mut().flat_map(Batch::tensors_mut);
    let Some(tensor) = tensors.nth(flipped) else { return Ok(()) };
    // A copy: the data set itself stays unchanged.
    *tensor = tensor.f_detach_copy().doing("flipping a bit")?;
    flip_bit(bit, tensor)
}

/// Flips bit `bit` of the values of `tensor`, which lie in sequence.
fn flip_bit(bit: u64, tensor: &mut Tensor) -> crate::error::Result<()> {
    let doing = "flipping a bit";
    let bits = 8 * num_bytes(tensor.kind(), 1) as u64;
    let flat = tensor.f_detach().and_then(|tensor| tensor.f_view(-1)).doing(doing)?;
    let mut element = flat.f_narrow(0, (bit / bits) as i64, 1).doing(doing)?;
    let mut bytes = bytes_of(&element)?;
    bytes[(bit % bits / 8) as usize] ^= 1 << (bit % 8);
    let flipped = Tensor::f_from_data_size(&bytes, &[1], tensor.kind()).doing(doing)?;
    tch::no_grad(|| element.f_copy_(&flipped)).doing(doing)
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
            return Err(Error::usage(format!(
                "--inject-fault skip-sample: a rank has one sample in step {step}, and no other one to take instead; use a \
                 larger --batch-size, or another step"
            )));
        }
    };
    let next: Result<Vec<Tensor>, _> =
        other.tensors().map(|tensor| tensor.f_narrow(0, row, 1)).collect();
    let next = next.doing(doing)?;
    for (to, next) in batches[0].tensors_mut().zip(next) {
        // A copy: the data set itself stays unchanged.
        *to = to.f_detach_copy().doing(doing)?;
        let put = to.f_narrow(0, 0, 1).and_then(|mut first| first.f_copy_(&next).map(drop));
        put.doing(doing)?;
    }
    Ok(())
}
