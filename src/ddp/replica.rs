//! [`Replica`]: what both wrappers of a model have in common, such as gradient accumulation ([`NoSync`]).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::slice;

use tch::Tensor;
use tch::nn::VarStore;

use super::options::DdpOptions;
use super::parameters::{self, NamedTensor};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::models::Forward;
use crate::process_group::ProcessGroup;

/// One rank's replica of a model, with the group that trains it.
/// [`DistributedDataParallel`](super::DistributedDataParallel) has these methods.
pub struct Replica<M> {
    module: M,
    pub(super) group: Rc<ProcessGroup>,
    pub(super) tensors: Vec<NamedTensor>,
    /// The number of live [`NoSync`] guards.
    no_sync: Rc<Cell<u32>>,
    /// The outputs of the forward passes in training; `None` unless they are kept.
    kept_outputs: RefCell<Option<Vec<Tensor>>>,
}

impl<M> fmt::Debug for Replica<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica")
            .field("group", &self.group)
            .field("parameters", &self.num_parameters())
            .finish_non_exhaustive()
    }
}

impl<M> Replica<M> {
    /// Checks that all ranks have the same model. A collective.
    pub(super) fn new(
        module: M,
        vs: &VarStore,
        group: Rc<ProcessGroup>,
        options: &DdpOptions,
    ) -> Result<Self> {
        let tensors = parameters::same_on_all_ranks(vs, options, &group)?;
        let (no_sync, kept_outputs) = Default::default();
        Ok(Self { module, group, tensors, no_sync, kept_outputs })
    }

    /// Returns a guard for gradient accumulation: until it is dropped, `backward` adds up gradients on this rank and
    /// does not average. The backward of the last batch must run after the drop, and averages the sum. Follows
    /// `no_sync`.
    pub fn no_sync(&self) -> NoSync {
        NoSync::new(&self.no_sync)
    }

    /// Returns whether backward averages: no [`NoSync`] guard is live.
    pub(super) fn averages(&self) -> bool {
        self.no_sync.get() == 0
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

    /// Returns the parameters that all ranks train together.
    pub(super) fn trained(&self) -> Vec<&NamedTensor> {
        parameters::trained(&self.tensors).collect()
    }

    /// Returns the number of trained elements over all parameters.
    pub fn num_parameters(&self) -> usize {
        parameters::trained(&self.tensors).map(|t| t.tensor.numel()).sum()
    }

    /// Returns parameters and buffers by name, as views and not copies. Follows the `state_dict` of the wrapped module.
    pub fn state_dict(&self) -> Vec<(String, Tensor)> {
        parameters::by_name(&self.tensors)
    }

    /// Returns a 64-bit hash of the names, shapes and values of all parameters and buffers. Equal on ranks that hold
    /// the same model. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Torch`], and the errors of [`ProcessGroup::synchronize`].
    pub fn parameters_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        parameters::hash(&self.tensors)
    }
}

impl<M: Forward> Replica<M> {
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

/// A guard: gradients stay on their rank until it is dropped. From [`Replica::no_sync`].
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
