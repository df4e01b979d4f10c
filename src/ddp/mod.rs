//! Data parallelism: every rank holds a replica of the model, and averaged gradients keep the replicas identical.

mod backward;
mod bucket;
mod comm_hooks;
mod data_parallel;
mod grad_probe;
mod hook_state;
mod join;
mod layout;
mod order;
mod parameters;
mod power_sgd;
mod reduce_path;
mod reducer;
mod strategy;
mod timings;
mod turn;
mod unused;
mod weight;

use std::cell::Cell;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;
use std::time::Duration;

use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};
use xxhash_rust::xxh3::xxh3_64;

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::set_grad;
use crate::optim::{FlatBuffer, clip_grad_norm};
use crate::process_group::ProcessGroup;
use crate::records::Parameter;
use parameters::NamedTensor;
use reducer::Reducer;
use timings::BackwardTimings;

pub use backward::{Averaged, BackwardOptions, backward};
pub use comm_hooks::{BucketParameter, CommHook, Compress, GradBucket, hook_fn};
pub use data_parallel::DataParallel;
pub(crate) use grad_probe::GradProbe;
pub use hook_state::{CommHookRecord, CommHookState, SavedCommHook};
pub use join::JoinOptions;
pub(crate) use parameters::bytes_of;
pub use parameters::{parameters_hash, state_dict};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use strategy::Strategy;

/// The options of [`DistributedDataParallel`], with PyTorch's names and defaults.
///
/// PyTorch's `gradient_as_bucket_view` is always on: each gradient is a view of its bucket, so no copy is needed.
#[derive(Debug, Clone, PartialEq)]
pub struct DdpOptions {
    /// Capacity of a bucket, in MiB. PyTorch's `bucket_cap_mb`.
    pub bucket_cap_mb: f64,
    /// Capacity of the first bucket, in MiB. Its gradients are the first that backward completes, and a small bucket
    /// can be reduced early.
    pub first_bucket_mb: f64,
    /// Copy rank 0's parameters and buffers to all ranks at construction. If false, the caller guarantees that they are
    /// identical.
    pub init_sync: bool,
    /// Copy rank 0's buffers, such as a batch norm's running statistics, to all ranks with every backward that
    /// averages. PyTorch does it before the next forward; only the state after the last step differs. Within
    /// [`join`](DistributedDataParallel::join) the buffers are copied at its end instead.
    pub broadcast_buffers: bool,
    /// The capacity of each bucket in order, in MiB; the last value applies to all further buckets. Replaces
    /// `bucket_cap_mb` and `first_bucket_mb` unless it is empty. PyTorch's `bucket_cap_mb_list`.
    pub bucket_cap_mb_list: Vec<f64>,
    /// Allow a loss that does not depend on some parameters; these contribute zeros. A parameter that no rank has used
    /// since [`zero_grad`](DistributedDataParallel::zero_grad) has no gradient, and optimizers skip it. Costs a small
    /// collective per step. Without this option unused parameters are [`Error::UnusedParameters`].
    pub find_unused_parameters: bool,
    /// Skip buckets in which a step uses no parameter. Every rank must leave out the same parameters in the same steps,
    /// otherwise their collectives differ. Requires `find_unused_parameters` or `static_graph`, and makes buckets be
    /// reduced after backward. PyTorch's `skip_all_reduce_unused_params`.
    pub skip_all_reduce_unused_params: bool,
    /// The loss depends on the same parameters in every step. Parameters that the first step does not use may stay
    /// unused in all steps, at no further cost.
    pub static_graph: bool,
    /// Reduce buckets during backward. `None` enables it where it is faster (with `nccl` and between processes) and all
    /// ranks are sure to use the same parameters. Apex called the opposite `delay_allreduce`. Must be the same on all
    /// ranks.
    pub overlap: Option<bool>,
    /// Names of parameters and buffers to ignore: they are not compared, copied or averaged, and are not in
    /// [`flat_buffers`](DistributedDataParallel::flat_buffers). Each rank keeps its own values and gradients. Follows
    /// `_set_params_and_buffers_to_ignore_for_model`.
    pub ignore: Vec<String>,
}

impl DdpOptions {
    /// Returns the capacities of the buckets in order, in bytes.
    fn bucket_caps(&self) -> Vec<usize> {
        match &self.bucket_cap_mb_list[..] {
            [] => vec![mib(self.first_bucket_mb), mib(self.bucket_cap_mb)],
            caps => caps.iter().copied().map(mib).collect(),
        }
    }
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            init_sync: true,
            broadcast_buffers: true,
            bucket_cap_mb_list: Vec::new(),
            find_unused_parameters: false,
            skip_all_reduce_unused_params: false,
            static_graph: false,
            overlap: None,
            ignore: Vec::new(),
        }
    }
}

/// Statistics of the backward passes that averaged on one rank; times are means per backward. Follows
/// `_get_ddp_logging_data`.
#[derive(Debug, Clone, PartialEq)]
pub struct DdpStatistics {
    /// Size of each bucket, in bytes.
    pub bucket_bytes: Vec<usize>,
    /// Duration of backward with its reductions, in microseconds. On a GPU, the time to launch them.
    pub backward_us: f64,
    /// Time that the rank, its communication thread or its GPU spent reducing or waiting for others, in microseconds.
    pub communication_us: f64,
    /// Fraction of `communication_us` that had passed when autograd ended, from 0 to 1.
    pub overlapped: f64,
    /// Fraction of `communication_us` that ran beside autograd on the communication thread or the GPU, from 0 to 1. It
    /// is 0 where the rank itself reduces during backward.
    pub hidden: f64,
}

impl DdpStatistics {
    fn new(times: BackwardTimings, bucket_bytes: Vec<usize>) -> Self {
        let mean = |time: Duration| time.as_secs_f64() / f64::from(times.count.max(1));
        let communication = mean(times.communication + times.beside);
        let share = |of: f64| if communication == 0.0 { 0.0 } else { of / communication };
        Self {
            bucket_bytes,
            backward_us: mean(times.total) * 1e6,
            communication_us: communication * 1e6,
            overlapped: share(mean(times.overlapped + times.beside)),
            hidden: share(mean(times.beside)),
        }
    }
}

/// A guard: gradients stay on their rank until it is dropped. From [`DistributedDataParallel::no_sync`].
#[derive(Debug)]
#[must_use = "gradients are averaged again when it is dropped"]
pub struct NoSync {
    depth: Rc<Cell<u32>>,
}

impl NoSync {
    fn new(depth: &Rc<Cell<u32>>) -> Self {
        depth.set(depth.get() + 1);
        Self { depth: depth.clone() }
    }
}

impl Drop for NoSync {
    fn drop(&mut self) {
        self.depth.set(self.depth.get() - 1);
    }
}

/// A model that all ranks train together. Each rank has a replica, and gradients are averaged.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::prelude::*;
/// use tch::nn::{self, VarStore};
///
/// let hashes = spawn(2, |rank| {
///     let group = rank.init_process_group(rank.backend())?;
///     let vs = VarStore::new(rank.device());
///     let model = nn::linear(vs.root(), 3, 1, Default::default()); // other values on each rank
///     let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?; // those of rank 0
///     let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
///     let samples = Tensor::full([4, 3], rank.rank() as f64, (Kind::Float, rank.device()));
///     ddp.zero_grad()?;
///     let loss = ddp.forward(&samples).square().mean(Kind::Float);
///     ddp.backward(&loss)?;
///     optimizer.step(0.1)?;
///     Ok(ddp.parameters_hash()?)
/// })?;
/// assert_eq!(hashes[0], hashes[1]);
/// # Ok(())
/// # }
/// ```
///
/// Follows `torch.nn.parallel.DistributedDataParallel`. Its steps, in order:
///
/// 1. At construction it compares the models of all ranks and copies rank 0's parameters and buffers to all. It moves
///    the parameters into flat buffers ("buckets"), each with a twin for its gradients. Every parameter and its `grad`
///    are views; backward's gradients are moved there.
/// 2. [`forward`](Self::forward) runs the model's own forward pass.
/// 3. [`backward`](Self::backward) runs autograd. Hooks report each complete gradient. A bucket with all of its
///    gradients is summed over the ranks and divided by their number. With `nccl` this happens during backward.
/// 4. Every rank makes the same optimizer step with the same numbers, so the replicas stay identical.
///
/// With batches of equal size and a mean loss, the average is the gradient of the whole batch. With batches of
/// different sizes it is not, as in PyTorch: see [`backward_weighted`](Self::backward_weighted).
///
/// Zero gradients with [`zero_grad`](Self::zero_grad). The `zero_grad` of tch's optimizers fills them with zeros
/// (`set_to_none=False`), which takes longer. The `backward_step` of tch's optimizers is refused, because it would not
/// average.
///
/// The type is `!Send`, like its group: it stays on its rank's thread.
pub struct DistributedDataParallel<M> {
    module: M,
    group: Rc<ProcessGroup>,
    reducer: Reducer,
    tensors: Vec<NamedTensor>,
    options: DdpOptions,
    /// The number of live [`NoSync`] guards.
    no_sync: Rc<Cell<u32>>,
}

impl<M> fmt::Debug for DistributedDataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("group", &self.group)
            .field("parameters", &self.num_parameters())
            .field("reducer", &self.reducer)
            .finish_non_exhaustive()
    }
}

impl<M> DistributedDataParallel<M> {
    /// Wraps `module`, whose parameters and buffers are in `vs`, on this rank's device. A collective:
    /// every rank must call it, with the same model.
    ///
    /// Rank 0's values are used; those on other ranks are overwritten.
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
        let tensors = parameters::same_on_all_ranks(vs, &options, &group)?;
        let parameters: Vec<&NamedTensor> = parameters::trained(&tensors).collect();
        let reducer = Reducer::new(&parameters, group.clone(), options.clone())?;
        let ddp = Self { module, group, reducer, tensors, options, no_sync: Rc::default() };
        if ddp.options.init_sync {
            ddp.sync_from(0)?;
        }
        Ok(ddp)
    }

    /// Averages gradients with `hook` from now on. Follows `register_comm_hook`. Every rank must call it, with
    /// the same hook.
    ///
    /// # Errors
    /// [`Error::Input`] when a hook is registered already.
    pub fn register_comm_hook(&mut self, hook: Box<dyn CommHook>) -> Result<()> {
        self.reducer.set_comm_hook(hook)
    }

    /// Returns a guard for gradient accumulation: until it is dropped, [`backward`](Self::backward) adds up gradients
    /// on this rank and does not average. The backward of the last batch must run after the drop, and averages the sum.
    /// Follows `no_sync`.
    pub fn no_sync(&self) -> NoSync {
        NoSync::new(&self.no_sync)
    }

    /// Returns the bucket of each parameter: [`Strategy::parameter_places`].
    pub(crate) fn parameter_places(&self) -> Vec<Parameter> {
        self.reducer.parameter_places()
    }

    /// Returns the total time that this rank has spent reducing gradients or waiting for other ranks to.
    pub(crate) fn communication_time(&self) -> Duration {
        self.reducer.times().communication
    }

    /// Returns the time from the start of the last backward to the completion of each bucket, without reductions; on a
    /// GPU, the time to launch it. `None` for a bucket that lacked a gradient.
    pub(crate) fn bucket_times(&self) -> Vec<Option<Duration>> {
        self.reducer.bucket_times()
    }

    /// Returns statistics over every [`backward`](Self::backward) so far that averaged.
    pub fn statistics(&self) -> DdpStatistics {
        let times = self.reducer.times();
        let statistics = DdpStatistics::new(times, self.reducer.bucket_bytes());
        match self.group().gpu_seconds().filter(|it| it.beside > 0.0) {
            Some(gpu) => DdpStatistics {
                communication_us: gpu.beside * 1e6 / f64::from(times.count.max(1)),
                overlapped: gpu.hidden(),
                hidden: gpu.hidden(),
                ..statistics
            },
            None => statistics,
        }
    }

    /// Returns the wrapped model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns the group of ranks that train the model.
    pub fn group(&self) -> &Rc<ProcessGroup> {
        &self.group
    }

    /// Returns the number of trained elements over all parameters.
    pub fn num_parameters(&self) -> usize {
        parameters::trained(&self.tensors).map(|t| t.tensor.numel()).sum()
    }

    /// Returns parameters and gradients as flat buffers for an optimizer, one per dtype. The buckets are ranges of
    /// these buffers.
    pub fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.reducer.flat_buffers()
    }

    /// Removes all gradients, as PyTorch's `zero_grad` does by default (`set_to_none`). Until the next
    /// [`backward`](Self::backward) an optimizer's step does nothing.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn zero_grad(&mut self) -> Result<()> {
        let ignored = self.tensors.iter().filter(|it| it.is_ignored && !it.is_buffer);
        ignored.map(|it| &it.tensor).try_for_each(|it| set_grad(it, &Tensor::new()))?;
        self.reducer.zero_grad()
    }

    /// Computes the gradients of `loss` and averages them over all ranks. A collective. tch's own [`Tensor::backward`]
    /// fails on such a loss, because it has no way to return the errors of the averaging. For a loss that depends on
    /// several wrapped models call [`ddp::backward`](backward()).
    ///
    /// Gradients add up until [`zero_grad`](Self::zero_grad), as in PyTorch. The first backward that averages rebuilds
    /// the buckets in the order in which rank 0's gradients became ready.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`], [`Error::Torch`], [`Error::Input`] when a parameter's `grad` has been
    /// replaced, and those of [`ProcessGroup::all_reduce`], which may happen in the model's own
    /// backward pass as well.
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// Runs [`backward`](Self::backward) with options.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward).
    #[track_caller]
    pub fn backward_with(&mut self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        backward::run(loss, &[self], options, Location::caller())
    }

    /// Scales the averaged gradients so that their total 2-norm is at most `max_norm`. Returns the norm before scaling.
    /// Call it between [`backward`](Self::backward) and the optimizer's step.
    ///
    /// Follows `torch.nn.utils.clip_grad_norm_`. All ranks have the same averaged gradients, so each computes the same
    /// norm without communication.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm(&self.flat_buffers(), max_norm)
    }

    /// Returns parameters and buffers by name, as views and not copies. Follows the `state_dict` of the wrapped module.
    pub fn state_dict(&self) -> Vec<(String, Tensor)> {
        parameters::by_name(&self.tensors)
    }

    /// Returns a 64-bit hash of the names, shapes and values of all parameters and buffers. Equal on ranks that hold
    /// the same model. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Torch`], and those of [`ProcessGroup::synchronize`].
    pub fn parameters_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        parameters::hash(&self.tensors)
    }

    /// Returns a 64-bit hash of the values of all parameters, which must be defined.
    pub(crate) fn replica_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        let each = self.tensor_hashes(false)?.into_iter();
        Ok(xxh3_64(&each.flat_map(|(_, hash)| hash.to_le_bytes()).collect::<Vec<_>>()))
    }

    /// Returns the names of all parameters, and of buffers if wanted, with a 64-bit hash of the values of each, which
    /// must be defined.
    pub(crate) fn tensor_hashes(&self, buffers: bool) -> Result<Vec<(String, u64)>> {
        parameters::hash_each(&self.tensors, buffers)
    }
}

impl<M: ModuleT> DistributedDataParallel<M> {
    /// Runs the model's own forward pass in training mode.
    #[track_caller]
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        self.forward_t(inputs, true)
    }

    /// Runs the model's own forward pass, in training or evaluation mode. PyTorch selects the mode with `model.train()`
    /// and `model.eval()`.
    #[track_caller]
    pub fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        if train {
            self.group.enter_forward(inputs);
        }
        self.module.forward_t(inputs, train)
    }
}

/// Converts a capacity from MiB to bytes.
fn mib(cap: f64) -> usize {
    (cap * f64::from(1 << 20)) as usize
}

/// Returns the number of elements of `kind` that fill a cache line. Each parameter starts at a multiple of that in its
/// bucket, as if it were allocated alone. Kernels then take the same vector paths and give the same bits.
fn elements_per_line(kind: Kind) -> usize {
    64 / kind.elt_size_in_bytes()
}
