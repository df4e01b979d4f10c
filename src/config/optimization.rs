//! The options of optimization, and the optimizer and schedule that they select.

use clap::Args;
use serde::Serialize;
use serde_with::{SerializeDisplay, skip_serializing_none};
use strum::{Display, EnumString, VariantNames};

use super::option_rules::{Conflict, DefaultInWords, InShortHelp, MayDiffer, OnlyIf, RefusedBy};
use super::values::{MAX_F32, POSITIVE, format_number, name, number, whole};
use super::{Config, StrategyKind};
use engine::error::{Error, Result, counted};
use engine::optim::{AdamWOptions, OptimizerOptions, ParamSpan, Schedule, SgdOptions, Unit};
use engine::trainer::Amp;

/// The optimizer: `--optimizer`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum OptimizerKind {
    /// Stochastic gradient descent.
    Sgd,
    /// Adam with decoupled weight decay.
    AdamW,
}

/// The learning rate schedule: `--schedule`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "kebab-case")]
pub enum ScheduleKind {
    /// A constant learning rate.
    Constant,
    /// A learning rate multiplied by `gamma` at each milestone.
    MultiStep,
    /// Half a cosine wave over the run.
    Cosine,
}

/// The optimizer, its learning rate, and what is done to gradients before a step.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Optimization")]
#[group(skip)]
pub struct OptimizationSection {
    /// Set the learning rate
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32), default_value_t = 0.001)]
    #[arg(add = InShortHelp, add = MayDiffer::OnResumeWithNote)]
    pub lr: f64,
    /// Choose the optimizer
    #[arg(long, value_name = "NAME", value_parser = name::<OptimizerKind>())]
    #[arg(default_value_t = OptimizerKind::Sgd, add = InShortHelp)]
    pub optimizer: OptimizerKind,
    /// Set the momentum of SGD
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32))]
    #[arg(default_value_t = SgdOptions::default().momentum, add = ONLY_WITH_SGD)]
    pub momentum: f64,
    /// Set the dampening of SGD's momentum
    #[arg(long, value_name = "X", value_parser = number(-MAX_F32..=MAX_F32))]
    #[arg(default_value_t = SgdOptions::default().dampening, add = MOMENTUM)]
    pub dampening: f64,
    /// Use Nesterov momentum for SGD
    #[arg(long, add = Conflict(nesterov_problem), add = ONLY_WITH_SGD)]
    pub nesterov: bool,
    /// Set the weight decay
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32))]
    #[arg(add = MayDiffer::OnResumeWithNote)]
    #[arg(add = DefaultInWords("0 for sgd, 0.01 for adamw"))]
    pub weight_decay: Option<f64>,
    /// Exempt biases and the parameters of norms from weight decay
    #[arg(long, add = MayDiffer::OnResumeWithNote)]
    pub no_decay_on_bias_and_norm: bool,
    /// Set the decay rate of AdamW's mean gradient
    #[arg(long, value_name = "X", value_parser = number(0.0..1.0))]
    #[arg(default_value_t = AdamWOptions::default().betas.0)]
    #[arg(add = ADAMW, add = MayDiffer::OnResumeWithNote)]
    pub beta1: f64,
    /// Set the decay rate of AdamW's mean squared gradient
    #[arg(long, value_name = "X", value_parser = number(0.0..1.0))]
    #[arg(default_value_t = AdamWOptions::default().betas.1)]
    #[arg(add = ADAMW, add = MayDiffer::OnResumeWithNote)]
    pub beta2: f64,
    /// Add X to AdamW's denominator
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32))]
    #[arg(default_value_t = AdamWOptions::default().eps)]
    #[arg(add = ADAMW, add = MayDiffer::OnResumeWithNote)]
    pub eps: f64,
    /// Choose the learning rate schedule
    ///
    /// cosine goes to --eta-min over the run
    #[arg(long, value_name = "NAME", value_parser = name::<ScheduleKind>())]
    #[arg(default_value_t = ScheduleKind::Constant)]
    #[arg(add = Conflict(no_milestones), add = MayDiffer::OnResumeWithNote)]
    pub schedule: ScheduleKind,
    /// Count the schedule in epochs, or in steps after warm-up
    #[arg(long, value_name = "UNIT", value_parser = name::<Unit>(), default_value_t = Unit::Epoch)]
    #[arg(add = ONLY_WITH_SCHEDULE, add = MayDiffer::OnResumeWithNote)]
    pub schedule_by: Unit,
    /// Apply --gamma at these epochs or steps, with commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole::<u64>(..))]
    #[arg(add = Conflict(milestones_problem), add = MULTI_STEP, add = MayDiffer::OnResumeWithNote)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub milestones: Vec<u64>,
    /// Multiply the learning rate by X at each milestone
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32), default_value_t = 0.1)]
    #[arg(add = MULTI_STEP, add = MayDiffer::OnResumeWithNote)]
    pub gamma: f64,
    /// Set the learning rate at the end of cosine
    #[arg(long, value_name = "X", value_parser = number(0.0..=MAX_F32), default_value_t = 0.0)]
    #[arg(add = COSINE, add = MayDiffer::OnResumeWithNote)]
    pub eta_min: f64,
    /// Raise the learning rate from a third over N steps
    #[arg(long, value_name = "N", value_parser = whole::<u64>(..), default_value_t = 0)]
    #[arg(add = MayDiffer::OnResumeWithNote)]
    pub warmup_steps: u64,
    /// Multiply the learning rate by the number of ranks
    #[arg(long, add = MayDiffer::OnResumeWithNote)]
    pub scale_lr: bool,
    /// Scale down gradients whose norm exceeds X
    #[arg(long, value_name = "X", value_parser = number(POSITIVE))]
    #[arg(add = MayDiffer::OnResumeWithNote)]
    pub max_grad_norm: Option<f64>,
    /// Skip up to N steps whose values are not finite
    ///
    /// The gradients are checked before each step. One more such step ends the run. Without this option the first
    /// loss that is not finite ends it
    #[arg(long, value_name = "N", value_parser = whole::<u64>(..))]
    #[arg(add = Conflict(skip_problem), add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub skip_nonfinite: Option<u64>,
}

const ONLY_WITH_SGD: OnlyIf = OnlyIf(
    |it| it.optimization.optimizer == OptimizerKind::Sgd,
    "applies only to SGD; add --optimizer sgd, or remove it",
);
const MOMENTUM: OnlyIf = OnlyIf(
    |it| it.optimization.momentum != 0.0 && (ONLY_WITH_SGD.0)(it),
    "applies only to SGD with --momentum; add them, or remove it",
);
const ADAMW: OnlyIf = OnlyIf(
    |it| it.optimization.optimizer == OptimizerKind::AdamW,
    "applies only to AdamW; add --optimizer adamw, or remove it",
);
const ONLY_WITH_SCHEDULE: OnlyIf = OnlyIf(
    |it| it.optimization.schedule != ScheduleKind::Constant,
    "applies only to --schedule multi-step and cosine; add one, or remove it",
);
const MULTI_STEP: OnlyIf = OnlyIf(
    |it| it.optimization.schedule == ScheduleKind::MultiStep,
    "applies only to --schedule multi-step; add it, or remove this",
);
const COSINE: OnlyIf = OnlyIf(
    |it| it.optimization.schedule == ScheduleKind::Cosine,
    "applies only to --schedule cosine; add it, or remove this",
);

fn nesterov_problem(config: &Config) -> Option<String> {
    let OptimizationSection { nesterov, momentum, dampening, .. } = config.optimization;
    (nesterov && (momentum == 0.0 || dampening != 0.0)).then(|| {
        "Nesterov momentum needs a momentum above 0 and no dampening; use for example --momentum 0.9"
            .into()
    })
}

fn no_milestones(config: &Config) -> Option<String> {
    let OptimizationSection { schedule, milestones, .. } = &config.optimization;
    (*schedule == ScheduleKind::MultiStep && milestones.is_empty())
        .then(|| "multi-step needs milestones; use for example --milestones 30,60,90".into())
}

fn milestones_problem(config: &Config) -> Option<String> {
    let pair = config.optimization.milestones.windows(2).find(|pair| pair[0] >= pair[1])?;
    Some(format!(
        "{} comes after {}, but milestones must increase; sort them, and name each once",
        pair[1], pair[0]
    ))
}

fn skip_problem(config: &Config) -> Option<String> {
    let problem = match (config.training.amp, config.ddp.strategy) {
        (Amp::Fp16, _) => "fp16 already skips steps whose gradients overflow; remove this",
        (_, StrategyKind::Dp) => {
            "needs --strategy ddp: each rank would decide by its own gradients"
        }
        _ => return None,
    };
    Some(problem.into())
}

impl OptimizationSection {
    fn sgd(&self) -> SgdOptions {
        let Self { momentum, dampening, nesterov, .. } = *self;
        let weight_decay = self.weight_decay.unwrap_or(SgdOptions::default().weight_decay);
        SgdOptions { momentum, dampening, nesterov, weight_decay, decays: self.decays() }
    }

    fn adamw(&self) -> AdamWOptions {
        let Self { beta1, beta2, eps, .. } = *self;
        let weight_decay = self.weight_decay.unwrap_or(AdamWOptions::default().weight_decay);
        AdamWOptions { betas: (beta1, beta2), eps, weight_decay, decays: self.decays() }
    }

    /// Returns the function that selects the parameters with weight decay.
    fn decays(&self) -> fn(&ParamSpan) -> bool {
        if self.no_decay_on_bias_and_norm { ParamSpan::is_weight } else { |_| true }
    }
}

impl Config {
    /// Returns the optimizer's options.
    pub fn optimizer_options(&self) -> Box<dyn OptimizerOptions> {
        match self.optimization.optimizer {
            OptimizerKind::Sgd => Box::new(self.optimization.sgd()),
            OptimizerKind::AdamW => Box::new(self.optimization.adamw()),
        }
    }

    /// Returns the learning rate for `world_size` ranks, and a note for the user if it is scaled.
    pub fn lr_for(&self, world_size: usize) -> (f64, Option<String>) {
        if !self.optimization.scale_lr {
            return (self.optimization.lr, None);
        }
        let lr = self.optimization.lr * world_size as f64;
        let note = format!(
            "--scale-lr: learning rate {} x {} = {}",
            format_number(self.optimization.lr),
            counted(world_size, "rank"),
            format_number(lr)
        );
        (lr, Some(note))
    }

    /// Returns the learning rate schedule of a run on `world_size` ranks.
    pub fn schedule_for(&self, world_size: usize) -> Schedule {
        let (lr, _) = self.lr_for(world_size);
        let OptimizationSection { schedule_by, gamma, eta_min, warmup_steps, .. } =
            self.optimization;
        let schedule = match self.optimization.schedule {
            ScheduleKind::Constant => Schedule::constant(lr),
            ScheduleKind::MultiStep => {
                Schedule::multi_step(lr, self.optimization.milestones.clone(), gamma)
            }
            ScheduleKind::Cosine => {
                let t_max = match schedule_by {
                    Unit::Epoch => self.training.max_epochs,
                    Unit::Step => self.steps(world_size).saturating_sub(warmup_steps),
                };
                Schedule::cosine(lr, t_max, eta_min)
            }
        };
        schedule.by(schedule_by).warmup(warmup_steps, Schedule::START_FACTOR)
    }

    /// Returns a note if the schedule has no effect in a run of `world_size` ranks, or if the limit on steps ends the run
    /// before the schedule. `None` if all of it has an effect.
    pub(crate) fn schedule_note(&self, world_size: usize) -> Option<String> {
        let OptimizationSection { schedule, milestones, warmup_steps, .. } = &self.optimization;
        let (whole, in_epoch) = (self.steps(world_size), self.steps_per_epoch(world_size));
        let steps = self.training.max_steps.map_or(whole, |limit| limit.min(whole));
        let epochs = steps.div_ceil(in_epoch.max(1));
        let (unit, length, planned, remedy) = match self.optimization.schedule_by {
            Unit::Epoch => {
                let planned = self.training.max_epochs;
                ("epoch", epochs, planned, "--schedule-by step, or more epochs")
            }
            Unit::Step => ("step", steps, whole, "more steps"),
        };
        let limit = self.name_of("max_steps");
        let ends = format!("{limit}: this run ends after {steps} of {whole} steps");
        let remedy_of_limit = format!("leave {limit} out, and let --max-epochs end the run");
        if steps < whole && steps <= *warmup_steps {
            return Some(format!(
                "{ends}, within the warm-up of {warmup_steps}; {remedy_of_limit}"
            ));
        }
        let first = milestones.first().copied().unwrap_or_default();
        let missed = milestones.iter().find(|milestone| **milestone >= length);
        match schedule {
            ScheduleKind::MultiStep if first >= length => Some(format!(
                "the first milestone is {unit} {first}, and this run has {length}: the learning rate stays as it is"
            )),
            ScheduleKind::MultiStep if steps < whole => missed.map(|missed| {
                format!("{ends}, before the milestone at {unit} {missed}; {remedy_of_limit}")
            }),
            ScheduleKind::Cosine if length < planned => {
                Some(format!("{ends}, before the end of the cosine; {remedy_of_limit}"))
            }
            ScheduleKind::Cosine if length == 1 => Some(format!(
                "a cosine over one {unit} leaves the learning rate as it is; use {remedy}"
            )),
            _ => None,
        }
    }

    /// Refuses a learning rate or a warm-up that does not fit `world_size` ranks.
    pub(super) fn validate_optimization_for(&self, world_size: usize) -> Result<()> {
        let (lr, _) = self.lr_for(world_size);
        if lr > MAX_F32 {
            return Err(Error::usage(format!(
                "{}: a learning rate of {} for {} is too large; use a smaller --lr",
                self.name_of("scale_lr"),
                format_number(lr),
                counted(world_size, "rank")
            )));
        }
        let steps = self.steps(world_size);
        if self.optimization.warmup_steps >= steps.max(1) {
            return Err(Error::usage(format!(
                "{}: a warm-up of {} fills the whole run, which has {steps}; use fewer",
                self.name_of("warmup_steps"),
                counted(self.optimization.warmup_steps, "step")
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(flags: &str) -> Result<Config> {
        Config::resolve(None, &flags.parse().unwrap())
    }

    #[test]
    fn optimizer_invalid_values_are_refused_with_the_flag() {
        for (given, complaint) in [
            ("lr = nan", "invalid value 'NaN' for '--lr <X>': expected a number from 0 to 3.4e38"),
            ("lr = 3.5e38", "invalid value '3.5e38' for '--lr <X>': expected a number from 0"),
            ("gamma = 1e39", "invalid value '1e39' for '--gamma <X>': expected a number from 0"),
            ("max_grad_norm = 1e300", "invalid value '1e300' for '--max-grad-norm <X>': expected"),
            ("dampening = -1e39", "invalid value '-1e39' for '--dampening <X>': expected"),
            ("momentum = -0.1", "invalid value '-0.1' for '--momentum <X>': expected"),
            ("weight_decay = inf", "invalid value 'inf' for '--weight-decay <X>': expected"),
            (
                "beta2 = 1.0",
                "invalid value '1.0' for '--beta2 <X>': expected a number at least 0 and less than 1",
            ),
            ("nesterov = true", "--nesterov: Nesterov momentum needs a momentum"),
            (
                "max_grad_norm = 0.0",
                "invalid value '0.0' for '--max-grad-norm <X>': expected a number above 0 and at most",
            ),
            ("schedule = \"multi-step\"", "--schedule: multi-step needs milestones"),
            ("milestones = [3, 2]", "--milestones: 2 comes after 3, but milestones must increase"),
            ("milestones = [3]", "--milestones: applies only to --schedule multi-step"),
            ("eta_min = 0.1", "--eta-min: applies only to --schedule cosine"),
            ("optimizer = \"adamw\"\nmomentum = 0.9", "--momentum: applies only to SGD"),
            ("eps = 1e-6", "--eps: applies only to AdamW"),
            (
                "optimizer = \"lion\"",
                "invalid value 'lion' for '--optimizer <NAME>'\n  [possible values: sgd",
            ),
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
            error.starts_with("--warmup-steps: a warm-up of 64 steps fills the whole run"),
            "{error}"
        );
    }

    #[test]
    fn optimizer_defaults_are_those_of_pytorch() {
        let config = resolve("").unwrap();
        assert!(config.optimizer_options().is_plain());
        let sgd = config.optimization.sgd();
        assert_eq!((sgd.momentum, sgd.weight_decay), (0.0, 0.0));
        let config = resolve("optimizer = \"adamw\"").unwrap();
        assert_eq!(config.optimizer_options().states(), ["exp_avg", "exp_avg_sq"]);
        let adamw = config.optimization.adamw();
        assert_eq!((adamw.betas, adamw.eps, adamw.weight_decay), ((0.9, 0.999), 1e-8, 0.01));
    }

    #[test]
    fn scale_lr_multiplies_the_rate_by_the_ranks() {
        assert_eq!(resolve("").unwrap().lr_for(4), (0.001, None));
        let (lr, note) = resolve("scale_lr = true").unwrap().lr_for(4);
        assert_eq!(lr, 0.004);
        assert_eq!(note.unwrap(), "--scale-lr: learning rate 0.001 x 4 ranks = 0.004");
    }

    #[test]
    fn schedules_without_an_effect_are_noted_with_the_remedy() {
        for (given, note) in [
            (
                "schedule = \"cosine\"",
                "a cosine over one epoch leaves the learning rate as it is; use --schedule-by step, or more epochs",
            ),
            (
                "schedule = \"cosine\"\nschedule_by = \"step\"\nnum_samples = 32",
                "a cosine over one step leaves the learning rate as it is; use more steps",
            ),
            (
                "schedule = \"multi-step\"\nmilestones = [1, 2]",
                "the first milestone is epoch 1, and this run has 1: the learning rate stays as it is",
            ),
        ] {
            assert_eq!(resolve(given).unwrap().schedule_note(1).unwrap(), note);
        }
        let by_step = resolve("schedule = \"cosine\"\nschedule_by = \"step\"").unwrap();
        assert_eq!(by_step.schedule_note(2), None);
        assert_eq!(resolve("").unwrap().schedule_note(1), None);
    }

    /// Two ranks make 64 steps an epoch.
    #[test]
    fn limit_that_ends_a_run_before_its_schedule_is_noted() {
        let note =
            |given: &str| resolve(&format!("max_epochs = 10\n{given}")).unwrap().schedule_note(2);
        let cosine = "schedule = \"cosine\"\nlr = 1.0\nmax_steps";
        let remedy = "leave --max-steps out, and let --max-epochs end the run";
        for (given, expected) in [
            (format!("schedule_by = \"step\"\n{cosine} = 100"), "before the end of the cosine"),
            (format!("{cosine} = 65"), "before the end of the cosine"),
            (format!("warmup_steps = 65\n{cosine} = 65"), "within the warm-up of 65"),
            (
                "schedule = \"multi-step\"\nmilestones = [1, 4]\nmax_steps = 200".into(),
                "before the milestone at epoch 4",
            ),
        ] {
            let note = note(&given).unwrap();
            let (_, told) = note.split_once(" of 640 steps, ").unwrap();
            assert_eq!(told, format!("{expected}; {remedy}"));
        }
        for given in [
            format!("{cosine} = 640"),
            format!("{cosine} = 1000"),
            format!("{cosine} = 600"), // in the last epoch
            "max_steps = 3".into(),
            "schedule = \"multi-step\"\nmilestones = [1, 3]\nmax_steps = 200".into(),
        ] {
            assert_eq!(note(&given), None, "{given}");
        }
    }

    #[test]
    fn cosine_schedule_spans_the_whole_run() {
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
