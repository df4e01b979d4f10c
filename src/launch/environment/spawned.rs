//! What `--spawn=processes` sets for the processes that it starts: what torchrun does, and a mark.

use super::variables::{Variables, and};
use super::{Launch, LaunchKind, LaunchOptions, torchrun};
use crate::error::{Error, Result};
use crate::launch::Nproc;

/// Says that the others are this program's own.
const MARK: &str = "DDP_MP_SPAWNED";

pub(super) fn is_here(variables: &Variables) -> bool {
    variables.is_set(MARK)
}

/// One rank, whatever the flags say about all of them; but `--nproc-per-node=cpu` also says where.
pub(super) fn read(variables: &Variables, options: &LaunchOptions) -> Result<Launch> {
    let names =
        ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let missing: Vec<_> = names.into_iter().filter(|name| !variables.is_set(name)).collect();
    if !missing.is_empty() {
        return Err(lacks(&missing));
    }
    let nproc = if options.nproc == Nproc::Cpu { Nproc::Cpu } else { Nproc::Count(1) };
    let options = LaunchOptions { nproc, ..LaunchOptions::default() };
    let launch = torchrun::read(variables, &options, 0)?;
    Ok(Launch {
        kind: LaunchKind::Spawned,
        reason: "--spawn=processes: one rank in each process".into(),
        nnodes: Some(1),
        node_rank: Some(0),
        cores: Some(1),
        parent: Some(torchrun::master(variables)?),
        ..launch
    })
}

fn lacks(missing: &[&str]) -> Error {
    let is = if missing.len() == 1 { "is" } else { "are" };
    Error::Input(format!(
        "{} {is} not set, but {MARK} is: --spawn=processes sets all of them for the processes that it starts; unset it",
        and(missing)
    ))
}

/// The environment of rank `rank` of `count`, where it differs from that of who starts it; `None` unsets.
pub(in crate::launch) fn variables(
    [rank, count, threads]: [usize; 3],
    port: u16,
) -> Vec<(&'static str, Option<String>)> {
    let number = |number: usize| Some(number.to_string());
    let mut all = vec![
        (MARK, Some("1".into())),
        ("RANK", number(rank)),
        ("LOCAL_RANK", number(rank)),
        ("WORLD_SIZE", number(count)),
        ("LOCAL_WORLD_SIZE", number(count)),
        ("MASTER_ADDR", Some("127.0.0.1".into())),
        ("MASTER_PORT", number(port.into())),
        ("OMP_NUM_THREADS", number(threads)),
        ("TORCHELASTIC_USE_AGENT_STORE", Some("True".into())),
    ];
    // What an outer torchrun may have set that `--launch=local` ignores.
    let unset = [
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_ERROR_FILE",
    ];
    all.extend(unset.map(|name| (name, None)));
    all
}

#[cfg(test)]
mod tests {
    use super::super::{LaunchChoice, detect};
    use super::*;

    #[test]
    fn a_process_finds_out_what_was_set_for_it() {
        let all = variables([1, 3, 2], 4000);
        let look_up = |name: &str| all.iter().find(|(key, _)| *key == name)?.1.clone();
        for nproc in [Nproc::Count(3), Nproc::Auto, Nproc::Gpu, Nproc::Cpu] {
            let launch = LaunchChoice::Local;
            let options =
                LaunchOptions { launch, nnodes: Some(1), nproc, ..LaunchOptions::default() };
            let launch = detect(&look_up, &options, 4).unwrap();
            assert_eq!(launch.kind, LaunchKind::Spawned);
            assert_eq!((launch.processes.index, launch.processes.count), (1, 3));
            assert_eq!((launch.processes.local_index, launch.processes.local_count), (1, 3));
            assert_eq!(launch.nproc, if nproc == Nproc::Cpu { nproc } else { Nproc::Count(1) });
            assert_eq!((launch.cores, launch.threads_per_rank), (Some(1), Some(2)));
            let master = launch.master.unwrap();
            assert!(master.agent_store && launch.parent == Some(master.clone()));
            assert_eq!(master.to_string(), "127.0.0.1:4000");
        }
    }
}
