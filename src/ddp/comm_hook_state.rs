//! The state of communication hooks in a checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::comm_hooks::{CommHook, CommHookState};
use super::reducer::Reducer;
use super::reducer_state::ReducerState;
use super::wrapper::DistributedDataParallel;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;

/// The contents of [`SavedCommHook`] other than tensors.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CommHookRecord {
    /// The hook's name.
    pub name: String,
    /// [`CommHookState::counters`].
    pub counters: BTreeMap<String, u64>,
    /// The names of the parameters in bucket order; empty before the first step.
    pub order: Vec<String>,
    /// The number of ranks of the saved run.
    pub world_size: usize,
}

/// The state of the communication hooks of all ranks. From [`DistributedDataParallel::comm_hook_state`].
#[derive(Debug)]
pub struct SavedCommHook {
    /// Its numbers and names.
    pub record: CommHookRecord,
    /// Its tensors: `shared/name`, and `rank0/name` of each rank. On the CPU.
    pub tensors: BTreeMap<String, Tensor>,
}

const SHARED: &str = "shared/";

impl SavedCommHook {
    /// Returns the state for a rank of a run of `world_size` ranks. If the number of ranks has changed, each rank gets
    /// the mean of the per-rank tensors, so that their mean does not change.
    fn state_of(&self, rank: usize, world_size: usize) -> Result<CommHookState> {
        let mut state =
            CommHookState { counters: self.record.counters.clone(), ..CommHookState::default() };
        for (key, tensor) in &self.tensors {
            if let Some(name) = key.strip_prefix(SHARED) {
                state.shared.insert(name.into(), tensor.shallow_clone());
            } else if let Some(name) = key.strip_prefix("rank0/") {
                let tensor_of = |rank: usize| {
                    self.tensors.get(&format!("rank{rank}/{name}")).ok_or_else(|| {
                        let hook = &self.record.name;
                        Error::InvalidInput(format!(
                            "the state of `{hook}` has no `{name}` of rank {rank}; use another \
                             checkpoint"
                        ))
                    })
                };
                let mine = if world_size == self.record.world_size {
                    tensor_of(rank)?.shallow_clone()
                } else {
                    self.mean(tensor, tensor_of)?
                };
                state.local.insert(name.into(), mine);
            }
        }
        Ok(state)
    }

    /// Checks that `hook` could be restored from `saved`. `parameters` are the names of the model's.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that names what does not fit.
    pub(crate) fn check(
        saved: Option<&Self>,
        hook: Option<Box<dyn CommHook>>,
        parameters: &BTreeSet<String>,
    ) -> Result<()> {
        let hook = match hook {
            Some(hook) if hook.state()?.is_some() => Some(hook),
            _ => None,
        };
        Self::check_name(saved, hook.as_ref().map(|hook| hook.name()))?;
        let (Some(saved), Some(mut hook)) = (saved, hook) else { return Ok(()) };
        let CommHookRecord { order, world_size, .. } = &saved.record;
        let ordered: BTreeSet<String> = order.iter().cloned().collect();
        if !order.is_empty() && (ordered.len() != order.len() || ordered != *parameters) {
            return Err(Error::InvalidInput(format!(
                "comm_hook.order is {order:?}, and the model's parameters are {parameters:?}"
            )));
        }
        hook.load_state(saved.state_of(0, *world_size)?)
    }

    /// Checks that `saved` is the state of the hook `needed`. `None` for a hook without state.
    fn check_name(saved: Option<&Self>, needed: Option<&str>) -> Result<()> {
        let saved = saved.map(|saved| &saved.record.name[..]);
        if saved == needed {
            return Ok(());
        }
        let saved =
            saved.map_or("no hook state".into(), |name| format!("the state of hook `{name}`"));
        let needed = needed.map_or("no hook with state".into(), |name| format!("`{name}`"));
        Err(Error::InvalidInput(format!(
            "the checkpoint has {saved}, but this run uses {needed}; use the hook of the saved run"
        )))
    }

    /// Returns the mean of the tensors of all ranks, added in rank order from `first` on.
    fn mean<'a>(
        &self,
        first: &Tensor,
        tensor_of: impl Fn(usize) -> Result<&'a Tensor>,
    ) -> Result<Tensor> {
        let ranks = self.record.world_size;
        let doing = "the mean over the ranks";
        let mut sum = first.f_detach_copy().doing(doing)?;
        for rank in 1..ranks {
            sum = sum.f_add(tensor_of(rank)?).doing(doing)?;
        }
        sum.f_div_scalar(ranks as f64).doing(doing)
    }
}

impl<M> DistributedDataParallel<M> {
    /// Gathers the state of the communication hooks of all ranks on rank 0, for a checkpoint. Returns `None` on the
    /// other ranks, and if the hook has no state. A collective.
    ///
    /// # Errors
    /// [`Error::Torch`], and the errors of [`ProcessGroup::gather`](crate::ProcessGroup::gather).
    pub fn comm_hook_state(&self) -> Result<Option<SavedCommHook>> {
        let Some((name, state)) = self.reducer.comm_hook_state()? else { return Ok(None) };
        let (group, doing) = (&self.group, "copying the state of a hook");
        let copy = |tensor: &Tensor| tensor.f_to_device(Device::Cpu)?.f_detach_copy();
        let mut tensors = BTreeMap::new();
        for (key, tensor) in &state.local {
            let zeros = |_| tensor.f_zeros_like();
            let ranks = if group.rank() == 0 { 0..group.world_size() } else { 0..0 };
            let mut all = ranks.map(zeros).collect::<Result<Vec<_>, _>>().doing(doing)?;
            let list = (group.rank() == 0).then_some(&mut all[..]);
            group.gather(tensor, list, 0)?;
            group.synchronize()?;
            for (rank, tensor) in all.iter().enumerate() {
                tensors.insert(format!("rank{rank}/{key}"), copy(tensor).doing(doing)?);
            }
        }
        if group.rank() != 0 {
            return Ok(None);
        }
        for (key, tensor) in &state.shared {
            tensors.insert(format!("{SHARED}{key}"), copy(tensor).doing(doing)?);
        }
        let order = self.reducer.order();
        let (counters, world_size) = (state.counters, group.world_size());
        let record = CommHookRecord { name: name.into(), counters, order, world_size };
        Ok(Some(SavedCommHook { record, tensors }))
    }

    /// Restores the communication hook from `saved`, the state of an earlier run with the same hook and model; the
    /// number of ranks may differ. `None` is the state of a hook without state. Every rank must call this before the
    /// first backward.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the state belongs to another hook or model.
    pub fn load_comm_hook_state(&mut self, saved: Option<&SavedCommHook>) -> Result<()> {
        let needed = self.reducer.comm_hook_state()?.map(|(name, _)| name);
        SavedCommHook::check_name(saved, needed)?;
        let Some(saved) = saved else { return Ok(()) };
        let state = saved.state_of(self.group.rank(), self.group.world_size())?;
        self.reducer.load_comm_hook_state(state, &saved.record.order)
    }
}

impl Reducer {
    /// Returns the hook's name and its state on this rank; `None` if it has no state.
    fn comm_hook_state(&self) -> Result<Option<(&'static str, CommHookState)>> {
        let state = self.state.borrow();
        let Some(hook) = state.averaging.hook() else { return Ok(None) };
        Ok(hook.state()?.map(|kept| (hook.name(), kept)))
    }

    /// Restores the hook from `kept`, which is on the CPU, and orders the buckets' parameters by `order`.
    fn load_comm_hook_state(&self, mut kept: CommHookState, order: &[String]) -> Result<()> {
        let mut state = self.state.borrow_mut();
        let ReducerState { averaging, group, .. } = &mut *state;
        // The copies run on the hook's own stream. Memory of another stream would be reused there when the hook drops
        // the tensor, while the hook's stream still reads it.
        averaging.run(group, |group| {
            for tensor in kept.shared.values_mut().chain(kept.local.values_mut()) {
                *tensor = group.to_device(tensor)?;
            }
            Ok(())
        })?;
        averaging.wait(group)?;
        if !order.is_empty() {
            let ReducerState { order: bucket_order, layout, .. } = &mut *state;
            bucket_order.set(order, layout, &self.options)?;
        }
        state.averaging.hook_mut().map_or(Ok(()), |hook| hook.load_state(kept))
    }

    /// Returns the names of all parameters in bucket order. Empty before the first step, after which the buckets are
    /// rebuilt.
    fn order(&self) -> Vec<String> {
        let state = self.state.borrow();
        state.order.names(&state.layout)
    }
}
