//! Data parallelism: the same model on every rank, kept the same by averaging gradients.

mod bucket;
mod parameters;
mod reducer;

use std::fmt;
use std::rc::Rc;

use tch::nn::{Module, VarStore};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::optim::FlatBuffer;
use crate::process_group::ProcessGroup;
use parameters::{NamedTensor, named_tensors};
use reducer::Reducer;

pub use parameters::parameters_hash;

/// How gradients are put into buckets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DdpOptions {
    /// A bucket is full when it holds this much, in MiB. PyTorch's `bucket_cap_mb`.
    pub bucket_cap_mb: f64,
    /// The first bucket is full when it holds this much, in MiB: its gradients come first out of the
    /// backward pass, and a small bucket can be on its way early.
    pub first_bucket_mb: f64,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self { bucket_cap_mb: 25.0, first_bucket_mb: 1.0 }
    }
}

/// A model that is trained on all ranks at once.
///
/// Follows `torch.nn.parallel.DistributedDataParallel`. What it does, in order:
///
/// 1. At construction it compares the models of all ranks, copies rank 0's parameters and buffers to
///    all, and moves the parameters into flat buffers ("buckets"), each with a twin for its gradients:
///    every parameter and its `grad` are views, so backward writes straight into the buckets.
/// 2. [`forward`](Self::forward) is the model's own.
/// 3. [`backward`](Self::backward) runs autograd, and then sums each bucket of gradients over the ranks,
///    divided by their number: the mean over the ranks of each rank's gradient.
/// 4. Every rank makes the same optimizer step with the same numbers, and stays the same.
///
/// Buffers are copied from rank 0 at construction only: those that a model changes in training, such as
/// the running statistics of a batch norm, are each rank's own from then on.
///
/// With equal batches and a mean loss that mean is the gradient of the whole batch; when ranks have
/// batches of different sizes it is not, here as in PyTorch.
///
/// Zero gradients with [`zero_grad`](Self::zero_grad), which takes one call a bucket. The one of tch's
/// optimizers would drop them, which libtorch refuses for views.
pub struct DistributedDataParallel<M> {
    module: M,
    group: Rc<ProcessGroup>,
    reducer: Reducer,
    tensors: Vec<NamedTensor>,
}

impl<M> fmt::Debug for DistributedDataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("group", &self.group)
            .field("parameters", &self.num_parameters())
            .field("buckets", &self.reducer.buckets().len())
            .finish_non_exhaustive()
    }
}

impl<M> DistributedDataParallel<M> {
    /// Wraps `module`, whose parameters and buffers are in `vs`, on this rank's device. A collective:
    /// every rank must call it, with the same model.
    ///
    /// The values that the parameters have on rank 0 count; on other ranks they are overwritten.
    ///
    /// # Errors
    /// [`Error::ModelMismatch`] when this rank's model differs from rank 0's; it names the first
    /// difference. [`Error::Input`] when the model has nothing to train or is on another device. And
    /// those of [`ProcessGroup::broadcast`].
    pub fn new(
        module: M,
        vs: &VarStore,
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        let tensors = named_tensors(vs)?;
        if tensors.iter().all(|t| !t.trainable) {
            return Err(Error::Input("the model has no parameters to train".into()));
        }
        parameters::compare(&tensors, &group)?;
        let parameters: Vec<&NamedTensor> = tensors.iter().filter(|t| t.trainable).collect();
        let mut reducer = Reducer::new(&parameters, options)?;
        for bucket in reducer.buckets_mut() {
            group.broadcast(&mut bucket.parameters, 0)?;
        }
        for buffer in tensors.iter().filter(|t| !t.trainable) {
            tch::no_grad(|| group.broadcast(&mut buffer.tensor.shallow_clone(), 0))?;
        }
        Ok(Self { module, group, reducer, tensors })
    }

    /// The wrapped model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The ranks that it is trained on.
    pub fn group(&self) -> &Rc<ProcessGroup> {
        &self.group
    }

    /// How many numbers are trained.
    pub fn num_parameters(&self) -> usize {
        self.tensors.iter().filter(|t| t.trainable).map(|t| t.tensor.numel()).sum()
    }

    /// Parameters and gradients as flat buffers, one a bucket, in the order in which they are reduced:
    /// what an optimizer steps.
    pub fn flat_buffers(&self) -> Vec<FlatBuffer> {
        let handles = |bucket: &reducer::Bucket| FlatBuffer {
            parameters: bucket.parameters.shallow_clone(),
            gradients: bucket.gradients.shallow_clone(),
        };
        self.reducer.buckets().iter().map(handles).collect()
    }

    /// Sets all gradients to zero, in place.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.reducer.zero_grad()
    }

    /// Computes the gradients of `loss` and averages them over all ranks. A collective.
    ///
    /// Gradients add up until [`zero_grad`](Self::zero_grad), as in PyTorch. A parameter that `loss` does
    /// not depend on contributes zeros.
    ///
    /// # Errors
    /// [`Error::Torch`], [`Error::Input`] when a parameter's `grad` has been replaced, and those of [`ProcessGroup::all_reduce`].
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        loss.f_backward().map_err(Error::torch("backward"))?;
        self.reducer.reduce(&self.group)
    }

    /// 64 bits over the names, shapes and values of all parameters and buffers; equal on two ranks that
    /// hold the same model. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Torch`], and those of [`ProcessGroup::synchronize`].
    pub fn parameters_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        parameters::hash(&self.tensors)
    }
}

impl<M: Module> DistributedDataParallel<M> {
    /// The model's own forward pass.
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        self.module.forward(inputs)
    }
}

/// How many bytes a MiB cap is.
fn mib(cap: f64) -> usize {
    (cap * f64::from(1 << 20)) as usize
}

/// How many elements of `kind` fill a cache line: where each parameter starts in its bucket, as if it had
/// been allocated alone, so that kernels take the same vector paths and give the same bits.
fn elements_per_line(kind: Kind) -> usize {
    64 / kind.elt_size_in_bytes()
}
