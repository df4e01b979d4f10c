//! Validates the values for a model, and for the number of ranks.

use super::{Config, Invalid};
use engine::data::batches_of_all;
use engine::error::{Error, Result, counted};

impl Config {
    /// Checks the values that depend on the number of ranks.
    ///
    /// # Errors
    /// [`Error::Input`], naming the remedy.
    pub fn validate_for(&self, world_size: usize) -> Result<()> {
        // The number is not known before a file is open.
        let Some(samples) = self.data.num_samples.map(|samples| samples as usize) else {
            return Ok(());
        };
        if world_size > samples {
            return Err(Error::usage(format!(
                "{world_size} ranks for {}: some ranks would have nothing to train on; use \
                 --nproc-per-node {samples} or fewer, or more samples",
                counted(samples, "sample")
            )));
        }
        if self.steps_per_epoch(world_size) == 0 {
            return Err(Error::usage(format!(
                "{}: {} with {} have no whole batch of {}; use a smaller batch size",
                self.name_of("drop_last_batch"),
                counted(world_size, "rank"),
                counted(samples, "sample"),
                self.training.batch_size
            )));
        }
        self.validate_optimization_for(world_size)?;
        let Some(fault) = &self.launch.inject_fault else { return Ok(()) };
        let samples = self.training.batch_size as u64 * self.ddp.grad_accum_steps;
        let steps = self.steps(world_size).min(self.training.max_steps.unwrap_or(u64::MAX));
        let checked = fault.check(world_size, steps, samples);
        self.named("inject_fault", checked.map_err(Error::usage))
    }

    /// Returns the number of steps that each of `world_size` ranks makes in the whole run.
    pub(crate) fn steps(&self, world_size: usize) -> u64 {
        self.training.max_epochs.saturating_mul(self.steps_per_epoch(world_size))
    }

    /// Returns the number of steps that each of `world_size` ranks makes in an epoch.
    pub(crate) fn steps_per_epoch(&self, world_size: usize) -> u64 {
        let samples = self.data.num_samples.unwrap_or(0) as usize;
        // No steps if some rank would have no sample.
        let Ok(sampler) = self.sampler(samples, world_size, 0) else { return 0 };
        let batches =
            batches_of_all(&sampler, 0, self.training.batch_size, self.data.drop_last_batch);
        (batches as u64).div_ceil(self.ddp.grad_accum_steps)
    }

    /// Checks that the model fits its data, and this machine's memory.
    pub(super) fn validate_model(&self) -> Result<(), Invalid> {
        // A gpt's own options say all of its sizes.
        let is_ours = self.program.model.is_none();
        if is_ours && (self.data.in_features.is_some() || self.model.kind.uses("block_size")) {
            let problem = |(key, problem): (&str, _)| Invalid { key: key.into(), problem };
            self.model_config().check().map_err(problem)?;
        }
        self.validate_memory()
    }
}
