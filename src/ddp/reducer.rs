//! [`Reducer`]: averages gradients over the ranks, bucket by bucket, during backward or after it.

use std::cell::{RefCell, RefMut};
use std::ffi::CStr;
use std::rc::Rc;

use tch::{Device, Tensor};

use super::averaging::Averaging;
use super::comm_hooks::{CommHook, average};
use super::layout::{Bucket, Layout};
use super::options::DdpOptions;
use super::reducer_state::ReducerState;
use crate::error::{Error, Result};
use crate::ffi::GradHooks;
use crate::models::NamedTensor;
use crate::process_group::{ProcessGroup, num_bytes};

/// The error for a backward outside of `ddp.backward`, after which the ranks would diverge silently.
const BACKWARD_BYPASSED: &CStr =
    c"backward reached a parameter of a DistributedDataParallel: outside of ddp.backward its gradient would not be \
      averaged; call ddp.backward instead of Tensor::backward or an optimizer's backward_step, within no_sync() too; \
      for a loss that depends on several models wrap them as one, with one VarStore, or call set_requires_grad(false) on \
      the parameters that it is not to train";

/// All buckets of a model, with a hook on each gradient. Every rank reduces the buckets in index order, whichever
/// gradient is ready first. Follows PyTorch's `Reducer`.
pub(super) struct Reducer {
    pub(super) state: Rc<RefCell<ReducerState>>,
    _hooks: GradHooks,
    pub(super) options: DdpOptions,
}

impl Reducer {
    /// Moves `parameters` into buckets, of which their `grad`s will be views, and registers gradient hooks.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        let handles: Vec<Tensor> = parameters.iter().map(|p| p.tensor.shallow_clone()).collect();
        // On GPUs a copy into a bucket costs little, and a kernel for each gradient would cost more.
        let in_place = group.reduces_in_place() && group.device() == Device::Cpu;
        let in_place = in_place && !options.optimizer_layout.partitions(group.world_size());
        let layout = Layout::new(parameters, &options, in_place, group.clone())?;
        let state = ReducerState::new(layout, group)?;
        let state = Rc::new(RefCell::new(state));
        let in_hooks = state.clone();
        let hooks = GradHooks::register(handles, move |index| match in_hooks.try_borrow_mut() {
            Ok(state) if !state.is_in_autograd => Some(BACKWARD_BYPASSED),
            Ok(mut state) => {
                state.on_grad(index);
                None
            }
            Err(_) => Some(c"backward within a communication hook"),
        })?;
        Ok(Self { state, _hooks: hooks, options })
    }

    /// Returns the state. The guard must be dropped before autograd runs, because the hooks borrow the state too.
    pub(super) fn state(&self) -> RefMut<'_, ReducerState> {
        self.state.borrow_mut()
    }

    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        let bytes = |b: &Bucket| num_bytes(b.memory.dtype, b.memory.numel);
        self.state.borrow().layout.buckets.iter().map(bytes).collect()
    }

    /// Makes the collectives of a step once, if they are launched on a GPU. All gradients must be zero; they stay so. A
    /// collective.
    ///
    /// NCCL connects and allocates memory at the first call of each algorithm, which follows from the operation and the
    /// size.
    pub(super) fn warm_up(&self) -> Result<()> {
        let ReducerState { layout, group, averaging, .. } = &mut *self.state();
        if !group.is_stream_ordered() {
            return Ok(());
        }
        let is_partitioned = layout.memory.is_partitioned();
        for gradients in layout.buckets.iter_mut().flat_map(|bucket| &mut bucket.memory.gradients) {
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

    /// Registers `hook` for averaging; only one can be registered.
    pub(super) fn set_comm_hook(&self, hook: Box<dyn CommHook>) -> Result<()> {
        let mut state = self.state();
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

    /// Returns whether buckets are reduced during backward. Where ranks may use different parameters, a bucket is
    /// complete at different times on different ranks. The order of its reduction and other collectives in backward
    /// (SyncBatchNorm's) would differ too.
    pub(super) fn overlaps(&self) -> bool {
        let DdpOptions { find_unused_parameters, static_graph, overlap, .. } = self.options;
        let same_everywhere = !find_unused_parameters && !static_graph;
        let pays = || same_everywhere && self.state.borrow().averaging.path.overlaps();
        overlap.unwrap_or_else(pays)
    }

    /// Waits for reductions that still use the gradients, after a failure.
    pub(super) fn give_up(&self) {
        let mut state = self.state();
        state.is_in_autograd = false;
        // The wait ends: either the other ranks take part in these reductions, or the run ends. The error is already
        // known.
        let ReducerState { averaging, group, .. } = &mut *state;
        let _ = averaging.path.wait(group);
    }
}
