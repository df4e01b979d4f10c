//! The flags of training: those that `config::Config` has keys for.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::values::{number, whole, whole_in};

/// The flags that `config::Config` has keys for; those not given are not there.
#[derive(Debug, Args, Serialize)]
pub(crate) struct TrainFlags {
    /// Passes over the data [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Training")]
    max_epochs: Option<u64>,
    /// Samples per batch and rank [default: 32]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Training")]
    batch_size: Option<u64>,
    /// Model [default: linear]
    #[arg(long, value_name = "NAME", value_parser = ["linear", "mlp", "cnn"], help_heading = "Training")]
    model: Option<String>,
    /// Widths of an mlp's hidden layers, with commas [default: 64,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(1), help_heading = "Training")]
    hidden: Option<Vec<u64>>,
    /// Activation between the layers of an mlp or cnn [default: relu]
    #[arg(long, value_name = "NAME", value_parser = ["relu", "tanh", "gelu", "sigmoid"], help_heading = "Training")]
    activation: Option<String>,
    /// Dropout probability between an mlp's layers [default: 0]
    #[arg(long, value_name = "P", value_parser = number(), help_heading = "Training")]
    dropout: Option<f64>,
    /// Channels of a cnn's convolutions, with commas [default: 16,32]
    ///
    /// Each convolution halves the image
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(1), help_heading = "Training")]
    channels: Option<Vec<u64>>,
    /// Batch norm of a cnn over all ranks' samples
    #[arg(long, help_heading = "Training")]
    #[serde(skip_serializing_if = "is_false")]
    sync_batch_norm: bool,
    /// Loss function [default: mse]
    #[arg(long, value_name = "NAME", value_parser = ["mse", "cross-entropy"], help_heading = "Training")]
    loss: Option<String>,
    /// Mixed precision of the forward pass [default: off]
    ///
    /// Operations that need more precision stay in float32. With fp16 the loss is scaled
    #[arg(long, value_name = "NAME", value_parser = ["off", "bf16", "fp16"], help_heading = "Training")]
    amp: Option<String>,
    /// Random seed [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Training")]
    seed: Option<u64>,

    /// Learning rate [default: 0.001]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    lr: Option<f64>,
    /// Optimizer [default: sgd]
    #[arg(long, value_name = "NAME", value_parser = ["sgd", "adamw"], help_heading = "Optimization")]
    optimizer: Option<String>,
    /// Momentum of SGD [default: 0]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    momentum: Option<f64>,
    /// Dampening of SGD's momentum [default: 0]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    dampening: Option<f64>,
    /// Nesterov momentum for SGD
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
    /// Decay rate of AdamW's mean gradient [default: 0.9]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    beta1: Option<f64>,
    /// Decay rate of AdamW's mean squared gradient [default: 0.999]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    beta2: Option<f64>,
    /// Term added to AdamW's denominator [default: 0.00000001]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    eps: Option<f64>,
    /// Learning rate schedule [default: constant]
    ///
    /// cosine goes to --eta-min over the run
    #[arg(long, value_name = "NAME", value_parser = ["constant", "multi-step", "cosine"], help_heading = "Optimization")]
    schedule: Option<String>,
    /// Unit of the schedule; steps count after the warm-up [default: epoch]
    #[arg(long, value_name = "UNIT", value_parser = ["epoch", "step"], help_heading = "Optimization")]
    schedule_by: Option<String>,
    /// Epochs or steps at which multi-step applies --gamma, with commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(0), help_heading = "Optimization")]
    milestones: Option<Vec<u64>>,
    /// Factor of the learning rate at each milestone [default: 0.1]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    gamma: Option<f64>,
    /// Learning rate at the end of cosine [default: 0]
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    eta_min: Option<f64>,
    /// Warm-up steps of the learning rate, from a third [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Optimization")]
    warmup_steps: Option<u64>,
    /// Learning rate times the number of ranks
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    scale_lr: bool,
    /// Largest norm of the gradients; larger ones are scaled down
    #[arg(long, value_name = "X", value_parser = number(), help_heading = "Optimization")]
    max_grad_norm: Option<f64>,
    /// Steps that may be skipped for values that are not finite
    ///
    /// The gradients are checked before each step. One more such step ends the run. Without this option the first
    /// loss that is not finite ends it
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Optimization")]
    skip_nonfinite: Option<u64>,

    /// Data set [default: random]
    ///
    /// random; digits (handwritten, part of this program); or a file of your own: safetensors:FILE,
    /// npy:INPUTS,TARGETS, idx:FOLDER (as MNIST), csv:FILE
    #[arg(long, value_name = "DATA", help_heading = "Data")]
    dataset: Option<String>,
    /// Samples of random data, or the first of a file's [default: 4096]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    num_samples: Option<u64>,
    /// Numbers per sample, where no file says so [default: 20]
    ///
    /// For a cnn the pixels of a square image
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    in_features: Option<u64>,
    /// Outputs of the model, where no file says so [default: 1]
    ///
    /// For cross-entropy the number of classes
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    out_features: Option<u64>,
    /// Fraction of the samples held back for validation [default: none]
    ///
    /// They are chosen at random. idx uses the t10k files instead, if they are there
    #[arg(long, value_name = "F", value_parser = number(), help_heading = "Data")]
    val_fraction: Option<f64>,
    /// Epochs between validations; the last epoch always validates [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    val_every: Option<u64>,
    /// No shuffling of the samples
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    no_shuffle: bool,
    /// No padding: samples that cannot be divided equally are dropped
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    drop_last: bool,
    /// No smaller batch at the end of an epoch
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    drop_last_batch: bool,
    /// Threads per rank that load batches ahead [default: 0]
    ///
    /// With 0 the rank itself loads them
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Data")]
    num_workers: Option<u64>,
    /// Batches that each worker loads ahead [default: 2]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Data")]
    prefetch_factor: Option<u64>,

    /// Folder for checkpoints
    ///
    /// They hold the model, the optimizer and all else that a run needs to continue
    #[arg(long, value_name = "DIR", help_heading = "Stopping and resuming")]
    checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    save_every: Option<u64>,
    /// Epochs between checkpoints [default: 1 without --save-every]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    save_every_epochs: Option<u64>,
    /// Newest checkpoints to keep, besides the best [default: 3]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    keep_last: Option<u64>,
    /// Checkpoint to continue from
    ///
    /// auto (the newest in --checkpoint-dir, or the beginning if there is none); best, latest or step-... in --checkpoint-dir;
    /// or a path
    #[arg(long, value_name = "auto|PATH", help_heading = "Stopping and resuming")]
    resume: Option<String>,
    /// File with the first parameters and buffers
    ///
    /// A safetensors file, as PyTorch saves it; a checkpoint; or the folder of a run, for its newest checkpoint
    #[arg(long, value_name = "FILE", help_heading = "Stopping and resuming")]
    init_from: Option<PathBuf>,
    /// Steps of the whole run, at most
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    max_steps: Option<u64>,
    /// Longest time of this start, as 90, 30s or 10m
    ///
    /// Time before a checkpoint does not count
    #[arg(long, value_name = "TIME", help_heading = "Stopping and resuming")]
    max_seconds: Option<String>,
    /// Validations in a row without a better loss, before stopping
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Stopping and resuming")]
    patience: Option<u64>,
    /// Restarts after a failure, from the newest checkpoint [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Stopping and resuming")]
    max_restarts: Option<u64>,

    /// Ranks that this process starts: auto, gpu, cpu or N [default: auto]
    ///
    /// auto: one per visible GPU, else one per CPU core; one if a launcher starts a process per rank
    #[arg(long, value_name = "auto|gpu|cpu|N", help_heading = "Run")]
    nproc_per_node: Option<String>,
    /// Ranks as threads, or as processes of this machine [default: threads]
    #[arg(long, value_name = "NAME", value_parser = ["threads", "processes"], help_heading = "Run")]
    spawn: Option<String>,
    /// Communication backend [default: auto]
    ///
    /// auto: nccl on GPUs, else threaded; gloo for several processes
    #[arg(long, value_name = "NAME", value_parser = ["auto", "nccl", "threaded", "gloo"], help_heading = "Run")]
    backend: Option<String>,
    /// Launcher whose variables place this process [default: auto]
    ///
    /// local: none of them. See ddp-mp env
    #[arg(long, value_name = "NAME", value_parser = ["auto", "local", "torchrun", "slurm", "mpi", "kubernetes"], help_heading = "Several machines")]
    launch: Option<String>,
    /// Machines, with one process started on each by hand [default: 1]
    ///
    /// A launcher sets this itself
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Several machines")]
    nnodes: Option<u64>,
    /// This machine's number, from 0
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Several machines")]
    node_rank: Option<u64>,
    /// Host name or address of the machine of rank 0
    #[arg(long, value_name = "HOST", help_heading = "Several machines")]
    master_addr: Option<String>,
    /// Port on that machine [default: 29500; with slurm from the job's number]
    #[arg(long, value_name = "PORT", value_parser = whole_in(1..=65535), help_heading = "Several machines")]
    master_port: Option<u64>,
    /// Distributed strategy [default: ddp]
    ///
    /// ddp: all ranks average their gradients. dp, to compare: rank 0 gathers the gradients, steps, and sends out
    /// the parameters, as DataParallel does
    #[arg(long, value_name = "NAME", value_parser = ["ddp", "dp"], help_heading = "Distributed")]
    strategy: Option<String>,
    /// Batches whose gradients are added before a step [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Distributed")]
    grad_accum_steps: Option<u64>,
    /// Size of a gradient bucket, in MiB [default: 25]
    #[arg(long, value_name = "MIB", value_parser = number(), help_heading = "Distributed")]
    bucket_cap_mb: Option<f64>,
    /// Gradients weighted by each rank's number of samples
    #[arg(long, help_heading = "Distributed")]
    #[serde(skip_serializing_if = "is_false")]
    exact_mean: bool,
    /// Gradients averaged after backward, not during it
    #[arg(long, help_heading = "Distributed")]
    #[serde(skip_serializing_if = "is_false")]
    no_overlap: bool,
    /// Compression of gradients [default: none]
    ///
    /// powersgd sends them as products of thin matrices
    #[arg(long, value_name = "NAME", value_parser = ["none", "fp16", "bf16", "powersgd"], help_heading = "Distributed")]
    comm_hook: Option<String>,
    /// Steps without compression before powersgd begins [default: 1000]
    #[arg(long, value_name = "N", value_parser = whole(0), help_heading = "Distributed")]
    powersgd_start_iter: Option<u64>,
    /// Parameters may be unused by the loss
    #[arg(long, help_heading = "Distributed")]
    #[serde(skip_serializing_if = "is_false")]
    find_unused_parameters: bool,
    /// The loss uses the same parameters in every step
    #[arg(long, help_heading = "Distributed")]
    #[serde(skip_serializing_if = "is_false")]
    static_graph: bool,
    /// Buffers, such as running statistics, stay local to each rank
    #[arg(long, help_heading = "Distributed")]
    #[serde(skip_serializing_if = "is_false")]
    no_broadcast_buffers: bool,
    /// Longest wait for other ranks, as 500ms, 30s, 10m [default: 10m]
    ///
    /// A plain number is seconds
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    timeout: Option<String>,
    /// Time for other ranks to return after a failure [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    grace_period: Option<String>,
    /// Time in a collective until missing ranks are reported [default: 10s]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    stall_warning: Option<String>,
    /// Folder for TensorBoard: scalars, histograms and pictures
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    tensorboard: Option<PathBuf>,
    /// File for a timeline of all ranks
    ///
    /// For Perfetto (ui.perfetto.dev) and chrome://tracing
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    trace: Option<PathBuf>,
    /// File for a web page about the run
    ///
    /// Curves, timeline, samples, buckets and a verdict
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    report: Option<PathBuf>,
    /// File for metrics, one JSON object per line, appended
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    metrics: Option<PathBuf>,
    /// Steps between reports of progress [default: 50; with --report 10]
    #[arg(long, value_name = "N", value_parser = whole(1), help_heading = "Run")]
    log_every: Option<u64>,
    /// Format of the results on stdout [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"], help_heading = "Run")]
    log_format: Option<String>,
    /// Explanation of the first steps on stderr, with their numbers
    #[arg(long, help_heading = "Run")]
    #[serde(skip_serializing_if = "is_false")]
    explain: bool,
    /// Language of --explain [default: en]
    #[arg(long, value_name = "NAME", value_parser = ["en", "zh"], help_heading = "Run")]
    language: Option<String>,
    /// Comparison of all collective calls with nccl, too
    ///
    /// threaded always compares them
    #[arg(long, help_heading = "Run")]
    #[serde(skip_serializing_if = "is_false")]
    check_collectives: bool,
    /// Steps between comparisons of all ranks' parameters
    ///
    /// The first parameter that differs ends the run
    #[arg(long, value_name = "STEPS", value_parser = whole(1), help_heading = "Run")]
    check_replicas_every: Option<u64>,
    /// Failure of a rank, made on purpose
    ///
    /// KIND: error, panic, kill, stall, slow=50ms (from this step on); in a step also nan, desync, wrong-shape,
    /// skip-sample. STAGE: rendezvous, init, broadcast, step, barrier
    #[arg(long, value_name = "KIND:rank=R,at=STAGE[,step=N]", help_heading = "Run")]
    inject_fault: Option<String>,
    /// TOML file with options; flags win over it
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
