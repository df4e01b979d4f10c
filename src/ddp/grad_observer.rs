//! Observers of gradients: functions that get each gradient of this rank before it is averaged.

use std::fmt;

use tch::Tensor;

use crate::error::Result;

/// A function that gets the index of a trained parameter and this rank's own gradient of it, whose values it may change.
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
    /// Adds an observer.
    pub(super) fn add(&mut self, name: &'static str, observe: Observe) {
        self.0.push((name, observe));
    }

    /// Removes the observer of this name, if there is one.
    pub(super) fn remove(&mut self, name: &'static str) {
        self.0.retain(|(other, _)| *other != name);
    }

    /// Returns whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls all observers.
    pub(super) fn observe(&mut self, parameter: usize, gradient: &mut Tensor) -> Result<()> {
        for (_, observe) in &mut self.0 {
            observe(parameter, gradient)?;
        }
        Ok(())
    }
}
