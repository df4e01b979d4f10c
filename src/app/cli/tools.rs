//! The flags of `bench` with its subcommands, of `verify`, and of `env`.

use clap::{Args, Subcommand};

use super::TrainFlags;
use crate::commands::{BenchFlags, MOST_STEPS};
use crate::config::{InShortHelp, whole};

/// The flags of `bench`: a collective, or a subcommand.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) subcommand: Option<BenchCommand>,
    #[command(flatten)]
    pub(crate) collective: BenchFlags,
}

/// What else can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Time a training step and its parts
    Step(StepFlags),
    /// Measure weak and strong scaling on this machine
    Scaling(ScalingFlags),
}

/// The flags of `bench step`: the flags of training that change a step.
#[derive(Debug, Args)]
pub(crate) struct StepFlags {
    /// Measure N steps
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=MOST_STEPS), default_value_t = 500)]
    pub(crate) steps: usize,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// The flags of `bench scaling`: the flags of training that change a step.
#[derive(Debug, Args)]
pub(crate) struct ScalingFlags {
    /// Make N steps in each repetition
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=MOST_STEPS), default_value_t = 100)]
    pub(crate) steps: usize,
    /// Repeat N times per number of ranks; the median counts
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=1000), default_value_t = 5)]
    pub(crate) repetitions: usize,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// The flags of `verify`: the flags of training that change what is compared.
#[derive(Debug, Args)]
pub(crate) struct VerifyFlags {
    /// Train N steps in each way
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=MOST_STEPS), default_value_t = 20)]
    pub(crate) steps: u64,
    /// Show the difference of each parameter, however many there are
    #[arg(long)]
    pub(crate) per_parameter: bool,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

/// The flags of `env`: all flags of training.
#[derive(Debug, Args)]
pub(crate) struct EnvFlags {
    /// Show all options, including those at their defaults
    #[arg(long, add = InShortHelp)]
    pub(crate) all: bool,
    /// Check that each GPU and each pair works
    ///
    /// Each GPU multiplies matrices, and each pair copies and makes an all_reduce with NCCL. A check that hangs is ended. If
    /// an all_reduce does not pass, it is tried with NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1
    #[arg(long, add = InShortHelp, conflicts_with = "all")]
    pub(crate) check_gpus: bool,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}
