//! The keys of the DDP engine: its strategy, options and communication hook.

use serde::{Deserialize, Serialize};

use super::{Config, Invalid, ScheduleKind};
use crate::ddp::{CommHook, Compress, DdpOptions, PowerSgd, PowerSgdOptions};
use crate::optim::Unit;
use crate::trainer::Amp;

/// The distributed strategy: `--strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StrategyKind {
    /// `DistributedDataParallel`.
    Ddp,
    /// `DataParallel`, the older strategy.
    Dp,
}

/// The communication hook that averages buckets of gradients: `--comm-hook`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommHookKind {
    /// No compression.
    None,
    /// Compression to float16.
    Fp16,
    /// Compression to bfloat16.
    Bf16,
    /// Products of thin matrices, from step [`Config::powersgd_start_iter`] on.
    PowerSgd,
}

impl Config {
    /// Returns the options of the DDP engine.
    pub fn ddp_options(&self) -> DdpOptions {
        let default = DdpOptions::default();
        DdpOptions {
            bucket_cap_mb: self.bucket_cap_mb,
            first_bucket_mb: default.first_bucket_mb.min(self.bucket_cap_mb),
            find_unused_parameters: self.find_unused_parameters,
            static_graph: self.static_graph,
            broadcast_buffers: !self.no_broadcast_buffers,
            overlap: self.no_overlap.then_some(false),
            ..default
        }
    }

    /// Refuses options that `DataParallel` does not have. It would ignore them, or they would change results.
    pub(super) fn validate_strategy(&self) -> Result<(), Invalid> {
        let default = Config::default();
        let of_ddp = [
            ("bucket_cap_mb", self.bucket_cap_mb != default.bucket_cap_mb),
            ("no_overlap", self.no_overlap),
            ("comm_hook", self.comm_hook != CommHookKind::None),
            ("find_unused_parameters", self.find_unused_parameters),
            ("static_graph", self.static_graph),
            ("no_broadcast_buffers", self.no_broadcast_buffers),
            ("sync_batch_norm", self.sync_batch_norm),
            ("explain", self.explain),
        ];
        if self.strategy == StrategyKind::Dp && self.amp == Amp::Fp16 {
            let problem = "fp16 needs --strategy ddp: rank 0 alone would know which steps to skip";
            return Err(Invalid { key: "amp", problem: problem.into() });
        }
        if self.strategy == StrategyKind::Dp && self.exact_mean {
            let problem =
                "needs --strategy ddp: with dp rank 0 gives every rank a batch of the same size";
            return Err(Invalid { key: "exact_mean", problem: problem.into() });
        }
        match of_ddp.into_iter().find(|(_, is_set)| *is_set) {
            Some((key, _)) if self.strategy == StrategyKind::Dp => {
                Err(Invalid { key, problem: "needs --strategy ddp".into() })
            }
            _ => Ok(()),
        }
    }

    /// Returns a note if the communication hook has no effect in a run of `steps` steps. `None` if it has an effect.
    pub(crate) fn idle_hook_warning(&self, steps: u64) -> Option<String> {
        let is_idle = self.comm_hook == CommHookKind::PowerSgd && self.powersgd_start_iter >= steps;
        is_idle.then(|| {
            format!(
                "powersgd begins at step {}, and this run has {steps}: gradients go out as they are; see \
                 --powersgd-start-iter",
                self.powersgd_start_iter
            )
        })
    }

    /// Returns a note on a requested option that has no effect in a run of `steps` steps; `None` if there is none.
    pub(crate) fn no_effect_warning(&self, steps: u64) -> Option<String> {
        if let Some(idle) = self.idle_hook_warning(steps) {
            return Some(idle);
        }
        let (unit, length) = match self.schedule_by {
            Unit::Epoch => ("epoch", self.max_epochs),
            Unit::Step => ("step", steps),
        };
        let first = self.milestones.first().copied().unwrap_or_default();
        match self.schedule {
            ScheduleKind::MultiStep if first >= length => Some(format!(
                "the first milestone is {unit} {first}, and this run has {length}: the learning rate stays as it is"
            )),
            ScheduleKind::Cosine if length == 1 => Some(format!(
                "a cosine over one {unit} leaves the learning rate as it is; use --schedule-by step, or more epochs"
            )),
            _ => None,
        }
    }

    /// Returns the communication hook. `None` if gradients are not compressed.
    pub fn comm_hook(&self) -> Option<Box<dyn CommHook>> {
        match self.comm_hook {
            CommHookKind::None => None,
            CommHookKind::Fp16 => Some(Box::new(Compress::fp16())),
            CommHookKind::Bf16 => Some(Box::new(Compress::bf16())),
            CommHookKind::PowerSgd => Some(Box::new(PowerSgd::new(PowerSgdOptions {
                start_iter: self.powersgd_start_iter,
                seed: self.seed,
                ..PowerSgdOptions::default()
            }))),
        }
    }
}
