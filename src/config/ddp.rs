//! The options of the DDP engine: its strategy, buckets and communication hook.

use std::ops::Bound;

use clap::Args;
use serde::Serialize;
use serde_with::{SerializeDisplay, skip_serializing_none};
use strum::{Display, EnumString, VariantNames};

use super::Config;
use super::option_rules::{Conflict, MayDiffer, RefusedBy};
use super::training::MOST_IN_A_STEP;
use super::values::{name, number, whole};
use engine::ddp::{CommHook, Compress, DdpOptions};
use engine::launch::SpawnChoice;
use engine::optim::OptimizerLayout;
use engine::process_group::SimulatedCluster;

/// The distributed strategy: `--strategy`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum StrategyKind {
    /// `DistributedDataParallel`.
    Ddp,
    /// `DataParallel`, the older strategy.
    Dp,
}

/// The communication hook that averages buckets of gradients: `--comm-hook`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum CommHookKind {
    /// No compression.
    None,
    /// Compression to float16.
    Fp16,
    /// Compression to bfloat16.
    Bf16,
}

/// The exchange of gradients between the ranks.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Distributed")]
#[group(skip)]
pub struct DdpSection {
    /// Choose the distributed strategy
    ///
    /// ddp: all ranks average their gradients. dp, to compare: rank 0 gathers the gradients, steps, and sends out
    /// the parameters, as DataParallel does
    #[arg(long, value_name = "NAME", value_parser = name::<StrategyKind>())]
    #[arg(default_value_t = StrategyKind::Ddp, add = RefusedBy::VERIFY)]
    pub strategy: StrategyKind,
    /// Add the gradients of N batches before each step
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=MOST_IN_A_STEP))]
    #[arg(default_value_t = 1, add = RefusedBy::ONE_PROCESS)]
    pub grad_accum_steps: u64,
    /// Set the size of a gradient bucket, in MiB
    #[arg(long, value_name = "MIB", value_parser = number(BUCKET_MIB))]
    #[arg(default_value_t = DdpOptions::default().bucket_cap_mb)]
    #[arg(add = Conflict(needs_ddp), add = MayDiffer::OnResume)]
    pub bucket_cap_mb: f64,
    /// Keep one copy of the model per process
    ///
    /// Each rank updates one part of the parameters, for all ranks. The results are the same to the bit
    #[arg(long, add = Conflict(shares_memory), add = MayDiffer::OnResume)]
    pub share_model: bool,
    /// Partition the optimizer state among the ranks
    ///
    /// Stage 1 of ZeRO. Each rank updates its partitions of the parameters, and the others copy them. For ranks that do
    /// not share memory: processes, or a GPU for each rank
    #[arg(long, add = Conflict(partitions_optimizer), add = MayDiffer::OnResume)]
    pub zero: bool,
    /// Average gradients over all ranks' samples, not over the ranks
    #[arg(long, add = Conflict(equal_batches))]
    pub exact_mean: bool,
    /// Average gradients after backward, not during it
    #[arg(long, add = Conflict(needs_ddp), add = MayDiffer::OnResume)]
    pub no_overlap: bool,
    /// Choose the compression of gradients
    #[arg(long, value_name = "NAME", value_parser = name::<CommHookKind>())]
    #[arg(default_value_t = CommHookKind::None, add = Conflict(needs_ddp))]
    pub comm_hook: CommHookKind,
    /// Allow parameters that the loss does not use
    #[arg(long, add = MayDiffer::OnResume)]
    pub find_unused_parameters: bool,
    /// Assume that the loss uses the same parameters every step
    #[arg(long, add = MayDiffer::OnResume)]
    pub static_graph: bool,
    /// Keep buffers, such as running statistics, local to each rank
    #[arg(long, add = Conflict(needs_ddp), add = MayDiffer::OnResume)]
    pub no_broadcast_buffers: bool,
    /// Simulate the network of a cluster
    ///
    /// In training, on CPU ranks, each all_reduce takes as long as on this network, and the results stay the same; without
    /// nodes and gpus each rank is a node. bench step forecasts the time of a step instead. The keys and their defaults, as
    /// nodes=64,gpus=8: nodes (2), gpus (8), latency (5us), bandwidth (25GB/s), node-latency (3us), node-bandwidth
    /// (300GB/s), algorithm (auto, ring, tree, hierarchical)
    #[arg(long, value_name = "KEY=VALUE,...", add = Conflict(has_no_model))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::ONE_PROCESS)]
    pub simulate_cluster: Option<SimulatedCluster>,
    /// Compare the ranks' collective calls under nccl
    ///
    /// threaded and gloo always compare them
    #[arg(long, add = MayDiffer::OnResume)]
    pub check_collectives: bool,
    /// Compare all ranks' parameters every STEPS steps
    ///
    /// The first parameter that differs ends the run
    #[arg(long, value_name = "STEPS", value_parser = whole::<u64>(1..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub check_replicas_every: Option<u64>,
}

/// The sizes of a bucket, in MiB: up to 1 TiB.
const BUCKET_MIB: (Bound<f64>, Bound<f64>) =
    (Bound::Excluded(0.0), Bound::Included((1 << 20) as f64));

/// Refuses options that `--strategy dp` does not have. It would ignore them, or they would change results.
pub(super) fn needs_ddp(config: &Config) -> Option<String> {
    config
        .is_data_parallel()
        .then(|| "needs --strategy ddp; remove it, or use that strategy".into())
}

/// Refuses options whose communication `SimulatedCluster` does not model.
fn has_no_model(config: &Config) -> Option<String> {
    let options = [
        ("--strategy dp", config.is_data_parallel()),
        ("--zero", config.ddp.zero),
        ("--share-model", config.ddp.share_model),
    ];
    let (option, _) = options.into_iter().find(|(_, is_set)| *is_set)?;
    Some(format!("has no model of {option}; leave out one of the two"))
}

fn shares_memory(config: &Config) -> Option<String> {
    let is_alone = config.launch.spawn == SpawnChoice::Processes;
    let is_alone = is_alone.then(|| {
        "needs --spawn threads, because processes share no memory; for processes use --zero".into()
    });
    needs_ddp(config).or(is_alone)
}

fn partitions_optimizer(config: &Config) -> Option<String> {
    let shares = config.ddp.share_model.then(|| {
        "cannot be combined with --share-model, which already keeps one optimizer state per process; remove one".into()
    });
    needs_ddp(config).or(shares)
}

fn equal_batches(config: &Config) -> Option<String> {
    needs_ddp(config)?;
    Some("needs --strategy ddp: with dp rank 0 gives every rank a batch of the same size".into())
}

impl Config {
    /// Returns whether all goes through rank 0: `--strategy dp`.
    pub(crate) fn is_data_parallel(&self) -> bool {
        self.ddp.strategy == StrategyKind::Dp
    }

    /// Returns how the ranks keep the model.
    pub(crate) fn optimizer_layout(&self) -> OptimizerLayout {
        match (self.ddp.share_model, self.ddp.zero) {
            (true, _) => OptimizerLayout::SharedModel,
            (false, true) => OptimizerLayout::Partitioned,
            (false, false) => OptimizerLayout::Replicated,
        }
    }

    /// Returns the options of the DDP engine.
    pub fn ddp_options(&self) -> DdpOptions {
        let default = DdpOptions::default();
        DdpOptions {
            bucket_cap_mb: self.ddp.bucket_cap_mb,
            first_bucket_mb: default.first_bucket_mb.min(self.ddp.bucket_cap_mb),
            find_unused_parameters: self.ddp.find_unused_parameters,
            static_graph: self.ddp.static_graph,
            broadcast_buffers: !self.ddp.no_broadcast_buffers,
            optimizer_layout: self.optimizer_layout(),
            overlap: self.ddp.no_overlap.then_some(false),
            ..default
        }
    }

    /// Returns the communication hook. `None` if gradients are not compressed.
    pub fn comm_hook(&self) -> Option<Box<dyn CommHook>> {
        match self.ddp.comm_hook {
            CommHookKind::None => None,
            CommHookKind::Fp16 => Some(Box::new(Compress::fp16())),
            CommHookKind::Bf16 => Some(Box::new(Compress::bf16())),
        }
    }
}
