//! The options of a trainer that are plain values.

use super::Amp;

/// The options of a [`Trainer`](super::Trainer) that are plain values.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainerOptions {
    /// Run the model and the loss in mixed precision. Float16 gets a [`GradScaler`](crate::optim::GradScaler). A step
    /// that the scaler skips counts as a step, also for the schedule.
    pub amp: Amp,
    /// The number of batches (at least 1) whose gradients are accumulated for each step and averaged over the ranks
    /// once. The last step of an epoch may have fewer batches.
    pub accumulate: usize,
    /// Average gradients over the samples of all ranks instead of over the ranks: each rank's loss is multiplied by its
    /// number of samples, and divided by the mean of all ranks' numbers. For a loader that is
    /// [in step](crate::DataLoader::in_step), whose ranks have batches of different sizes.
    pub exact_mean: bool,
    /// Scale gradients with a larger norm down to this norm before each step; see
    /// [`DistributedDataParallel::clip_grad_norm`](crate::DistributedDataParallel::clip_grad_norm).
    pub max_grad_norm: Option<f64>,
    /// Check the gradients before each step, and skip up to this many steps of the whole run whose losses or gradients
    /// are not finite. The next such step ends the run. With `None` only losses are checked, and the first that is not
    /// finite ends the run. With a [`GradScaler`](crate::optim::GradScaler) nothing is checked here: it skips steps by
    /// its own rule.
    ///
    /// The averaged gradients are the same on all ranks, so all ranks decide alike without communication.
    pub skip_nonfinite: Option<u64>,
    /// Stop after this many steps of the whole run; `None` for no limit.
    pub max_steps: Option<u64>,
    /// Stop training after this many validations in a row (at least 1) without a smaller loss than the best before
    /// them. `None` never stops. Follows `EarlyStopping` of PyTorch Lightning.
    pub patience: Option<u64>,
    /// Compare the ranks' parameters each time after this many steps (at least 1), by a 64-bit hash of each parameter's
    /// values. `None` never compares. Must be the same on all ranks.
    pub check_replicas: Option<u64>,
}

impl TrainerOptions {
    /// Returns these options for a run of `steps` steps that are measured or compared: without those that only a whole
    /// training run has.
    #[doc(hidden)]
    pub fn for_steps(self, steps: u64) -> Self {
        Self {
            max_steps: Some(steps),
            skip_nonfinite: None,
            patience: None,
            check_replicas: None,
            ..self
        }
    }
}

impl Default for TrainerOptions {
    fn default() -> Self {
        Self {
            amp: Amp::Off,
            accumulate: 1,
            exact_mean: false,
            max_grad_norm: None,
            skip_nonfinite: None,
            max_steps: None,
            patience: None,
            check_replicas: None,
        }
    }
}
