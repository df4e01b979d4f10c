//! The variable of the processes that this program starts (`--spawn=processes`, `--max-restarts`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Launch, LaunchKind, MasterEndpoint, Processes};
use crate::error::{Error, Result};
use crate::launch::Nproc;

/// The variable with a [`ParentStart`].
pub(in crate::launch) const PARENT_START: &str = "DDP_MP_SPAWNED";

/// A start of a process by its parent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::launch) struct ParentStart {
    /// The process's rank and the number of ranks; `None` for a process with all ranks as threads.
    pub rank: Option<[usize; 2]>,
    /// The port of the parent's store.
    pub port: u16,
    /// How many times the processes were restarted before.
    pub restart_count: usize,
    /// How many times they are restarted at most.
    pub max_restarts: usize,
    /// [`Launch::state_dir`].
    #[serde(default)]
    pub state_dir: Option<PathBuf>,
}

impl ParentStart {
    /// Reads the launch of a process that this program started: one rank, because the flags are for all ranks, or all ranks
    /// as threads.
    pub(super) fn read(text: &str, nproc: Nproc) -> Result<Launch> {
        let wrong = |why: String| {
            Error::usage(format!(
                "{PARENT_START}: {why}; ddp-mp sets it for the processes that it starts: unset it"
            ))
        };
        let Self { rank, port, restart_count, max_restarts, state_dir } =
            serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let (addr, from) = ("127.0.0.1".into(), PARENT_START);
        let parent = MasterEndpoint { addr, from, port, agent_store: true };
        let reason = "--max-restarts: a process that is started again".into();
        let launch = Launch {
            parent: Some(parent.clone()),
            restart_count,
            max_restarts,
            state_dir,
            ..Launch::local(nproc, reason)
        };
        let Some([index, count]) = rank else { return Ok(launch) };
        if index >= count {
            return Err(wrong(format!("rank {index} of {count}")));
        }
        Ok(Launch {
            kind: LaunchKind::Spawned,
            reason: "--spawn=processes: one rank in each process".into(),
            processes: Processes { index, count, local_index: index, local_count: count },
            // `--nproc-per-node=cpu` still places it on the CPU.
            nproc: if nproc == Nproc::Cpu { Nproc::Cpu } else { Nproc::Count(1) },
            cores: Some(1),
            master: (count > 1).then_some(parent),
            ..launch
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LaunchChoice, LaunchOptions, detect};
    use super::*;

    fn started(start: ParentStart, options: &LaunchOptions) -> Launch {
        let text = serde_json::to_string(&start).unwrap();
        let look_up = |name: &str| match name {
            PARENT_START => Some(text.clone()),
            "OMP_NUM_THREADS" => Some("2".into()),
            _ => None,
        };
        detect(&look_up, options, 4).unwrap()
    }

    #[test]
    fn spawned_process_reads_the_variable_set_for_it() {
        let rank = Some([1, 3]);
        let (port, state_dir) = (4000, Some("/dev/shm/run".into()));
        let start = ParentStart { rank, port, restart_count: 1, max_restarts: 4, state_dir };
        for nproc in [Nproc::Count(3), Nproc::Auto, Nproc::Gpu, Nproc::Cpu] {
            let launch = LaunchChoice::Local;
            let options =
                LaunchOptions { launch, nnodes: Some(1), nproc, ..LaunchOptions::default() };
            let launch = started(start.clone(), &options);
            assert_eq!(launch.kind, LaunchKind::Spawned);
            assert_eq!((launch.processes.index, launch.processes.count), (1, 3));
            assert_eq!((launch.processes.local_index, launch.processes.local_count), (1, 3));
            assert_eq!(launch.nproc, if nproc == Nproc::Cpu { nproc } else { Nproc::Count(1) });
            assert_eq!((launch.cores, launch.threads_per_rank), (Some(1), Some(2)));
            assert_eq!((launch.restart_count, launch.max_restarts), (1, 4));
            assert_eq!(launch.state_dir, Some("/dev/shm/run".into()));
            let master = launch.master.unwrap();
            assert!(master.agent_store && launch.parent == Some(master.clone()));
            assert_eq!(master.to_string(), "127.0.0.1:4000");
        }
    }

    #[test]
    fn spawned_threads_are_a_local_launch_with_a_parent() {
        let (rank, port, state_dir) = (None, 4000, None);
        let start = ParentStart { rank, port, restart_count: 2, max_restarts: 3, state_dir };
        let options = LaunchOptions { nproc: Nproc::Count(5), ..LaunchOptions::default() };
        let launch = started(start, &options);
        assert_eq!((launch.kind, launch.nproc), (LaunchKind::Local, Nproc::Count(5)));
        assert_eq!((launch.processes.count, &launch.master), (1, &None));
        assert_eq!((launch.restart_count, launch.max_restarts), (2, 3));
        assert_eq!(launch.parent.unwrap().to_string(), "127.0.0.1:4000");
    }
}
