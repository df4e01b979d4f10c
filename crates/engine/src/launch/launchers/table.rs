//! The launchers that pass a process its numbers in environment variables, one row each.

use xxhash_rust::xxh3::xxh3_64;

use super::variables::{Names, Number, Variables};
use super::{DEFAULT_PORT, Launch, LaunchKind, MasterEndpoint, Processes, check_addr};
use crate::error::{Error, Result};
use crate::launch::Nproc;

/// A launcher, and the variables that it sets. Those that have no names are not set. The flags count as variables.
#[derive(Clone, Copy, Default)]
pub(super) struct Launcher {
    pub kind: LaunchKind,
    /// What starts the processes, for errors.
    name: &'static str,
    /// Sets of variables. Each whole set shows the launcher.
    shown_by: &'static [Names],
    /// Whether a single process counts as one without a launcher, as in a shell that the launcher has started.
    needs_several: bool,
    /// The process's number among all.
    index: Names,
    /// The number of processes.
    count: Names,
    /// The process's number on its machine.
    local_index: Names,
    /// The number of processes on this machine. Without names all machines have as many.
    local_count: Names,
    /// The number of machines. Without names here and above, each process is on a machine of its own.
    nodes: Names,
    /// This machine's number.
    node: Names,
    /// A list of hosts. The first has the store if `MASTER_ADDR` is not set.
    hosts: Names,
    /// The id of the run.
    run_id: Names,
    /// The number of the run among those with this id.
    step: Names,
    /// How many CPU cores a process has.
    cores: Names,
    /// How many processes each machine has, with commas if not all have as many.
    on_nodes: Names,
}

/// The ids of jobs that launchers of MPI programs set.
const MPI_RUN_ID: Names = &["PMIX_NAMESPACE", "FLUX_JOB_ID", "PALS_APID"];

/// The flag and the variables with the address of the store, and those with its port.
const ADDR: [&str; 3] = ["--master-addr", "MASTER_ADDR", "PET_MASTER_ADDR"];
const PORT: [&str; 3] = ["--master-port", "MASTER_PORT", "PET_MASTER_PORT"];

/// A launcher of MPI programs whose variables have one prefix.
macro_rules! mpi {
    ($name:literal, $prefix:literal) => {
        Launcher {
            kind: LaunchKind::Mpi,
            name: $name,
            shown_by: &[&[concat!($prefix, "RANK")]],
            index: &[concat!($prefix, "RANK")],
            count: &[concat!($prefix, "SIZE")],
            local_index: &[concat!($prefix, "LOCAL_RANK")],
            local_count: &[concat!($prefix, "LOCAL_SIZE")],
            run_id: MPI_RUN_ID,
            ..Launcher::default()
        }
    };
}

/// Returns all launchers, in the order in which they are looked for: torchrun first. In a Slurm job, mpirun starts its
/// processes through srun, which leaves its own variables there, so mpirun comes before srun.
pub(super) fn launchers() -> [Launcher; 11] {
    // MPICH, Intel MPI and Cray PALS.
    let mpich = Launcher {
        kind: LaunchKind::Mpi,
        name: "mpirun",
        shown_by: &[&["MPI_LOCALRANKID"], &["PALS_RANKID"]],
        index: &["PMI_RANK", "PALS_RANKID"],
        count: &["PMI_SIZE"],
        local_index: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
        local_count: &["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"],
        run_id: MPI_RUN_ID,
        ..Launcher::default()
    };
    [
        // Ray Train sets the same variables.
        Launcher {
            kind: LaunchKind::Torchrun,
            name: "torchrun --no-python",
            shown_by: &[&["LOCAL_RANK", "RANK"]],
            index: &["RANK"],
            count: &["WORLD_SIZE"],
            local_index: &["LOCAL_RANK"],
            local_count: &["LOCAL_WORLD_SIZE"],
            nodes: &["GROUP_WORLD_SIZE"],
            node: &["GROUP_RANK"],
            run_id: &["TORCHELASTIC_RUN_ID"],
            ..Launcher::default()
        },
        mpi!("mpirun", "OMPI_COMM_WORLD_"),
        mpi!("mpirun_rsh", "MV2_COMM_WORLD_"),
        mpi!("mpiexec", "MVP_COMM_WORLD_"),
        mpi!("jsrun", "JSM_NAMESPACE_"),
        Launcher {
            kind: LaunchKind::Mpi,
            name: "flux run",
            shown_by: &[&["FLUX_TASK_RANK"]],
            index: &["FLUX_TASK_RANK"],
            count: &["FLUX_JOB_SIZE"],
            local_index: &["FLUX_TASK_LOCAL_ID"],
            nodes: &["FLUX_JOB_NNODES"],
            run_id: MPI_RUN_ID,
            ..Launcher::default()
        },
        mpich,
        Launcher {
            kind: LaunchKind::Slurm,
            name: "srun",
            shown_by: &[&["SLURM_STEP_ID"]],
            needs_several: true,
            index: &["SLURM_PROCID"],
            count: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
            local_index: &["SLURM_LOCALID"],
            nodes: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"],
            node: &["SLURM_NODEID"],
            hosts: &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"],
            run_id: &["SLURM_JOB_ID"],
            step: &["SLURM_STEP_ID"],
            cores: &["SLURM_CPUS_PER_TASK"],
            on_nodes: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
            ..Launcher::default()
        },
        // Another launcher with MPICH's variables, without those of the machine: an error. srun sets `PMI_RANK`, too.
        Launcher { shown_by: &[&["PMI_RANK"]], needs_several: true, ..mpich },
        // A pod is a machine with one process. Kubeflow's older operator sets torchrun's names.
        Launcher {
            kind: LaunchKind::Kubernetes,
            name: "a PyTorchJob",
            shown_by: &[&["RANK", "WORLD_SIZE", "MASTER_ADDR"], &["PET_NNODES"]],
            index: &["PET_NODE_RANK", "RANK"],
            count: &["PET_NNODES", "WORLD_SIZE"],
            ..Launcher::default()
        },
        // A person.
        Launcher {
            kind: LaunchKind::ByHand,
            name: "--nnodes, --node-rank, --master-addr and perhaps --master-port",
            shown_by: &[&["--nnodes"], &["--node-rank"], &["--master-addr"], &["--master-port"]],
            needs_several: true,
            index: &["--node-rank"],
            count: &["--nnodes"],
            ..Launcher::default()
        },
    ]
}

impl Launcher {
    /// Returns whether variables are set that only this launcher sets. `is_chosen` is whether the user has named it.
    pub(super) fn is_here(&self, variables: &Variables, is_chosen: bool) -> Result<bool> {
        let all_set = |names: &Names| names.iter().all(|&it| variables.text(&[it]).is_some());
        let is_shown = self.shown_by.iter().any(all_set);
        if !is_shown || is_chosen || !self.needs_several {
            return Ok(is_shown);
        }
        let [index, count] = [self.index, self.count].map(|names| variables.number(names));
        Ok(count?.is_none_or(|it| it.value != 1) || index?.is_some_and(|it| it.value > 0))
    }

    /// Reads this launcher's variables, and checks them against each other and against the flags.
    pub(super) fn read(&self, variables: &Variables, nproc: Nproc, gpus: usize) -> Result<Launch> {
        self.check_complete(variables)?;
        let read =
            |names: Names| -> Result<Number> { Ok(variables.number(names)?.unwrap_or_default()) };
        let (index, count, local) = (read(self.index)?, read(self.count)?, read(self.local_index)?);
        check_below(index, count)?;
        let (nodes, node) = match (self.nodes, self.local_count) {
            ([], []) => (Some(count), Some(index)),
            (names, _) => (variables.number(names)?, variables.number(self.node)?),
        };
        let uneven = variables.text(self.on_nodes).filter(|(_, list)| list.contains(','));
        let of = match self.local_count {
            [] => on_each(count, nodes.unwrap_or_default(), local, uneven.is_some())?,
            names => read(names)?,
        };
        check_below(local, of)?;
        if of.value > count.value {
            return Err(contradiction(format!("{of} must be at most {count}")));
        }
        nodes.map(|nodes| check_below(node.unwrap_or_default(), nodes)).transpose()?;
        // If no variable holds the number of machines, it is known only if all processes are on one.
        let one = |name, value| (of.value == count.value).then_some(Number { name, value });
        let (nodes, node) = (nodes.or(one("machines", 1)), node.or(one("machine", 0)));
        self.check_given(variables, index, nodes, node)?;
        let nnodes = nodes.map(|nodes| nodes.value);
        let (run_id, port) = self.run_id_and_port(variables)?;
        let several = (count.value > 1).then(|| self.master(variables, nnodes == Some(1), port));
        // A process that is alone on its machine has a rank for each GPU.
        let is_rank = gpus < 2 && matches!(self.kind, LaunchKind::Torchrun | LaunchKind::Mpi);
        let nproc = match nproc {
            Nproc::Auto if of.value > 1 || is_rank => Nproc::Count(1),
            given => given,
        };
        let reason = format!("{index} {count}");
        let [index, count, local_index, local_count] = [index, count, local, of].map(|it| it.value);
        Ok(Launch {
            kind: self.kind,
            processes: Processes { index, count, local_index, local_count },
            nnodes,
            node_rank: node.map(|node| node.value),
            master: several.transpose()?,
            cores: variables.number(self.cores)?.map(|cores| cores.value),
            run_id,
            has_agent: variables.text(&["TORCHELASTIC_RUN_ID"]).is_some(),
            restart_count: read(&["TORCHELASTIC_RESTART_COUNT"])?.value,
            max_restarts: read(&["TORCHELASTIC_MAX_RESTARTS"])?.value,
            error_file: variables.text(&["TORCHELASTIC_ERROR_FILE"]).map(|(_, file)| file.into()),
            ..Launch::local(nproc, reason)
        })
    }

    /// Checks the numbers that the user has given against those that the launcher's variables hold.
    fn check_given(
        &self,
        variables: &Variables,
        index: Number,
        nodes: Option<Number>,
        node: Option<Number>,
    ) -> Result<()> {
        for (name, known) in [("RANK", Some(index)), ("--nnodes", nodes), ("--node-rank", node)] {
            let Some(given) = variables.number(&[name])? else { continue };
            let unknown = || {
                Error::usage(format!("{given} cannot be checked with {}; leave it out", self.name))
            };
            let known = known.ok_or_else(unknown)?;
            if given.value != known.value {
                return Err(contradiction(format!("{given} contradicts {known}")));
            }
        }
        Ok(())
    }

    /// Checks that all variables are set that the launcher always sets together.
    fn check_complete(&self, variables: &Variables) -> Result<()> {
        let nodes: Names = if self.local_count.is_empty() { self.nodes } else { &[] };
        let all = [self.index, self.count, nodes, self.local_index, self.local_count, self.step];
        let is_missing = |names: &Names| !names.is_empty() && variables.text(names).is_none();
        let missing: Vec<&str> = all.into_iter().filter(is_missing).map(|names| names[0]).collect();
        let set: Vec<&str> =
            all.into_iter().filter_map(|names| Some(variables.text(names)?.0)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let others = match &set[..] {
            [] => String::new(),
            _ => format!(", or remove {} (--launch local ignores variables)", set.join(", ")),
        };
        let (missing, name) = (missing.join(", "), self.name);
        Err(Error::usage(format!("not set: {missing}; start ddp-mp with {name}{others}")))
    }

    /// Returns where the processes meet: where a flag or a variable says, or else where process 0 must be, on the only
    /// machine if it is the only one.
    fn master(&self, variables: &Variables, is_one: bool, port: u16) -> Result<MasterEndpoint> {
        let first = variables.text(self.hosts).map(|(name, list)| (name, first_host(&list)));
        let here = is_one.then(|| (ADDR[0], "127.0.0.1".into()));
        let Some((from, addr)) = variables.text(&ADDR).or(first).or(here) else {
            return Err(Error::usage(
                "processes on several machines need --master-addr, the name or address of machine 0, or MASTER_ADDR \
                 on all (Open MPI: mpirun -x MASTER_ADDR; MPICH, Intel: mpirun -genv MASTER_ADDR ...)"
                    .into(),
            ));
        };
        let addr = check_addr(from, &addr)?;
        let port = variables.port(&PORT)?.unwrap_or(port);
        // Python writes `True`, and PyTorch compares with that.
        let agent = variables.text(&["TORCHELASTIC_USE_AGENT_STORE"]);
        let agent_store =
            self.kind == LaunchKind::Torchrun && agent.is_some_and(|(_, text)| text == "True");
        if let Some((flag, _)) = variables.text(&[ADDR[0], PORT[0]]).filter(|_| agent_store) {
            return Err(contradiction(format!("{flag} contradicts torchrun, whose store is used")));
        }
        Ok(MasterEndpoint { addr, from, port, agent_store })
    }

    /// Returns the id of the run, and a port that follows from it. Two runs on one machine must not meet at one port, least
    /// of all two steps of one job.
    fn run_id_and_port(&self, variables: &Variables) -> Result<(String, u16)> {
        let Some((_, id)) = variables.text(self.run_id) else {
            return Ok(("none".into(), DEFAULT_PORT));
        };
        let step = variables.number(self.step)?.map(|step| step.value as u64);
        let hash = xxh3_64(id.as_bytes()) % 10_000 + step.unwrap_or(0);
        let port = 15_000 + (hash % 10_000) as u16;
        Ok((step.map_or(id.clone(), |step| format!("{id}.{step}")), port))
    }
}

/// Returns the first host of a list of Slurm's, such as `node[01-03,07],login1`.
pub(super) fn first_host(list: &str) -> String {
    let (mut host, mut rest) = (String::new(), list);
    while let Some((before, after)) = rest.split_once('[')
        && !before.contains(',')
        && let Some((numbers, after)) = after.split_once(']')
    {
        host += before;
        host += numbers.split([',', '-']).next().unwrap_or_default();
        rest = after;
    }
    host + rest.split(',').next().unwrap_or_default()
}

/// Returns how many of `count` processes each machine has, if each has as many. This process has the number `local` on its
/// own.
fn on_each(count: Number, nodes: Number, local: Number, is_uneven: bool) -> Result<Number> {
    let value = count.value.checked_div(nodes.value).unwrap_or(0);
    if is_uneven || value * nodes.value != count.value || local.value >= value {
        let why = format!("{count} are not as many on each of {nodes}; start as many on each node");
        return Err(contradiction(why));
    }
    Ok(Number { name: "tasks-per-node", value })
}

/// Checks that `index` is below `count`.
fn check_below(index: Number, count: Number) -> Result<()> {
    if index.value < count.value {
        return Ok(());
    }
    Err(contradiction(format!("{index} must be below {count}, because it counts from 0")))
}

/// Returns the error of variables that contradict each other.
fn contradiction(why: String) -> Error {
    Error::usage(format!("{why}; check what sets them (--launch local ignores variables)"))
}
