//! No launcher: one process, or one started by hand on each of several machines.

use super::{
    DEFAULT_PORT, Launch, LaunchKind, LaunchOptions, MasterEndpoint, Processes, check_addr,
};
use crate::error::{Error, Result};

/// Reads the launch from the flags alone. `why` is the reason that no launcher's variables are used.
pub(super) fn read(options: &LaunchOptions, why: &str) -> Result<Launch> {
    let LaunchOptions { nnodes, node_rank, master_addr, master_port, .. } = options;
    let flags = [
        ("--node-rank", node_rank.is_some()),
        ("--master-addr", master_addr.is_some()),
        ("--master-port", master_port.is_some()),
    ];
    if let (None, Some((flag, _))) = (nnodes, flags.iter().find(|(_, given)| *given)) {
        return Err(Error::usage(format!("{flag} needs --nnodes, the number of machines: {why}")));
    }
    let nnodes = nnodes.unwrap_or(1);
    let missing = |flag: &str, what: &str| {
        Error::usage(format!("--nnodes={nnodes} needs {flag}, {what}: {why}"))
    };
    let index = match node_rank {
        Some(node_rank) => *node_rank,
        None if nnodes == 1 => 0,
        None => return Err(missing("--node-rank", "this machine's number, from 0")),
    };
    if index >= nnodes {
        return Err(Error::usage(format!(
            "--node-rank={index} must be below --nnodes={nnodes}, because machines count from 0"
        )));
    }
    let processes = Processes { index, count: nnodes, local_index: 0, local_count: 1 };
    if nnodes == 1 {
        return Ok(Launch {
            nnodes: Some(1),
            node_rank: Some(0),
            ..Launch::new(LaunchKind::Local, processes, options.nproc, why.into())
        });
    }
    let Some(addr) = master_addr else {
        return Err(missing("--master-addr", "the name or address of machine 0"));
    };
    let addr = check_addr("--master-addr", addr)?;
    let reason = format!(
        "--nnodes={nnodes} --node-rank={index}, and {why}; ranks are threads of one process a machine"
    );
    let port = master_port.unwrap_or(DEFAULT_PORT);
    Ok(Launch {
        nnodes: Some(nnodes),
        node_rank: Some(index),
        master: Some(MasterEndpoint { addr, port, agent_store: false }),
        ..Launch::new(LaunchKind::ByHand, processes, options.nproc, reason)
    })
}
