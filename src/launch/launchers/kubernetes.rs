//! The variables that Kubeflow sets in each pod of a `PyTorchJob` or a `TrainJob`: one process has the whole pod.
//!
//! `WORLD_SIZE` is the number of pods with the older operator, and pods times `nprocPerNode` with the newer one.
//! The newer one also sets `PET_NNODES`, so that is read first. (`PET_` variables are flags of torchrun.)

use super::variables::{Launcher, Variables, check_below};
use super::{
    DEFAULT_PORT, Launch, LaunchKind, LaunchOptions, MasterEndpoint, Processes, check_addr,
    check_flag, check_master_addr,
};
use crate::error::{Error, Result};
use crate::launch::Nproc;

const KUBEFLOW: Launcher = Launcher { choice: "kubernetes", program: "a PyTorchJob or TrainJob" };

pub(super) fn is_here(variables: &Variables) -> bool {
    let set = |name| variables.is_set(name);
    let has_rank = ["RANK", "WORLD_SIZE", "MASTER_ADDR"].into_iter().all(set);
    (has_rank && !set("LOCAL_RANK")) || set("PET_NNODES") || set("PET_NODE_RANK")
}

pub(super) fn read(variables: &Variables, options: &LaunchOptions) -> Result<Launch> {
    let (nodes, nnodes) = nnodes(variables)?;
    let (name, node) = node_rank(variables, nnodes)?;
    check_below(name, node, nodes, nnodes)?;
    check_flag("--nnodes", options.nnodes.as_ref(), "Kubeflow", Some(&nnodes))?;
    check_flag("--node-rank", options.node_rank.as_ref(), "Kubeflow", Some(&node))?;
    let master = if nnodes > 1 { Some(master(variables)?) } else { None };
    check_master_addr(options, "Kubeflow", master.as_ref())?;
    let port = master.as_ref().map(|master| &master.port);
    check_flag("--master-port", options.master_port.as_ref(), "Kubeflow", port)?;
    let nproc = match (options.nproc, variables.text("PET_NPROC_PER_NODE")) {
        (Nproc::Auto, Some(text)) => text
            .parse()
            .map_err(|error: Error| Error::InvalidInput(format!("PET_NPROC_PER_NODE: {error}")))?,
        (given, _) => given,
    };
    let processes = Processes { index: node, count: nnodes, local_index: 0, local_count: 1 };
    let reason = format!("{}; one process a pod: its ranks are threads", variables.as_text());
    Ok(Launch {
        nnodes: Some(nnodes),
        node_rank: Some(node),
        master,
        run_id: variables.text("PET_RDZV_ID").unwrap_or("none".into()),
        ..Launch::new(LaunchKind::Kubernetes, processes, nproc, reason)
    })
}

/// Returns the number of pods, and the variable that holds it.
fn nnodes(variables: &Variables) -> Result<(&'static str, usize)> {
    let name = "PET_NNODES";
    let Some(text) = variables.text(name) else {
        if variables.is_set("PET_NODE_RANK") && !variables.is_set("WORLD_SIZE") {
            return Err(KUBEFLOW.lacks(&[name], &["PET_NODE_RANK"]));
        }
        let [_, pods] = variables.all(KUBEFLOW, ["RANK", "WORLD_SIZE"])?;
        return Ok(("WORLD_SIZE", pods));
    };
    let Some((least, most)) = text.split_once(':') else {
        return Ok((name, variables.count(name)?.unwrap_or(1)));
    };
    match (least.parse::<u32>(), most.parse::<u32>()) {
        (Ok(least), Ok(most)) if least == most => Ok((name, least as usize)),
        _ => Err(Error::InvalidInput(format!(
            "{name}={text:?}: a number of pods that changes needs torchrun; start torchrun --no-python ddp-mp in \
             each pod"
        ))),
    }
}

/// Returns this pod's number, and the variable that holds it.
fn node_rank(variables: &Variables, nnodes: usize) -> Result<(&'static str, usize)> {
    match (variables.integer("PET_NODE_RANK")?, variables.integer("RANK")?) {
        (Some(node), Some(rank)) if node != rank => Err(Error::InvalidInput(format!(
            "RANK={rank} contradicts PET_NODE_RANK={node}; check what sets them"
        ))),
        (Some(node), _) => Ok(("PET_NODE_RANK", node)),
        (None, Some(rank)) => Ok(("RANK", rank)),
        (None, None) if nnodes == 1 => Ok(("PET_NODE_RANK", 0)),
        (None, None) => Err(KUBEFLOW.lacks(&["PET_NODE_RANK"], &["PET_NNODES"])),
    }
}

fn master(variables: &Variables) -> Result<MasterEndpoint> {
    let either = |names: &[&'static str]| variables.first_of(names).unwrap_or(names[0]);
    let name = either(&["PET_MASTER_ADDR", "MASTER_ADDR"]);
    let Some(addr) = variables.text(name) else {
        let set = variables.first_of(&["PET_NNODES", "WORLD_SIZE"]);
        return Err(KUBEFLOW.lacks(&["MASTER_ADDR"], set.as_slice()));
    };
    let addr = check_addr(name, &addr)?;
    let port = variables.port(either(&["PET_MASTER_PORT", "MASTER_PORT"]))?;
    Ok(MasterEndpoint { addr, port: port.unwrap_or(DEFAULT_PORT), agent_store: false })
}
