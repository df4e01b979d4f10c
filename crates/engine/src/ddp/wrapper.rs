//! [`DistributedDataParallel`]: a model that all ranks train together.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;
use std::slice;
use std::time::Duration;

use tch::Tensor;
use tch::nn::VarStore;
use xxhash_rust::xxh3::xxh3_64;

use super::averaging::Averaging;
use super::backward::BackwardOptions;
use super::comm_hooks::{CommHook, average};
use super::layout::Observe;
use super::no_sync::NoSync;
use super::options::DdpOptions;
use super::parameters;
use super::reducer::Reducer;
use super::reducer_state::ReducerState;
use super::statistics::DdpStatistics;
use crate::error::{Error, Result, opaque_debug};
use crate::ffi::remove_grad;
use crate::models::{self, Forward, NamedTensor};
use crate::operation::Operation;
use crate::optim::{FlatBuffer, GradState, average_gradients, clip_grad_norm};
use crate::process_group::ProcessGroup;
use crate::records::Parameter;

/// A model that all ranks train together. Each rank has a replica, and gradients are averaged.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
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
/// 2. [`forward`](Self::forward) runs the model's own forward pass.
/// 3. [`backward`](Self::backward) runs autograd. Hooks report each complete gradient. A bucket with all of its
///    gradients is averaged: each rank's is multiplied by 1/N, and the sum goes to all. With `nccl`, and over a
///    network, this happens during backward.
/// 4. Every rank makes the same optimizer step with the same numbers, so the replicas stay identical. With
///    another [`OptimizerLayout`](crate::OptimizerLayout) each rank steps a part of the parameters.
///
/// With batches of equal size and a mean loss, the average is the gradient of the whole batch. With batches of
/// different sizes it is not, as in PyTorch. Then multiply each rank's loss by `n * R / N` before backward: `n` is the
/// rank's number of samples, `R` the number of ranks, and `N` the number of all ranks' samples.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
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
///     ddp.backward(&(loss * (batch.len() as f64 * 2.0 / 4.0)))?;
///     // The mean of 1, 1, 1 and 5; the mean of the ranks' means is 3.
///     assert_eq!(weight.grad().double_value(&[0]), 2.0);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// Zero gradients with [`zero_grad`](Self::zero_grad). The `zero_grad` of tch's optimizers only removes each parameter's
/// `grad`; large gradients then keep their memory until the next backward. The `backward_step` of tch's optimizers is
/// refused, because it would not average.
///
/// The type is `!Send`, like its group: it stays on its rank's thread.
pub struct DistributedDataParallel<M> {
    module: M,
    pub(super) group: Rc<ProcessGroup>,
    pub(super) tensors: Vec<NamedTensor>,
    /// The number of live [`NoSync`] guards.
    no_sync: Rc<Cell<u32>>,
    /// The outputs of the forward passes in training; `None` unless they are kept.
    kept_outputs: RefCell<Option<Vec<Tensor>>>,
    pub(super) reducer: Reducer,
}

opaque_debug!(DistributedDataParallel<M>, M);

impl<M> DistributedDataParallel<M> {
    /// Wraps `module`, whose parameters and buffers are in `vs`, on this rank's device. A collective:
    /// every rank must call it, with the same model.
    ///
    /// Rank 0's values are used; those on other ranks are overwritten.
    ///
    /// # Errors
    /// [`Error::ModelMismatch`] when this rank's model differs from rank 0's; it names the first
    /// difference. [`Error::Input`] when the model has nothing to train or is on another device. Also
    /// the errors of [`ProcessGroup::broadcast`].
    pub fn new(
        module: M,
        vs: &VarStore,
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        let tensors = parameters::same_on_all_ranks(vs, &options, &group)?;
        let trained: Vec<&NamedTensor> = parameters::trained(&tensors).collect();
        let reducer = Reducer::new(&trained, group.clone(), options)?;
        let (no_sync, kept_outputs) = (Rc::new(Cell::new(0)), RefCell::new(None));
        let ddp = Self { module, group, tensors, no_sync, kept_outputs, reducer };
        if ddp.reducer.state().options.init_sync {
            ddp.sync_module_states(0)?;
        }
        ddp.reducer.state().layout.memory.share()?;
        Ok(ddp)
    }

    /// Returns a guard for gradient accumulation: until it is dropped, `backward` adds up gradients on this rank and
    /// does not average. The backward of the last batch must run after the drop, and averages the sum. Follows
    /// `no_sync`.
    pub fn no_sync(&self) -> NoSync {
        NoSync::new(&self.no_sync)
    }

    /// Keeps a copy of the output of each forward pass in training, until [`take_outputs`](Self::take_outputs).
    pub(crate) fn keep_outputs(&self) {
        *self.kept_outputs.borrow_mut() = Some(Vec::new());
    }

    /// Returns the outputs since [`keep_outputs`](Self::keep_outputs), and keeps no more.
    pub(crate) fn take_outputs(&self) -> Vec<Tensor> {
        self.kept_outputs.take().unwrap_or_default()
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

    /// Returns parameters and buffers by name, as views and not copies. Follows the `state_dict` of the wrapped module.
    pub fn state_dict(&self) -> Vec<(String, Tensor)> {
        models::by_name(&self.tensors)
    }

    /// Returns a 64-bit hash of the names, shapes and values of all parameters and buffers. Equal on ranks that hold
    /// the same model. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Torch`], and the errors of [`ProcessGroup::synchronize`].
    pub fn parameters_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        models::hash(&self.tensors)
    }

    /// Copies the parameters and buffers of rank `src` to all ranks. A collective, which ends before this returns: otherwise
    /// the caller's next copy between host and GPU would wait behind it. Follows `_sync_module_states`.
    pub(super) fn sync_module_states(&self, src: usize) -> Result<()> {
        let flat_buffers = self.flat_buffers();
        let trained = flat_buffers.iter().map(|buffer| &buffer.parameters);
        // Includes parameters that are not trained.
        let rest = self.tensors.iter().filter(|named| !named.trainable && !named.is_ignored);
        self.broadcast(trained.chain(rest.map(|named| &named.tensor)), src)?;
        self.group.await_launched()
    }

    /// Returns the buffers, which a forward pass in training may change.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.iter().filter(|named| named.is_buffer).map(|named| &named.tensor)
    }

    /// Returns whether this rank may have other buffers, or other parameters that are not trained, than rank 0.
    pub(crate) fn has_own_buffers(&self) -> bool {
        let broadcasts = self.reducer.state().options.broadcast_buffers;
        self.tensors.iter().any(|it| it.is_ignored || it.is_buffer && !broadcasts)
    }

    /// Returns whether an optimizer's step changes all parameters in one collective, or none if it fails.
    pub(crate) fn steps_at_once(&self) -> bool {
        self.reducer.state().layout.memory.steps_at_once()
    }

    /// Copies rank 0's buffers to all ranks. A collective. Follows `_sync_buffers`.
    fn sync_buffers(&self) -> Result<()> {
        let buffers = self.tensors.iter().filter(|named| named.is_buffer && !named.is_ignored);
        self.broadcast(buffers.map(|named| &named.tensor), 0)
    }

    fn broadcast<'a>(&self, tensors: impl Iterator<Item = &'a Tensor>, src: usize) -> Result<()> {
        tch::no_grad(|| {
            for tensor in tensors {
                self.group.broadcast(&mut tensor.shallow_clone(), src)?;
            }
            Ok(())
        })
    }

    /// Averages gradients with `hook` from now on. Follows `register_comm_hook`. Every rank must call it, with
    /// the same hook.
    ///
    /// # Errors
    /// [`Error::Input`] when a hook is registered already.
    pub fn register_comm_hook(&mut self, hook: Box<dyn CommHook>) -> Result<()> {
        let mut state = self.reducer.state();
        if let Some(known) = state.averaging.hook() {
            return Err(Error::usage(format!(
                "the communication hook `{}` cannot be registered: `{}` is already registered, and a model has one; \
                 wrap the model again to use another",
                hook.name(),
                known.name()
            )));
        }
        state.averaging = Averaging::with_hook(&state.group, hook)?;
        Ok(())
    }

    /// Returns statistics over every [`backward`](Self::backward) so far that averaged.
    pub fn statistics(&self) -> DdpStatistics {
        let times = self.reducer.state().clock.totals;
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

    /// Returns how often [`backward`](Self::backward) has averaged.
    pub(crate) fn num_averages(&self) -> u32 {
        self.reducer.state().clock.totals.count
    }

    /// Returns the time from the start of the last backward to the completion of each bucket, without reductions; on a
    /// GPU, the time to launch it. `None` for a bucket that lacked a gradient.
    #[doc(hidden)]
    pub fn bucket_times(&self) -> Vec<Option<Duration>> {
        self.reducer.state().clock.bucket_times.clone()
    }

    /// Returns each parameter with its bucket, in the order of their creation.
    #[doc(hidden)]
    pub fn described_parameters(&self) -> Vec<Parameter> {
        self.reducer.state().layout.described()
    }

    /// Returns whether each rank keeps a part of the optimizer's state only.
    pub(crate) fn partitions_optimizer(&self) -> bool {
        self.reducer.state().layout.memory.is_partitioned()
    }

    /// Makes the collectives of a step once, if they are launched on a GPU. All gradients must be zero; they stay so. A
    /// collective.
    ///
    /// NCCL connects and allocates memory at the first call of each algorithm, which follows from the operation and the
    /// size.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`].
    pub(crate) fn warm_up(&self) -> Result<()> {
        let ReducerState { layout, group, averaging, .. } = &mut *self.reducer.state();
        if !group.is_stream_ordered() {
            return Ok(());
        }
        let is_partitioned = layout.memory.is_partitioned();
        for gradients in layout.buckets.iter_mut().flat_map(|bucket| &mut bucket.gradients) {
            averaging.path.run(group, |group| {
                group.all_reduce(gradients, average(group))?;
                if is_partitioned {
                    group.reduce_scatter_in_place(gradients, average(group))?;
                    group.all_gather_in_place(gradients)?;
                }
                Ok(())
            })?;
        }
        averaging.path.wait(group).map(drop)
    }

    /// Returns parameters and gradients as flat buffers for an optimizer: one per dtype, and one for each large parameter
    /// whose gradient stays where autograd puts it. Buckets are made of ranges of these buffers.
    pub fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.reducer.state().layout.memory.flat_buffers()
    }

    /// Removes all gradients, as PyTorch's `zero_grad` does by default (`set_to_none`). Until the next
    /// [`backward`](Self::backward) an optimizer's step does nothing.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn zero_grad(&mut self) -> Result<()> {
        for named in self.tensors.iter().filter(|named| named.is_ignored && !named.is_buffer) {
            remove_grad(&named.tensor)?;
        }
        self.reducer.state().layout.zero_grad()
    }

    /// Computes the gradients of `loss` and averages them over all ranks. A collective. tch's own [`Tensor::backward`]
    /// fails on such a loss, because it has no way to return the errors of the averaging. A loss that depends on several
    /// models needs one wrapper around all of them: their parameters in one `VarStore`.
    ///
    /// Gradients add up until [`zero_grad`](Self::zero_grad), as in PyTorch. The first backward that averages rebuilds
    /// the buckets in the order in which rank 0's gradients became ready.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`], [`Error::Torch`], [`Error::Input`] when the memory of a parameter's `grad`
    /// has been replaced (`set_data`), and the errors of [`ProcessGroup::all_reduce`], which may happen in the model's own
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
        self.group.next_phase(Operation::Backward);
        let averages = self.no_sync.get() == 0;
        let backward = self.reducer.backward(loss, averages, options, Location::caller());
        backward.inspect_err(|_| self.reducer.give_up())?;
        let state = self.reducer.state();
        let broadcasts = averages && state.options.broadcast_buffers && state.joining.is_none();
        drop(state);
        if broadcasts { self.sync_buffers() } else { Ok(()) }
    }

    /// Returns the averaged gradient of the parameter `name`; `None` if no rank has one. Where the ranks step together (see
    /// [`OptimizerLayout`](crate::OptimizerLayout)) this is a collective: it calls [`average_gradients`] first.
    ///
    /// # Errors
    /// [`Error::Input`] if the model has no such parameter, or the last backward was within `no_sync`. Also the errors
    /// of [`average_gradients`].
    pub fn averaged_grad(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(named) = parameters::trained(&self.tensors).find(|named| named.name == name)
        else {
            return Err(Error::usage(format!(
                "averaged_grad: the model trains no parameter `{name}`; use a name of its state_dict"
            )));
        };
        let buffers = self.flat_buffers();
        if buffers.iter().any(|buffer| buffer.layout.gradients() == GradState::Local) {
            return Err(Error::usage(
                "averaged_grad: the gradients of this rank are not averaged, because the last backward was within no_sync; \
                 call a backward outside of it first"
                    .into(),
            ));
        }
        average_gradients(&buffers)?;
        Ok(Some(named.tensor.grad()).filter(Tensor::defined))
    }

    /// Scales the averaged gradients so that their total 2-norm is at most `max_norm`. Returns the norm before scaling.
    /// Call it between [`backward`](Self::backward) and the optimizer's step.
    ///
    /// Follows `torch.nn.utils.clip_grad_norm_`. All ranks have the same averaged gradients, so each computes the same
    /// norm. Where the ranks step together (see [`OptimizerLayout`](crate::OptimizerLayout)) this is a collective: it calls
    /// [`average_gradients`] first.
    ///
    /// # Errors
    /// [`Error::Torch`], and the errors of [`average_gradients`].
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm(&self.flat_buffers(), max_norm)
    }

    /// Returns a 64-bit hash of the values of all parameters, which must be defined.
    #[doc(hidden)]
    pub fn replica_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        let each = self.tensor_hashes(false)?.into_iter();
        Ok(xxh3_64(&each.flat_map(|(_, hash)| hash.to_le_bytes()).collect::<Vec<_>>()))
    }

    /// Returns the names of all parameters, and of buffers if wanted, with a 64-bit hash of the values of each, which
    /// must be defined.
    pub(crate) fn tensor_hashes(&self, buffers: bool) -> Result<Vec<(String, u64)>> {
        let wanted = |it: &&NamedTensor| !it.is_ignored && (buffers || !it.is_buffer);
        let wanted = self.tensors.iter().filter(wanted);
        wanted.map(|it| Ok((it.name.clone(), models::tensor_hash(&it.tensor)?))).collect()
    }

    /// Calls `observe` before each averaging, until [`stop_observing`](Self::stop_observing) gets the same `name`. The
    /// bits of training do not change, unless `observe` changes them. All ranks must call this alike: gradients that are
    /// observed are averaged as a whole, in each [`OptimizerLayout`](crate::OptimizerLayout).
    pub(crate) fn observe_gradients(&self, name: &'static str, observe: Observe) {
        self.reducer.state().layout.observers.push((name, observe));
    }

    /// Stops the observer of this name, if there is one.
    pub(crate) fn stop_observing(&self, name: &'static str) {
        self.reducer.state().layout.observers.retain(|(other, _)| *other != name);
    }

    /// Returns the names and values of the parameters that the ranks train. Observers number them in this order.
    pub(crate) fn trained_parameters(&self) -> Vec<(String, Tensor)> {
        models::by_name(parameters::trained(&self.tensors))
    }

    /// Returns the names and values of all other tensors of the model.
    pub(crate) fn untrained_tensors(&self) -> Vec<(String, Tensor)> {
        let is_untrained = |named: &&NamedTensor| !named.trainable || named.is_ignored;
        models::by_name(self.tensors.iter().filter(is_untrained))
    }
}

impl<M: Forward> DistributedDataParallel<M> {
    /// Runs the model's own forward pass in training mode.
    #[track_caller]
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        self.forward_t(inputs, true)
    }

    /// Runs the model's own forward pass, in training or evaluation mode. PyTorch selects the mode with `model.train()`
    /// and `model.eval()`.
    #[track_caller]
    pub fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        self.forward_inputs(slice::from_ref(inputs), train)
    }

    /// Runs [`forward_t`](Self::forward_t) for a model of several inputs.
    #[track_caller]
    pub fn forward_inputs(&self, inputs: &[Tensor], train: bool) -> Tensor {
        if train && let Some(first) = inputs.first() {
            self.group.enter_forward(first);
        }
        let output = self.module.forward_inputs(inputs, train);
        if train && let Some(kept) = &mut *self.kept_outputs.borrow_mut() {
            kept.push(output.detach().copy());
        }
        output
    }
}
