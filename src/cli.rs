//! What was typed on the command line, as typed; `config` says what it means.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use ddp_mp::ReduceOp;
use ddp_mp::commands::{BenchOp, BenchRequest, CommOp, CommRequest, SamplerRequest};
use ddp_mp::config::parse_timeout;
use ddp_mp::launch::{BackendChoice, Nproc};
use ddp_mp::observe::LogFormat;
use ddp_mp::process_group::{KINDS, kind_name, kind_named};
use serde::Serialize;
use tch::Kind;

/// Data-parallel training: one rank per visible GPU, each a thread of this process.
///
/// Without a command it trains: the defaults are a random data set of 4096 samples and one dense layer.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model on all ranks (the default)
    Train(TrainFlags),
    /// Show what each collective does, on all ranks
    Comm(CommFlags),
    /// Show which sample goes to which rank
    Sampler(SamplerFlags),
    /// Measure a collective at many sizes, in the columns of nccl-tests
    Bench(BenchFlags),
    /// Show what was found on this machine, and what would be run with these options
    Env(TrainFlags),
}

/// The flags that `config::Config` has keys for; those not given are not there.
#[derive(Debug, Args, Serialize)]
pub(crate) struct TrainFlags {
    /// How often to go through the data [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(), help_heading = "Training")]
    max_epochs: Option<u64>,
    /// How many samples a step takes, on each rank [default: 32]
    #[arg(long, value_name = "N", value_parser = whole(), help_heading = "Training")]
    batch_size: Option<u64>,
    /// The model [default: linear]
    #[arg(long, value_name = "NAME", value_parser = ["linear", "mlp", "cnn"], help_heading = "Training")]
    model: Option<String>,
    /// The widths of an mlp's hidden layers, with commas [default: 64,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',', help_heading = "Training")]
    hidden: Option<Vec<i64>>,
    /// The channels of a cnn's convolutions, with commas; each halves the image [default: 16,32]
    #[arg(long, value_name = "N,...", value_delimiter = ',', help_heading = "Training")]
    channels: Option<Vec<i64>>,
    /// Normalize a cnn's batches over the samples of all ranks
    #[arg(long, help_heading = "Training")]
    #[serde(skip_serializing_if = "is_false")]
    sync_batch_norm: bool,
    /// What is to become small [default: mse]
    #[arg(long, value_name = "NAME", value_parser = ["mse", "cross-entropy"], help_heading = "Training")]
    loss: Option<String>,
    /// What all randomness starts from [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(), help_heading = "Training")]
    seed: Option<u64>,

    /// The learning rate [default: 0.001]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    lr: Option<f64>,
    /// What steps the parameters [default: sgd]
    #[arg(long, value_name = "NAME", value_parser = ["sgd", "adamw"], help_heading = "Optimization")]
    optimizer: Option<String>,
    /// How much of SGD's last step goes into the next [default: 0]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    momentum: Option<f64>,
    /// How much less of the gradient goes into SGD's momentum [default: 0]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    dampening: Option<f64>,
    /// Nesterov's momentum for SGD
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    nesterov: bool,
    /// Weight decay [default: 0 for sgd, 0.01 for adamw]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    weight_decay: Option<f64>,
    /// No weight decay for biases and the parameters of norms
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    no_decay_on_bias_and_norm: bool,
    /// How much of its mean gradient AdamW keeps in a step [default: 0.9]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    beta1: Option<f64>,
    /// How much of its mean squared gradient AdamW keeps in a step [default: 0.999]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    beta2: Option<f64>,
    /// What AdamW adds to its denominator [default: 0.00000001]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    eps: Option<f64>,
    /// How the learning rate changes: cosine goes to --eta-min over the run [default: constant]
    #[arg(long, value_name = "NAME", value_parser = ["constant", "multi-step", "cosine"], help_heading = "Optimization")]
    schedule: Option<String>,
    /// What a schedule counts; steps from the end of the warm-up [default: epoch]
    #[arg(long, value_name = "UNIT", value_parser = ["epoch", "step"], help_heading = "Optimization")]
    schedule_by: Option<String>,
    /// When multi-step multiplies the learning rate by --gamma, with commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = whole(), help_heading = "Optimization")]
    milestones: Option<Vec<u64>>,
    /// By what multi-step multiplies the learning rate [default: 0.1]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    gamma: Option<f64>,
    /// The learning rate that cosine ends at [default: 0]
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    eta_min: Option<f64>,
    /// In how many steps the learning rate rises at first, from a third to all of it [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(), help_heading = "Optimization")]
    warmup_steps: Option<u64>,
    /// Multiply the learning rate by the number of ranks, as their batches add up to one
    #[arg(long, help_heading = "Optimization")]
    #[serde(skip_serializing_if = "is_false")]
    scale_lr: bool,
    /// Scale gradients down that are longer, all together, than this
    #[arg(long, value_name = "X", help_heading = "Optimization")]
    max_grad_norm: Option<f64>,

    /// How many samples the random data set has [default: 4096]
    #[arg(long, value_name = "N", help_heading = "Data")]
    num_samples: Option<i64>,
    /// How many numbers each sample has; for a cnn the pixels of a square image [default: 20]
    #[arg(long, value_name = "N", help_heading = "Data")]
    in_features: Option<i64>,
    /// How many numbers the model predicts; the number of classes for cross-entropy [default: 1]
    #[arg(long, value_name = "N", help_heading = "Data")]
    out_features: Option<i64>,
    /// Don't shuffle the samples
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    no_shuffle: bool,
    /// Drop the samples that don't go round between the ranks, instead of dealing some twice
    #[arg(long, help_heading = "Data")]
    #[serde(skip_serializing_if = "is_false")]
    drop_last: bool,

    /// How many ranks to start: auto (one per visible GPU, else per CPU core), gpu, cpu, or a number
    /// [default: auto]
    #[arg(long, value_name = "auto|gpu|cpu|N", help_heading = "Run")]
    nproc_per_node: Option<String>,
    /// What carries the tensors: auto (nccl on GPUs, else threaded) [default: auto]
    #[arg(long, value_name = "NAME", value_parser = ["auto", "nccl", "threaded"], help_heading = "Run")]
    backend: Option<String>,
    /// When a bucket of gradients is full, in MiB [default: 25]
    #[arg(long, value_name = "MIB", help_heading = "Run")]
    bucket_cap_mb: Option<f64>,
    /// How long a rank waits for the others, as 500ms, 30s or 10m [default: 10m]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    timeout: Option<String>,
    /// How long the other ranks get to come back after one has failed [default: 30s]
    #[arg(long, value_name = "TIME", help_heading = "Run")]
    grace_period: Option<String>,
    /// How results are written on stdout [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"], help_heading = "Run")]
    log_format: Option<String>,
    /// Compare what the ranks call at every collective with nccl too, and tell who differs; threaded
    /// always does
    #[arg(long, help_heading = "Run")]
    #[serde(skip_serializing_if = "is_false")]
    check_collectives: bool,
    /// Make a rank fail, to see what happens. KIND: error, panic, stall. STAGE: rendezvous, init,
    /// broadcast, step, barrier
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

/// The flags of `sampler`.
#[derive(Debug, Args)]
pub(crate) struct SamplerFlags {
    /// How many samples there are
    #[arg(long, value_name = "N")]
    len: usize,
    /// How many ranks they are dealt to
    #[arg(long, value_name = "W")]
    world_size: usize,
    /// Show this rank only
    #[arg(long, value_name = "R")]
    rank: Option<usize>,
    /// The epoch
    #[arg(long, value_name = "E", default_value_t = 0)]
    epoch: u64,
    /// What the shuffle starts from
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Drop the samples that don't go round between the ranks, instead of dealing some twice
    #[arg(long)]
    drop_last: bool,
    /// Don't shuffle the samples
    #[arg(long)]
    no_shuffle: bool,
    /// text (one index a line) or json (one object a rank)
    #[arg(long, value_name = "FORMAT", value_parser = log_format(), default_value = "text")]
    log_format: LogFormat,
}

impl SamplerFlags {
    pub(crate) fn request(&self) -> SamplerRequest {
        SamplerRequest {
            len: self.len,
            world_size: self.world_size,
            rank: self.rank,
            epoch: self.epoch,
            seed: self.seed,
            drop_last: self.drop_last,
            no_shuffle: self.no_shuffle,
        }
    }

    pub(crate) fn log_format(&self) -> LogFormat {
        self.log_format
    }
}

/// The flags of commands that start ranks and have no configuration.
#[derive(Debug, Args)]
struct RanksFlags {
    /// How many ranks to start: auto (one per visible GPU, else per CPU core), gpu, cpu, or a number
    #[arg(long, value_name = "auto|gpu|cpu|N", default_value = "auto")]
    nproc_per_node: Nproc,
    /// What carries the tensors: auto (nccl on GPUs, else threaded)
    #[arg(long, value_name = "NAME", value_parser = backend(), default_value = "auto")]
    backend: BackendChoice,
    /// How long a rank waits for the others, as 500ms, 30s or 10m
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, default_value = "10m")]
    timeout: Duration,
}

/// The flags of `comm`.
#[derive(Debug, Args)]
pub(crate) struct CommFlags {
    /// The operation; all of them, one after the other, if none
    #[arg(value_name = "OP", value_parser = comm_op())]
    op: Option<CommOp>,
    /// How many elements each tensor has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..), default_value_t = 2)]
    op_numel: i64,
    /// The kind of the elements
    #[arg(long, value_name = "KIND", value_parser = kind(), default_value = "float32")]
    kind: Kind,
    /// How reductions combine elements
    #[arg(long, value_name = "OP", value_parser = reduce_op(), default_value = "sum")]
    reduce_op: ReduceOp,
    #[command(flatten)]
    ranks: RanksFlags,
    /// text (for people) or json (one object for each operation and rank)
    #[arg(long, value_name = "FORMAT", value_parser = log_format(), default_value = "text")]
    log_format: LogFormat,
}

impl CommFlags {
    pub(crate) fn request(&self) -> CommRequest {
        CommRequest {
            op: self.op,
            numel: self.op_numel,
            kind: self.kind,
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
pub(crate) struct BenchFlags {
    /// The collective
    #[arg(value_name = "OP", value_parser = bench_op())]
    op: BenchOp,
    /// The smallest size, as 4, 16K or 128M
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4")]
    min_bytes: u64,
    /// The largest size
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "128M")]
    max_bytes: u64,
    /// By what a size is multiplied to get the next
    #[arg(long, value_name = "N", default_value_t = 2)]
    step_factor: u64,
    /// How often each size is measured [default: for a quarter of a second]
    #[arg(long, value_name = "N")]
    iters: Option<u64>,
    /// How often before that
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmup: u64,
    /// The kind of the elements
    #[arg(long, value_name = "KIND", value_parser = kind_named, default_value = "float32")]
    kind: Kind,
    /// How elements are combined: sum, avg, product, min, max, band, bor, bxor
    #[arg(long, value_name = "OP", default_value = "sum")]
    reduce_op: ReduceOp,
    #[command(flatten)]
    ranks: RanksFlags,
    /// text (a table) or json (one object a size)
    #[arg(long, value_name = "FORMAT", value_parser = log_format(), default_value = "text")]
    log_format: LogFormat,
}

impl BenchFlags {
    pub(crate) fn request(&self) -> BenchRequest {
        BenchRequest {
            op: self.op,
            kind: self.kind,
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
    PossibleValuesParser::new(KINDS.map(kind_name)).try_map(|name| kind_named(&name))
}

fn reduce_op() -> impl TypedValueParser<Value = ReduceOp> {
    let names = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"];
    PossibleValuesParser::new(names).try_map(|name| name.parse::<ReduceOp>())
}

/// A size in bytes, as nccl-tests reads it: K is 1024.
fn size(text: &str) -> Result<u64, parse_size::Error> {
    parse_size::Config::new().with_binary().parse_size(text)
}

fn backend() -> impl TypedValueParser<Value = BackendChoice> {
    PossibleValuesParser::new(["auto", "nccl", "threaded"]).map(|name| match &name[..] {
        "nccl" => BackendChoice::Nccl,
        "threaded" => BackendChoice::Threaded,
        _ => BackendChoice::Auto,
    })
}

fn log_format() -> impl TypedValueParser<Value = LogFormat> {
    PossibleValuesParser::new(["text", "json"]).map(|name| match &name[..] {
        "json" => LogFormat::Json,
        _ => LogFormat::Text,
    })
}

/// Reads the command line. `_` is as good as `-` in a flag's name, as Python programs write them.
///
/// # Errors
/// What clap wants to say and leave with: a mistake, or the help that was asked for.
pub(crate) fn parse(args: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let mut flags_end = false;
    // A negative number is a wrong value, and not an unknown flag.
    let negative = |arg: Arg| {
        let takes_value = arg.get_num_args().is_none_or(|range| range.takes_values());
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    };
    let command = Cli::command()
        .mut_args(negative)
        .mut_subcommands(|subcommand| subcommand.mut_args(negative));
    let args = args.map(|arg| {
        flags_end |= arg == "--";
        match arg.to_str() {
            Some(text) if text.starts_with("--") && !flags_end => {
                let (name, rest) = text.split_at(text.find('=').unwrap_or(text.len()));
                OsString::from(name.replace('_', "-") + rest)
            }
            _ => arg,
        }
    });
    Cli::from_arg_matches(&command.try_get_matches_from(args)?)
}

/// A whole number that TOML can hold as well.
fn whole() -> impl TypedValueParser<Value = u64> {
    clap::value_parser!(u64).range(..=i64::MAX as u64)
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !value
}

#[cfg(test)]
mod tests {
    use ddp_mp::config::Config;

    use super::*;

    fn train_flags(line: &str) -> TrainFlags {
        let args = line.split(' ').map(OsString::from);
        parse(std::iter::once("ddp-mp".into()).chain(args)).unwrap().train
    }

    #[test]
    fn clap_is_content() {
        Cli::command().debug_assert();
    }

    #[test]
    fn underscores_are_as_good_as_dashes() {
        let table = train_flags("--max_epochs=2 --batch_size 8 --no_shuffle").table().unwrap();
        let expected = "max_epochs = 2\nbatch_size = 8\nno_shuffle = true";
        assert_eq!(table, expected.parse::<toml::Table>().unwrap());
    }

    #[test]
    fn every_key_of_the_configuration_is_a_flag_and_its_help_tells_the_default() {
        let defaults = Config::default().to_string().parse::<toml::Table>().unwrap();
        let command = Cli::command();
        let arguments: Vec<_> = command.get_arguments().collect();
        for (key, default) in &defaults {
            let argument = arguments.iter().find(|a| a.get_id().as_str() == key);
            let argument = argument.unwrap_or_else(|| panic!("no flag for {key}"));
            let help = argument.get_help().unwrap().to_string();
            let value = match default {
                toml::Value::Boolean(_) => continue,
                toml::Value::String(text) => text.clone(),
                toml::Value::Array(items) => {
                    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
                }
                toml::Value::Float(x) => format!("{x}"),
                other => other.to_string(),
            };
            assert!(help.ends_with(&format!("[default: {value}]")), "{key} is {value}: {help}");
        }
        // The only keys without a default.
        let Config { fault, weight_decay, milestones, max_grad_norm, .. } = Config::default();
        assert_eq!((fault, weight_decay, max_grad_norm), (None, None, None));
        assert!(milestones.is_empty());
    }
}
