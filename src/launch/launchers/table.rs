//! The launchers that pass a process its numbers in environment variables, one row each.

use xxhash_rust::xxh3::xxh3_64;

use super::variables::{Number, Variables, and, check_below};
use super::{
    DEFAULT_PORT, Launch, LaunchKind, LaunchOptions, MasterEndpoint, Processes, check_addr,
    check_flag, ranks_of_one, slurm,
};
use crate::error::{Error, Result};
use crate::launch::Nproc;

/// Names of one variable; the first that is set counts.
type Names = &'static [&'static str];

/// A launcher, and the variables that it sets. A name that it does not have is empty.
pub(super) struct Launcher {
    pub kind: LaunchKind,
    /// Its value of `--launch`.
    choice: &'static str,
    /// What starts the processes, for errors.
    program: &'static str,
    /// What sets the variables, for errors of flags.
    name: &'static str,
    /// Sets of variables. Each whole set shows the launcher.
    shown_by: &'static [Names],
    /// The process's number among all.
    pub index: Names,
    /// The number of processes.
    count: Names,
    /// The process's number on its machine.
    local_index: Names,
    /// The number of processes on this machine.
    local_count: Names,
    /// The number of machines.
    nodes: Names,
    /// This machine's number.
    node: Names,
    /// The numbers of processes on all machines, as Slurm writes them.
    per_node: Names,
    /// The store's address and port. If there are none, the user chooses them with `MASTER_ADDR` and `MASTER_PORT`.
    addr: Names,
    port: Names,
    /// The id of the run.
    run_id: Names,
}

/// The numbers that a launcher has set.
struct Numbers {
    index: Number,
    count: Number,
    local_index: Option<Number>,
    local_count: Option<Number>,
    nodes: Option<Number>,
    node: Option<Number>,
}

/// A launcher that sets nothing.
const NONE: Launcher = Launcher {
    kind: LaunchKind::Mpi,
    choice: "mpi",
    program: "",
    name: "",
    shown_by: &[],
    index: &[],
    count: &[],
    local_index: &[],
    local_count: &[],
    nodes: &[],
    node: &[],
    per_node: &[],
    addr: &[],
    port: &[],
    run_id: &[],
};

/// A launcher of MPI programs whose variables have one prefix.
macro_rules! mpi {
    ($program:literal, $prefix:literal) => {
        Launcher {
            program: $program,
            name: $program,
            shown_by: &[&[concat!($prefix, "RANK")]],
            index: &[concat!($prefix, "RANK")],
            count: &[concat!($prefix, "SIZE")],
            local_index: &[concat!($prefix, "LOCAL_RANK")],
            local_count: &[concat!($prefix, "LOCAL_SIZE")],
            run_id: &["PMIX_NAMESPACE"],
            ..NONE
        }
    };
}

/// torchrun, and launchers with its variables, such as Ray Train.
pub(super) const TORCHRUN: Launcher = Launcher {
    kind: LaunchKind::Torchrun,
    choice: "torchrun",
    program: "torchrun --no-python",
    name: "torchrun",
    shown_by: &[&["LOCAL_RANK", "RANK"], &["LOCAL_RANK", "WORLD_SIZE"]],
    index: &["RANK"],
    count: &["WORLD_SIZE"],
    local_index: &["LOCAL_RANK"],
    local_count: &["LOCAL_WORLD_SIZE"],
    nodes: &["GROUP_WORLD_SIZE"],
    node: &["GROUP_RANK"],
    addr: &["MASTER_ADDR"],
    port: &["MASTER_PORT"],
    run_id: &["TORCHELASTIC_RUN_ID"],
    ..NONE
};

/// MPICH, Intel MPI and Cray PALS. srun may set `PMI_RANK`, too.
pub(super) const PMI: Launcher = Launcher {
    program: "mpirun",
    name: "mpirun",
    shown_by: &[&["MPI_LOCALRANKID"], &["PALS_RANKID"]],
    index: &["PMI_RANK", "PALS_RANKID"],
    count: &["PMI_SIZE"],
    local_index: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"],
    local_count: &["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"],
    run_id: &["PALS_APID"],
    ..NONE
};

/// All launchers, in the order in which they are looked for. In a Slurm job, mpirun starts its processes through srun,
/// which leaves its own variables there, so mpirun comes first.
pub(super) static LAUNCHERS: [Launcher; 9] = [
    TORCHRUN,
    mpi!("mpirun", "OMPI_COMM_WORLD_"),
    mpi!("mpirun_rsh", "MV2_COMM_WORLD_"),
    mpi!("mpiexec", "MVP_COMM_WORLD_"),
    mpi!("jsrun", "JSM_NAMESPACE_"),
    Launcher {
        program: "flux run",
        name: "flux run",
        shown_by: &[&["FLUX_TASK_RANK"]],
        index: &["FLUX_TASK_RANK"],
        count: &["FLUX_JOB_SIZE"],
        local_index: &["FLUX_TASK_LOCAL_ID"],
        nodes: &["FLUX_JOB_NNODES"],
        run_id: &["FLUX_JOB_ID"],
        ..NONE
    },
    PMI,
    Launcher {
        kind: LaunchKind::Slurm,
        choice: "slurm",
        program: "srun",
        name: "srun",
        index: &["SLURM_PROCID"],
        count: &slurm::TASKS,
        local_index: &["SLURM_LOCALID"],
        nodes: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"],
        node: &["SLURM_NODEID"],
        per_node: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
        ..NONE
    },
    // A PyTorchJob of the older operator has torchrun's names, but no number on the machine.
    Launcher {
        kind: LaunchKind::Kubernetes,
        choice: "kubernetes",
        program: "a PyTorchJob or TrainJob",
        name: "Kubeflow",
        shown_by: &[&["RANK", "WORLD_SIZE", "MASTER_ADDR"], &["PET_NNODES"], &["PET_NODE_RANK"]],
        index: &["PET_NODE_RANK", "RANK"],
        count: &["PET_NNODES", "WORLD_SIZE"],
        addr: &["PET_MASTER_ADDR", "MASTER_ADDR"],
        port: &["PET_MASTER_PORT", "MASTER_PORT"],
        run_id: &["PET_RDZV_ID"],
        ..NONE
    },
];

/// Returns the launcher of this `kind` whose variables are set; the first of the kind if none are.
pub(super) fn launcher(kind: LaunchKind, variables: &Variables) -> &'static Launcher {
    let of_kind = || LAUNCHERS.iter().filter(|it| it.kind == kind);
    let shown = of_kind().find(|it| it.is_shown(variables));
    let has_index = || of_kind().find(|it| variables.first_of(it.index).is_some());
    shown.or_else(has_index).or_else(|| of_kind().next()).unwrap_or(&LAUNCHERS[0])
}

impl Launcher {
    /// Returns whether variables are set that only this launcher sets.
    pub(super) fn is_shown(&self, variables: &Variables) -> bool {
        self.shown_by.iter().any(|names| names.iter().all(|name| variables.is_set(name)))
    }

    /// Reads this launcher's variables, and checks them against each other and against the flags.
    pub(super) fn read(
        &self,
        variables: &Variables,
        options: &LaunchOptions,
        gpus: usize,
    ) -> Result<Launch> {
        if self.kind == LaunchKind::Slurm {
            slurm::check_task(self, variables)?;
        }
        let numbers = self.numbers(variables)?;
        let Numbers { index, count, nodes, node, .. } = numbers;
        check_below(index, count)?;
        if let (Some(node), Some(nodes)) = (node, nodes) {
            check_below(node, nodes)?;
        }
        let [local_index, local_count] = self.local_numbers(variables, &numbers)?;
        let processes = Processes {
            index: index.value,
            count: count.value,
            local_index: local_index.value,
            local_count: local_count.value,
        };
        let nnodes = match nodes {
            _ if self.local_index.is_empty() => Some(count.value),
            Some(nodes) => Some(nodes.value),
            None => (local_count.value == count.value).then_some(1),
        };
        let node_rank = match node {
            _ if self.local_index.is_empty() => Some(index.value),
            Some(node) => Some(node.value),
            None => (nnodes == Some(1)).then_some(0),
        };
        check_flag("--nnodes", options.nnodes.as_ref(), self.name, nnodes.as_ref())?;
        check_flag("--node-rank", options.node_rank.as_ref(), self.name, node_rank.as_ref())?;
        if index.name != "RANK" {
            variables.check_rank(index)?;
        }
        let master = self.endpoint(variables, options, processes, nnodes)?;
        let variables_read = variables.as_text();
        let (nproc, ranks) = self.ranks(variables, options.nproc, processes, nnodes, gpus)?;
        let reason = format!("{variables_read}; {ranks}");
        let launch = Launch {
            nnodes,
            node_rank,
            master,
            run_id: self.run_id(variables),
            ..Launch::new(self.kind, processes, nproc, reason)
        };
        Ok(match self.kind {
            LaunchKind::Torchrun => Launch {
                has_agent: variables.is_set("TORCHELASTIC_RUN_ID"),
                restart_count: variables.integer_or_0("TORCHELASTIC_RESTART_COUNT")?,
                max_restarts: variables.integer_or_0("TORCHELASTIC_MAX_RESTARTS")?,
                error_file: variables.text("TORCHELASTIC_ERROR_FILE").map(Into::into),
                ..launch
            },
            LaunchKind::Slurm => {
                Launch { cores: variables.count("SLURM_CPUS_PER_TASK")?, ..launch }
            }
            _ => launch,
        })
    }

    /// Reads the numbers that the launcher always sets together. Only torchrun may leave out those of the machines.
    fn numbers(&self, variables: &Variables) -> Result<Numbers> {
        let (mut set, mut missing) = (Vec::new(), Vec::new());
        let mut number = |names: Names, is_needed: bool| -> Result<Option<Number>> {
            let Some(first) = names.first() else { return Ok(None) };
            let name = variables.first_of(names).unwrap_or(first);
            let value = variables.integer(name)?;
            if value.is_some() {
                set.push(name);
            } else if is_needed {
                missing.push(name);
            }
            Ok(value.map(|value| Number { name, value }))
        };
        let sets_nodes = self.kind != LaunchKind::Torchrun;
        let (index, count) = (number(self.index, true)?, number(self.count, true)?);
        let local_index = number(self.local_index, true)?;
        let local_count = number(self.local_count, true)?;
        let (nodes, node) = (number(self.nodes, sets_nodes)?, number(self.node, sets_nodes)?);
        match (index, count) {
            (Some(index), Some(count)) if missing.is_empty() => {
                Ok(Numbers { index, count, local_index, local_count, nodes, node })
            }
            _ => Err(self.lacks(&missing, &set)),
        }
    }

    /// Returns the process's number on its machine, and how many processes there are there.
    fn local_numbers(&self, variables: &Variables, numbers: &Numbers) -> Result<[Number; 2]> {
        let Numbers { index, count, nodes, .. } = *numbers;
        let refuse = |why: String| Err(Error::InvalidInput(why));
        let Some(local_index) = numbers.local_index else {
            // One process a machine.
            return Ok([Number { value: 0, ..index }, Number { value: 1, ..count }]);
        };
        let per_node = variables.first_of(self.per_node).or(self.per_node.first().copied());
        let name = per_node.or(nodes.map(|nodes| nodes.name)).unwrap_or(count.name);
        let local_count = match (numbers.local_count, nodes) {
            (Some(local_count), _) => local_count,
            (None, Some(nodes)) if nodes.value == 1 => Number { name, ..count },
            (None, Some(nodes)) if nodes.value == count.value => Number { name, value: 1 },
            (None, nodes) => match per_node {
                Some(name) => slurm::tasks_on(self, variables, name, numbers.node, count)?,
                None => {
                    let nodes = nodes.map_or(0, |nodes| nodes.value);
                    if nodes == 0 || count.value % nodes != 0 {
                        return refuse(format!(
                            "{count} processes on {name}={nodes} nodes cannot be as many on each; start as many on \
                             each (flux run --tasks-per-node)"
                        ));
                    }
                    Number { name, value: count.value / nodes }
                }
            },
        };
        check_below(local_index, local_count)?;
        let is_in_order = self.kind != LaunchKind::Torchrun || local_index.value <= index.value;
        if local_count.value > count.value || !is_in_order {
            return refuse(format!(
                "{index} of {count} cannot be {local_index} of {local_count}: a machine has no more processes than \
                 there are; check what sets them"
            ));
        }
        Ok([local_index, local_count])
    }

    /// Returns where the processes meet; `None` for a single process.
    fn endpoint(
        &self,
        variables: &Variables,
        options: &LaunchOptions,
        processes: Processes,
        nnodes: Option<usize>,
    ) -> Result<Option<MasterEndpoint>> {
        let is_alone = processes.count == 1;
        if self.addr.is_empty() {
            let chosen = || self.chosen_master(variables, options, processes, nnodes);
            return (!is_alone).then(chosen).transpose();
        }
        let master = if is_alone { None } else { Some(self.master(variables)?) };
        let given = options.master_addr.as_deref().map(|addr| check_addr("--master-addr", addr));
        let addr = master.as_ref().map(|master| &master.addr);
        check_flag("--master-addr", given.transpose()?.as_ref(), self.name, addr)?;
        let port = master.as_ref().map(|master| &master.port);
        check_flag("--master-port", options.master_port.as_ref(), self.name, port)?;
        Ok(master)
    }

    /// Returns the store that the launcher has named.
    pub(super) fn master(&self, variables: &Variables) -> Result<MasterEndpoint> {
        let name = |names: Names| variables.first_of(names).unwrap_or(names[0]);
        let [index, count] = [self.index, self.count].map(name);
        let [addr, port] = [self.addr, self.port].map(name);
        let number = match variables.port(port)? {
            None if self.kind == LaunchKind::Kubernetes => Some(DEFAULT_PORT),
            port => port,
        };
        let (Some(text), Some(number)) = (variables.text(addr), number) else {
            let (set, missing): (Vec<_>, Vec<_>) =
                [index, count, addr, port].into_iter().partition(|name| variables.is_set(name));
            return Err(self.lacks(&missing, &set));
        };
        let addr = check_addr(addr, &text)?;
        // Python writes `True`, and PyTorch compares with that.
        let agent_store = variables.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        Ok(MasterEndpoint { addr, port: number, agent_store })
    }

    /// Returns the store for a launcher that leaves it to the user: from the flags, else from the variables, else where
    /// process 0 must be.
    fn chosen_master(
        &self,
        variables: &Variables,
        options: &LaunchOptions,
        processes: Processes,
        nnodes: Option<usize>,
    ) -> Result<MasterEndpoint> {
        let addr = match (&options.master_addr, variables.text("MASTER_ADDR")) {
            (Some(flag), _) => check_addr("--master-addr", flag)?,
            (None, Some(variable)) => check_addr("MASTER_ADDR", &variable)?,
            (None, None) if self.kind == LaunchKind::Slurm => {
                slurm::first_host(variables, nnodes.unwrap_or(1))?
            }
            (None, None) if nnodes == Some(1) => "127.0.0.1".into(),
            (None, None) => {
                let Processes { count, local_count, .. } = processes;
                return Err(Error::InvalidInput(format!(
                    "MASTER_ADDR is not set, and {} has started processes on several machines ({local_count} of {count} \
                     on this one); use --master-addr with the address of rank 0's machine, or set MASTER_ADDR on all \
                     (Open MPI: mpirun -x MASTER_ADDR; MPICH, Intel: mpirun -genv MASTER_ADDR ...)",
                    self.program
                )));
            }
        };
        let port = match (options.master_port, variables.port("MASTER_PORT")?) {
            (Some(flag), _) => flag,
            (None, Some(variable)) => variable,
            (None, None) if self.kind == LaunchKind::Slurm => slurm::port(variables)?,
            // Two runs on one machine must not meet at one port.
            (None, None) => match self.run_id(variables).as_str() {
                "none" => DEFAULT_PORT,
                id => 15_000 + (xxh3_64(id.as_bytes()) % 10_000) as u16,
            },
        };
        Ok(MasterEndpoint { addr, port, agent_store: false })
    }

    /// Returns how many ranks this process starts, and why.
    fn ranks(
        &self,
        variables: &Variables,
        given: Nproc,
        processes: Processes,
        nnodes: Option<usize>,
        gpus: usize,
    ) -> Result<(Nproc, String)> {
        let of_pod = "PET_NPROC_PER_NODE";
        Ok(match self.kind {
            LaunchKind::Kubernetes => {
                let nproc = match (given, variables.text(of_pod)) {
                    (Nproc::Auto, Some(text)) => text.parse().map_err(|error: Error| {
                        Error::InvalidInput(format!("{of_pod}: {error}"))
                    })?,
                    (given, _) => given,
                };
                (nproc, "one process a pod: its ranks are threads".into())
            }
            // One task a node means a process that uses the whole node.
            LaunchKind::Slurm if nnodes == Some(processes.count) => {
                (given, "one task a node: its ranks are threads".into())
            }
            _ => ranks_of_one(given, processes, gpus),
        })
    }

    /// Returns the id of the run; `none` if the launcher sets none.
    fn run_id(&self, variables: &Variables) -> String {
        if self.kind == LaunchKind::Slurm {
            return slurm::run_id(variables);
        }
        let name = variables.first_of(self.run_id);
        name.and_then(|name| variables.text(name)).unwrap_or("none".into())
    }

    /// Returns the error of variables that are `missing`, though others are `set`.
    pub(super) fn lacks(&self, missing: &[&str], set: &[&str]) -> Error {
        let Self { choice, program, .. } = self;
        let is = |names: &[&str]| if names.len() == 1 { "is" } else { "are" };
        let missing = format!("{} {} not set", and(missing), is(missing));
        Error::InvalidInput(if set.is_empty() {
            format!(
                "--launch {choice}: {missing}; start ddp-mp with {program}, or leave --launch out"
            )
        } else {
            format!(
                "{missing}, but {} {}: {program} sets all of them; set the missing ones, or unset the others \
                 (--launch local ignores them)",
                and(set),
                is(set)
            )
        })
    }
}
