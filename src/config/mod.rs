//! Everything a run can be told, as plain data: defaults, then a TOML file, then flags.

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

/// A whole configuration. Every field is a flag (with `-` for `_`) and a key of a TOML file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// How often to go through the data.
    #[serde(alias = "max-epochs")]
    pub max_epochs: u64,
    /// How many samples a step takes, on each rank.
    #[serde(alias = "batch-size")]
    pub batch_size: usize,
    /// The model.
    pub model: ModelKind,
    /// The widths of an mlp's hidden layers.
    pub hidden: Vec<i64>,
    /// The function between the layers of an mlp or a cnn.
    pub activation: Activation,
    /// With which probability a number between an mlp's layers is zeroed.
    pub dropout: f64,
    /// The channels of a cnn's convolutions.
    pub channels: Vec<i64>,
    /// Whether a cnn's batch norms take their statistics over the samples of all ranks.
    #[serde(alias = "sync-batch-norm")]
    pub sync_batch_norm: bool,
    /// What is to become small.
    pub loss: Loss,
    /// What kind the forward pass is computed in where that is precise enough.
    pub amp: Amp,

    /// The learning rate.
    pub lr: f64,
    /// What steps the parameters.
    pub optimizer: OptimizerKind,
    /// How much of SGD's last step goes into the next.
    pub momentum: f64,
    /// How much less of the gradient goes into SGD's momentum.
    pub dampening: f64,
    /// Nesterov's momentum for SGD.
    pub nesterov: bool,
    /// Weight decay; the optimizer's default if there is none.
    #[serde(alias = "weight-decay", skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// No weight decay for biases and the parameters of norms.
    #[serde(alias = "no-decay-on-bias-and-norm")]
    pub no_decay_on_bias_and_norm: bool,
    /// How much of its mean gradient AdamW keeps in a step.
    pub beta1: f64,
    /// How much of its mean squared gradient AdamW keeps in a step.
    pub beta2: f64,
    /// What AdamW adds to its denominator.
    pub eps: f64,
    /// How the learning rate changes.
    pub schedule: ScheduleKind,
    /// What a schedule counts.
    #[serde(alias = "schedule-by")]
    pub schedule_by: Unit,
    /// When a multi-step schedule lowers the learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub milestones: Vec<u64>,
    /// By what it is multiplied there.
    pub gamma: f64,
    /// Where a cosine schedule ends.
    #[serde(alias = "eta-min")]
    pub eta_min: f64,
    /// In how many steps the learning rate rises to its value at first.
    #[serde(alias = "warmup-steps")]
    pub warmup_steps: u64,
    /// Multiply the learning rate by the number of ranks.
    #[serde(alias = "scale-lr")]
    pub scale_lr: bool,
    /// How long the gradient may be.
    #[serde(alias = "max-grad-norm", skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,

    /// How many steps to leave out whose losses or gradients are not finite.
    #[serde(alias = "skip-nonfinite", skip_serializing_if = "Option::is_none")]
    pub skip_nonfinite: Option<u64>,
    /// After how many steps each time to compare what each rank has for each parameter.
    #[serde(alias = "check-replicas-every", skip_serializing_if = "Option::is_none")]
    pub check_replicas_every: Option<u64>,

    /// What to train on.
    pub dataset: DatasetSpec,
    /// How many samples there are; those of a file from its first on. All of a file's, if not given.
    #[serde(alias = "num-samples", skip_serializing_if = "Option::is_none")]
    pub num_samples: Option<i64>,
    /// How many numbers each sample has; as many as in the file, if not given.
    #[serde(alias = "in-features", skip_serializing_if = "Option::is_none")]
    pub in_features: Option<i64>,
    /// How many numbers the model predicts; with cross-entropy, how many classes there are. From the file, if
    /// not given.
    #[serde(alias = "out-features", skip_serializing_if = "Option::is_none")]
    pub out_features: Option<i64>,
    /// The folder of TensorBoard's files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensorboard: Option<PathBuf>,
    /// The file of the timeline of all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// The file of the page that shows the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
    /// The file of metrics, a JSON object a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<PathBuf>,
    /// After how many steps to tell how training goes each time, if not by default.
    #[serde(alias = "log-every", skip_serializing_if = "Option::is_none")]
    pub log_every: Option<u64>,
    /// Which fraction of the samples is held back for validation; if it is not given, files for validation that
    /// lie beside those for training are used.
    #[serde(alias = "val-fraction", skip_serializing_if = "Option::is_none")]
    pub val_fraction: Option<f64>,
    /// After how many epochs to validate each time.
    #[serde(alias = "val-every")]
    pub val_every: u64,
    /// Don't shuffle the samples.
    #[serde(alias = "no-shuffle")]
    pub no_shuffle: bool,
    /// Drop the samples that don't go round between the ranks, instead of dealing some twice.
    #[serde(alias = "drop-last")]
    pub drop_last: bool,
    /// Leave out an epoch's last batch, if it has fewer samples.
    #[serde(alias = "drop-last-batch")]
    pub drop_last_batch: bool,
    /// How many threads load batches for each rank; none: the rank itself does.
    #[serde(alias = "num-workers")]
    pub num_workers: usize,
    /// How many batches each of them is ahead.
    #[serde(alias = "prefetch-factor")]
    pub prefetch_factor: usize,
    /// What all randomness starts from.
    pub seed: u64,

    /// Where to save checkpoints.
    #[serde(alias = "checkpoint-dir", skip_serializing_if = "Option::is_none")]
    pub checkpoint_dir: Option<PathBuf>,
    /// After how many steps to save each time.
    #[serde(alias = "save-every", skip_serializing_if = "Option::is_none")]
    pub save_every: Option<u64>,
    /// After how many epochs; after each, if neither is said.
    #[serde(alias = "save-every-epochs", skip_serializing_if = "Option::is_none")]
    pub save_every_epochs: Option<u64>,
    /// How many of the newest checkpoints to keep.
    #[serde(alias = "keep-last")]
    pub keep_last: u64,
    /// The checkpoint to go on from, or `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
    /// A file of parameters and buffers to start from.
    #[serde(alias = "init-from", skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
    /// After how many steps of the whole run to stop.
    #[serde(alias = "max-steps", skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// After how many validations without progress to stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// After how much time to stop, counted from this start.
    #[serde(
        alias = "max-seconds",
        with = "text::some_duration",
        skip_serializing_if = "Option::is_none"
    )]
    pub max_seconds: Option<Duration>,
    /// How often the ranks of this machine start again after a failure, from the newest checkpoint.
    #[serde(alias = "max-restarts")]
    pub max_restarts: usize,

    /// How many ranks to start.
    #[serde(alias = "nproc-per-node", with = "text::nproc")]
    pub nproc_per_node: Nproc,
    /// What the ranks are.
    pub spawn: SpawnChoice,
    /// Which launcher's variables to go by.
    pub launch: LaunchChoice,
    /// How many machines there are, if no launcher says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nnodes: Option<usize>,
    /// This machine's number among them, from 0.
    #[serde(alias = "node-rank", skip_serializing_if = "Option::is_none")]
    pub node_rank: Option<usize>,
    /// The name or address of machine 0.
    #[serde(alias = "master-addr", skip_serializing_if = "Option::is_none")]
    pub master_addr: Option<String>,
    /// The port where the machines meet.
    #[serde(alias = "master-port", skip_serializing_if = "Option::is_none")]
    pub master_port: Option<u16>,
    /// What carries the tensors.
    pub backend: BackendChoice,
    /// How one model is trained on all ranks.
    pub strategy: StrategyKind,
    /// When a bucket of gradients is full, in MiB.
    #[serde(alias = "bucket-cap-mb")]
    pub bucket_cap_mb: f64,
    /// Of how many batches the gradients are added up before a step.
    #[serde(alias = "grad-accum-steps")]
    pub grad_accum_steps: u64,
    /// Average gradients over samples and not over ranks, and deal no sample twice.
    #[serde(alias = "exact-mean")]
    pub exact_mean: bool,
    /// Reduce buckets after backward only.
    #[serde(alias = "no-overlap")]
    pub no_overlap: bool,
    /// How buckets are averaged.
    #[serde(alias = "comm-hook")]
    pub comm_hook: CommHookKind,
    /// How many steps powersgd averages without compression first: `start_powerSGD_iter`.
    #[serde(alias = "powersgd-start-iter")]
    pub powersgd_start_iter: u64,
    /// Allow that the loss does not depend on some parameters.
    #[serde(alias = "find-unused-parameters")]
    pub find_unused_parameters: bool,
    /// The loss depends on the same parameters in every step.
    #[serde(alias = "static-graph")]
    pub static_graph: bool,
    /// Let each rank keep its own buffers in training.
    #[serde(alias = "no-broadcast-buffers")]
    pub no_broadcast_buffers: bool,
    /// How long a rank waits for the others.
    #[serde(with = "text::duration")]
    pub timeout: Duration,
    /// How long the others get to come back after one rank has failed.
    #[serde(alias = "grace-period", with = "text::duration")]
    pub grace_period: Duration,
    /// After how long in a collective who is missing there is told.
    #[serde(alias = "stall-warning", with = "text::duration")]
    pub stall_warning: Duration,
    /// How results are written.
    #[serde(alias = "log-format")]
    pub log_format: LogFormat,
    /// Whether the run is told step by step.
    pub explain: bool,
    /// In which language.
    pub language: Language,
    /// Compare what the ranks call also where the backend need not.
    #[serde(alias = "check-collectives")]
    pub check_collectives: bool,
    /// A rank that is to fail.
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
            dataset: DatasetSpec::Random,
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
    /// As a TOML file that gives this very configuration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(toml::to_string(self).map_err(|_| fmt::Error)?.trim_end())
    }
}

impl Config {
    /// What this says about how the process was launched.
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

    /// After how many steps to tell how training goes each time: more often for the curves of a report.
    pub fn log_every(&self) -> u64 {
        self.log_every.unwrap_or(if self.report.is_some() { 10 } else { 50 })
    }

    /// The model that this asks for.
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
