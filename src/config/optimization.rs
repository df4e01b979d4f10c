//! The optimization keys: the optimizer and the schedule that they select, and their validation.

use serde::{Deserialize, Serialize};

use super::{Config, Invalid};
use crate::error::{Error, Result};
use crate::optim::{AdamWOptions, OptimizerConfig, ParamSpan, Schedule, SgdOptions, Unit};

/// The optimizer: `--optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Stochastic gradient descent.
    Sgd,
    /// Adam with decoupled weight decay.
    AdamW,
}

/// The learning rate schedule: `--schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// A constant learning rate.
    Constant,
    /// A learning rate multiplied by `gamma` at each milestone.
    MultiStep,
    /// Half a cosine wave over the run.
    Cosine,
}

impl Config {
    /// Returns the configuration of the optimizer.
    pub fn optimizer_config(&self) -> OptimizerConfig {
        let decays =
            if self.no_decay_on_bias_and_norm { ParamSpan::is_weight } else { |_: &_| true };
        match self.optimizer {
            OptimizerKind::Sgd => OptimizerConfig::Sgd(SgdOptions {
                momentum: self.momentum,
                dampening: self.dampening,
                nesterov: self.nesterov,
                weight_decay: self.weight_decay.unwrap_or(SgdOptions::default().weight_decay),
                decays,
            }),
            OptimizerKind::AdamW => OptimizerConfig::AdamW(AdamWOptions {
                betas: (self.beta1, self.beta2),
                eps: self.eps,
                weight_decay: self.weight_decay.unwrap_or(AdamWOptions::default().weight_decay),
                decays,
            }),
        }
    }

    /// Returns the learning rate for `world_size` ranks, and a note for the user if it is scaled.
    pub fn lr_for(&self, world_size: usize) -> (f64, Option<String>) {
        if !self.scale_lr {
            return (self.lr, None);
        }
        let lr = self.lr * world_size as f64;
        let ranks = if world_size == 1 { "rank" } else { "ranks" };
        let note = format!("--scale-lr: learning rate {} x {world_size} {ranks} = {lr}", self.lr);
        (lr, Some(note))
    }

    /// Returns the learning rate schedule of a run on `world_size` ranks.
    pub fn schedule_for(&self, world_size: usize) -> Schedule {
        let (lr, _) = self.lr_for(world_size);
        let schedule = match self.schedule {
            ScheduleKind::Constant => Schedule::constant(lr),
            ScheduleKind::MultiStep => {
                Schedule::multi_step(lr, self.milestones.clone(), self.gamma)
            }
            ScheduleKind::Cosine => {
                let steps = self.max_epochs.saturating_mul(self.steps_per_epoch(world_size));
                let t_max = match self.schedule_by {
                    Unit::Epoch => self.max_epochs,
                    Unit::Step => steps.saturating_sub(self.warmup_steps),
                };
                Schedule::cosine(lr, t_max, self.eta_min)
            }
        };
        schedule.by(self.schedule_by).warmup(self.warmup_steps, Schedule::START_FACTOR)
    }

    pub(super) fn validate_optimization(&self) -> Result<(), Invalid> {
        let refuse = |key, problem: String| Err(Invalid { key, problem });
        if !is_positive(self.lr) {
            let problem = format!(
                "{} is not a learning rate; use a number from 0 to {MOST:e}",
                shown(self.lr)
            );
            return refuse("lr", problem);
        }
        for (key, value) in [
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay.unwrap_or_default()),
            ("eps", self.eps),
            ("gamma", self.gamma),
            ("eta_min", self.eta_min),
        ] {
            if !is_positive(value) {
                let problem = format!(
                    "{} is out of range: it must be at least 0, and float32 must hold it; use a number from 0 to \
                     {MOST:e}",
                    shown(value)
                );
                return refuse(key, problem);
            }
        }
        if !is_positive(self.dampening.abs()) {
            let problem = format!(
                "{} is out of range: float32 cannot hold it; use a number from -{MOST:e} to {MOST:e}",
                shown(self.dampening)
            );
            return refuse("dampening", problem);
        }
        for (key, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return refuse(
                    key,
                    format!(
                        "{beta} is out of range: AdamW keeps this share of a mean; use a number from 0 to below 1"
                    ),
                );
            }
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let problem = "Nesterov momentum needs a momentum above 0 and no dampening; use for \
                           example --momentum 0.9";
            return refuse("nesterov", problem.into());
        }
        if let Some(norm) = self.max_grad_norm
            && !(norm > 0.0 && is_positive(norm))
        {
            let problem = format!(
                "{} is out of range: gradients are scaled down to this norm; use a number above 0, up to {MOST:e}",
                shown(norm)
            );
            return refuse("max_grad_norm", problem);
        }
        if self.schedule == ScheduleKind::MultiStep && self.milestones.is_empty() {
            let problem = "multi-step needs milestones; use for example --milestones 30,60,90";
            return refuse("schedule", problem.into());
        }
        if let Some(pair) = self.milestones.windows(2).find(|pair| pair[0] >= pair[1]) {
            let problem = format!(
                "{} comes after {}, but milestones must increase; sort them, and name each once",
                pair[1], pair[0]
            );
            return refuse("milestones", problem);
        }
        Ok(())
    }

    /// Refuses a flag that another flag makes useless.
    pub(super) fn check_idle_optimization(
        &self,
        given: impl Fn(&str) -> bool,
    ) -> Result<(), Invalid> {
        let sgd = self.optimizer == OptimizerKind::Sgd;
        let multi_step = self.schedule == ScheduleKind::MultiStep;
        let cosine = self.schedule == ScheduleKind::Cosine;
        let constant = self.schedule == ScheduleKind::Constant;
        for (key, used, remedy) in [
            ("momentum", sgd, "is for SGD; use --optimizer sgd"),
            ("dampening", sgd && self.momentum != 0.0, "is for SGD with --momentum"),
            ("nesterov", sgd, "is for SGD; use --optimizer sgd"),
            ("beta1", !sgd, "is for AdamW; use --optimizer adamw"),
            ("beta2", !sgd, "is for AdamW; use --optimizer adamw"),
            ("eps", !sgd, "is for AdamW; use --optimizer adamw"),
            ("milestones", multi_step, "is for --schedule multi-step"),
            ("gamma", multi_step, "is for --schedule multi-step"),
            ("eta_min", cosine, "is for --schedule cosine"),
            ("schedule_by", !constant, "is for --schedule multi-step and cosine"),
        ] {
            if given(key) && !used {
                return Err(Invalid { key, problem: remedy.into() });
            }
        }
        Ok(())
    }

    /// Refuses a learning rate or a warm-up that does not fit `world_size` ranks.
    pub(super) fn validate_optimization_for(&self, world_size: usize) -> Result<()> {
        let (lr, _) = self.lr_for(world_size);
        if !is_positive(lr) {
            return Err(Error::Input(format!(
                "--scale-lr: a learning rate of {} for {world_size} ranks is too large; use a smaller --lr",
                shown(lr)
            )));
        }
        let steps = self.max_epochs.saturating_mul(self.steps_per_epoch(world_size));
        if self.warmup_steps >= steps.max(1) {
            return Err(Error::Input(format!(
                "--warmup-steps: {} steps of warm-up fill the whole run, which has {steps}; use fewer",
                self.warmup_steps
            )));
        }
        Ok(())
    }
}

/// Returns `value` as text, with an exponent where it would be long.
pub(super) fn shown(value: f64) -> String {
    if value.abs() < 1e16 { format!("{value}") } else { format!("{value:?}") }
}

/// The largest number that the optimizers accept. They step in float32, whose largest number is a little above.
const MOST: f64 = 3.4e38;

/// Returns whether `value` is at least 0 and float32 can hold it.
fn is_positive(value: f64) -> bool {
    (0.0..=MOST).contains(&value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(flags: &str) -> Result<Config> {
        Config::resolve(None, flags.parse().unwrap())
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (given, complaint) in [
            ("lr = nan", "--lr: NaN is not a learning rate"),
            ("lr = 3.5e38", "--lr: 3.5e38 is not a learning rate; use a number from 0 to 3.4e38"),
            ("gamma = 1e39", "--gamma: 1e39 is out of range: it must be at least 0"),
            ("max_grad_norm = 1e300", "--max-grad-norm: 1e300 is out of range: gradients"),
            ("dampening = -1e39", "--dampening: -1e39 is out of range: float32 cannot hold it"),
            ("momentum = -0.1", "--momentum: -0.1 is out of range"),
            ("weight_decay = inf", "--weight-decay: inf is out of range"),
            ("beta2 = 1.0", "--beta2: 1 is out of range: AdamW"),
            ("nesterov = true", "--nesterov: Nesterov momentum needs a momentum"),
            ("max_grad_norm = 0.0", "--max-grad-norm: 0 is out of range"),
            ("schedule = \"multi-step\"", "--schedule: multi-step needs milestones"),
            ("milestones = [3, 2]", "--milestones: 2 comes after 3, but milestones must increase"),
            ("milestones = [3]", "--milestones: is for --schedule multi-step"),
            ("eta_min = 0.1", "--eta-min: is for --schedule cosine"),
            ("optimizer = \"adamw\"\nmomentum = 0.9", "--momentum: is for SGD"),
            ("eps = 1e-6", "--eps: is for AdamW"),
            ("optimizer = \"lion\"", "--optimizer: unknown variant `lion`"),
        ] {
            let error = resolve(given).unwrap_err().to_string();
            assert!(error.starts_with(complaint), "{given} gave {error:?}");
        }
        let error = resolve("lr = 3e38\nscale_lr = true").unwrap().validate_for(2).unwrap_err();
        assert!(
            error.to_string().starts_with("--scale-lr: a learning rate of 6e38 for 2 ranks"),
            "{error}"
        );
        let error = resolve("warmup_steps = 64").unwrap().validate_for(2).unwrap_err().to_string();
        assert!(
            error.starts_with("--warmup-steps: 64 steps of warm-up fill the whole run"),
            "{error}"
        );
    }

    #[test]
    fn the_optimizers_have_pytorch_s_defaults() {
        let OptimizerConfig::Sgd(sgd) = resolve("").unwrap().optimizer_config() else { panic!() };
        assert_eq!((sgd.momentum, sgd.weight_decay), (0.0, 0.0));
        let adamw = resolve("optimizer = \"adamw\"").unwrap();
        let OptimizerConfig::AdamW(adamw) = adamw.optimizer_config() else { panic!() };
        assert_eq!((adamw.betas, adamw.eps, adamw.weight_decay), ((0.9, 0.999), 1e-8, 0.01));
    }

    #[test]
    fn the_learning_rate_grows_with_the_ranks_if_asked_to() {
        assert_eq!(resolve("").unwrap().lr_for(4), (0.001, None));
        let (lr, note) = resolve("scale_lr = true").unwrap().lr_for(4);
        assert_eq!(lr, 0.004);
        assert_eq!(note.unwrap(), "--scale-lr: learning rate 0.001 x 4 ranks = 0.004");
    }

    #[test]
    fn a_cosine_spans_the_run() {
        let cosine = "schedule = \"cosine\"\nlr = 1.0\nmax_epochs = 2\nnum_samples = 64";
        let by_epoch = resolve(cosine).unwrap().schedule_for(2);
        assert_eq!(by_epoch, Schedule::cosine(1.0, 2, 0.0));
        // 2 epochs of one step each, the first of which warms up.
        let by_step = resolve(&format!("{cosine}\nschedule_by = \"step\"\nwarmup_steps = 1"));
        let expected =
            Schedule::cosine(1.0, 1, 0.0).by(Unit::Step).warmup(1, Schedule::START_FACTOR);
        assert_eq!(by_step.unwrap().schedule_for(2), expected);
    }
}
