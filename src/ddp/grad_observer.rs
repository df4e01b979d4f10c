//! Observers of gradients: functions that get each gradient of this rank before it is averaged.

use std::fmt;

use tch::Tensor;

use super::parameters;
use super::wrapper::DistributedDataParallel;
use crate::error::Result;

/// A function that gets the number of a trained parameter and this rank's own gradient of it, whose values it may change.
pub(crate) type Observe = Box<dyn FnMut(usize, &mut Tensor) -> Result<()>>;

/// The observers, each with its name. They run in the order in which they began.
#[derive(Default)]
pub(super) struct GradObservers(Vec<(&'static str, Observe)>);

impl fmt::Debug for GradObservers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl GradObservers {
    /// Returns whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls all observers.
    pub(super) fn observe(&mut self, parameter: usize, gradient: &mut Tensor) -> Result<()> {
        self.0.iter_mut().try_for_each(|(_, observe)| observe(parameter, gradient))
    }
}

impl<M> DistributedDataParallel<M> {
    /// Calls `observe` before each averaging, until [`stop_observing`](Self::stop_observing) gets the same `name`. The
    /// bits of training do not change, unless `observe` changes them. All ranks must call this alike: gradients that are
    /// observed are averaged as a whole, also with `share_model` and `zero`.
    pub(crate) fn observe_gradients(&self, name: &'static str, observe: Observe) {
        self.reducer.state().layout.observers.0.push((name, observe));
    }

    /// Stops the observer of this name, if there is one.
    pub(crate) fn stop_observing(&self, name: &'static str) {
        self.reducer.state().layout.observers.0.retain(|(other, _)| *other != name);
    }

    /// Returns the names and values of the parameters that the ranks train. Observers number them in this order.
    pub(crate) fn trained_parameters(&self) -> Vec<(String, Tensor)> {
        let trained = parameters::trained(&self.tensors);
        trained.map(|named| (named.name.clone(), named.tensor.shallow_clone())).collect()
    }

    /// Returns whether the ranks of this process share one copy of the parameters.
    pub(crate) fn shares_model(&self) -> bool {
        self.options.share_model
    }

    /// Returns the names and values of all other tensors of the model.
    pub(crate) fn untrained_tensors(&self) -> Vec<(String, Tensor)> {
        let untrained = self.tensors.iter().filter(|named| !named.trainable || named.is_ignored);
        untrained.map(|named| (named.name.clone(), named.tensor.shallow_clone())).collect()
    }
}
