//! The callbacks of this crate, and the order in which callbacks run.

mod checkpoints;
mod events;
mod fault_injection;
mod fingerprints;
mod kept_tensors;
mod non_finite;
mod replica_check;
mod save_after_failure;
mod validation;
mod weight_probe;

use anyhow::Result;

use super::Callback;
use crate::error::opaque_debug;

pub(super) use checkpoints::Checkpoints;
pub(super) use events::Events;
pub(super) use fault_injection::FaultInjection;
pub use fingerprints::FingerprintOptions;
pub(super) use fingerprints::Fingerprints;
pub use kept_tensors::KeepTensors;
pub(super) use kept_tensors::KeptTensors;
pub(super) use non_finite::NonFiniteGuard;
pub(super) use replica_check::ReplicaCheck;
pub(super) use save_after_failure::SaveAfterFailure;
pub(super) use validation::Validation;
pub(super) use weight_probe::WeightProbe;

pub use checkpoints::SaveEvery;
pub use replica_check::compare_replicas;

/// The order in which callbacks run at each point of the loop; reversed when training ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// Before all that look at batches.
    Batches,
    FaultInjection,
    /// Before callbacks that read gradients: it skips the step.
    NonFiniteGuard,
    WeightProbe,
    ReplicaCheck,
    /// Before callbacks that use its result.
    Validation,
    Events,
    User,
    /// After callbacks that may change a step, the model or its gradients.
    Fingerprints,
    KeptTensors,
    /// After callbacks that may change the model in a step or at the end of an epoch. At the end of training it saves
    /// first.
    Checkpoints,
    /// After the callback that may still write a checkpoint.
    SaveAfterFailure,
}

/// The configured callbacks of a trainer.
pub(super) struct Callbacks<M>(pub(super) Vec<(Order, Box<dyn Callback<M>>)>);

impl<M> Callbacks<M> {
    /// Adds `callback` behind those of the same order.
    pub(super) fn add(&mut self, order: Order, callback: impl Callback<M> + 'static) {
        let index = self.0.partition_point(|(other, _)| *other <= order);
        self.0.insert(index, (order, Box::new(callback)));
    }

    /// Replaces the callback of this order; `None` removes it.
    pub(super) fn set(&mut self, order: Order, callback: Option<impl Callback<M> + 'static>) {
        self.0.retain(|(other, _)| *other != order);
        if let Some(callback) = callback {
            self.add(order, callback);
        }
    }

    /// Returns whether there is a callback of this order.
    pub(super) fn has(&self, order: Order) -> bool {
        self.0.iter().any(|(other, _)| *other == order)
    }

    /// Calls `call` with each callback, those of the program last: they may change the model, or take long.
    pub(super) fn each_on_failure(&mut self, mut call: impl FnMut(&mut dyn Callback<M>)) {
        let (of_program, ours): (Vec<_>, Vec<_>) =
            self.0.iter_mut().partition(|(order, _)| *order == Order::User);
        ours.into_iter().chain(of_program).for_each(|(_, callback)| call(&mut **callback));
    }

    /// Calls `call` with each callback, in their order, until one returns an error.
    pub(super) fn each(
        &mut self,
        mut call: impl FnMut(&mut dyn Callback<M>) -> Result<()>,
    ) -> Result<()> {
        self.0.iter_mut().try_for_each(|(_, callback)| call(&mut **callback))
    }
}

opaque_debug!(Callbacks<M>, M);
