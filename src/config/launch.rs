//! The options of the launch: where the ranks run, and how long they wait for each other (`Spawn` has the defaults).

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_with::skip_serializing_none;

use super::Config;
use super::option_rules::{Conflict, DefaultInWords, InShortHelp, MayDiffer, RefusedBy};
use super::values::{self, duration, format_duration, name, positive_duration, whole};
use engine::launch::{
    BackendChoice, BindChoice, Fault, LaunchChoice, LaunchOptions, Nproc, SharedMemory, Spawn,
    SpawnChoice,
};

/// The ranks of a run: how many, where, and how long they wait.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Launch")]
#[group(skip)]
pub struct LaunchSection {
    /// Start this many ranks here: auto, gpu, cpu or N
    ///
    /// auto: one if a launcher starts a process per rank; else one per visible GPU; without a GPU one per CPU core
    #[arg(long, value_name = "auto|gpu|cpu|N", default_value = "auto")]
    #[arg(add = InShortHelp, add = MayDiffer::BetweenProcesses)]
    #[serde(serialize_with = "values::nproc")]
    pub nproc_per_node: Nproc,
    /// Run ranks as threads, or as processes of this machine
    #[arg(long, value_name = "NAME", value_parser = name::<SpawnChoice>())]
    #[arg(default_value_t, add = MayDiffer::BetweenProcesses, add = RefusedBy::SCALING)]
    pub spawn: SpawnChoice,
    /// Choose the communication backend
    ///
    /// auto: nccl on GPUs; on CPUs threaded, or gloo for several processes
    // Processes compare the backend that it selects.
    #[arg(long, value_name = "NAME", value_parser = values::backend())]
    #[arg(default_value_t = BackendChoice::Auto)]
    #[arg(add = MayDiffer::BetweenProcesses)]
    pub backend: BackendChoice,
    /// Bind each rank to CPUs
    ///
    /// auto: core for ranks on the CPU, if every thread of every rank gets a CPU; else none
    #[arg(long, value_name = "NAME", value_parser = name::<BindChoice>())]
    #[arg(default_value_t, add = MayDiffer::BetweenProcesses, add = RefusedBy::VERIFY)]
    pub bind: BindChoice,
    /// Choose how processes of one machine exchange tensors on CPUs
    ///
    /// auto: through shared memory if all can, else over TCP. off: over TCP. require: an error if they cannot share memory.
    /// Machines always use TCP
    #[arg(long, value_name = "NAME", value_parser = name::<SharedMemory>())]
    #[arg(default_value_t, add = MayDiffer::OnResume, add = RefusedBy::SCALING)]
    pub shared_memory: SharedMemory,
    /// Choose the launcher whose variables place this process
    ///
    /// local: none of them. See the command env
    #[arg(id = "launch", long = "launch", value_name = "NAME", value_parser = name::<LaunchChoice>())]
    #[arg(default_value_t, add = MayDiffer::BetweenProcesses, add = RefusedBy::ONE_PROCESS)]
    #[serde(rename = "launch")]
    pub launcher: LaunchChoice,
    /// Use N machines; start one process on each by hand
    ///
    /// A launcher sets this itself
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..))]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::ONE_PROCESS)]
    #[arg(add = DefaultInWords("1"))]
    pub nnodes: Option<usize>,
    /// Set this machine's number, from 0
    #[arg(long, value_name = "N", value_parser = whole::<usize>(..))]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::ONE_PROCESS)]
    pub node_rank: Option<usize>,
    /// Set the host name or address of rank 0's machine
    #[arg(long, value_name = "HOST")]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::ONE_PROCESS)]
    pub master_addr: Option<String>,
    /// Set the port on rank 0's machine
    #[arg(long, value_name = "PORT", value_parser = whole::<u16>(1..=65535))]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::ONE_PROCESS)]
    #[arg(add = DefaultInWords("29500, or from the id of the job"))]
    pub master_port: Option<u16>,
    /// Wait at most TIME for other ranks (500ms, 30s, 10m)
    ///
    /// A plain number is seconds
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    #[arg(default_value = format_duration(Spawn::TIMEOUT), add = MayDiffer::BetweenProcesses)]
    #[serde(serialize_with = "humantime_serde::serialize")]
    pub timeout: Duration,
    /// Give other ranks TIME to return after a failure
    #[arg(long, value_name = "TIME", value_parser = duration)]
    #[arg(default_value = format_duration(Spawn::GRACE_PERIOD), add = MayDiffer::BetweenProcesses)]
    #[serde(serialize_with = "humantime_serde::serialize")]
    pub grace_period: Duration,
    /// Report missing ranks after TIME in a collective
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    #[arg(default_value = format_duration(Spawn::STALL_WARNING))]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::VERIFY, add = Conflict(never_warns))]
    #[serde(serialize_with = "humantime_serde::serialize")]
    pub stall_warning: Duration,
    /// Restart up to N times, from the newest saved state
    #[arg(long, value_name = "N", value_parser = whole::<usize>(0..=MOST_RESTARTS))]
    #[arg(default_value_t = 0, add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    pub max_restarts: usize,
    /// Make a rank fail on purpose
    #[arg(long, value_name = "KIND:rank=R,at=STAGE[,step=N]")]
    #[arg(long_help = format!("Make a rank fail on purpose\n\n{}", Fault::NAMES))]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::BENCH)]
    pub inject_fault: Option<Fault>,
}

fn never_warns(config: &Config) -> Option<String> {
    let LaunchSection { stall_warning, timeout, .. } = &config.launch;
    (stall_warning >= timeout).then(|| {
        format!(
            "a warning after {} never comes within a timeout of {}; make --stall-warning shorter than --timeout",
            format_duration(*stall_warning),
            format_duration(*timeout)
        )
    })
}

/// The most restarts; more would be a mistake.
const MOST_RESTARTS: u64 = 1_000_000;

impl Config {
    /// Returns the options that say how this process was launched.
    pub fn launch_options(&self) -> LaunchOptions {
        LaunchOptions {
            launch: self.launch.launcher,
            nnodes: self.launch.nnodes,
            node_rank: self.launch.node_rank,
            master_addr: self.launch.master_addr.clone(),
            master_port: self.launch.master_port,
            nproc: self.launch.nproc_per_node,
            bind: self.launch.bind,
            shared_memory: self.launch.shared_memory,
        }
    }
}
