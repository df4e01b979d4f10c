//! Launcher detection: which launcher started this process, and the process's number among all. Launchers are
//! torchrun, Slurm, MPI, Kubernetes, several machines by hand, or none.
//!
//! Launchers pass a process its index in environment variables, each launcher in its own. [`detect`] reads them,
//! checks them against each other and against the flags, and returns what decided. It is a pure function: nothing
//! else in this crate reads these variables.
//!
//! The table of launchers is in `table`. It is gone through from the top; a process that this program has started comes
//! before it. The last row is a person: `--nnodes`, `--node-rank`, `--master-addr`.
//!
//! Without `--spawn=processes`, `--nproc-per-node` means threads of this very process. Without either flag, a process
//! that its launcher counts as one rank has one. But if it is alone on its machine and sees several GPUs, it starts a
//! thread for each: use `torchrun --nproc-per-node=1` to get that. `--nproc-per-node=1` as a flag of this program
//! means one rank.

mod spawned;
mod table;
mod variables;

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, IntoStaticStr, VariantNames};

use super::{BindChoice, Nproc, SharedMemory};
use crate::error::{Error, Result};
use table::launchers;
use variables::Variables;

/// The launcher whose variables are used: `--launch`.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum LaunchChoice {
    /// The launcher whose variables are set.
    #[default]
    Auto,
    /// No launcher: only the flags count.
    Local,
    /// torchrun, `torch.distributed.launch` or Ray Train.
    Torchrun,
    /// srun, of Slurm.
    Slurm,
    /// mpirun and the like: Open MPI, MPICH, Intel MPI, Cray PALS, MVAPICH, jsrun, Flux.
    Mpi,
    /// Kubeflow, for a `PyTorchJob`, or variables like its own.
    Kubernetes,
}

/// The launch options of the command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaunchOptions {
    /// The launcher whose variables are used.
    pub launch: LaunchChoice,
    /// How many machines there are.
    pub nnodes: Option<usize>,
    /// This machine's number, from 0.
    pub node_rank: Option<usize>,
    /// The name or address of machine 0.
    pub master_addr: Option<String>,
    /// The port of the store through which the processes connect.
    pub master_port: Option<u16>,
    /// How many ranks this process is to start.
    pub nproc: Nproc,
    /// The CPUs to which its ranks are bound.
    pub bind: BindChoice,
    /// Whether processes of one host share memory.
    pub shared_memory: SharedMemory,
}

pub(super) use spawned::{PARENT_START, ParentStart};

/// The launcher of this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum LaunchKind {
    /// No launcher: the only process.
    #[default]
    Local,
    /// A person, on each of several machines.
    #[strum(to_string = "by hand")]
    ByHand,
    /// Another process of this program, with `--spawn=processes`.
    #[strum(to_string = "spawn")]
    Spawned,
    /// torchrun, or a launcher that sets its variables.
    Torchrun,
    /// srun.
    Slurm,
    /// mpirun.
    Mpi,
    /// Kubeflow.
    Kubernetes,
}

impl LaunchKind {
    /// Returns the launcher's name in reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// This process's number, and the number of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processes {
    /// This process's number among all, from 0. Process 0 has rank 0.
    pub index: usize,
    /// How many processes there are in all.
    pub count: usize,
    /// This process's number on its machine, from 0; always 0 with torchrun's `--virtual-local-rank`.
    pub local_index: usize,
    /// How many processes there are on this machine.
    pub local_count: usize,
}

impl Default for Processes {
    /// Returns the numbers of a single process.
    fn default() -> Self {
        Self { index: 0, count: 1, local_index: 0, local_count: 1 }
    }
}

/// The address of the store through which the processes connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasterEndpoint {
    /// A host name or an address.
    pub addr: String,
    /// The flag or the variable that the address comes from.
    pub from: &'static str,
    /// The TCP port.
    pub port: u16,
    /// Whether a torchrun agent already serves a `TCPStore` there, so that every process is a client. Otherwise
    /// process 0 serves it.
    pub agent_store: bool,
}

impl fmt::Display for MasterEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, port, .. } = self;
        if addr.contains(':') { write!(f, "[{addr}]:{port}") } else { write!(f, "{addr}:{port}") }
    }
}

/// The launch of this process: how it was started, and how it connects to the others.
///
/// The total number of ranks is known only when the processes have connected and exchanged how many each has. The
/// ranks of process 0 come first, then those of process 1, and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launch {
    /// The launcher that started it.
    pub kind: LaunchKind,
    /// The reason for this result, for the user.
    pub reason: String,
    /// This process's number, and the number of processes.
    pub processes: Processes,
    /// How many machines there are; `None` if the launcher does not set it.
    pub nnodes: Option<usize>,
    /// This machine's number, from 0; `None` if the launcher does not set it.
    pub node_rank: Option<usize>,
    /// How many ranks this process starts.
    pub nproc: Nproc,
    /// The CPUs to which its ranks are bound.
    pub bind: BindChoice,
    /// Whether processes of one host share memory.
    pub shared_memory: SharedMemory,
    /// The address of the store; `None` if this is the only process.
    pub master: Option<MasterEndpoint>,
    /// How many CPU cores the launcher gave to this process, if it set that.
    pub cores: Option<usize>,
    /// How many threads libtorch uses in each rank, if the user or the launcher set it: `OMP_NUM_THREADS`.
    pub threads_per_rank: Option<usize>,
    /// The id of the run, the same in all its processes and part of every key in the store. `none` if it was not
    /// set.
    pub run_id: String,
    /// Whether a torchrun agent supervises this process, and ends it when machines join or leave.
    pub has_agent: bool,
    /// How many times torchrun or `--max-restarts` has restarted the processes of this machine after a failure.
    /// Other machines may have another count.
    pub restart_count: usize,
    /// How many times torchrun or `--max-restarts` restarts them at most.
    pub max_restarts: usize,
    /// The file from which torchrun reads the reason of a failure.
    pub error_file: Option<PathBuf>,
    /// The store of the parent process, with `--spawn=processes` or `--max-restarts`: the parent reads the reason
    /// of a failure there.
    pub parent: Option<MasterEndpoint>,
    /// The folder for the state of a rank that survives a failure, which the next start reads. The parent process makes it
    /// for a run that it restarts and that has no folder for checkpoints.
    pub state_dir: Option<PathBuf>,
}

/// torchrun's default for `--master-port`.
const DEFAULT_PORT: u16 = 29500;

/// Detects how this process was started.
///
/// `variables` looks up an environment variable; `gpus` is the number of GPUs that this process sees and can use.
///
/// # Errors
/// [`Error::Input`], which names the variables or flags that are missing, wrong, or contradict each other.
pub fn detect(
    variables: &dyn Fn(&str) -> Option<String>,
    options: &LaunchOptions,
    gpus: usize,
) -> Result<Launch> {
    let variables = Variables { look_up: variables, options };
    let launch = read(&variables, options, gpus)?;
    Ok(Launch {
        threads_per_rank: variables.threads()?,
        bind: options.bind,
        shared_memory: options.shared_memory,
        ..launch
    })
}

fn read(variables: &Variables, options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    // Comes before the flags, which are those of the parent process.
    if let Some((_, start)) = variables.text(&[PARENT_START]) {
        return ParentStart::read(&start, options.nproc);
    }
    let is_chosen = !matches!(options.launch, LaunchChoice::Auto | LaunchChoice::Local);
    let choice = options.launch.to_string();
    let mut rows = launchers().into_iter().filter(|row| !is_chosen || row.kind.name() == choice);
    for row in rows.clone() {
        if row.is_here(variables, is_chosen)? {
            return row.read(variables, options.nproc, gpus);
        }
    }
    // With only some of torchrun's variables, every process would train on its own.
    let of_torchrun = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    if (is_chosen || variables.text(&of_torchrun).is_some())
        && let Some(row) = rows.next()
    {
        return row.read(variables, options.nproc, gpus); // reports what is missing
    }
    let reason = match options.launch {
        LaunchChoice::Local => "--launch local",
        _ => "no launcher's variables are set for several processes",
    };
    Ok(Launch::local(options.nproc, reason.into()))
}

/// Checks that `addr` looks like a host name or address; does not resolve it. Returns it without the brackets that an IPv6
/// address has ahead of a port.
fn check_addr(name: &str, addr: &str) -> Result<String> {
    let refuse = |why: &str| Err(Error::usage(format!("{name}={addr:?} {why}")));
    if let Some(inner) = addr.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'))
        // A link-local address has a zone, fe80::1%eth0.
        && inner.split('%').next().is_some_and(|it| it.parse::<Ipv6Addr>().is_ok())
    {
        return Ok(inner.into());
    }
    let is_wrong = |c: char| c.is_whitespace() || c.is_control() || c == '/';
    if addr.is_empty() || addr.contains(is_wrong) || addr.rfind('[') > Some(0) {
        return refuse("is not a host name or address");
    }
    if addr.matches(':').count() == 1 || addr.starts_with('[') {
        return refuse("has a port in it; give that as the master port, on its own");
    }
    Ok(addr.into())
}

impl Launch {
    /// Creates the launch of a process without others. `reason` says why it has none.
    pub(super) fn local(nproc: Nproc, reason: String) -> Self {
        let (nnodes, node_rank) = (Some(1), Some(0));
        Self { reason, nproc, nnodes, node_rank, run_id: "none".into(), ..Self::default() }
    }

    /// Returns which process of which launcher this is, for a message.
    #[doc(hidden)]
    pub fn this_process(&self) -> String {
        let Self { processes, kind, reason, .. } = self;
        format!("process {} of {} ({}: {reason})", processes.index, processes.count, kind.name())
    }
}

#[cfg(test)]
mod tests;
