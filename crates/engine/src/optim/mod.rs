//! Optimizers that step a model's flat buffers, with gradient clipping, loss scaling and schedules.

mod adamw;
mod clip;
mod complete;
mod flat_memory;
mod grad_scaler;
mod optimizer_layout;
mod optimizer_state;
mod param_layout;
mod param_memory;
mod parts;
mod runs;
mod saved_state;
mod schedule;
mod sgd;
mod shared_model;
mod shared_step;

pub use adamw::{AdamW, AdamWOptions};
pub use clip::clip_grad_norm;
pub use complete::average_gradients;
pub(crate) use flat_memory::{Bucket, FlatMemory};
pub use grad_scaler::{GradScaler, GradScalerOptions, GradScalerState};
pub use optimizer_layout::OptimizerLayout;
pub use param_layout::{FlatBuffer, GradState, ParamLayout, ParamSpan};
pub(crate) use param_memory::ParamMemory;
pub use schedule::{Schedule, Unit};
pub use sgd::{Sgd, SgdOptions};
use shared_model::SharedModel;

use std::collections::BTreeMap;
use std::fmt::Debug;

use tch::Tensor;

use crate::error::Result;

/// An optimizer, which steps parameters by their gradients.
pub trait Optimizer: Debug {
    /// Makes one step with the current gradients and learning rate `lr`. Does nothing without gradients, as before the
    /// first backward, like PyTorch.
    ///
    /// The step is an in-place change of the parameters: backward refuses an older graph that needs their values. For a
    /// [shared model](OptimizerLayout::SharedModel) it is a collective of the ranks that share it. For a
    /// [partitioned optimizer](OptimizerLayout::Partitioned) it is a collective of all ranks.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the gradients are not averaged because the last
    /// backward was within `no_sync`; [`Error::Torch`](crate::Error::Torch).
    fn step(&mut self, lr: f64) -> Result<()>;

    /// Returns a copy of all state of the next step besides parameters and gradients, per parameter in creation order.
    /// Allocates; may wait for the device.
    ///
    /// For a [partitioned optimizer](OptimizerLayout::Partitioned) it is a collective. Rank 0 gets the whole state, on the
    /// CPU. The other ranks get an empty list. Follows `ZeroRedundancyOptimizer.consolidate_state_dict`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch). For a partitioned optimizer also the errors of
    /// [`ProcessGroup::gather`](crate::ProcessGroup::gather).
    fn state(&self) -> Result<Vec<ParameterState>>;

    /// Restores `state`, which an optimizer of the same type and options has returned for a model with the same
    /// parameters. The layout may differ. Each rank of a partitioned optimizer takes its part of the
    /// whole state.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when it does not fit; the optimizer is then unchanged.
    /// [`Error::Torch`](crate::Error::Torch).
    fn load_state(&mut self, state: &[ParameterState]) -> Result<()>;

    /// Returns the names of all parameters, in creation order.
    fn parameter_names(&self) -> Vec<String>;
}

/// The optimizer state of one parameter.
#[derive(Debug)]
pub struct ParameterState {
    /// The parameter's name.
    pub name: String,
    /// The tensors by their names in torch's `state_dict`, such as `exp_avg`, `exp_avg_sq` and `step` of AdamW. Empty
    /// if the optimizer keeps none, or while the parameter has had no gradient.
    pub tensors: BTreeMap<String, Tensor>,
}

/// The options of an optimizer, which build it. They say what a program must know about it before.
pub trait OptimizerOptions: Debug {
    /// Returns the names of the states that the optimizer keeps for each parameter, as in torch's `state_dict`. Each
    /// state has the parameter's shape.
    fn states(&self) -> &'static [&'static str];

    /// Returns whether a step is `parameter -= lr * gradient` and no more.
    fn is_plain(&self) -> bool {
        false
    }

    /// Returns the optimizer for the parameters in `buffers`, which come from a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers).
    ///
    /// # Errors
    /// The errors of the optimizer's `new`.
    fn build(&self, buffers: Vec<FlatBuffer>) -> Result<Box<dyn Optimizer>>;
}
