//! Which launcher started this process, and which process of how many it is: torchrun, Slurm, MPI,
//! Kubernetes, several machines by hand, or none.
//!
//! Launchers tell a process its place in environment variables, each in its own. [`detect`] reads them, checks
//! them against each other and against the flags, and says what decided. It is a pure function: nobody
//! else in this crate looks at these variables.
//!
//! | looked for, in this order | by | what a process is |
//! |---|---|---|
//! | `--spawn=processes` of this program | `DDP_MP_SPAWNED` | one rank |
//! | `--max-restarts` of this program | `DDP_MP_SPAWNED=threads` | a thread per GPU |
//! | torchrun, or whoever sets what it sets | `RANK` and `LOCAL_RANK` | one rank |
//! | mpirun | `OMPI_COMM_WORLD_RANK`, `MPI_LOCALRANKID` (MPICH, Intel), `PALS_RANKID` (Cray) | one rank |
//! | srun | `SLURM_PROCID` and `SLURM_STEP_ID` | one rank; with one task a node a thread per GPU |
//! | Kubeflow | `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and no `LOCAL_RANK`, or `PET_NNODES` | a thread per GPU |
//! | flags | `--nnodes`, `--node-rank`, `--master-addr` | a thread per GPU |
//! | none | | a thread per GPU |
//!
//! mpirun comes before srun, because in a Slurm job mpirun starts its processes through srun, which leaves its
//! own variables there.
//!
//! `--nproc-per-node` always means threads of this very process. Where a process is one rank and the flag is
//! not given, a process that is alone on its machine and sees several GPUs still starts a thread for each:
//! `torchrun --nproc-per-node=1` is how to have that. `--nproc-per-node=1` says one rank.

mod kubernetes;
mod local;
mod mpi;
mod nodelist;
mod slurm;
mod spawned;
mod torchrun;
mod variables;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{NodeSlice, Nproc};
use crate::error::{Error, Result};
use variables::Variables;

/// Which launcher's variables to go by: `--launch`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchChoice {
    /// Those that are there.
    #[default]
    Auto,
    /// None: only the flags count.
    Local,
    /// torchrun's, or `torch.distributed.launch`'s, or Ray Train's.
    Torchrun,
    /// srun's.
    Slurm,
    /// mpirun's: Open MPI, MPICH, Intel MPI, Cray PALS.
    Mpi,
    /// Kubeflow's, for a `PyTorchJob` or a `TrainJob`.
    Kubernetes,
}

/// What was said about the launch on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchOptions {
    /// Which launcher's variables to go by.
    pub launch: LaunchChoice,
    /// How many machines there are.
    pub nnodes: Option<usize>,
    /// This machine's number, from 0.
    pub node_rank: Option<usize>,
    /// The name or address of machine 0.
    pub master_addr: Option<String>,
    /// The port where the processes meet.
    pub master_port: Option<u16>,
    /// How many ranks this process is to start.
    pub nproc: Nproc,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            launch: LaunchChoice::Auto,
            nnodes: None,
            node_rank: None,
            master_addr: None,
            master_port: None,
            nproc: Nproc::Auto,
        }
    }
}

pub(super) use spawned::{variables as variables_of_spawned, variables_of_threads};

/// What the ranks of one machine are: `--spawn`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpawnChoice {
    /// Threads of one process.
    #[default]
    Threads,
    /// Processes with one rank each, that this one starts.
    Processes,
}

/// Who started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchKind {
    /// Nobody who starts more than one.
    Local,
    /// A person, on each of several machines.
    ByHand,
    /// Another process of this program, with `--spawn=processes`.
    Spawned,
    /// torchrun, or whoever sets its variables.
    Torchrun,
    /// srun.
    Slurm,
    /// mpirun.
    Mpi,
    /// Kubeflow.
    Kubernetes,
}

impl LaunchKind {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            LaunchKind::Local => "local",
            LaunchKind::ByHand => "by hand",
            LaunchKind::Spawned => "spawn",
            LaunchKind::Torchrun => "torchrun",
            LaunchKind::Slurm => "slurm",
            LaunchKind::Mpi => "mpi",
            LaunchKind::Kubernetes => "kubernetes",
        }
    }
}

/// Which process this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processes {
    /// This process's number among all, from 0. Process 0 has rank 0.
    pub index: usize,
    /// How many processes there are in all.
    pub count: usize,
    /// This process's number on its machine, from 0; always 0 with torchrun's `--virtual-local-rank`.
    pub local_index: usize,
    /// How many there are on this machine.
    pub local_count: usize,
}

/// Where the processes meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasterEndpoint {
    /// A host name or an address.
    pub addr: String,
    /// The TCP port.
    pub port: u16,
    /// Whether a torchrun agent listens there already with a `TCPStore`, so that every process is a client.
    /// Otherwise process 0 listens.
    pub agent_store: bool,
}

impl fmt::Display for MasterEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, port, .. } = self;
        if addr.contains(':') { write!(f, "[{addr}]:{port}") } else { write!(f, "{addr}:{port}") }
    }
}

/// How this process was started, and where it finds the others.
///
/// How many ranks there are in all is known when the processes have met and told each other how many each
/// has: the ranks of process 0 come first, then those of process 1, and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Who started it.
    pub kind: LaunchKind,
    /// What decided, for people: the variables and flags, and how many ranks follow from them.
    pub reason: String,
    /// Which process this is.
    pub processes: Processes,
    /// How many machines there are, where that is told.
    pub nnodes: Option<usize>,
    /// This machine's number, from 0, where that is told.
    pub node_rank: Option<usize>,
    /// How many ranks this process starts.
    pub nproc: Nproc,
    /// Where the processes meet; none if this is the only one.
    pub master: Option<MasterEndpoint>,
    /// How many CPU cores the launcher gave to this process, if it said so.
    pub cores: Option<usize>,
    /// How many threads libtorch is to use in each rank, if the user or the launcher said so: `OMP_NUM_THREADS`.
    pub threads_per_rank: Option<usize>,
    /// What all processes of this run share and those of no other, part of every key in the store. `none` if nobody
    /// gave it.
    pub run_id: String,
    /// Whether an agent of torchrun's watches over this process, and ends it when machines come or go.
    pub has_agent: bool,
    /// How often torchrun, or `--max-restarts`, has started the processes of this machine anew after a failure; other
    /// machines may count otherwise.
    pub restart_count: usize,
    /// How often it would.
    pub max_restarts: usize,
    /// Where torchrun looks for the reason of a failure.
    pub error_file: Option<PathBuf>,
    /// The store of the process that has started this one, with `--spawn=processes` or `--max-restarts`: it reads the
    /// reason of a failure there.
    pub parent: Option<MasterEndpoint>,
}

/// torchrun's `--master-port`, where nobody says another.
const DEFAULT_PORT: u16 = 29500;

/// Finds out how this process was started.
///
/// `variables` looks up an environment variable; `gpus` is how many GPUs this process sees and can use.
///
/// # Errors
/// [`Error::Input`] that names the variables or flags that are missing, wrong, or contradict each other.
pub fn detect(
    variables: &dyn Fn(&str) -> Option<String>,
    options: &LaunchOptions,
    gpus: usize,
) -> Result<Launch> {
    let variables = Variables::new(variables);
    let launch = read(&variables, options, gpus)?;
    Ok(Launch { threads_per_rank: variables.threads()?, ..launch })
}

fn read(variables: &Variables, options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    // Whatever the flags say: they are those of who has started it.
    if spawned::is_here(variables) {
        return spawned::read(variables, options);
    }
    match options.launch {
        LaunchChoice::Local => local::read(options, "--launch local"),
        LaunchChoice::Torchrun => torchrun::read(variables, options, gpus),
        LaunchChoice::Slurm => slurm::read(variables, options, gpus),
        LaunchChoice::Mpi => mpi::read(variables, options, gpus),
        LaunchChoice::Kubernetes => kubernetes::read(variables, options),
        LaunchChoice::Auto => detect_any(variables, options, gpus),
    }
}

fn detect_any(variables: &Variables, options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    if torchrun::is_here(variables) {
        return torchrun::read(variables, options, gpus);
    }
    if mpi::is_here(variables) {
        return mpi::read(variables, options, gpus);
    }
    let outside_of_srun = match slurm::step(variables)? {
        slurm::Step::Task => return slurm::read(variables, options, gpus),
        slurm::Step::Outside(why) => why,
    };
    if kubernetes::is_here(variables) {
        return kubernetes::read(variables, options);
    }
    if variables.is_set("PMI_RANK") {
        return mpi::read(variables, options, gpus);
    }
    torchrun::refuse_remains(variables)?;
    local::read(options, &outside_of_srun.unwrap_or("no launcher's variables are set".into()))
}

/// How many ranks a process starts that its launcher takes for one rank, and why.
fn ranks_of_one(nproc: Nproc, processes: Processes, gpus: usize) -> (Nproc, String) {
    let many = processes.local_count > 1;
    match nproc {
        Nproc::Auto if !many && gpus > 1 => (
            Nproc::Auto,
            format!(
                "alone on its machine, it has a rank for each of {gpus} visible GPUs (--nproc-per-node=1: \
                 only one)"
            ),
        ),
        Nproc::Auto => (Nproc::Count(1), "one rank in each process".into()),
        given => (given, "ranks in this process as --nproc-per-node says".into()),
    }
}

/// Refuses flags that say other than the launcher does; `told` has what that is, if it is known.
fn check_flag<T: PartialEq + std::fmt::Display>(
    flag: &str,
    given: Option<&T>,
    launcher: &str,
    told: Option<&T>,
) -> Result<()> {
    match (given, told) {
        (Some(given), Some(told)) if given == told => Ok(()),
        (Some(given), Some(told)) => Err(Error::Input(format!(
            "{flag}={given}: {launcher} says {told}; leave the flag out, or use --launch local to ignore {launcher}"
        ))),
        (Some(given), None) => Err(Error::Input(format!(
            "{flag}={given}: {launcher} has started the processes, and sets this itself; leave the flag out"
        ))),
        (None, _) => Ok(()),
    }
}

/// A host name or address, as far as that can be seen without looking it up.
fn check_addr(name: &str, addr: &str) -> Result<()> {
    let refuse = |why: &str| Err(Error::Input(format!("{name}={addr:?} {why}")));
    if addr.is_empty() || addr.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        return refuse("is not a host name or address");
    }
    if addr.matches(':').count() == 1 {
        return refuse("has a port in it; give that as the master port, on its own");
    }
    Ok(())
}

/// Where to meet, for launchers that leave that to the user: the flags, else the variables, else as given.
fn master(
    variables: &Variables,
    options: &LaunchOptions,
    addr: impl FnOnce() -> Result<String>,
    port: impl FnOnce() -> Result<u16>,
) -> Result<MasterEndpoint> {
    let addr = match (&options.master_addr, variables.text("MASTER_ADDR")) {
        (Some(flag), _) => {
            check_addr("--master-addr", flag)?;
            flag.clone()
        }
        (None, Some(variable)) => {
            check_addr("MASTER_ADDR", &variable)?;
            variable
        }
        (None, None) => addr()?,
    };
    let port = match options.master_port {
        Some(flag) => flag,
        None => variables.port("MASTER_PORT")?.map_or_else(port, Ok)?,
    };
    Ok(MasterEndpoint { addr, port, agent_store: false })
}

impl Launch {
    /// A launch without all that only some launchers tell.
    fn new(kind: LaunchKind, processes: Processes, nproc: Nproc, reason: String) -> Self {
        Self {
            kind,
            reason,
            processes,
            nnodes: None,
            node_rank: None,
            nproc,
            master: None,
            cores: None,
            threads_per_rank: None,
            run_id: "none".into(),
            has_agent: false,
            restart_count: 0,
            max_restarts: 0,
            error_file: None,
            parent: None,
        }
    }

    /// This process's part of a machine where it may use so many CPU cores.
    pub fn share(&self, cores: usize) -> NodeSlice {
        let Processes { local_index, local_count, .. } = self.processes;
        NodeSlice {
            index: local_index,
            count: local_count,
            cores: self.cores.unwrap_or(cores / local_count).clamp(1, cores.max(1)),
            threads_per_rank: self.threads_per_rank,
        }
    }
}
