//! The variables that torchrun sets for each of its workers, as do `torch.distributed.launch --use-env` and Ray
//! Train.

use super::variables::{Launcher, Variables, check_below};
use super::{
    Launch, LaunchKind, LaunchOptions, MasterEndpoint, Processes, check_addr, check_flag,
    check_master_addr, ranks_of_one,
};
use crate::error::{Error, Result};

const TORCHRUN: Launcher = Launcher { choice: "torchrun", program: "torchrun --no-python" };

/// Returns whether `LOCAL_RANK` is set, which Kubeflow does not set, with `RANK` or `WORLD_SIZE`.
pub(super) fn is_here(variables: &Variables) -> bool {
    variables.is_set("LOCAL_RANK") && (variables.is_set("RANK") || variables.is_set("WORLD_SIZE"))
}

/// Returns an error if only some of these variables are set and no launcher was detected. Otherwise every process
/// would train on its own.
pub(super) fn refuse_remains(variables: &Variables) -> Result<()> {
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    let (set, missing): (Vec<_>, Vec<_>) =
        names.into_iter().partition(|name| variables.is_set(name));
    if set.is_empty() { Ok(()) } else { Err(TORCHRUN.lacks(&missing, &set)) }
}

pub(super) fn read(variables: &Variables, options: &LaunchOptions, gpus: usize) -> Result<Launch> {
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    let [index, count, local_index, local_count] = variables.all(TORCHRUN, names)?;
    check_below("RANK", index, "WORLD_SIZE", count)?;
    check_below("LOCAL_RANK", local_index, "LOCAL_WORLD_SIZE", local_count)?;
    if local_count > count || local_index > index {
        return Err(Error::InvalidInput(format!(
            "RANK={index} of WORLD_SIZE={count} cannot be LOCAL_RANK={local_index} of \
             LOCAL_WORLD_SIZE={local_count}: a machine has no more processes than there are; check what sets them"
        )));
    }
    let nnodes = variables.count("GROUP_WORLD_SIZE")?;
    let node_rank = variables.integer("GROUP_RANK")?;
    if let (Some(node_rank), Some(nnodes)) = (node_rank, nnodes) {
        check_below("GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", nnodes)?;
    }
    check_flag("--nnodes", options.nnodes.as_ref(), "torchrun", nnodes.as_ref())?;
    check_flag("--node-rank", options.node_rank.as_ref(), "torchrun", node_rank.as_ref())?;
    let master = if count > 1 { Some(master(variables)?) } else { None };
    check_master_addr(options, "torchrun", master.as_ref())?;
    let port = master.as_ref().map(|master| &master.port);
    check_flag("--master-port", options.master_port.as_ref(), "torchrun", port)?;

    let processes = Processes { index, count, local_index, local_count };
    let variables_read = variables.as_text();
    let (nproc, ranks) = ranks_of_one(options.nproc, processes, gpus);
    Ok(Launch {
        nnodes,
        node_rank,
        master,
        run_id: variables.text("TORCHELASTIC_RUN_ID").unwrap_or("none".into()),
        has_agent: variables.is_set("TORCHELASTIC_RUN_ID"),
        restart_count: variables.integer_or_0("TORCHELASTIC_RESTART_COUNT")?,
        max_restarts: variables.integer_or_0("TORCHELASTIC_MAX_RESTARTS")?,
        error_file: variables.text("TORCHELASTIC_ERROR_FILE").map(Into::into),
        ..Launch::new(LaunchKind::Torchrun, processes, nproc, format!("{variables_read}; {ranks}"))
    })
}

pub(super) fn master(variables: &Variables) -> Result<MasterEndpoint> {
    let (Some(addr), Some(port)) = (variables.text("MASTER_ADDR"), variables.port("MASTER_PORT")?)
    else {
        let (set, missing): (Vec<_>, Vec<_>) = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
            .into_iter()
            .partition(|name| variables.is_set(name));
        return Err(TORCHRUN.lacks(&missing, &set));
    };
    let addr = check_addr("MASTER_ADDR", &addr)?;
    // Python writes `True`, and PyTorch compares with that.
    let agent_store = variables.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
    Ok(MasterEndpoint { addr, port, agent_store })
}
