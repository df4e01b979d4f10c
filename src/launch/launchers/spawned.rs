//! The variables of the processes that this program starts (`--spawn=processes`, `--max-restarts`): torchrun's variables,
//! and a mark.

use super::table::TORCHRUN;
use super::variables::{Variables, and};
use super::{Launch, LaunchKind, LaunchOptions, local};
use crate::error::{Error, Result};
use crate::launch::Nproc;

/// Marks the other variables as set by this program.
const MARK: &str = "DDP_MP_SPAWNED";

/// The mark's value for a process with all ranks as threads, which `--max-restarts` restarts.
const THREADS: &str = "threads";

pub(super) fn is_here(variables: &Variables) -> bool {
    variables.is_set(MARK)
}

/// Reads the launch of a process that this program started: one rank, because the flags are for all ranks.
/// `--nproc-per-node=cpu` still places it on the CPU. If the mark is [`THREADS`], the process has all ranks and the
/// flags count.
pub(super) fn read(variables: &Variables, options: &LaunchOptions) -> Result<Launch> {
    let names =
        ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let threads = variables.text(MARK).as_deref() == Some(THREADS);
    let names = if threads { &names[4..] } else { &names };
    let missing: Vec<_> = names.iter().copied().filter(|name| !variables.is_set(name)).collect();
    if !missing.is_empty() {
        return Err(lacks(&missing));
    }
    if threads {
        return Ok(Launch {
            parent: Some(TORCHRUN.master(variables)?),
            restart_count: variables.integer_or_0("TORCHELASTIC_RESTART_COUNT")?,
            max_restarts: variables.integer_or_0("TORCHELASTIC_MAX_RESTARTS")?,
            ..local::read(options, "--max-restarts: a process that is started again")?
        });
    }
    let nproc = if options.nproc == Nproc::Cpu { Nproc::Cpu } else { Nproc::Count(1) };
    let options = LaunchOptions { nproc, ..LaunchOptions::default() };
    let launch = TORCHRUN.read(variables, &options, 0)?;
    Ok(Launch {
        kind: LaunchKind::Spawned,
        reason: "--spawn=processes: one rank in each process".into(),
        nnodes: Some(1),
        node_rank: Some(0),
        cores: Some(1),
        parent: Some(TORCHRUN.master(variables)?),
        ..launch
    })
}

fn lacks(missing: &[&str]) -> Error {
    let is = if missing.len() == 1 { "is" } else { "are" };
    Error::usage(format!(
        "{} {is} not set, but {MARK} is: ddp-mp sets all of them for the processes that it starts; unset it",
        and(missing)
    ))
}

/// Variables to set; those with `None` are to be unset.
type Environment = Vec<(&'static str, Option<String>)>;

/// A start of the processes by their parent.
#[derive(Debug, Clone, Copy)]
pub(in crate::launch) struct ParentStart {
    /// The port of the parent's store.
    pub port: u16,
    /// How many times the processes were restarted before.
    pub restart_count: usize,
    /// How many times they are restarted at most.
    pub max_restarts: usize,
}

/// Returns the changes to this process's environment for rank `rank` of `count`, with `threads` threads.
pub(in crate::launch) fn variables(
    rank: usize,
    count: usize,
    threads: usize,
    start: ParentStart,
) -> Environment {
    let number = |number: usize| Some(number.to_string());
    let mut all = common("1", start);
    all.extend([
        ("RANK", number(rank)),
        ("LOCAL_RANK", number(rank)),
        ("WORLD_SIZE", number(count)),
        ("LOCAL_WORLD_SIZE", number(count)),
        ("OMP_NUM_THREADS", number(threads)),
        ("TORCHELASTIC_USE_AGENT_STORE", Some("True".into())),
    ]);
    all
}

/// Returns the same as [`variables`] for one process with all ranks as threads.
pub(in crate::launch) fn variables_of_threads(start: ParentStart) -> Environment {
    common(THREADS, start)
}

fn common(mark: &str, start: ParentStart) -> Environment {
    let mut all = vec![
        (MARK, Some(mark.into())),
        ("MASTER_ADDR", Some("127.0.0.1".into())),
        ("MASTER_PORT", Some(start.port.to_string())),
        ("TORCHELASTIC_RESTART_COUNT", Some(start.restart_count.to_string())),
        ("TORCHELASTIC_MAX_RESTARTS", Some(start.max_restarts.to_string())),
    ];
    // An outer torchrun may have set these, and `--launch=local` ignores them.
    let unset =
        ["GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"];
    all.extend(unset.map(|name| (name, None)));
    all
}

#[cfg(test)]
mod tests {
    use super::super::{LaunchChoice, detect};
    use super::*;

    #[test]
    fn spawned_process_reads_the_variables_set_for_it() {
        let start = ParentStart { port: 4000, restart_count: 1, max_restarts: 4 };
        let all = variables(1, 3, 2, start);
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
            assert_eq!((launch.restart_count, launch.max_restarts), (1, 4));
            let master = launch.master.unwrap();
            assert!(master.agent_store && launch.parent == Some(master.clone()));
            assert_eq!(master.to_string(), "127.0.0.1:4000");
        }
    }
    #[test]
    fn spawned_threads_are_a_local_launch_with_a_parent() {
        let start = ParentStart { port: 4000, restart_count: 2, max_restarts: 3 };
        let all = variables_of_threads(start);
        let look_up = |name: &str| all.iter().find(|(key, _)| *key == name)?.1.clone();
        let options = LaunchOptions { nproc: Nproc::Count(5), ..LaunchOptions::default() };
        let launch = detect(&look_up, &options, 0).unwrap();
        assert_eq!((launch.kind, launch.nproc), (LaunchKind::Local, Nproc::Count(5)));
        assert_eq!((launch.processes.count, &launch.master), (1, &None));
        assert_eq!((launch.restart_count, launch.max_restarts), (2, 3));
        assert_eq!(launch.parent.unwrap().to_string(), "127.0.0.1:4000");
    }
}
