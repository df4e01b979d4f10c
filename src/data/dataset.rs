//! The data set: in memory once, whatever the number of ranks.

use std::sync::Mutex;
use std::sync::PoisonError;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::torch::{SharedTensor, fork_rng};

/// What a model is to predict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// So many numbers a sample.
    Values(i64),
    /// One of so many classes a sample.
    Classes(i64),
}

/// Samples with their targets: the first dimension counts the samples.
///
/// Shared by all ranks: wrap it in an [`Arc`](std::sync::Arc) and let the rank function capture that.
#[derive(Debug)]
pub struct Dataset {
    samples: Samples,
    /// Copies on GPUs: one a device, made by the first rank there.
    copies: Mutex<Vec<(Device, Samples)>>,
}

#[derive(Debug)]
struct Samples {
    inputs: SharedTensor,
    targets: SharedTensor,
}

impl Samples {
    fn handles(&self) -> (Tensor, Tensor) {
        (self.inputs.get(), self.targets.get())
    }
}

impl Dataset {
    /// `inputs` and `targets` of as many samples, on the CPU.
    ///
    /// # Errors
    /// [`Error::Input`] when there are no samples, or not as many targets as inputs.
    pub fn new(inputs: Tensor, targets: Tensor) -> Result<Self> {
        let count = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
        let (samples, labels) = (count(&inputs), count(&targets));
        if samples == 0 || samples != labels {
            return Err(Error::Input(format!(
                "a data set needs as many targets as inputs, and at least one; got {samples} inputs \
                 and {labels} targets"
            )));
        }
        let samples =
            Samples { inputs: SharedTensor::new(inputs), targets: SharedTensor::new(targets) };
        Ok(Self { samples, copies: Mutex::default() })
    }

    /// The seed program's data: uniform in \[0, 1), `num_samples` x `in_features`, with uniform targets
    /// (or uniform classes). The same numbers as in PyTorch after `torch.manual_seed(seed)`:
    /// `torch.rand(num_samples, in_features)` and then `torch.rand(num_samples, values)` (or
    /// `torch.randint(classes, (num_samples,))`).
    ///
    /// # Errors
    /// [`Error::Torch`] when it does not fit into memory.
    pub fn random(num_samples: i64, in_features: i64, targets: Targets, seed: u64) -> Result<Self> {
        let float = (Kind::Float, Device::Cpu);
        let draw = || {
            let inputs = Tensor::f_rand([num_samples, in_features], float)?;
            let targets = match targets {
                Targets::Values(values) => Tensor::f_rand([num_samples, values], float)?,
                Targets::Classes(classes) => {
                    Tensor::f_randint(classes, [num_samples], (Kind::Int64, Device::Cpu))?
                }
            };
            Ok((inputs, targets))
        };
        let (inputs, targets) =
            fork_rng(seed, draw)?.map_err(Error::torch("making the random data set"))?;
        Self::new(inputs, targets)
    }

    /// How many samples there are.
    pub fn len(&self) -> usize {
        self.samples.inputs.get().size()[0] as usize
    }

    /// Never: a data set has at least one sample.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// All inputs and targets on `device`, which all ranks there share: read them only.
    ///
    /// # Errors
    /// [`Error::Torch`] when the device has no room.
    pub fn on(&self, device: Device) -> Result<(Tensor, Tensor)> {
        if device == Device::Cpu {
            return Ok(self.samples.handles());
        }
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, copy)) = copies.iter().find(|(known, _)| *known == device) {
            return Ok(copy.handles());
        }
        let (inputs, targets) = self.samples.handles();
        let copy = |tensor: Tensor| {
            tensor.f_to_device(device).map_err(Error::torch("copying the data set to the GPU"))
        };
        let (inputs, targets) =
            (SharedTensor::new(copy(inputs)?), SharedTensor::new(copy(targets)?));
        let samples = Samples { inputs, targets };
        let handles = samples.handles();
        copies.push((device, samples));
        Ok(handles)
    }
}
