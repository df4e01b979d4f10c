//! The launchers that pass a process its numbers in environment variables, one row each.

use xxhash_rust::xxh3::xxh3_64;

use super::variables::{Number, Variables, and, check_below};
use super::{
    DEFAULT_PORT, Launch, LaunchKind, LaunchOptions, MasterEndpoint, Processes, check_addr,
    check_flag, ranks_of_one, slurm,
};
use crate::error::{Error, Result};

/// What a number says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    /// The process's number among all.
    Index,
    /// The number of processes.
    Count,
    /// The process's number on its machine.
    LocalIndex,
    /// The number of processes on this machine.
    LocalCount,
    /// This machine's number.
    Node,
    /// The number of machines.
    Nodes,
}

/// Names of one variable; the first that is set counts.
type Names = &'static [&'static str];

/// A launcher, and the variables that it sets.
pub(super) struct Launcher {
    pub kind: LaunchKind,
    /// What starts the processes, for errors.
    name: &'static str,
    /// Sets of variables. Each whole set shows the launcher.
    shown_by: &'static [Names],
    /// The numbers, in the order in which errors list them. A launcher sets all of them; only torchrun may leave out
    /// those of the machines.
    numbers: &'static [(Key, Names)],
    /// The store's address and port; `None` if the user chooses them with `MASTER_ADDR` and `MASTER_PORT`.
    store: Option<(Names, Names)>,
    /// The id of the run.
    run_id: Names,
}

/// The ids of jobs that launchers of MPI programs set.
const MPI_RUN_ID: Names = &["PMIX_NAMESPACE", "FLUX_JOB_ID", "PALS_APID"];

/// A launcher of MPI programs whose variables have one prefix.
macro_rules! mpi {
    ($name:literal, $prefix:literal) => {
        Launcher {
            kind: LaunchKind::Mpi,
            name: $name,
            shown_by: &[&[concat!($prefix, "RANK")]],
            numbers: &[
                (Key::Index, &[concat!($prefix, "RANK")]),
                (Key::Count, &[concat!($prefix, "SIZE")]),
                (Key::LocalIndex, &[concat!($prefix, "LOCAL_RANK")]),
                (Key::LocalCount, &[concat!($prefix, "LOCAL_SIZE")]),
            ],
            store: None,
            run_id: MPI_RUN_ID,
        }
    };
}

/// torchrun, and launchers with its variables, such as Ray Train.
pub(super) const TORCHRUN: Launcher = Launcher {
    kind: LaunchKind::Torchrun,
    name: "torchrun",
    shown_by: &[&["LOCAL_RANK", "RANK"], &["LOCAL_RANK", "WORLD_SIZE"]],
    numbers: &[
        (Key::Index, &["RANK"]),
        (Key::Count, &["WORLD_SIZE"]),
        (Key::LocalIndex, &["LOCAL_RANK"]),
        (Key::LocalCount, &["LOCAL_WORLD_SIZE"]),
        (Key::Nodes, &["GROUP_WORLD_SIZE"]),
        (Key::Node, &["GROUP_RANK"]),
    ],
    store: Some((&["MASTER_ADDR"], &["MASTER_PORT"])),
    run_id: &["TORCHELASTIC_RUN_ID"],
};

/// MPICH, Intel MPI and Cray PALS. srun may set `PMI_RANK`, too.
pub(super) const PMI: Launcher = Launcher {
    kind: LaunchKind::Mpi,
    name: "mpirun",
    shown_by: &[&["MPI_LOCALRANKID"], &["PALS_RANKID"]],
    numbers: &[
        (Key::Index, &["PMI_RANK", "PALS_RANKID"]),
        (Key::Count, &["PMI_SIZE"]),
        (Key::LocalIndex, &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"]),
        (Key::LocalCount, &["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"]),
    ],
    store: None,
    run_id: MPI_RUN_ID,
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
        kind: LaunchKind::Mpi,
        name: "flux run",
        shown_by: &[&["FLUX_TASK_RANK"]],
        numbers: &[
            (Key::Index, &["FLUX_TASK_RANK"]),
            (Key::Count, &["FLUX_JOB_SIZE"]),
            (Key::LocalIndex, &["FLUX_TASK_LOCAL_ID"]),
            (Key::Nodes, &["FLUX_JOB_NNODES"]),
        ],
        store: None,
        run_id: MPI_RUN_ID,
    },
    PMI,
    Launcher {
        kind: LaunchKind::Slurm,
        name: "srun",
        shown_by: &[], // see `slurm::step`
        numbers: &[
            (Key::Index, &["SLURM_PROCID"]),
            (Key::LocalIndex, &["SLURM_LOCALID"]),
            (Key::Node, &["SLURM_NODEID"]),
            (Key::Count, &slurm::TASKS),
            (Key::Nodes, &["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"]),
        ],
        store: None,
        run_id: &[],
    },
    // The older operator sets torchrun's names, but no number on the machine: a pod has one process.
    Launcher {
        kind: LaunchKind::Kubernetes,
        name: "Kubeflow",
        shown_by: &[&["RANK", "WORLD_SIZE", "MASTER_ADDR"], &["PET_NNODES"], &["PET_NODE_RANK"]],
        numbers: &[
            (Key::Index, &["PET_NODE_RANK", "RANK"]),
            (Key::Count, &["PET_NNODES", "WORLD_SIZE"]),
        ],
        store: Some((&["PET_MASTER_ADDR", "MASTER_ADDR"], &["PET_MASTER_PORT", "MASTER_PORT"])),
        run_id: &["PET_RDZV_ID"],
    },
];

/// Returns the launcher of this `kind` whose variables are set; the first of the kind if none are.
pub(super) fn launcher(kind: LaunchKind, variables: &Variables) -> &'static Launcher {
    let of_kind = || LAUNCHERS.iter().filter(|it| it.kind == kind);
    let shown = of_kind().find(|it| it.is_shown(variables));
    let has_index = || of_kind().find(|it| variables.first_of(it.names(Key::Index)).is_some());
    shown.or_else(has_index).or_else(|| of_kind().next()).unwrap_or(&LAUNCHERS[0])
}

impl Launcher {
    /// Returns whether variables are set that only this launcher sets.
    pub(super) fn is_shown(&self, variables: &Variables) -> bool {
        self.shown_by.iter().any(|names| names.iter().all(|name| variables.is_set(name)))
    }

    fn names(&self, key: Key) -> Names {
        self.numbers.iter().find(|(one, _)| *one == key).map_or(&[], |(_, names)| names)
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
        let number = |key| numbers.iter().find(|(one, _)| *one == key).map(|(_, number)| *number);
        let unknown = Number { name: "", value: 0 };
        let [index, count] = [Key::Index, Key::Count].map(|key| number(key).unwrap_or(unknown));
        let (nodes, node) = (number(Key::Nodes), number(Key::Node));
        check_below(index, count)?;
        if let (Some(node), Some(nodes)) = (node, nodes) {
            check_below(node, nodes)?;
        }
        let (mut local_index, mut local_count) = (0, 1);
        let is_pod = self.names(Key::LocalIndex).is_empty();
        if let Some(local) = number(Key::LocalIndex) {
            let of = match (number(Key::LocalCount), nodes) {
                (Some(of), _) => of,
                (None, Some(nodes)) if nodes.value == 1 => count,
                (None, Some(nodes)) if nodes.value == count.value => Number { value: 1, ..nodes },
                (None, Some(nodes)) if node.is_none() => on_each(count, nodes)?,
                _ => slurm::tasks_on_node(self, variables, node, count)?,
            };
            check_below(local, of)?;
            let is_in_order = self.kind != LaunchKind::Torchrun || local.value <= index.value;
            if of.value > count.value || !is_in_order {
                return Err(Error::usage(format!(
                    "{index} of {count} cannot be {local} of {of}: a machine has no more processes than there are; \
                     check what sets them"
                )));
            }
            (local_index, local_count) = (local.value, of.value);
        }
        let processes =
            Processes { index: index.value, count: count.value, local_index, local_count };
        // If no variable holds the number of machines, it is known only if all processes are on one.
        let one = (local_count == count.value).then_some(1);
        let pods = is_pod.then_some(count.value);
        let nnodes = nodes.map(|nodes| nodes.value).or(pods).or(one);
        let of_pod = is_pod.then_some(index.value);
        let node_rank = node.map(|node| node.value).or(of_pod).or(one.map(|_| 0));
        check_flag("--nnodes", options.nnodes.as_ref(), self.name, nnodes.as_ref())?;
        check_flag("--node-rank", options.node_rank.as_ref(), self.name, node_rank.as_ref())?;
        if index.name != "RANK" {
            variables.check_rank(index)?;
        }
        let master = self.endpoint(variables, options, processes, nnodes)?;
        let nproc = match self.kind {
            LaunchKind::Kubernetes => variables.nproc("PET_NPROC_PER_NODE", options.nproc)?,
            _ => options.nproc,
        };
        let variables_read = variables.as_text();
        let (nproc, ranks) = match self.kind {
            LaunchKind::Kubernetes => (nproc, "one process a pod: its ranks are threads".into()),
            // One task a node means a process that uses the whole node.
            LaunchKind::Slurm if nnodes == Some(count.value) => {
                (options.nproc, "one task a node: its ranks are threads".into())
            }
            _ => ranks_of_one(options.nproc, processes, gpus),
        };
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

    /// Reads the numbers that the launcher always sets together.
    fn numbers(&self, variables: &Variables) -> Result<Vec<(Key, Number)>> {
        let (mut numbers, mut set, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for (key, names) in self.numbers {
            let name = variables.first_of(names).unwrap_or(names[0]);
            let is_optional =
                self.kind == LaunchKind::Torchrun && matches!(key, Key::Node | Key::Nodes);
            let value = match (name, key) {
                ("PET_NNODES", _) => variables.pods(name)?,
                (_, Key::Nodes) => variables.count(name)?,
                _ => variables.integer(name)?,
            };
            match value {
                Some(value) => {
                    numbers.push((*key, Number { name, value }));
                    set.extend((!is_optional).then_some(name));
                }
                None if is_optional => {}
                None => missing.push(name),
            }
        }
        let is_one_pod = self.kind == LaunchKind::Kubernetes
            && matches!(numbers[..], [(Key::Count, Number { value: 1, .. })]);
        if let (true, [index]) = (is_one_pod, &missing[..]) {
            numbers.push((Key::Index, Number { name: index, value: 0 }));
        } else if !missing.is_empty() {
            return Err(self.lacks(&missing, &set));
        }
        Ok(numbers)
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
        if self.store.is_none() {
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
        let (addr, port) = self.store.unwrap_or((&["MASTER_ADDR"], &["MASTER_PORT"]));
        let all = [self.names(Key::Index), self.names(Key::Count), addr, port];
        let all = all.map(|names| variables.first_of(names).unwrap_or(names[0]));
        let [_, _, addr, port] = all;
        let default = (self.kind == LaunchKind::Kubernetes).then_some(DEFAULT_PORT);
        let (Some(text), Some(port)) = (variables.text(addr), variables.port(port)?.or(default))
        else {
            let (set, missing): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|name| variables.is_set(name));
            return Err(self.lacks(&missing, &set));
        };
        let addr = check_addr(addr, &text)?;
        // Python writes `True`, and PyTorch compares with that.
        let agent_store = self.kind == LaunchKind::Torchrun
            && variables.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        Ok(MasterEndpoint { addr, port, agent_store })
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
                return Err(Error::usage(format!(
                    "MASTER_ADDR is not set, and {} has started processes on several machines ({local_count} of {count} \
                     on this one); use --master-addr with the address of rank 0's machine, or set MASTER_ADDR on all \
                     (Open MPI: mpirun -x MASTER_ADDR; MPICH, Intel: mpirun -genv MASTER_ADDR ...)",
                    self.name
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
        let choice = self.kind.name();
        let name = match self.kind {
            LaunchKind::Torchrun => "torchrun --no-python",
            LaunchKind::Kubernetes => "a PyTorchJob or TrainJob",
            _ => self.name,
        };
        let is = |names: &[&str]| if names.len() == 1 { "is" } else { "are" };
        let missing = format!("{} {} not set", and(missing), is(missing));
        Error::usage(if set.is_empty() {
            format!("--launch {choice}: {missing}; start ddp-mp with {name}, or leave --launch out")
        } else {
            format!(
                "{missing}, but {} {}: {name} sets all of them; set the missing ones, or unset the others \
                 (--launch local ignores them)",
                and(set),
                is(set)
            )
        })
    }
}

/// Returns how many of `count` processes each machine has, if each has as many.
fn on_each(count: Number, nodes: Number) -> Result<Number> {
    if !count.value.is_multiple_of(nodes.value) {
        return Err(Error::usage(format!(
            "{count} processes on {nodes} nodes cannot be as many on each; start as many on each (flux run \
             --tasks-per-node)"
        )));
    }
    Ok(Number { value: count.value / nodes.value, ..nodes })
}
