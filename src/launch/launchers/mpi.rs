//! The variables that mpirun and programs like it set: Open MPI, MPICH and Intel MPI (Hydra), Cray PALS, MVAPICH, jsrun of
//! IBM, and Flux.

use xxhash_rust::xxh3::xxh3_64;

use super::variables::{Launcher, Variables, check_below};
use super::{
    DEFAULT_PORT, Launch, LaunchKind, LaunchOptions, Processes, check_flag, master, ranks_of_one,
};
use crate::error::{Error, Result};

/// The variables of a family of launchers.
#[derive(Clone, Copy)]
struct Family {
    /// The name of the launcher.
    program: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

/// Flux gives the number of nodes, and not the number of processes on each.
const FLUX_NODES: &str = "FLUX_JOB_NNODES";

/// The families whose rank no other launcher sets.
const FAMILIES: [Family; 5] = [
    Family {
        program: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Family {
        program: "mpirun_rsh",
        rank: "MV2_COMM_WORLD_RANK",
        size: "MV2_COMM_WORLD_SIZE",
        local_rank: "MV2_COMM_WORLD_LOCAL_RANK",
        local_size: "MV2_COMM_WORLD_LOCAL_SIZE",
    },
    Family {
        program: "mpiexec",
        rank: "MVP_COMM_WORLD_RANK",
        size: "MVP_COMM_WORLD_SIZE",
        local_rank: "MVP_COMM_WORLD_LOCAL_RANK",
        local_size: "MVP_COMM_WORLD_LOCAL_SIZE",
    },
    Family {
        program: "jsrun",
        rank: "JSM_NAMESPACE_RANK",
        size: "JSM_NAMESPACE_SIZE",
        local_rank: "JSM_NAMESPACE_LOCAL_RANK",
        local_size: "JSM_NAMESPACE_LOCAL_SIZE",
    },
    Family {
        program: "flux run",
        rank: "FLUX_TASK_RANK",
        size: "FLUX_JOB_SIZE",
        local_rank: "FLUX_TASK_LOCAL_ID",
        local_size: FLUX_NODES,
    },
];

/// Returns whether a variable is set that only these launchers set. (srun may set `PMI_RANK`.)
pub(super) fn is_here(variables: &Variables) -> bool {
    FAMILIES.iter().any(|family| variables.is_set(family.rank))
        || variables.first_of(&["MPI_LOCALRANKID", "PALS_RANKID"]).is_some()
}

/// Returns the family whose variables are set, or the first.
fn family(variables: &Variables) -> Family {
    let known = FAMILIES.iter().find(|family| variables.is_set(family.rank));
    if known.is_some() || variables.first_of(&["PMI_RANK", "PALS_RANKID"]).is_none() {
        return *known.unwrap_or(&FAMILIES[0]);
    }
    let either = |names: &[&'static str]| variables.first_of(names).unwrap_or(names[0]);
    Family {
        program: "mpirun",
        rank: either(&["PMI_RANK", "PALS_RANKID"]),
        size: "PMI_SIZE",
        local_rank: either(&["MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"]),
        local_size: either(&["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"]),
    }
}

pub(super) fn read(variables: &Variables, options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    let Family { program, rank, size, local_rank, local_size } = family(variables);
    let launcher = Launcher { choice: "mpi", program };
    let [index, count, local_index, mut local_count] =
        variables.all(launcher, [rank, size, local_rank, local_size])?;
    if local_size == FLUX_NODES {
        let nodes = local_count;
        if nodes == 0 || count % nodes != 0 {
            return Err(Error::InvalidInput(format!(
                "{size}={count} processes on {FLUX_NODES}={nodes} nodes cannot be as many on each; start as many on each \
                 (flux run --tasks-per-node)"
            )));
        }
        local_count = count / nodes;
    }
    check_below(rank, index, size, count)?;
    check_below(local_rank, local_index, local_size, local_count)?;
    if local_count > count {
        return Err(Error::InvalidInput(format!(
            "{local_size}={local_count} is more than {size}={count}; check what sets them"
        )));
    }
    // No variable holds the number of machines; it is known only if all processes are on one.
    let nnodes = (local_count == count).then_some(1);
    check_flag("--nnodes", options.nnodes.as_ref(), program, nnodes.as_ref())?;
    let node_rank = nnodes.map(|_| 0);
    check_flag("--node-rank", options.node_rank.as_ref(), program, node_rank.as_ref())?;
    variables.check_rank(rank, index)?;

    let addr = || match nnodes {
        Some(_) => Ok("127.0.0.1".into()),
        None => Err(Error::InvalidInput(format!(
            "MASTER_ADDR is not set, and {program} has started processes on several machines ({local_count} of {count} on \
             this one); use --master-addr with the address of rank 0's machine, or set MASTER_ADDR on all (Open MPI: \
             mpirun -x MASTER_ADDR; MPICH, Intel: mpirun -genv MASTER_ADDR ...)"
        ))),
    };
    let processes = Processes { index, count, local_index, local_count };
    let id = variables.first_of(&["PMIX_NAMESPACE", "FLUX_JOB_ID", "PALS_APID"]);
    let id = id.and_then(|name| variables.text(name));
    // Two runs on one machine must not meet at one port.
    let port = || {
        Ok(id.as_ref().map_or(DEFAULT_PORT, |id| 15_000 + (xxh3_64(id.as_bytes()) % 10_000) as u16))
    };
    let master = if count > 1 { Some(master(variables, options, addr, port)?) } else { None };
    let variables_read = variables.as_text();
    let (nproc, ranks) = ranks_of_one(options.nproc, processes, gpus);
    Ok(Launch {
        nnodes,
        node_rank,
        master,
        // The id of the job, where the launcher sets one.
        run_id: id.unwrap_or("none".into()),
        ..Launch::new(LaunchKind::Mpi, processes, nproc, format!("{variables_read}; {ranks}"))
    })
}
