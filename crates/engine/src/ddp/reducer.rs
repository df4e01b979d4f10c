//! [`Reducer`]: averages gradients over the ranks, bucket by bucket, during backward or after it.

use std::cell::{RefCell, RefMut};
use std::ffi::CStr;
use std::rc::Rc;

use tch::Tensor;

use super::options::DdpOptions;
use super::reducer_state::ReducerState;
use crate::error::Result;
use crate::ffi::GradHooks;
use crate::models::NamedTensor;
use crate::optim::Bucket;
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
}

impl Reducer {
    /// Moves `parameters` into buckets, of which their `grad`s will be views, and registers gradient hooks.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        let handles: Vec<Tensor> = parameters.iter().map(|p| p.tensor.shallow_clone()).collect();
        let state = Rc::new(RefCell::new(ReducerState::new(parameters, group, options)?));
        let in_hooks = state.clone();
        let hooks = GradHooks::register(handles, move |index| match in_hooks.try_borrow_mut() {
            Ok(state) if !state.backward.is_in_autograd => Some(BACKWARD_BYPASSED),
            Ok(mut state) => {
                state.on_grad(index);
                None
            }
            Err(_) => Some(c"backward within a communication hook"),
        })?;
        Ok(Self { state, _hooks: hooks })
    }

    /// Returns the state. The guard must be dropped before autograd runs, because the hooks borrow the state too.
    pub(super) fn state(&self) -> RefMut<'_, ReducerState> {
        self.state.borrow_mut()
    }

    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        let bytes = |bucket: &Bucket| num_bytes(bucket.dtype, bucket.numel);
        self.state.borrow().layout.buckets.iter().map(bytes).collect()
    }

    /// Waits for reductions that still use the gradients, after a failure.
    pub(super) fn give_up(&self) {
        let mut state = self.state();
        state.backward.is_in_autograd = false;
        // The wait ends: either the other ranks take part in these reductions, or the run ends. The error is already
        // known.
        let ReducerState { averaging, group, .. } = &mut *state;
        let _ = averaging.path.wait(group);
    }
}
