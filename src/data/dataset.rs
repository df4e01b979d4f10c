//! What can be trained on: samples with targets, in memory once, whatever the number of ranks.

use std::fmt;
use std::sync::Mutex;
use std::sync::PoisonError;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi::{SharedTensor, fork_rng};

/// What a model is to predict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// So many numbers a sample.
    Values(i64),
    /// One of so many classes a sample.
    Classes(i64),
}

/// Samples that can be had by number. For data of one's own: [`TensorDataset`], or an implementation of this.
///
/// Follows `torch.utils.data.Dataset` (a map-style one). All ranks, and all workers of their loaders, share one.
///
/// ```
/// use ddp_mp::Dataset;
/// use tch::Tensor;
///
/// /// Numbers and their squares.
/// #[derive(Debug)]
/// struct Squares;
///
/// impl Dataset for Squares {
///     fn len(&self) -> usize {
///         100
///     }
///     fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
///         let x = index as f32 / 100.0;
///         Ok((Tensor::from_slice(&[x]), Tensor::from_slice(&[x * x])))
///     }
/// }
/// let (inputs, targets) = Squares.batch(&[10, 20])?;
/// assert_eq!((inputs.size(), targets.size()), (vec![2, 1], vec![2, 1]));
/// # anyhow::Ok(())
/// ```
pub trait Dataset: fmt::Debug + Send + Sync {
    /// How many samples there are, the same each time.
    fn len(&self) -> usize;

    /// Whether there are none, which no loader accepts.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The inputs and the target of sample `index`, on the CPU: of the same shapes and kinds for all samples.
    ///
    /// # Errors
    /// Whatever keeps it from being read; it ends the run.
    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)>;

    /// The number that sample `index` has where it comes from, for messages: the same, but for a part of another data
    /// set.
    fn source_index(&self, index: usize) -> usize {
        index
    }

    /// Inputs and targets of several samples: those of [`get`](Self::get), stacked, unless that can be had in one
    /// go.
    ///
    /// # Errors
    /// Those of `get`, and when the samples' shapes differ.
    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        let mut samples = (Vec::with_capacity(indices.len()), Vec::with_capacity(indices.len()));
        for &index in indices {
            let (input, target) = self.get(index)?;
            samples.0.push(input);
            samples.1.push(target);
        }
        Ok((Tensor::f_stack(&samples.0, 0)?, Tensor::f_stack(&samples.1, 0)?))
    }

    /// All inputs and targets on `device`, if they are there or fit there: a loader then picks from them without
    /// asking for each batch.
    ///
    /// # Errors
    /// [`Error::Torch`] when they can't be copied there.
    fn resident(&self, device: Device) -> Result<Option<(Tensor, Tensor)>> {
        let _ = device;
        Ok(None)
    }
}

/// Samples with their targets as two tensors, whose first dimension counts the samples. Follows
/// `torch.utils.data.TensorDataset`.
///
/// Shared by all ranks: wrap it in an [`Arc`](std::sync::Arc) and let the rank function capture that.
#[derive(Debug)]
pub struct TensorDataset {
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

impl TensorDataset {
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

    /// Never: there is at least one sample.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// All inputs and targets on `device`, which all ranks there share: read them only.
    fn on(&self, device: Device) -> Result<(Tensor, Tensor)> {
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

impl Dataset for TensorDataset {
    fn len(&self) -> usize {
        TensorDataset::len(self)
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let (inputs, targets) = self.samples.handles();
        let index = index as i64;
        Ok((inputs.f_get(index)?.f_detach_copy()?, targets.f_get(index)?.f_detach_copy()?))
    }

    /// One gather.
    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let indices = Tensor::f_from_slice(&indices)?;
        let (inputs, targets) = self.samples.handles();
        Ok((inputs.f_index_select(0, &indices)?, targets.f_index_select(0, &indices)?))
    }

    /// Always there.
    fn resident(&self, device: Device) -> Result<Option<(Tensor, Tensor)>> {
        self.on(device).map(Some)
    }
}
