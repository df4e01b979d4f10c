//! Optimizers that step the flat buffers of a model's buckets, and what goes with them.

mod adamw;
mod clip;
mod flat;
mod grad_scaler;
mod param_layout;
mod schedule;
mod sgd;

pub use adamw::{AdamW, AdamWOptions};
pub use clip::clip_grad_norm;
pub use grad_scaler::{GradScaler, GradScalerOptions, GradScalerState};
pub use param_layout::{FlatBuffer, GradState, ParamLayout, ParamSpan};
pub use schedule::{Schedule, Unit};
pub use sgd::{Sgd, SgdOptions};

use std::collections::BTreeMap;
use std::fmt::Debug;

use tch::Tensor;

use crate::error::Result;

/// Steps parameters by their gradients.
pub trait Optimizer: Debug {
    /// Steps once, with the gradients that are there and learning rate `lr`; where there are none, as before
    /// the first backward, nothing happens, as in PyTorch. Allocates nothing.
    ///
    /// Counts as an in-place change of the parameters: backward refuses a graph from before it that needs their values.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the gradients are not averaged, because the last backward was
    /// within `no_sync`; [`Error::Torch`](crate::Error::Torch).
    fn step(&mut self, lr: f64) -> Result<()>;

    /// A copy of all that the next step depends on besides parameters and gradients, parameter by
    /// parameter in the order of their creation. Allocates; may wait for the device.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    fn state(&self) -> Result<Vec<ParameterState>>;

    /// Goes on from `state`, which an optimizer of the same type and options has given for a model of
    /// the same parameters, however they lie in their buffers.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when it does not fit, and nothing has changed then;
    /// [`Error::Torch`](crate::Error::Torch).
    fn load_state(&mut self, state: &[ParameterState]) -> Result<()>;
}

/// What an optimizer keeps for one parameter.
#[derive(Debug)]
pub struct ParameterState {
    /// The parameter's name.
    pub name: String,
    /// Under the names of torch's `state_dict`: `momentum_buffer` of SGD; `exp_avg`, `exp_avg_sq` and
    /// `step` of AdamW. Empty where nothing is kept, or not yet: as long as the parameter had no gradient.
    pub tensors: BTreeMap<String, Tensor>,
}

/// Which optimizer, with its options.
#[derive(Debug, Clone, Copy)]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd(SgdOptions),
    /// Adam with decoupled weight decay.
    AdamW(AdamWOptions),
}

impl OptimizerConfig {
    /// The optimizer, for the parameters in `buffers`.
    ///
    /// # Errors
    /// Those of [`Sgd::new`] and [`AdamW::new`].
    pub fn build(self, buffers: Vec<FlatBuffer>) -> Result<Box<dyn Optimizer>> {
        Ok(match self {
            OptimizerConfig::Sgd(options) => Box::new(Sgd::new(buffers, options)?),
            OptimizerConfig::AdamW(options) => Box::new(AdamW::new(buffers, options)?),
        })
    }
}
