//! [`DistributedDataParallel`]: a model that all ranks train together.

use std::fmt;
use std::ops::Deref;
use std::panic::Location;
use std::rc::Rc;

use tch::Tensor;
use tch::nn::VarStore;
use xxhash_rust::xxh3::xxh3_64;

use super::backward::sealed::Sealed;
use super::backward::{self, Averaged, BackwardOptions};
use super::broadcast::{sync_buffers, sync_module_states};
use super::comm_hooks::CommHook;
use super::options::DdpOptions;
use super::parameters;
use super::reducer::Reducer;
use super::replica::Replica;
use super::statistics::DdpStatistics;
use crate::error::{Error, Result};
use crate::ffi::remove_grad;
use crate::optim::{FlatBuffer, average_gradients, clip_grad_norm};
use crate::process_group::ProcessGroup;

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
///    the parameters into flat buffers, and makes a second buffer for the gradients of each. Buckets are ranges of
///    these. Each parameter and its `grad` are views; backward's gradients are moved there. CPU ranks of one process
///    leave large parameters and gradients where they are.
/// 2. [`forward`](Replica::forward) runs the model's own forward pass.
/// 3. [`backward`](Self::backward) runs autograd. Hooks report each complete gradient. A bucket with all of its
///    gradients is averaged: each rank's is multiplied by 1/N, and the sum goes to all. With `nccl`, and between
///    processes, this happens during backward.
/// 4. Every rank makes the same optimizer step with the same numbers, so the replicas stay identical. With
///    [`share_model`](DdpOptions::share_model) there is one copy, and each rank steps a part of it. With
///    [`zero`](DdpOptions::zero) each rank updates its partitions of the parameters, which the others then copy.
///
/// With batches of equal size and a mean loss, the average is the gradient of the whole batch. With batches of
/// different sizes it is not, as in PyTorch: see [`backward_weighted`](Self::backward_weighted).
///
/// Zero gradients with [`zero_grad`](Self::zero_grad). The `zero_grad` of tch's optimizers only removes each parameter's
/// `grad`; large gradients then keep their memory until the next backward. The `backward_step` of tch's optimizers is refused, because it would not
/// average.
///
/// The type is `!Send`, like its group: it stays on its rank's thread.
pub struct DistributedDataParallel<M> {
    replica: Replica<M>,
    pub(super) reducer: Reducer,
    pub(super) options: DdpOptions,
}

impl<M> fmt::Debug for DistributedDataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("replica", &self.replica)
            .field("reducer", &self.reducer)
            .finish_non_exhaustive()
    }
}

impl<M> Deref for DistributedDataParallel<M> {
    type Target = Replica<M>;

    fn deref(&self) -> &Replica<M> {
        &self.replica
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
    /// difference. [`Error::InvalidInput`] when the model has nothing to train or is on another device. And
    /// the errors of [`ProcessGroup::broadcast`].
    pub fn new(
        module: M,
        vs: &VarStore,
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        if options.share_model && options.zero {
            return Err(Error::InvalidInput(
                "zero cannot be used with share_model: the ranks of a process then share one optimizer state; leave \
                 one out"
                    .into(),
            ));
        }
        let replica = Replica::new(module, vs, group.clone(), &options)?;
        let reducer = Reducer::new(&replica.trained(), group, options.clone())?;
        let ddp = Self { replica, reducer, options };
        if ddp.options.init_sync {
            ddp.sync_module_states(0)?;
        }
        if ddp.options.share_model {
            ddp.reducer.share_parameters()?;
        }
        Ok(ddp)
    }

    /// Copies the parameters and buffers of rank `src` to all ranks. A collective.
    pub(super) fn sync_module_states(&self, src: usize) -> Result<()> {
        sync_module_states(&self.flat_buffers(), &self.tensors, &self.group, src)
    }

    /// Averages gradients with `hook` from now on. Follows `register_comm_hook`. Every rank must call it, with
    /// the same hook.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when a hook is registered already.
    pub fn register_comm_hook(&mut self, hook: Box<dyn CommHook>) -> Result<()> {
        self.reducer.set_comm_hook(hook)
    }

    /// Returns statistics over every [`backward`](Self::backward) so far that averaged.
    pub fn statistics(&self) -> DdpStatistics {
        let times = self.reducer.state().times;
        let statistics = DdpStatistics::new(times, self.reducer.bucket_bytes());
        match self.group().gpu_seconds().filter(|gpu| gpu.side_streams > 0.0) {
            Some(gpu) => DdpStatistics {
                communication_us: gpu.side_streams * 1e6 / f64::from(times.count.max(1)),
                overlapped: gpu.hidden(),
                hidden: gpu.hidden(),
                ..statistics
            },
            None => statistics,
        }
    }

    /// Returns parameters and gradients as flat buffers for an optimizer: one per dtype, and one for each large parameter
    /// whose gradient stays where autograd puts it. Buckets are made of ranges of these buffers.
    pub fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.reducer.state().layout.flat_buffers()
    }

    /// Removes all gradients, as PyTorch's `zero_grad` does by default (`set_to_none`). Until the next
    /// [`backward`](Self::backward) an optimizer's step does nothing.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn zero_grad(&mut self) -> Result<()> {
        let ignored = self.tensors.iter().filter(|named| named.is_ignored && !named.is_buffer);
        ignored.map(|named| &named.tensor).try_for_each(remove_grad)?;
        self.reducer.zero_grad()
    }

    /// Computes the gradients of `loss` and averages them over all ranks. A collective. tch's own [`Tensor::backward`]
    /// fails on such a loss, because it has no way to return the errors of the averaging. For a loss that depends on
    /// several wrapped models call [`ddp::backward`](super::backward()).
    ///
    /// Gradients add up until [`zero_grad`](Self::zero_grad), as in PyTorch. The first backward that averages rebuilds
    /// the buckets in the order in which rank 0's gradients became ready.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`], [`Error::Torch`], [`Error::InvalidInput`] when a parameter's `grad` has been
    /// replaced, and the errors of [`ProcessGroup::all_reduce`], which may happen in the model's own
    /// backward pass as well.
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// Runs [`backward`](Self::backward) with options.
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    #[track_caller]
    pub fn backward_with(&mut self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        backward::run(loss, &[self], options, Location::caller())
    }

    /// Computes the gradients of `loss`, the mean loss of `samples` samples, and averages them over the samples of all
    /// ranks. [`backward`](Self::backward) averages over the ranks instead. A collective that all ranks must call.
    ///
    /// With batches of different sizes the mean of the ranks' means is not the mean over all samples. A sample in a
    /// small batch would count more than one in a large batch. Here each rank's gradient is weighted by its number of
    /// samples. N ranks then give the result of one rank on all samples, up to rounding. With equal numbers of samples
    /// the gradients are those of `backward`, to the bit. PyTorch has no such method.
    ///
    /// Within [`no_sync`](Replica::no_sync) the samples add up over the batches, which may also differ in size. Every
    /// batch's `loss` is its own mean, not divided by the number of batches. Gradients that a plain `backward` adds
    /// within `no_sync` count as part of the loss of the first batch with samples.
    ///
    /// A rank without samples passes 0. The gradients of that batch are ignored, even if they are not finite. Within
    /// [`join`](Self::join) a rank that has run out has 0 samples, whatever
    /// [`divide_by_initial_world_size`](super::JoinOptions::divide_by_initial_world_size) says.
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward). [`Error::InvalidInput`] if `samples` is negative or not finite, if
    /// all ranks together have none, or if a communication hook does not
    /// [handle weights](super::CommHook::handles_weights). Also within `no_sync` while the averaged gradients of an earlier step remain. [`Error::Mismatch`] if another rank calls
    /// `backward`.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, spawn};
    /// use tch::{Kind, Tensor, nn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let vs = nn::VarStore::new(rank.device());
    ///     let weight = vs.root().var("weight", &[1], nn::Init::Const(1.0));
    ///     let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
    ///     let batch = if rank.rank() == 0 { vec![1f32, 1.0, 1.0] } else { vec![5.0] };
    ///     let loss = (&weight * Tensor::from_slice(&batch)).mean(Kind::Float);
    ///     ddp.backward_weighted(&loss, batch.len() as f64)?;
    ///     // The mean of 1, 1, 1 and 5; the mean of the ranks' means is 3.
    ///     assert_eq!(weight.grad().double_value(&[0]), 2.0);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn backward_weighted(&mut self, loss: &Tensor, samples: f64) -> Result<()> {
        self.backward_with(loss, BackwardOptions { samples: Some(samples), ..Default::default() })
    }

    /// Runs [`backward_weighted`](Self::backward_weighted) for one batch of a step of `samples` samples. The caller has
    /// divided `loss` by `samples` and multiplied it by the batch's number of samples.
    #[track_caller]
    pub(crate) fn backward_part(&mut self, loss: &Tensor, samples: f64) -> Result<()> {
        self.reducer.set_samples(samples, self.averages())?;
        backward::run(loss, &[self], BackwardOptions::default(), Location::caller())
    }

    /// Returns the averaged gradient of the parameter `name`; `None` if no rank has one. With
    /// [`share_model`](DdpOptions::share_model) or [`zero`](DdpOptions::zero) this is a collective: it calls
    /// [`average_gradients`] first.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the model has no such parameter, and the errors of [`average_gradients`].
    pub fn averaged_grad(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(named) = self.trained().into_iter().find(|named| named.name == name) else {
            return Err(Error::InvalidInput(format!(
                "averaged_grad: the model trains no parameter `{name}`; use a name of its state_dict"
            )));
        };
        average_gradients(&self.flat_buffers())?;
        Ok(Some(named.tensor.grad()).filter(Tensor::defined))
    }

    /// Scales the averaged gradients so that their total 2-norm is at most `max_norm`. Returns the norm before scaling.
    /// Call it between [`backward`](Self::backward) and the optimizer's step.
    ///
    /// Follows `torch.nn.utils.clip_grad_norm_`. All ranks have the same averaged gradients, so each computes the same
    /// norm. With [`share_model`](DdpOptions::share_model) or [`zero`](DdpOptions::zero) this is
    /// a collective: it calls [`average_gradients`] first.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm(&self.flat_buffers(), max_norm)
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

impl<M> Averaged for DistributedDataParallel<M> {}

impl<M> Sealed for DistributedDataParallel<M> {
    fn reducer(&self) -> &Reducer {
        &self.reducer
    }

    fn averages(&self) -> bool {
        self.replica.averages()
    }

    fn broadcast_buffers(&self) -> Result<()> {
        let is_due = self.options.broadcast_buffers && self.reducer.state().joining.is_none();
        if is_due { sync_buffers(&self.tensors, &self.group, 0) } else { Ok(()) }
    }
}
