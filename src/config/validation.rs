//! Validates each value on its own, with the others, and for the number of ranks.

use std::time::Duration;

use super::data::SIZES;
use super::optimization::shown;
use super::{CommHookKind, Config, text};
use crate::data::batches_of_all;
use crate::error::{Error, Result};
use crate::launch::{FaultKind, FaultSite};
use crate::models::ModelKind;
use crate::telemetry::total_memory;
use crate::trainer::{Amp, Loss};

impl Config {
    /// Refuses a flag that has no effect with the others. A file may have such keys.
    pub(super) fn reject_ineffective_flags(
        &self,
        given: impl Fn(&str) -> bool,
    ) -> Result<(), Invalid> {
        for (key, kind, what) in [
            ("hidden", ModelKind::Mlp, "hidden layers"),
            ("dropout", ModelKind::Mlp, "dropout"),
            ("channels", ModelKind::Cnn, "channels"),
            ("sync_batch_norm", ModelKind::Cnn, "batch norm"),
        ] {
            if self.model != kind && given(key) {
                let model = match self.model {
                    ModelKind::Linear => "a linear model",
                    ModelKind::Mlp => "an mlp",
                    ModelKind::Cnn => "a cnn",
                };
                let problem = format!("{model} has no {what}; use model {}", kind.name());
                return Err(Invalid { key, problem });
            }
        }
        if self.model == ModelKind::Linear && given("activation") {
            let problem = "a linear model has no activation; use model mlp or cnn".into();
            return Err(Invalid { key: "activation", problem });
        }
        if self.comm_hook != CommHookKind::PowerSgd && given("powersgd_start_iter") {
            let problem = "no gradients go through powersgd; use comm_hook powersgd".into();
            return Err(Invalid { key: "powersgd_start_iter", problem });
        }
        if self.checkpoint_dir.is_none() && given("keep_last") {
            let problem = "needs --checkpoint-dir: nothing is saved without it".into();
            return Err(Invalid { key: "keep_last", problem });
        }
        if self.num_workers == 0 && given("prefetch_factor") {
            let problem = "needs --num-workers: no batch is loaded ahead without it".into();
            return Err(Invalid { key: "prefetch_factor", problem });
        }
        if !self.explain && given("language") {
            let problem = "needs --explain: no other text is translated".into();
            return Err(Invalid { key: "language", problem });
        }
        if !self.may_validate() && given("val_every") {
            let problem = "there are no validation samples; hold some back with --val-fraction";
            return Err(Invalid { key: "val_every", problem: problem.into() });
        }
        self.check_idle_optimization(given)
    }

    /// Checks the values that depend on the number of ranks.
    ///
    /// # Errors
    /// [`Error::Input`], naming the remedy.
    pub fn validate_for(&self, world_size: usize) -> Result<()> {
        // The number is not known before a file is open.
        let Some(samples) = self.num_samples.map(|samples| samples as usize) else { return Ok(()) };
        if world_size > samples {
            return Err(Error::Input(format!(
                "{world_size} ranks for {samples} samples: some ranks would have nothing to train on; use \
                 --nproc-per-node {samples} or fewer, or more samples"
            )));
        }
        if self.steps_per_epoch(world_size) == 0 {
            return Err(Error::Input(format!(
                "--drop-last-batch: {world_size} ranks with {samples} samples have no whole batch of {}; use a \
                 smaller batch size",
                self.batch_size
            )));
        }
        self.validate_optimization_for(world_size)?;
        let Some(fault) = self.inject_fault else { return Ok(()) };
        if fault.rank >= world_size {
            return Err(Error::Input(format!(
                "--inject-fault: there is no rank {}; this run has ranks 0 to {}",
                fault.rank,
                world_size - 1
            )));
        }
        if fault.kind == FaultKind::Stall && world_size == 1 {
            return Err(Error::Input(
                "--inject-fault: no other rank would notice that the only rank stalls; use 2 ranks or more"
                    .into(),
            ));
        }
        if fault.kind == FaultKind::SkipSample && self.batch_size as u64 * self.grad_accum_steps < 2
        {
            return Err(Error::Input(
                "--inject-fault: skip-sample puts another sample of the step in its place, and a step has only one; use a \
                 larger --batch-size"
                    .into(),
            ));
        }
        let steps = self.steps(world_size);
        if fault.at == FaultSite::Step && fault.step >= steps {
            return Err(Error::Input(format!(
                "--inject-fault: there is no step {}; this run has steps 0 to {}",
                fault.step,
                steps - 1
            )));
        }
        Ok(())
    }

    /// Returns the number of steps that each of `world_size` ranks makes in the whole run.
    pub(crate) fn steps(&self, world_size: usize) -> u64 {
        self.max_epochs.saturating_mul(self.steps_per_epoch(world_size))
    }

    /// Returns the number of steps that each of `world_size` ranks makes in an epoch.
    pub(crate) fn steps_per_epoch(&self, world_size: usize) -> u64 {
        let samples = self.num_samples.unwrap_or(0) as usize;
        // No steps if some rank would have no sample.
        let Ok(sampler) = self.sampler(samples, world_size, 0) else { return 0 };
        let batches = batches_of_all(&sampler, 0, self.batch_size, self.drop_last_batch);
        (batches as u64).div_ceil(self.grad_accum_steps)
    }

    pub(super) fn validate(&self) -> Result<(), Invalid> {
        let at_least = |key, value: i64, least: i64| {
            let problem = || format!("{value} is too small; use {least} or more");
            if value >= least { Ok(()) } else { Err(Invalid { key, problem: problem() }) }
        };
        let refuse = |key, problem: String| Err(Invalid { key, problem });
        at_least("max_epochs", self.max_epochs as i64, 1)?;
        for (key, value, most) in [
            ("batch_size", self.batch_size as u64, MOST_IN_A_STEP),
            ("grad_accum_steps", self.grad_accum_steps, MOST_IN_A_STEP),
            ("prefetch_factor", self.prefetch_factor as u64, MOST_PREFETCHED),
        ] {
            if !(1..=most).contains(&value) {
                return match value {
                    0 => at_least(key, 0, 1),
                    _ => refuse(key, format!("{value} is too large; use {most} or less")),
                };
            }
        }
        if let Some(fraction) = self.val_fraction
            && !(0.0..1.0).contains(&fraction)
        {
            let problem = format!("{fraction} is not a fraction; use a number from 0 to below 1");
            return refuse("val_fraction", problem);
        }
        if self.max_restarts > MOST_RESTARTS {
            let problem =
                format!("{} is too large; use {MOST_RESTARTS} or less", self.max_restarts);
            return refuse("max_restarts", problem);
        }
        at_least("log_every", self.log_every.map_or(1, |every| every as i64), 1)?;
        at_least("val_every", self.val_every as i64, 1)?;
        if self.num_workers > MOST_WORKERS {
            let problem = format!(
                "{} threads per rank are too many; use {MOST_WORKERS} or less",
                self.num_workers
            );
            return refuse("num_workers", problem);
        }
        let sizes = [self.num_samples, self.in_features, self.out_features];
        for (key, size) in SIZES.into_iter().zip(sizes) {
            at_least(key, size.unwrap_or(1), 1)?;
        }
        if !(self.bucket_cap_mb > 0.0 && self.bucket_cap_mb <= LARGEST_BUCKET) {
            let problem = format!(
                "{} is not a bucket size; use a number above 0, up to {LARGEST_BUCKET}",
                shown(self.bucket_cap_mb)
            );
            return refuse("bucket_cap_mb", problem);
        }
        if self.hidden.is_empty() {
            let problem =
                "an mlp needs at least one hidden layer; use model linear for none".into();
            return refuse("hidden", problem);
        }
        for &width in &self.hidden {
            at_least("hidden", width, 1)?;
        }
        if !(0.0..=1.0).contains(&self.dropout) {
            let problem =
                format!("{} is not a probability; use a number from 0 to 1", self.dropout);
            return refuse("dropout", problem);
        }
        if self.in_features.is_some() {
            self.model_config().check().map_err(|(key, problem)| Invalid { key, problem })?;
        }
        self.validate_memory(total_memory())?;
        if self.stall_warning.is_zero() {
            return refuse(
                "stall_warning",
                "0 would report every wait; use a number above 0".into(),
            );
        }
        if self.timeout.is_zero() {
            return refuse("timeout", NO_TIME.into());
        }
        at_least("nnodes", self.nnodes.map_or(1, |nnodes| nnodes as i64), 1)?;
        at_least("master_port", self.master_port.map_or(1, i64::from), 1)?;
        if self.amp == Amp::Fp16 && self.comm_hook == CommHookKind::PowerSgd {
            let problem = "fp16 gradients overflow now and then, and powersgd would add the overflow to every later \
                           step; use --amp bf16";
            return refuse("amp", problem.into());
        }
        if self.explain && (self.amp == Amp::Fp16 || self.skip_nonfinite.is_some()) {
            let problem = "shows the first steps, and amp fp16 or skip_nonfinite may skip them; leave out one of the \
                           two";
            return refuse("explain", problem.into());
        }
        if self.loss == Loss::CrossEntropy && self.out_features.is_some_and(|classes| classes < 2) {
            let problem = "cross-entropy over one column is always 0, and so is its gradient: nothing \
                           would be learned; use --out-features 2 or more, or --loss mse";
            return refuse("loss", problem.into());
        }
        Ok(())
    }
}

/// Parses the timeout of a file or a flag: the longest time that a rank waits for the others.
///
/// # Errors
/// [`Error::Input`] if `text` is not a duration, or is zero.
pub fn parse_timeout(text: &str) -> Result<Duration> {
    let timeout = text::duration::parse(text)?;
    if timeout.is_zero() { Err(Error::Input(NO_TIME.into())) } else { Ok(timeout) }
}

/// The most workers of a rank. Each takes a thread, and more would be a mistake.
const MOST_WORKERS: usize = 256;

/// The most batches that a worker loads ahead. Room for all of them is allocated before the first is loaded.
const MOST_PREFETCHED: u64 = 1024;

/// The most samples of a batch, and the most batches of a step: their product fits into 63 bits.
const MOST_IN_A_STEP: u64 = i32::MAX as u64;

/// The most restarts; more would be a mistake. A process reads the number from a variable, as 32 bits.
const MOST_RESTARTS: usize = 1_000_000;

/// The largest bucket, in MiB: 1 TiB.
const LARGEST_BUCKET: f64 = (1 << 20) as f64;

const NO_TIME: &str = "0 leaves no time to wait; use for example 30s";

/// A value of the right type that is not valid.
pub(super) struct Invalid {
    pub key: &'static str,
    pub problem: String,
}
