//! The flags of training: those that `config::Config` has keys for.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::values::{number, whole, whole_in};

/// The flags that `config::Config` has keys for; those not given are not there.
#[derive(Debug, Args, Serialize)]
pub(crate) struct TrainFlags {
    /// How often to go through the data [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Training")]
    max_epochs: Option<u64>,
    /// How many samples a step takes, on each rank [default: 32]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Training")]
    batch_size: Option<u64>,
    /// The model [default: linear]
    #[arg(long, value_name = "NAME", value_parser = ["linear", "mlp", "cnn"], help_heading = "Training")]
    model: Option<String>,
    /// The widths of an mlp's hidden layers, with commas [default: 64,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(1), help_heading = "Training")]
    hidden: Option<Vec<u64>>,
    /// The function between the layers of an mlp or a cnn [default: relu]
    #[arg(long, value_name = "NAME", value_parser = ["relu", "tanh", "gelu", "sigmoid"], help_heading = "Training")]
    activation: Option<String>,
    /// With which probability each number between an mlp's layers is zeroed in training [default: 0]
    #[arg(long, value_name = "P", value_parser = number(), help_heading = "Training")]
    dropout: Option<f64>,
    /// The channels of a cnn's convolutions, with commas; each halves the image [default: 16,32]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(1), help_heading = "Training")]
    channels: Option<Vec<u64>>,
    /// Normalize a cnn's batches over the samples of all ranks
    #[arg(long, help_heading = "Training")]
    #[serde(skip_serializing_if = "is_false")]
    sync_batch_norm: bool,
    /// What is to become small [default: mse]
    #[arg(long, value_name = "NAME", value_parser = ["mse", "cross-entropy"], help_heading = "Training")]
    loss: Option<String>,
    /// Mixed precision: compute the forward pass in bf16 or fp16 where that is precise enough; fp16 scales
    /// the loss [default: off]
    #[arg(long, value_name = "NAME", value_parser = ["off", "bf16", "fp16"], help_heading = "Training")]
    amp: Option<String>,
    /// What all randomness starts from [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Training")]
    seed: Option<u64>,

    /// The learning rate [default: 0.001]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    lr: Option<f64>,
    /// What steps the parameters [default: sgd]
    #[arg(long, value_name = "NAME", value_parser = ["sgd", "adamw"], help_heading = "Optimization")]
    optimizer: Option<String>,
    /// How much of SGD's last step goes into the next [default: 0]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    momentum: Option<f64>,
    /// How much less of the gradient goes into SGD's momentum [default: 0]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    dampening: Option<f64>,
    /// Nesterov's momentum for SGD
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    nesterov: bool,
    /// Weight decay [default: 0 for sgd, 0.01 for adamw]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    weight_decay: Option<f64>,
    /// No weight decay for biases and the parameters of norms
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    no_decay_on_bias_and_norm: bool,
    /// How much of its mean gradient AdamW keeps in a step [default: 0.9]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    beta1: Option<f64>,
    /// How much of its mean squared gradient AdamW keeps in a step [default: 0.999]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    beta2: Option<f64>,
    /// What AdamW adds to its denominator [default: 0.00000001]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    eps: Option<f64>,
    /// How the learning rate changes: cosine goes to --eta-min over the run [default: constant]
    #[arg(long, value_name = "NAME", value_parser = ["constant", "multi-step", "cosine"], help_heading = "Optimization")]
    schedule: Option<String>,
    /// What a schedule counts; steps from the end of the warm-up [default: epoch]
    #[arg(long, value_name = "UNIT", value_parser = ["epoch", "step"], help_heading = "Optimization")]
    schedule_by: Option<String>,
    /// When multi-step multiplies the learning rate by --gamma, with commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(0), help_heading = "Optimization")]
    milestones: Option<Vec<u64>>,
    /// By what multi-step multiplies the learning rate [default: 0.1]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    gamma: Option<f64>,
    /// The learning rate that cosine ends at [default: 0]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    eta_min: Option<f64>,
    /// In how many steps the learning rate rises at first, from a third to all of it [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Optimization")]
    warmup_steps: Option<u64>,
    /// Multiply the learning rate by the number of ranks, as their batches add up to one
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    scale_lr: bool,
    /// Scale gradients down that are longer, all together, than this
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    max_grad_norm: Option<f64>,
    /// Look at the gradients before each step, and leave out up to so many steps where a loss or a gradient is not
    /// finite, before that ends the run; without it the first such loss does
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Optimization")]
    skip_nonfinite: Option<u64>,

    /// What to train on: random, digits (handwritten ones, which the program brings along), or a file of your
    /// own: safetensors:FILE, npy:INPUTS,TARGETS, idx:FOLDER (as MNIST), csv:FILE [default: random]
    #[arg(long, value_name = "DATA", help_heading = "Data")]
    dataset: Option<String>,
    /// How many samples random data has, or how many of a file's are used, from its first on, if not all
    /// [default: 4096]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    num_samples: Option<u64>,
    /// How many numbers each sample has, where no file says so; for a cnn the pixels of a square image
    /// [default: 20]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    in_features: Option<u64>,
    /// How many numbers the model predicts, where no file says so; the number of classes for cross-entropy
    /// [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    out_features: Option<u64>,
    /// Which fraction of the samples to hold back for validation, chosen by chance [default: none; idx uses the
    /// t10k files, if they are there]
    #[arg(long, value_name = "F", value_parser = number(), help_heading = "Data")]
    val_fraction: Option<f64>,
    /// After how many epochs to validate each time, besides after the last [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    val_every: Option<u64>,
    /// Don't shuffle the samples
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    no_shuffle: bool,
    /// Drop the samples that don't go round between the ranks, instead of dealing some twice
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    drop_last: bool,
    /// Leave out an epoch's last batch, if it has fewer samples than the others
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    drop_last_batch: bool,
    /// How many threads load batches ahead of time for each rank; none: the rank itself [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Data")]
    num_workers: Option<u64>,
    /// How many batches each of them is ahead [default: 2]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    prefetch_factor: Option<u64>,

    /// Save checkpoints in this folder: model, optimizer and all that it takes to go on
    #[arg(long, value_name = "DIR", help_heading = "Stopping and resuming")]
    save_dir: Option<PathBuf>,
    /// After how many steps to save each time
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    save_every: Option<u64>,
    /// After how many epochs to save each time [default: 1 without --save-every]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    save_every_epochs: Option<u64>,
    /// How many of the newest checkpoints to keep, besides the best [default: 3]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    keep_last: Option<u64>,
    /// Go on from a checkpoint: auto (the newest in --save-dir, or from the beginning if there is none), best,
    /// latest or step-... in --save-dir, or a path to one
    #[arg(long, value_name = "auto|PATH", help_heading = "Stopping and resuming")]
    resume: Option<String>,
    /// Start from the parameters and buffers in a safetensors file, as PyTorch saves it, or in a checkpoint, or in
    /// the newest of a run's folder
    #[arg(long, value_name = "FILE", help_heading = "Stopping and resuming")]
    init_from: Option<PathBuf>,
    /// Stop after so many steps of the whole run
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    max_steps: Option<u64>,
    /// Stop after so much time, as 90, 30s or 10m; only this start counts, not the time before a checkpoint
    #[arg(long, value_name = "TIME", help_heading = "Stopping and resuming")]
    max_seconds: Option<String>,
    /// Stop when so many validations in a row were no better, by their loss, than the best before them
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    patience: Option<u64>,
    /// Restarts after a failure, from the newest checkpoint [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Stopping and resuming")]
    max_restarts: Option<u64>,

    /// How many ranks this process starts: auto (one per visible GPU, else per CPU core; where a launcher starts
    /// one process per rank, one), gpu, cpu, or a number
    /// [default: auto]
    #[arg(long, value_name = "auto|gpu|cpu|N", help_heading = "Run")]
    nproc_per_node: Option<String>,
    /// What the ranks of this machine are: threads of this process, or processes that it starts [default: threads]
    #[arg(long, value_name = "NAME", value_parser = ["threads", "processes"], help_heading = "Run")]
    spawn: Option<String>,
    /// What carries the tensors: auto (nccl on GPUs, else threaded; gloo for several processes) [default: auto]
    #[arg(long, value_name = "NAME", value_parser = ["auto", "nccl", "threaded", "gloo"], help_heading = "Run")]
    backend: Option<String>,
    /// Whose variables say which process of how many this is; see ddp-mp env. local: nobody's [default: auto]
    #[arg(long, value_name = "NAME", value_parser = ["auto", "local", "torchrun", "slurm", "mpi", "kubernetes"], help_heading = "Several machines")]
    launch: Option<String>,
    /// How many machines there are, with one process started by hand on each; launchers know [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Several machines")]
    nnodes: Option<u64>,
    /// This machine's number, from 0
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Several machines")]
    node_rank: Option<u64>,
    /// The name or address of machine 0, or of the machine of rank 0
    #[arg(long, value_name = "HOST", help_heading = "Several machines")]
    master_addr: Option<String>,
    /// The port there that the others connect to [default: 29500; with slurm from the job's number]
    #[arg(long, value_name = "PORT", value_parser = whole_in(1..=65535), help_heading = "Several machines")]
    master_port: Option<u64>,
    /// How one model is trained on all ranks: ddp (all average their gradients), or the old way, to compare:
    /// dp (DataParallel: rank 0 gathers them, steps, and sends out the parameters) [default: ddp]
    #[arg(long, value_name = "NAME", value_parser = ["ddp", "dp"], help_heading = "Engine")]
    strategy: Option<String>,
    /// Of how many batches the gradients are added up before a step [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Engine")]
    accumulate: Option<u64>,
    /// When a bucket of gradients is full, in MiB [default: 25]
    #[arg(long, value_name = "MIB", value_parser = number(), help_heading = "Engine")]
    bucket_cap_mb: Option<f64>,
    /// Weight gradients by each rank's number of samples
    #[arg(long, help_heading = "Engine")]
    #[serde(skip_serializing_if = "is_false")]
    exact_mean: bool,
    /// Average gradients after backward only, and not while it goes on
    #[arg(long, help_heading = "Engine")]
    #[serde(skip_serializing_if = "is_false")]
    no_overlap: bool,
    /// How gradients are sent: none (as they are), fp16, bf16, powersgd (as products of thin matrices)
    /// [default: none]
    #[arg(long, value_name = "NAME", value_parser = ["none", "fp16", "bf16", "powersgd"], help_heading = "Engine")]
    comm_hook: Option<String>,
    /// How many steps powersgd sends gradients as they are first [default: 1000]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Engine")]
    powersgd_start: Option<u64>,
    /// Allow that the loss does not depend on some parameters
    #[arg(long, help_heading = "Engine")]
    #[serde(skip_serializing_if = "is_false")]
    find_unused_parameters: bool,
    /// The loss depends on the same parameters in every step
    #[arg(long, help_heading = "Engine")]
    #[serde(skip_serializing_if = "is_false")]
    static_graph: bool,
    /// Let each rank keep its own buffers, such as the running statistics of a batch norm
    #[arg(long, help_heading = "Engine")]
    #[serde(skip_serializing_if = "is_false")]
    no_broadcast_buffers: bool,
    /// How long a rank waits for the others, as 500ms, 30s or 10m; a plain number is seconds [default: 10m]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    timeout: Option<String>,
    /// How long the other ranks get to come back after one has failed; likewise [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    grace_period: Option<String>,
    /// After how long in a collective to tell who is missing there; likewise [default: 10s]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    stall_warning: Option<String>,
    /// Write scalars, histograms and pictures for TensorBoard into this folder
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    tensorboard: Option<PathBuf>,
    /// Write what each rank has done, and when, to this file, for Perfetto (ui.perfetto.dev) and chrome://tracing
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    trace: Option<PathBuf>,
    /// Write a page that shows the run to this file, for a browser: curves, timeline, samples, buckets, verdict
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    report: Option<PathBuf>,
    /// Write metrics at the end of this file, a JSON object a line
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    metrics: Option<PathBuf>,
    /// After how many steps to tell how training goes each time [default: 50; with --report 10]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Run")]
    log_every: Option<u64>,
    /// How results are written on stdout [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"], help_heading = "Run")]
    log_format: Option<String>,
    /// Tell on stderr how the ranks come to train one model: the first steps of this very run, with their numbers
    #[arg(long, help_heading = "Run")]
    #[serde(skip_serializing_if = "is_false")]
    explain: bool,
    /// In which language --explain tells: English or Chinese [default: en]
    #[arg(long, value_name = "NAME", value_parser = ["en", "zh"], help_heading = "Run")]
    language: Option<String>,
    /// Compare what the ranks call at every collective with nccl too, and tell who differs; threaded
    /// always does
    #[arg(long, help_heading = "Run")]
    #[serde(skip_serializing_if = "is_false")]
    check_collectives: bool,
    /// After each so many steps, compare what each rank has for each parameter; the first that differs ends the run
    #[arg(long, value_name = "STEPS", value_parser = whole(1), help_heading = "Run")]
    check_replicas: Option<u64>,
    /// Make a rank fail, to see what happens. KIND: error, panic, kill, stall, slow=50ms (from this step on);
    /// in a step also nan, desync, wrong-shape, skip-sample. STAGE: rendezvous, init, broadcast, step, barrier
    #[arg(long, value_name = "KIND:rank=R,at=STAGE[,step=N]", help_heading = "Run")]
    fault: Option<String>,
    /// Read options from a TOML file; flags win over it
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    #[serde(skip)]
    pub(crate) config: Option<PathBuf>,
}

impl TrainFlags {
    /// The given flags under the keys of a configuration file.
    pub(crate) fn table(&self) -> Result<toml::Table, toml::ser::Error> {
        toml::Table::try_from(self)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !value
}
