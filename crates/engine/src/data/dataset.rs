//! Data sets: samples with targets. All ranks of a process share one copy in memory.

use std::fmt;
use std::sync::Arc;

use anyhow::Context;
use parking_lot::Mutex;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::{Error, Result};
use crate::ffi::cuda::record_stream;
use crate::ffi::{SharedTensor, TorchResult, fork_rng};
use crate::runtime::panics;

/// The sort of targets that a model predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// Numbers. The field is how many each sample has.
    Values(i64),
    /// One class per sample. The field is the number of classes.
    Classes(i64),
}

/// Samples, accessed by index. For your own data use [`TensorDataset`], or implement this trait.
///
/// Follows `torch.utils.data.Dataset` (map-style). All ranks, and all workers of their loaders, share one data set.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
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
    /// Returns the number of samples, which must not change.
    fn len(&self) -> usize;

    /// Returns whether there are no samples. Loaders reject an empty data set.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the inputs and the target of sample `index`, on the CPU. Shapes and dtypes are the same for all samples.
    ///
    /// # Errors
    /// Any error that prevents reading the sample. It ends the run.
    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)>;

    /// Returns the number of sample `index` in its source, for messages. It differs from `index` only for a part of
    /// another data set.
    fn source_index(&self, index: usize) -> usize {
        index
    }

    /// Returns the inputs and targets of several samples. The default stacks the results of [`get`](Self::get).
    ///
    /// # Errors
    /// The errors of `get`, and an error if the samples' shapes differ.
    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        let sample = |&index: &usize| {
            let sample = panics::in_closure("the data set", || self.get(index));
            let sample = sample.map_err(anyhow::Error::from).and_then(|sample| sample);
            sample.with_context(|| format!("sample {index}"))
        };
        let samples = indices.iter().map(sample).collect::<anyhow::Result<Vec<_>>>()?;
        let (inputs, targets): (Vec<Tensor>, Vec<Tensor>) = samples.into_iter().unzip();
        Ok((Tensor::f_stack(&inputs, 0)?, Tensor::f_stack(&targets, 0)?))
    }

    /// Returns the further inputs of several samples, for a model of [several inputs](crate::models::Forward): one
    /// tensor for each input after the first, with the samples in its first dimension. Empty by default.
    ///
    /// # Errors
    /// Any error that prevents reading the samples. It ends the run.
    fn more_inputs(&self, indices: &[usize]) -> anyhow::Result<Vec<Tensor>> {
        let _ = indices;
        Ok(Vec::new())
    }

    /// Returns all inputs and targets on `device`, if the data set keeps them there. A loader then picks batches from
    /// them and does not call [`batch`](Self::batch), unless the samples have [more inputs](Self::more_inputs). `None` by
    /// default.
    ///
    /// # Errors
    /// [`Error::Torch`] if they cannot be copied there.
    fn resident(&self, device: Device) -> Result<Option<(Tensor, Tensor)>> {
        let _ = device;
        Ok(None)
    }
}

/// Inputs and targets as two tensors, whose first dimension is the samples. Follows
/// `torch.utils.data.TensorDataset`.
///
/// To share it between ranks, wrap it in an [`Arc`] that the rank function captures.
#[derive(Debug)]
pub struct TensorDataset {
    samples: Samples,
    /// One copy per GPU, made by the first rank that uses the GPU.
    copies: Mutex<Vec<(Device, Samples)>>,
}

/// The inputs and targets of samples, a row of each for every sample. Clones have the same memory.
#[derive(Debug, Clone)]
pub(super) struct Samples {
    inputs: Arc<SharedTensor>,
    targets: Arc<SharedTensor>,
}

impl Samples {
    pub(super) fn new(inputs: Tensor, targets: Tensor) -> Self {
        let share = |tensor| Arc::new(SharedTensor::new(tensor));
        Self { inputs: share(inputs), targets: share(targets) }
    }

    /// Returns all inputs and targets, to read only.
    pub(super) fn handles(&self) -> (Tensor, Tensor) {
        (self.inputs.get(), self.targets.get())
    }

    pub(super) fn len(&self) -> usize {
        self.inputs.get().size()[0] as usize
    }

    /// Returns the first `count` samples of the data set `name`. Errors call them `what`.
    ///
    /// # Errors
    /// [`Error::Input`] for 0, and for more samples than there are.
    pub(super) fn first(&self, count: usize, name: &str, what: &str) -> Result<Self> {
        let there = self.len();
        if count == 0 || count > there {
            return Err(Error::usage(format!(
                "{name} has {there} {what}, and {count} are asked for; use a number from 1 to {there}"
            )));
        }
        self.part(0, count)
    }

    /// Returns `len` samples from sample `first` on, without a copy.
    pub(super) fn part(&self, first: usize, len: usize) -> Result<Self> {
        let part = |tensor: Tensor| tensor.f_narrow(0, first as i64, len as i64).doing("narrow");
        let (inputs, targets) = self.handles();
        Ok(Self::new(part(inputs)?, part(targets)?))
    }

    /// Gathers some samples, in one call per tensor.
    pub(super) fn gathered(&self, indices: &[usize]) -> Result<(Tensor, Tensor), TchError> {
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let indices = Tensor::f_from_slice(&indices)?;
        let (inputs, targets) = self.handles();
        Ok((inputs.f_index_select(0, &indices)?, targets.f_index_select(0, &indices)?))
    }
}

impl TensorDataset {
    /// Creates a data set from `inputs` and `targets` on the CPU, with the same number of samples.
    ///
    /// # Errors
    /// [`Error::Input`] if there are no samples, or if the numbers of inputs and targets differ.
    pub fn new(inputs: Tensor, targets: Tensor) -> Result<Self> {
        let count = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
        let (samples, labels) = (count(&inputs), count(&targets));
        if samples == 0 || samples != labels {
            return Err(Error::mismatch(format!(
                "a data set needs as many targets as inputs, and at least one; got {samples} inputs \
                 and {labels} targets"
            )));
        }
        Ok(Self { samples: Samples::new(inputs, targets), copies: Mutex::default() })
    }

    /// Creates random data: inputs uniform in \[0, 1), of shape `num_samples` x `in_features`, with uniform targets
    /// (or uniform classes). The numbers are those of PyTorch after `torch.manual_seed(seed)`:
    /// `torch.rand(num_samples, in_features)` and then `torch.rand(num_samples, values)` (or
    /// `torch.randint(classes, (num_samples,))`).
    ///
    /// # Errors
    /// [`Error::Torch`] if the data does not fit into memory.
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
        let (inputs, targets) = fork_rng(seed, draw)?.doing("making the random data set")?;
        Self::new(inputs, targets)
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Returns `false`: there is at least one sample.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns all inputs and targets on `device`. All ranks on the device share them; do not write to them.
    fn on(&self, device: Device) -> Result<(Tensor, Tensor)> {
        if device == Device::Cpu {
            return Ok(self.samples.handles());
        }
        let mut copies = self.copies.lock();
        let known = copies.iter().position(|(known, _)| *known == device);
        if known.is_none() {
            // The host waits for the copies, so that other ranks' streams need not.
            let copy = |tensor: Tensor| {
                tensor.f_to_device(device).doing("copying the data set to the GPU")
            };
            let (inputs, targets) = self.samples.handles();
            copies.push((device, Samples::new(copy(inputs)?, copy(targets)?)));
        }
        let (inputs, targets) = copies[known.unwrap_or(copies.len() - 1)].1.handles();
        record_stream(&inputs)?;
        record_stream(&targets)?;
        Ok((inputs, targets))
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

    /// Gathers all samples in one call per tensor.
    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        Ok(self.samples.gathered(indices)?)
    }

    /// Always returns the samples.
    fn resident(&self, device: Device) -> Result<Option<(Tensor, Tensor)>> {
        self.on(device).map(Some)
    }
}
