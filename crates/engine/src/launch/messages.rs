//! The messages that the processes of a run exchange through their store: encoding, and validation of what is read.
//!
//! Any program that reaches the store can write to it, so every message is checked as untrusted input. No number is
//! used that does not fit the run, and no message ends a process.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::error::{Error, Result, escaped_line};
pub(super) use crate::ffi::store::{from_json, to_json, unreadable};
use crate::process_group::device_name;
use crate::runtime::Failure;

/// The most ranks of a run. Some memory is allocated for each rank, so a message must not ask for more.
pub(super) const MOST_RANKS: usize = 1 << 16;

/// Key under which each process publishes its description.
pub(super) const PROCESS: &str = "process";

/// The description of a process, for the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub version: String,
    pub host: String,
    pub pid: u32,
    /// A random number: two containers may have one host name and one process id.
    pub nonce: u64,
    pub backend: String,
    /// The number of its first rank among those of its machine.
    pub first_local: usize,
    /// The device of each of its ranks, such as `CPU:0`.
    pub ranks: Vec<String>,
    /// The unique id of each rank's GPU; empty for ranks on the CPU.
    pub gpus: Vec<String>,
    /// The host that NCCL takes this process to be on, if `NCCL_HOSTID` names one.
    #[serde(default)]
    pub nccl_host: Option<String>,
    /// Why the backend of this process does not let ranks share a GPU; `None` if it does.
    #[serde(default)]
    pub unshareable: Option<String>,
    /// Names and values that must be the same in all processes; opaque here. Empty once they have been compared.
    #[serde(default)]
    pub options: Vec<(String, String)>,
}

impl Process {
    /// Checks a process that was read from the store.
    ///
    /// # Errors
    /// [`Error::Input`] if its numbers cannot be those of a process.
    pub(super) fn check(&self) -> Result<()> {
        let (ranks, gpus) = (self.ranks.len(), self.gpus.len());
        if (1..=MOST_RANKS).contains(&ranks) && gpus <= ranks {
            return Ok(());
        }
        Err(unreadable(PROCESS, &format!("a process with {ranks} ranks and {gpus} GPUs")))
    }

    /// Returns the device, host and process id of this process's rank at this index, for the user.
    pub(super) fn label(&self, index: usize) -> String {
        let Process { host, pid, ranks, .. } = self;
        format!("{} on {host}, process {pid}", ranks[index])
    }
}

/// Checks that the processes can train together. Each is compared with the first, so that all find the same
/// difference.
///
/// # Errors
/// [`Error::Input`] with the first difference: its name, both values, and the two processes.
pub(super) fn check_same(processes: &[Process]) -> Result<()> {
    let Some((first, others)) = processes.split_first() else { return Ok(()) };
    let same = "start the same program with the same options everywhere";
    for (number, other) in (1..).zip(others) {
        let whose = |number: usize, process: &Process| {
            format!("process {number} (on {}, process {})", process.host, process.pid)
        };
        let (one, two) = (whose(0, first), whose(number, other));
        if (&first.version, &first.backend) != (&other.version, &other.backend) {
            return Err(Error::mismatch(format!(
                "{one} is ddp-mp {} with backend {}, {two} is {} with {}; {same}",
                first.version, first.backend, other.version, other.backend
            )));
        }
        let value = |process: &Process, name: &String| {
            let found = process.options.iter().find(|(other, _)| other == name);
            found.map_or("not set".into(), |(_, value)| value.clone())
        };
        let mut names = first.options.iter().chain(&other.options).map(|(name, _)| name);
        if let Some(name) = names.find(|name| value(first, name) != value(other, name)) {
            let (first_value, other_value) = (value(first, name), value(other, name));
            return Err(Error::mismatch(format!(
                "{name} is {first_value} for {one}, and {other_value} for {two}; {same}"
            )));
        }
    }
    Ok(())
}

/// Returns the number of the machine of process `mine`, for launchers that do not set it. Machines are numbered in
/// the order of their first processes. If several processes of one host each count their ranks from 0, each counts
/// as a machine.
pub(super) fn node_of(processes: &[Process], mine: usize) -> usize {
    let host = &processes[mine].host;
    let firsts = || processes.iter().enumerate().filter(|(_, process)| process.first_local == 0);
    let same_host = firsts().filter(|(index, process)| process.host == *host && *index <= mine);
    let first = same_host.map(|(index, _)| index).next_back().unwrap_or(mine);
    firsts().take_while(|(index, _)| *index < first).count()
}

/// Returns how many ranks `processes` have on the machine `host`.
pub(super) fn ranks_on(host: &str, processes: &[Process]) -> usize {
    let local = processes.iter().filter(|process| process.host == host);
    local.map(|process| process.ranks.len()).sum()
}

/// Returns the range of ranks of each process.
///
/// # Errors
/// [`Error::Input`] if there are more than [`MOST_RANKS`] in all.
pub(super) fn rank_ranges(processes: &[Process]) -> Result<Vec<Range<usize>>> {
    let mut next = 0;
    let mut take = |count: usize| {
        next += count;
        next - count..next
    };
    // Each process has been checked and its ranks are in memory, so the sum cannot overflow.
    let rank_ranges: Vec<_> = processes.iter().map(|process| take(process.ranks.len())).collect();
    if next <= MOST_RANKS {
        return Ok(rank_ranges);
    }
    let count = processes.len();
    Err(Error::usage(format!(
        "{count} processes have {next} ranks together, and {MOST_RANKS} are the most; start fewer"
    )))
}

/// Returns the first GPU that two ranks share, with the text for the user on both; `None` if no GPU is shared. With
/// `within_host`, only of ranks that NCCL takes to be on one host.
pub(super) fn shared_gpu(processes: &[Process], within_host: bool) -> Option<(&str, [String; 2])> {
    type Key<'a> = (&'a str, Option<&'a str>);
    let mut seen: HashMap<Key, (usize, &Process, usize)> = HashMap::new();
    let mut first = 0;
    for process in processes {
        for (index, gpu) in process.gpus.iter().enumerate() {
            let here = (first + index, process, index);
            let host = process.nccl_host.as_deref().filter(|_| within_host);
            if let Some(before) = seen.insert((gpu, host), here) {
                let name = |(rank, process, index): (usize, &Process, usize)| {
                    format!("rank {rank} ({})", process.label(index))
                };
                return Some((gpu, [name(before), name(here)]));
            }
        }
        first += process.ranks.len();
    }
    None
}

/// Renames the GPUs of each host where ranks share one: there is no GPU for each local rank then. They are counted in the
/// order of the ranks, whatever index each process sees.
pub(super) fn name_shared_gpus(processes: &mut [Process]) {
    let mut gpus_of: HashMap<String, (usize, Vec<String>)> = HashMap::new();
    for process in &*processes {
        let (ranks, gpus) = gpus_of.entry(process.host.clone()).or_default();
        for gpu in &process.gpus {
            *ranks += 1;
            if !gpus.contains(gpu) {
                gpus.push(gpu.clone());
            }
        }
    }
    for process in processes {
        let Some((ranks, gpus)) = gpus_of.get(&process.host) else { continue };
        for (label, gpu) in process.ranks.iter_mut().zip(&process.gpus) {
            if *ranks > gpus.len()
                && let Some(index) = gpus.iter().position(|other| other == gpu)
            {
                *label = device_name(Device::Cuda(index));
            }
        }
    }
}

/// Reads the failure that a process of a run with `world_size` ranks reports to the others.
///
/// # Errors
/// [`Error::Input`] if `bytes` are not a valid message.
pub(super) fn failure_from_bytes(key: &str, bytes: &[u8], world_size: usize) -> Result<Failure> {
    check_failure(key, from_json(key, bytes)?, world_size)
}

/// Checks a failure that was read from another process, and escapes its text.
///
/// # Errors
/// [`Error::Input`] if it names a rank that does not exist.
pub(super) fn check_failure(key: &str, mut failure: Failure, world_size: usize) -> Result<Failure> {
    // Users of the library print this text too.
    failure.error = escaped_line(&failure.error).into_owned();
    let Failure { rank, tied, error, .. } = &failure;
    if tied.iter().chain([rank]).all(|rank| *rank < world_size) {
        return Ok(failure);
    }
    Err(unreadable(key, &format!("rank {rank} of {world_size} has failed: {error}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;
    use strum::IntoEnumIterator;

    use super::*;
    use crate::ffi::store::Gathered;
    use crate::operation::{OpId, Operation};
    use crate::runtime::StopReason;

    const KEY: &str = "some/key";

    /// Reads `bytes` as each kind of message: none may panic, and every error names the key.
    fn read_all(bytes: &[u8], count: usize) {
        let refused = [
            from_json::<Process>(KEY, bytes).err(),
            from_json::<Gathered<Process>>(KEY, bytes).err(),
            failure_from_bytes(KEY, bytes, count).err(),
        ];
        for error in refused.into_iter().flatten() {
            assert!(error.to_string().contains(KEY), "{error}");
        }
        if let Ok(process) = from_json::<Process>(KEY, bytes)
            && process.check().is_ok()
        {
            let twice = [process.clone(), process];
            assert_eq!(rank_ranges(&twice).is_ok(), 2 * twice[0].ranks.len() <= MOST_RANKS);
            assert_eq!(shared_gpu(&twice, true).is_some(), !twice[0].gpus.is_empty());
        }
        if let Ok(failure) = failure_from_bytes(KEY, bytes, count) {
            assert!(failure.rank < count);
        }
    }

    /// The failure of a rank of a run with 9 ranks.
    fn failure() -> impl Strategy<Value = Failure> {
        let operations = prop::sample::select(Operation::iter().collect::<Vec<_>>());
        let tied = prop::collection::vec(0..9usize, 0..3);
        let stopped = prop::sample::select(vec![None, Some(StopReason::Terminate)]);
        (0..9usize, tied, operations, 0..1u64 << 56, ".*", stopped).prop_map(
            |(rank, tied, operation, sequence, error, stopped)| {
                let at = OpId { operation, sequence };
                Failure { tied, stopped, ..Failure::new(rank, at, error) }
            },
        )
    }

    fn process() -> impl Strategy<Value = Process> {
        let texts = (".*", ".*", ".*", prop::collection::vec(".*", 1..4));
        (texts, any::<u32>(), any::<usize>()).prop_map(|(texts, pid, first_local)| {
            let (version, host, backend, ranks) = texts;
            let gpus = ranks.clone();
            let (nccl_host, unshareable) = (Some(host.clone()), Some(host.clone()));
            let options = vec![(host.clone(), backend.clone())];
            Process {
                version,
                host,
                pid,
                nonce: first_local as u64,
                backend,
                first_local,
                ranks,
                gpus,
                nccl_host,
                unshareable,
                options,
            }
        })
    }

    /// Each kind of message as bytes, with the number of ranks of its run.
    fn written() -> impl Strategy<Value = (Vec<u8>, usize)> {
        let failure = failure().prop_map(|failure| (to_json(KEY, &failure).unwrap(), 9));
        let refused =
            ".*".prop_map(|why| (to_json(KEY, &Gathered::<Process>::Refused(why)).unwrap(), 1));
        let process = process().prop_map(|process| (to_json(KEY, &process).unwrap(), 1));
        prop_oneof![failure, refused, process]
    }

    proptest! {
        #[test]
        fn messages_from_random_bytes_never_panic(bytes: Vec<u8>, count in 0..9usize) {
            read_all(&bytes, count);
        }

        #[test]
        fn messages_from_changed_bytes_never_panic(
            (mut bytes, count) in written(),
            changes: Vec<(Index, u8)>,
            len: Index,
            cut: bool,
        ) {
            let whole = bytes.len();
            if whole > 0 {
                changes.iter().for_each(|(at, byte)| bytes[at.index(whole)] = *byte);
            }
            if cut {
                bytes.truncate(len.index(whole + 1));
            }
            read_all(&bytes, count);
        }

        #[test]
        fn messages_round_trip_and_errors_are_escaped(
            process in process(),
            failure in failure(),
        ) {
            let bytes = to_json(KEY, &process).unwrap();
            let read: Process = from_json(KEY, &bytes).unwrap();
            prop_assert!(read.check().is_ok());
            prop_assert_eq!(read, process);
            let bytes = to_json(KEY, &failure).unwrap();
            let read = failure_from_bytes(KEY, &bytes, 9).unwrap();
            prop_assert!(!read.error.contains(char::is_control));
            let error = escaped_line(&failure.error).into_owned();
            prop_assert_eq!(read, Failure { error, ..failure });
        }
    }

    fn crowd(count: usize) -> Process {
        Process {
            version: String::new(),
            host: "a".into(),
            pid: count as u32,
            nonce: 0,
            backend: String::new(),
            first_local: 0,
            ranks: (0..count).map(|rank| format!("GPU:{rank}")).collect(),
            gpus: Vec::new(),
            nccl_host: None,
            unshareable: None,
            options: Vec::new(),
        }
    }

    #[test]
    fn first_difference_between_processes_is_named() {
        let with = |options: &[(&str, &str)]| Process {
            options: options
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_string()))
                .collect(),
            ..crowd(1)
        };
        let first = with(&[("--lr", "0.1"), ("--seed", "0")]);
        assert!(check_same(&[first.clone(), first.clone()]).is_ok());
        for (other, reason) in [
            (
                with(&[("--lr", "1.0"), ("--seed", "1")]),
                "--lr is 0.1 for process 0 (on a, process 1), and 1.0 for process 2 (on a, process 1)",
            ),
            (
                with(&[("--lr", "0.1")]),
                "--seed is 0 for process 0 (on a, process 1), and not set for process 2",
            ),
            (
                with(&[("--lr", "0.1"), ("--seed", "0"), ("--eps", "1")]),
                "--eps is not set for process 0",
            ),
            (
                Process { version: "9".into(), ..first.clone() },
                "process 2 (on a, process 1) is 9 with",
            ),
        ] {
            let error = check_same(&[first.clone(), first.clone(), other]).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn ranks_that_share_a_gpu_are_found() {
        let with = |gpus: &[&str]| Process {
            gpus: gpus.iter().map(ToString::to_string).collect(),
            ..crowd(gpus.len())
        };
        assert_eq!(shared_gpu(&[with(&["x", "y"]), crowd(3), with(&["z"])], true), None);
        let mut ranks = [with(&["x", "y"]), crowd(3), with(&["z", "y", "x"])];
        let both = ["rank 1 (GPU:1 on a, process 2)", "rank 6 (GPU:1 on a, process 3)"];
        assert_eq!(shared_gpu(&ranks, true), Some(("y", both.map(String::from))));
        ranks[2].nccl_host = Some("b".into());
        assert_eq!(shared_gpu(&ranks, true), None);
        assert!(shared_gpu(&ranks, false).is_some());
        name_shared_gpus(&mut ranks);
        assert_eq!(
            [&ranks[0].ranks, &ranks[2].ranks],
            [&["GPU:0", "GPU:1"][..], &["GPU:2", "GPU:1", "GPU:0"]]
        );
        let mut apart = [with(&["x"]), Process { first_local: 1, ..with(&["y"]) }];
        name_shared_gpus(&mut apart);
        assert_eq!([&apart[0].ranks, &apart[1].ranks], [&["GPU:0"], &["GPU:0"]]); // as they were
    }

    #[test]
    fn numbers_beyond_the_run_are_refused() {
        let at = OpId { operation: Operation::Step, sequence: 1 };
        let bytes = to_json(KEY, &Failure::new(3, at, "why".into())).unwrap();
        let error = failure_from_bytes(KEY, &bytes, 3).unwrap_err().to_string();
        assert!(error.contains("rank 3 of 3 has failed: why"), "{error}");
        for count in [0, MOST_RANKS + 1] {
            let error = crowd(count).check().unwrap_err().to_string();
            assert!(error.contains(&format!("a process with {count} ranks")), "{error}");
        }
        let process = Process { gpus: vec!["x".into(); 3], ..crowd(2) };
        let error = process.check().unwrap_err().to_string();
        assert!(error.contains("a process with 2 ranks and 3 GPUs"), "{error}");
        let error = rank_ranges(&[crowd(MOST_RANKS), crowd(1)]).unwrap_err().to_string();
        assert!(error.contains("2 processes have 65537 ranks together"), "{error}");
        assert_eq!(rank_ranges(&[crowd(2), crowd(1)]).unwrap(), [0..2, 2..3]);
    }

    #[test]
    fn nodes_are_numbered_by_their_first_process() {
        let of = |host: &str, first_local| Process {
            version: String::new(),
            host: host.into(),
            pid: 0,
            nonce: 0,
            backend: String::new(),
            first_local,
            ranks: vec!["CPU:0".into()],
            gpus: Vec::new(),
            nccl_host: None,
            unshareable: None,
            options: Vec::new(),
        };
        let nodes =
            |all: &[Process]| (0..all.len()).map(|mine| node_of(all, mine)).collect::<Vec<_>>();
        let (a, b) = ("a", "b");
        assert_eq!(nodes(&[of(a, 0), of(a, 1), of(b, 0), of(b, 1)]), [0, 0, 1, 1]);
        // Slurm's `--distribution=cyclic`.
        let cyclic = [of(a, 0), of(b, 0), of(a, 1), of(b, 1)];
        assert_eq!(nodes(&cyclic), [0, 1, 0, 1]);
        assert_eq!([0, 2, 4].map(|count| ranks_on("a", &cyclic[..count])), [0, 1, 2]);
        // Two processes of one host that count as a machine each, and a process elsewhere.
        assert_eq!(nodes(&[of(a, 0), of(b, 0), of(a, 0)]), [0, 1, 2]);
        // No process counts from 0; no launcher does this.
        assert_eq!(nodes(&[of(a, 1), of(a, 2)]), [0, 0]);
    }
}
