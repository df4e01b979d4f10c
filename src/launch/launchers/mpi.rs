//! The variables that mpirun sets: Open MPI, MPICH and Intel MPI (Hydra), Cray PALS.

use super::variables::{Launcher, Variables, check_below};
use super::{
    DEFAULT_PORT, Launch, LaunchKind, LaunchOptions, Processes, check_flag, master, ranks_of_one,
};
use crate::error::{Error, Result};

const MPIRUN: Launcher = Launcher { choice: "mpi", program: "mpirun" };

/// Returns whether a variable is set that only mpirun sets. (srun may set `PMI_RANK`.)
pub(super) fn is_here(variables: &Variables) -> bool {
    let own = ["OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "PALS_RANKID"];
    variables.first_of(&own).is_some()
}

pub(super) fn read(variables: &Variables, options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    let either = |names: &[&'static str]| variables.first_of(names).unwrap_or(names[0]);
    let open_mpi = variables.is_set("OMPI_COMM_WORLD_RANK")
        || !(is_here(variables) || variables.is_set("PMI_RANK"));
    let names = if open_mpi {
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ]
    } else {
        [
            either(&["PMI_RANK", "PALS_RANKID"]),
            "PMI_SIZE",
            either(&["MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"]),
            either(&["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"]),
        ]
    };
    let [index, count, local_index, local_count] = variables.all(MPIRUN, names)?;
    check_below(names[0], index, names[1], count)?;
    check_below(names[2], local_index, names[3], local_count)?;
    if local_count > count {
        return Err(Error::InvalidInput(format!(
            "{}={local_count} is more than {}={count}; check what sets them",
            names[3], names[1]
        )));
    }
    // No variable holds the number of machines; it is known only if all processes are on one.
    let nnodes = (local_count == count).then_some(1);
    check_flag("--nnodes", options.nnodes.as_ref(), "mpirun", nnodes.as_ref())?;
    let node_rank = nnodes.map(|_| 0);
    check_flag("--node-rank", options.node_rank.as_ref(), "mpirun", node_rank.as_ref())?;
    variables.check_rank(names[0], index)?;

    let addr = || match nnodes {
        Some(_) => Ok("127.0.0.1".into()),
        None => Err(Error::InvalidInput(format!(
            "MASTER_ADDR is not set, and mpirun has started processes on several machines ({}={local_count} of \
             {}={count}); use --master-addr with the address of rank 0's machine, or set MASTER_ADDR on all (Open MPI: \
             mpirun -x MASTER_ADDR; MPICH, Intel: mpirun -genv MASTER_ADDR ...)",
            names[3], names[1]
        ))),
    };
    let processes = Processes { index, count, local_index, local_count };
    let master =
        if count > 1 { Some(master(variables, options, addr, || Ok(DEFAULT_PORT))?) } else { None };
    let variables_read = variables.as_text();
    let (nproc, ranks) = ranks_of_one(options.nproc, processes, gpus);
    Ok(Launch {
        nnodes,
        node_rank,
        master,
        // Open MPI's id of the job.
        run_id: variables.text("PMIX_NAMESPACE").unwrap_or("none".into()),
        ..Launch::new(LaunchKind::Mpi, processes, nproc, format!("{variables_read}; {ranks}"))
    })
}
