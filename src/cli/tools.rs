//! The flags of the commands that show and measure: `sampler`, `comm`, `bench`, `verify`.

use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use ddp_mp::ReduceOp;
use ddp_mp::commands::{
    BenchOp, BenchRequest, CommOp, CommRequest, MOST_STEPS, SamplerRequest, SimulatedCluster,
};
use ddp_mp::config::{name, positive_duration, whole};
use ddp_mp::launch::{BackendChoice, Nproc};
use ddp_mp::process_group::{DTYPES, dtype_name, parse_dtype};
use ddp_mp::telemetry::LogFormat;
use tch::Kind;

use super::TrainFlags;

/// The flags of `sampler`.
#[derive(Debug, Args)]
pub(crate) struct SamplerFlags {
    /// Number of samples
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=u64::MAX))]
    len: u64,
    /// Number of ranks
    #[arg(long, value_name = "W", value_parser = whole::<u64>(1..=SamplerRequest::MOST_RANKS as u64))]
    world_size: u64,
    /// Only rank to show
    #[arg(long, value_name = "R", value_parser = whole::<u64>(0..=u64::MAX))]
    rank: Option<u64>,
    /// Epoch, from 0
    #[arg(long, value_name = "E", value_parser = whole::<u64>(0..=u64::MAX), default_value_t = 0)]
    epoch: u64,
    /// Random seed of the shuffle
    #[arg(long, value_name = "S", value_parser = whole::<u64>(0..=u64::MAX), default_value_t = 0)]
    seed: u64,
    /// No padding: samples that cannot be divided equally are dropped
    #[arg(long)]
    drop_last: bool,
    /// Samples dealt once each, as training with --exact-mean does
    #[arg(long)]
    exact_mean: bool,
    /// No shuffling of the samples
    #[arg(long)]
    no_shuffle: bool,
    /// Format of the output
    ///
    /// text: one sample per line, with its rank unless --rank is given. json: one object per rank
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    log_format: LogFormat,
}

impl SamplerFlags {
    pub(crate) fn request(&self) -> SamplerRequest {
        SamplerRequest {
            len: self.len as usize,
            world_size: self.world_size as usize,
            rank: self.rank.map(|rank| rank as usize),
            epoch: self.epoch,
            seed: self.seed,
            drop_last: self.drop_last,
            exact_mean: self.exact_mean,
            no_shuffle: self.no_shuffle,
        }
    }

    pub(crate) fn log_format(&self) -> LogFormat {
        self.log_format
    }
}

/// The flags of commands that start ranks and have no configuration.
#[derive(Debug, Args)]
pub(super) struct RanksFlags {
    /// Ranks to start: auto, gpu, cpu or N
    ///
    /// auto: one per visible GPU, else one per CPU core
    #[arg(long, value_name = "auto|gpu|cpu|N", default_value = "auto")]
    nproc_per_node: Nproc,
    /// Communication backend
    ///
    /// auto: nccl on GPUs, else threaded
    #[arg(long, value_name = "NAME", value_parser = backend(), default_value = "auto")]
    backend: BackendChoice,
    /// Longest wait for other ranks, as 500ms, 30s, 10m
    ///
    /// A plain number is seconds
    #[arg(long, value_name = "TIME", value_parser = positive_duration, default_value = "10m")]
    timeout: Duration,
}

/// The flags of `comm`.
#[derive(Debug, Args)]
pub(crate) struct CommFlags {
    /// Operation; all of them without one
    #[arg(value_name = "OP", value_parser = comm_op())]
    op: Option<CommOp>,
    /// Elements of each tensor
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0..=CommRequest::MOST_NUMEL), default_value_t = 2)]
    numel: u64,
    /// Data type of the elements
    #[arg(long, value_name = "DTYPE", value_parser = kind(), default_value = "float32")]
    dtype: Kind,
    /// Reduction of the elements
    #[arg(long, value_name = "OP", value_parser = reduce_op(), default_value = "sum")]
    reduce_op: ReduceOp,
    #[command(flatten)]
    ranks: RanksFlags,
    /// Format of the output
    ///
    /// text: for people. json: one object per operation and rank
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    log_format: LogFormat,
}

impl CommFlags {
    pub(crate) fn request(&self) -> CommRequest {
        CommRequest {
            op: self.op,
            numel: self.numel as i64,
            dtype: self.dtype,
            reduce_op: self.reduce_op,
            nproc_per_node: self.ranks.nproc_per_node,
            backend: self.ranks.backend,
            timeout: self.ranks.timeout,
        }
    }

    pub(crate) fn log_format(&self) -> LogFormat {
        self.log_format
    }
}

/// The flags of `bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct BenchFlags {
    #[command(subcommand)]
    pub(crate) step: Option<BenchCommand>,
    /// Collective
    #[arg(value_name = "OP", value_parser = bench_op(), required = true)]
    op: Option<BenchOp>,
    /// Smallest size, as 4, 16K or 128M
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4")]
    min_bytes: u64,
    /// Largest size
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "128M")]
    max_bytes: u64,
    /// Factor from one size to the next
    #[arg(long, value_name = "N", value_parser = whole::<u64>(2..), default_value_t = 2)]
    step_factor: u64,
    /// Measurements of each size [default: for a quarter of a second]
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=BenchRequest::MOST_ITERS))]
    iters: Option<u64>,
    /// Warm-up iterations before them
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0..=BenchRequest::MOST_ITERS), default_value_t = 5)]
    warmup: u64,
    /// Data type of the elements
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype, default_value = "float32")]
    dtype: Kind,
    /// Reduction: sum, avg, product, min, max, band, bor, bxor
    #[arg(long, value_name = "OP", default_value = "sum")]
    reduce_op: ReduceOp,
    #[command(flatten)]
    ranks: RanksFlags,
    /// Format of the output
    ///
    /// text: a table. json: one object per size
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    log_format: LogFormat,
}

/// What else can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Time of a training step and of its parts
    Step(StepFlags),
    /// Weak and strong scaling of a training step on this machine
    Scaling(ScalingFlags),
}

/// The flags of `bench step`: those of training, as far as they change a step.
#[derive(Debug, Args)]
pub(crate) struct StepFlags {
    /// Steps to measure
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=MOST_STEPS), default_value_t = 500)]
    pub(crate) steps: u64,
    /// Forecast of the step's time on a cluster
    ///
    /// nodes=64,gpus=8,latency=5us,bandwidth=25GB/s,node-latency=3us,node-bandwidth=300GB/s,algorithm=ring|tree|hierarchical|auto,backend=nccl|gloo.
    /// Keys that are left out have a default, which is shown. One rank is measured, unless --nproc-per-node says otherwise
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) simulate_cluster: Option<SimulatedCluster>,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// The flags of `bench scaling`: those of training, as far as they change a step.
#[derive(Debug, Args)]
pub(crate) struct ScalingFlags {
    /// Steps of each repetition
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=MOST_STEPS), default_value_t = 100)]
    pub(crate) steps: u64,
    /// Repetitions per number of ranks; the median counts
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=1000), default_value_t = 5)]
    pub(crate) repetitions: u64,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// The flags of `verify`: those of training, as far as they change what is compared.
#[derive(Debug, Args)]
pub(crate) struct VerifyFlags {
    /// Steps to make
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=MOST_STEPS), default_value_t = 20)]
    pub(crate) steps: u64,
    /// Difference of each parameter, however many there are
    #[arg(long)]
    pub(crate) per_parameter: bool,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

impl BenchFlags {
    pub(crate) fn request(&self) -> BenchRequest {
        BenchRequest {
            op: self.op.unwrap_or(BenchOp::AllReduce), // clap asks for it
            dtype: self.dtype,
            reduce_op: self.reduce_op,
            min_bytes: self.min_bytes,
            max_bytes: self.max_bytes,
            step_factor: self.step_factor,
            iters: self.iters,
            warmup: self.warmup,
            nproc_per_node: self.ranks.nproc_per_node,
            backend: self.ranks.backend,
            timeout: self.ranks.timeout,
        }
    }

    pub(crate) fn log_format(&self) -> LogFormat {
        self.log_format
    }
}

/// An operation by its name, with `-` or `_`.
fn bench_op() -> impl TypedValueParser<Value = BenchOp> {
    let named = |op: BenchOp| PossibleValue::new(op.name().replace('_', "-")).alias(op.name());
    PossibleValuesParser::new(BenchOp::ALL.map(named)).try_map(|name| {
        let name = name.replace('-', "_");
        BenchOp::ALL.into_iter().find(|op| op.name() == name).ok_or("unknown operation")
    })
}

/// An operation by PyTorch's name, with `_` or `-`.
fn comm_op() -> impl TypedValueParser<Value = CommOp> {
    let named = |op: CommOp| PossibleValue::new(op.name()).alias(op.name().replace('_', "-"));
    PossibleValuesParser::new(CommOp::ALL.map(named)).try_map(|name| {
        let name = name.replace('-', "_");
        CommOp::ALL.into_iter().find(|op| op.name() == name).ok_or("unknown operation")
    })
}

fn kind() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(DTYPES.map(dtype_name)).try_map(|name| parse_dtype(&name))
}

fn reduce_op() -> impl TypedValueParser<Value = ReduceOp> {
    let names = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"];
    PossibleValuesParser::new(names).try_map(|name| name.parse::<ReduceOp>())
}

/// A size in bytes, as nccl-tests reads it: K is 1024.
fn size(text: &str) -> Result<u64, &'static str> {
    let size = parse_size::Config::new().with_binary().parse_size(text);
    size.map_err(|_| "expected a size in bytes, as 4, 16K or 128M")
}

fn backend() -> impl TypedValueParser<Value = BackendChoice> {
    PossibleValuesParser::new(["auto", "nccl", "threaded"]).map(|name| match &name[..] {
        "nccl" => BackendChoice::Nccl,
        "threaded" => BackendChoice::Threaded,
        _ => BackendChoice::Auto,
    })
}
