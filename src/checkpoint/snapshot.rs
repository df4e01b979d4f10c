//! A copy of a run's tensors and progress, taken between two steps.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use tch::Tensor;

use super::TrainerState;
use super::tensors::Copied;
use crate::ddp::SavedCommHook;
use crate::error::Result;
use crate::optim::ParameterState;

/// A copy of the contents of a checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) state: TrainerState,
    pub(super) model: BTreeMap<String, Copied>,
    pub(super) optimizer: BTreeMap<String, Copied>,
    pub(super) comm_hook: Option<BTreeMap<String, Copied>>,
}

impl Snapshot {
    /// Copies `model`, a [`state_dict`](crate::ddp::Replica::state_dict), and `optimizer`, the result of
    /// [`Optimizer::state`](crate::Optimizer::state). The device must have finished computing them.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch), and [`Error::Unsupported`](crate::Error::Unsupported) for dtypes that cannot be saved.
    pub fn take(
        state: TrainerState,
        model: &[(String, Tensor)],
        optimizer: Vec<ParameterState>,
    ) -> Result<Self> {
        // Each tensor is dropped as soon as it is copied, so that there is never a second copy of all state.
        let slots = optimizer.into_iter().flat_map(|ParameterState { name, tensors }| {
            tensors.into_iter().map(move |(slot, tensor)| (format!("{name}/{slot}"), tensor))
        });
        let model = model.iter().map(|(name, tensor)| (name.clone(), tensor));
        Ok(Self { state, model: copies(model)?, optimizer: copies(slots)?, comm_hook: None })
    }

    /// Adds a copy of `saved`, the result of
    /// [`comm_hook_state`](crate::DistributedDataParallel::comm_hook_state).
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn with_comm_hook(mut self, saved: Option<&SavedCommHook>) -> Result<Self> {
        self.state.comm_hook = saved.map(|saved| saved.record.clone());
        let named = |saved: &SavedCommHook| {
            copies(saved.tensors.iter().map(|(name, tensor)| (name.clone(), tensor)))
        };
        self.comm_hook = saved.map(named).transpose()?;
        Ok(self)
    }
}

/// Returns copies of `tensors` by name.
fn copies<T: Borrow<Tensor>>(
    tensors: impl Iterator<Item = (String, T)>,
) -> Result<BTreeMap<String, Copied>> {
    let copy = |(name, tensor): (String, T)| {
        let copied = Copied::of(&name, tensor.borrow())?;
        Ok((name, copied))
    };
    tensors.map(copy).collect()
}
