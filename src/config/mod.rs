//! The configuration of a run, as plain data: defaults, overridden by a TOML file, overridden by flags.

mod checkpoints;
mod data;
mod ddp;
mod files;
mod memory;
mod optimization;
mod other_names;
mod resolve;
mod text;
mod validation;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::data::DatasetSpec;
use crate::launch::{BackendChoice, Fault, LaunchChoice, LaunchOptions, Nproc, Spawn, SpawnChoice};
use crate::models::{Activation, ModelConfig, ModelKind};
use crate::optim::Unit;
use crate::telemetry::{Language, LogFormat};
use crate::trainer::{Amp, Loss};

pub use data::Data;
pub use ddp::{CommHookKind, StrategyKind};
pub use optimization::{OptimizerKind, ScheduleKind};
pub use other_names::{option_of_other_name, options_with_other_names};
use resolve::flag_name;
use validation::Invalid;
pub use validation::parse_timeout;

/// The configuration of a run. Each field is a flag (with `-` for `_`) and a key of a TOML file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The number of passes over the data.
    #[serde(alias = "max-epochs")]
    pub max_epochs: u64,
    /// Samples per batch on each rank. A step takes `grad_accum_steps` batches.
    #[serde(alias = "batch-size")]
    pub batch_size: usize,
    /// The model.
    pub model: ModelKind,
    /// The widths of an mlp's hidden layers.
    pub hidden: Vec<i64>,
    /// The activation function between the layers of an mlp or a cnn.
    pub activation: Activation,
    /// The dropout probability between an mlp's layers.
    pub dropout: f64,
    /// The channels of a cnn's convolutions.
    pub channels: Vec<i64>,
    /// Batch norms of a cnn take their statistics over the samples of all ranks, as `SyncBatchNorm` does.
    #[serde(alias = "sync-batch-norm")]
    pub sync_batch_norm: bool,
    /// The loss function.
    pub loss: Loss,
    /// The mixed precision of the forward pass: its dtype where that is precise enough.
    pub amp: Amp,

    /// The learning rate.
    pub lr: f64,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// SGD's momentum.
    pub momentum: f64,
    /// The dampening of SGD's momentum.
    pub dampening: f64,
    /// Nesterov momentum for SGD.
    pub nesterov: bool,
    /// Weight decay. `None` for the optimizer's default.
    #[serde(alias = "weight-decay", skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// No weight decay for biases and the parameters of norms.
    #[serde(alias = "no-decay-on-bias-and-norm")]
    pub no_decay_on_bias_and_norm: bool,
    /// The decay rate of AdamW's mean gradient.
    pub beta1: f64,
    /// The decay rate of AdamW's mean squared gradient.
    pub beta2: f64,
    /// The term added to AdamW's denominator.
    pub eps: f64,
    /// The learning rate schedule.
    pub schedule: ScheduleKind,
    /// The unit of the schedule: epochs or steps.
    #[serde(alias = "schedule-by")]
    pub schedule_by: Unit,
    /// The epochs or steps at which a multi-step schedule applies `gamma`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub milestones: Vec<u64>,
    /// The factor of the learning rate at each milestone.
    pub gamma: f64,
    /// The learning rate at the end of a cosine schedule.
    #[serde(alias = "eta-min")]
    pub eta_min: f64,
    /// The number of warm-up steps, in which the learning rate rises to its full value.
    #[serde(alias = "warmup-steps")]
    pub warmup_steps: u64,
    /// Multiply the learning rate by the number of ranks.
    #[serde(alias = "scale-lr")]
    pub scale_lr: bool,
    /// The largest norm of the gradients; larger ones are scaled down. `None` for no limit.
    #[serde(alias = "max-grad-norm", skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,

    /// The number of steps that may be skipped because their losses or gradients are not finite. `None` to skip none.
    #[serde(alias = "skip-nonfinite", skip_serializing_if = "Option::is_none")]
    pub skip_nonfinite: Option<u64>,
    /// Steps between comparisons of all ranks' parameters, if requested.
    #[serde(alias = "check-replicas-every", skip_serializing_if = "Option::is_none")]
    pub check_replicas_every: Option<u64>,

    /// The data set.
    pub dataset: DatasetSpec,
    /// The number of samples; of a file, the first ones. `None` for all samples of a file.
    #[serde(alias = "num-samples", skip_serializing_if = "Option::is_none")]
    pub num_samples: Option<i64>,
    /// Numbers per sample. `None` to take it from the file.
    #[serde(alias = "in-features", skip_serializing_if = "Option::is_none")]
    pub in_features: Option<i64>,
    /// Outputs of the model; with cross-entropy, the number of classes. `None` to take it from the file.
    #[serde(alias = "out-features", skip_serializing_if = "Option::is_none")]
    pub out_features: Option<i64>,
    /// The folder for TensorBoard's files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensorboard: Option<PathBuf>,
    /// The file for the timeline of all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// The file for the web page about the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
    /// The file for metrics, one JSON object per line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<PathBuf>,
    /// Steps between reports of progress. `None` for the default: 50, or 10 with a report.
    #[serde(alias = "log-every", skip_serializing_if = "Option::is_none")]
    pub log_every: Option<u64>,
    /// The fraction of the samples held back for validation. `None` to use the validation files beside the training
    /// files, if there are any.
    #[serde(alias = "val-fraction", skip_serializing_if = "Option::is_none")]
    pub val_fraction: Option<f64>,
    /// Epochs between validations.
    #[serde(alias = "val-every")]
    pub val_every: u64,
    /// Don't shuffle the samples.
    #[serde(alias = "no-shuffle")]
    pub no_shuffle: bool,
    /// Drop the samples that cannot be divided equally among the ranks, instead of repeating some.
    #[serde(alias = "drop-last")]
    pub drop_last: bool,
    /// Drop an epoch's last batch if it has fewer samples than the others.
    #[serde(alias = "drop-last-batch")]
    pub drop_last_batch: bool,
    /// Threads per rank that load batches. With 0, the rank itself loads them.
    #[serde(alias = "num-workers")]
    pub num_workers: usize,
    /// Batches that each worker loads ahead.
    #[serde(alias = "prefetch-factor")]
    pub prefetch_factor: usize,
    /// The random seed.
    pub seed: u64,

    /// The folder for checkpoints. `None` to save none.
    #[serde(alias = "checkpoint-dir", skip_serializing_if = "Option::is_none")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints.
    #[serde(alias = "save-every", skip_serializing_if = "Option::is_none")]
    pub save_every: Option<u64>,
    /// Epochs between checkpoints. The default is 1 without `save_every`.
    #[serde(alias = "save-every-epochs", skip_serializing_if = "Option::is_none")]
    pub save_every_epochs: Option<u64>,
    /// The number of newest checkpoints to keep.
    #[serde(alias = "keep-last")]
    pub keep_last: u64,
    /// The checkpoint to resume from, or `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
    /// The file of the initial parameters and buffers.
    #[serde(alias = "init-from", skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
    /// The number of steps of the whole run after which it stops.
    #[serde(alias = "max-steps", skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// The number of validations in a row without progress after which the run stops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// The time after which the run stops, counted from this start. Restarts by `max_restarts` do not reset it.
    #[serde(
        alias = "max-seconds",
        with = "text::some_duration",
        skip_serializing_if = "Option::is_none"
    )]
    pub max_seconds: Option<Duration>,
    /// The number of restarts of this machine's ranks after a failure, from the newest checkpoint.
    #[serde(alias = "max-restarts")]
    pub max_restarts: usize,

    /// The number of ranks that this process starts.
    #[serde(alias = "nproc-per-node", with = "text::nproc")]
    pub nproc_per_node: Nproc,
    /// Ranks as threads or as processes.
    pub spawn: SpawnChoice,
    /// The launcher whose variables place this process.
    pub launch: LaunchChoice,
    /// The number of machines, if no launcher sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nnodes: Option<usize>,
    /// This machine's number, from 0.
    #[serde(alias = "node-rank", skip_serializing_if = "Option::is_none")]
    pub node_rank: Option<usize>,
    /// The host name or address of machine 0.
    #[serde(alias = "master-addr", skip_serializing_if = "Option::is_none")]
    pub master_addr: Option<String>,
    /// The port of the rendezvous on machine 0.
    #[serde(alias = "master-port", skip_serializing_if = "Option::is_none")]
    pub master_port: Option<u16>,
    /// The communication backend.
    pub backend: BackendChoice,
    /// The distributed strategy.
    pub strategy: StrategyKind,
    /// The size of a gradient bucket, in MiB.
    #[serde(alias = "bucket-cap-mb")]
    pub bucket_cap_mb: f64,
    /// Batches whose gradients are added up before a step.
    #[serde(alias = "grad-accum-steps")]
    pub grad_accum_steps: u64,
    /// Average gradients over samples instead of ranks, and repeat no sample.
    #[serde(alias = "exact-mean")]
    pub exact_mean: bool,
    /// Reduce buckets after backward, not during it.
    #[serde(alias = "no-overlap")]
    pub no_overlap: bool,
    /// The communication hook that averages buckets.
    #[serde(alias = "comm-hook")]
    pub comm_hook: CommHookKind,
    /// Steps without compression before powersgd begins: `start_powerSGD_iter`.
    #[serde(alias = "powersgd-start-iter")]
    pub powersgd_start_iter: u64,
    /// Allow parameters that the loss does not depend on.
    #[serde(alias = "find-unused-parameters")]
    pub find_unused_parameters: bool,
    /// The loss depends on the same parameters in every step.
    #[serde(alias = "static-graph")]
    pub static_graph: bool,
    /// Keep each rank's own buffers in training: rank 0's are not broadcast.
    #[serde(alias = "no-broadcast-buffers")]
    pub no_broadcast_buffers: bool,
    /// The longest time that a rank waits for the others.
    #[serde(with = "text::duration")]
    pub timeout: Duration,
    /// The time for the other ranks to return after one has failed.
    #[serde(alias = "grace-period", with = "text::duration")]
    pub grace_period: Duration,
    /// The time in a collective after which missing ranks are reported.
    #[serde(alias = "stall-warning", with = "text::duration")]
    pub stall_warning: Duration,
    /// The format of the results.
    #[serde(alias = "log-format")]
    pub log_format: LogFormat,
    /// Explain the first steps of the run.
    pub explain: bool,
    /// The language of the explanation.
    pub language: Language,
    /// Compare all ranks' collective calls, also where the backend does not require it.
    #[serde(alias = "check-collectives")]
    pub check_collectives: bool,
    /// The fault to inject into a rank.
    #[serde(
        alias = "inject-fault",
        skip_serializing_if = "Option::is_none",
        deserialize_with = "text::some_fault"
    )]
    pub inject_fault: Option<Fault>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_epochs: 1,
            batch_size: 32,
            model: ModelKind::Linear,
            hidden: vec![64, 64],
            activation: Activation::Relu,
            dropout: 0.0,
            channels: vec![16, 32],
            sync_batch_norm: false,
            loss: Loss::Mse,
            amp: Amp::Off,
            lr: 0.001,
            optimizer: OptimizerKind::Sgd,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: None,
            no_decay_on_bias_and_norm: false,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            schedule: ScheduleKind::Constant,
            schedule_by: Unit::Epoch,
            milestones: Vec::new(),
            gamma: 0.1,
            eta_min: 0.0,
            warmup_steps: 0,
            scale_lr: false,
            max_grad_norm: None,
            skip_nonfinite: None,
            check_replicas_every: None,
            dataset: DatasetSpec::RANDOM,
            num_samples: Some(4096),
            in_features: Some(20),
            out_features: Some(1),
            no_shuffle: false,
            drop_last: false,
            tensorboard: None,
            trace: None,
            report: None,
            metrics: None,
            log_every: None,
            val_fraction: None,
            val_every: 1,
            drop_last_batch: false,
            num_workers: 0,
            prefetch_factor: 2,
            seed: 0,
            checkpoint_dir: None,
            save_every: None,
            save_every_epochs: None,
            keep_last: 3,
            resume: None,
            init_from: None,
            max_steps: None,
            max_seconds: None,
            max_restarts: 0,
            patience: None,
            nproc_per_node: Nproc::Auto,
            spawn: SpawnChoice::Threads,
            launch: LaunchChoice::Auto,
            nnodes: None,
            node_rank: None,
            master_addr: None,
            master_port: None,
            backend: BackendChoice::Auto,
            strategy: StrategyKind::Ddp,
            bucket_cap_mb: 25.0,
            grad_accum_steps: 1,
            exact_mean: false,
            no_overlap: false,
            comm_hook: CommHookKind::None,
            powersgd_start_iter: 1000,
            find_unused_parameters: false,
            static_graph: false,
            no_broadcast_buffers: false,
            timeout: Spawn::TIMEOUT,
            grace_period: Spawn::GRACE_PERIOD,
            stall_warning: Spawn::STALL_WARNING,
            log_format: LogFormat::Text,
            explain: false,
            language: Language::En,
            check_collectives: false,
            inject_fault: None,
        }
    }
}

impl fmt::Display for Config {
    /// Writes the TOML file that gives this configuration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(toml::to_string(self).map_err(|_| fmt::Error)?.trim_end())
    }
}

impl Config {
    /// Returns the options that say how this process was launched.
    pub fn launch_options(&self) -> LaunchOptions {
        LaunchOptions {
            launch: self.launch,
            nnodes: self.nnodes,
            node_rank: self.node_rank,
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            nproc: self.nproc_per_node,
        }
    }

    /// Returns the steps between reports of progress: fewer for the curves of a report.
    pub fn log_every(&self) -> u64 {
        self.log_every.unwrap_or(if self.report.is_some() { 10 } else { 50 })
    }

    /// Returns the configuration of the model.
    pub fn model_config(&self) -> ModelConfig {
        let default = ModelConfig::default();
        ModelConfig {
            kind: self.model,
            in_features: self.in_features.unwrap_or(default.in_features),
            out_features: self.out_features.unwrap_or(default.out_features),
            hidden: match self.model {
                ModelKind::Linear | ModelKind::Mlp => self.hidden.clone(),
                ModelKind::Cnn => self.channels.clone(),
            },
            activation: self.activation,
            dropout: self.dropout,
        }
    }
}
