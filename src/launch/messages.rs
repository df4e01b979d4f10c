//! The messages that the processes of a run exchange through their store: encoding, and validation of what is read.
//!
//! Any program that reaches the store can write to it, so every message is checked as untrusted input. No number is
//! used that does not fit the run, and no message ends a process.

use std::collections::HashMap;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, escaped_line};
use crate::operation::OpId;
use crate::runtime::ReportedFailure;

/// The most ranks of a run. Some memory is allocated for each rank, so a message must not ask for more.
pub(super) const MOST_RANKS: usize = 1 << 16;

/// The description of a process, for the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub version: String,
    pub host: String,
    pub pid: u32,
    pub backend: String,
    /// The number of its first rank among those of its machine.
    pub first_local: usize,
    /// The device of each of its ranks, such as `CPU:0`.
    pub ranks: Vec<String>,
    /// The unique id of each rank's GPU; empty for ranks on the CPU.
    pub gpus: Vec<String>,
    /// Names and values that must be the same in all processes; opaque here.
    #[serde(default)]
    pub options: Vec<(String, String)>,
}

impl Process {
    pub(super) fn to_bytes(&self, key: &str) -> Result<Vec<u8>> {
        to_json(key, self)
    }

    /// # Errors
    /// [`Error::InvalidInput`] if `bytes` are not a valid message.
    pub(super) fn from_bytes(key: &str, bytes: &[u8]) -> Result<Self> {
        let process: Self = from_json(key, bytes)?;
        match (process.ranks.len(), process.gpus.len()) {
            (count @ 1..=MOST_RANKS, gpus) if gpus <= count => Ok(process),
            (count, gpus) => {
                Err(unreadable(key, &format!("a process with {count} ranks and {gpus} GPUs")))
            }
        }
    }

    /// Returns the device, host and process id of this process's rank number `place`, for the user.
    pub(super) fn label(&self, place: usize) -> String {
        let Process { host, pid, ranks, .. } = self;
        format!("{} on {host}, process {pid}", ranks[place])
    }
}

/// Checks that the processes can train together. Each is compared with the first, so that all find the same
/// difference.
///
/// # Errors
/// [`Error::InvalidInput`] with the first difference: its name, both values, and the two processes.
pub(super) fn check_same(processes: &[Process]) -> Result<()> {
    let Some((first, others)) = processes.split_first() else { return Ok(()) };
    let same = "start the same program with the same options everywhere";
    for (number, other) in (1..).zip(others) {
        let whose = |number: usize, process: &Process| {
            format!("process {number} (on {}, process {})", process.host, process.pid)
        };
        let (one, two) = (whose(0, first), whose(number, other));
        if (&first.version, &first.backend) != (&other.version, &other.backend) {
            return Err(Error::InvalidInput(format!(
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
            return Err(Error::InvalidInput(format!(
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

/// Returns how many ranks of the machine of process `mine` come before its own, and how many there are on it.
pub(super) fn ranks_of_machine(processes: &[Process], mine: usize) -> [usize; 2] {
    [&processes[..mine], processes].map(|some| {
        let local = some.iter().filter(|process| process.host == processes[mine].host);
        local.map(|process| process.ranks.len()).sum()
    })
}

/// Returns the range of ranks of each process.
///
/// # Errors
/// [`Error::InvalidInput`] if there are more than [`MOST_RANKS`] in all.
pub(super) fn places(processes: &[Process]) -> Result<Vec<Range<usize>>> {
    let mut next = 0;
    let mut take = |count: usize| {
        next += count;
        next - count..next
    };
    // Each process has been checked and its ranks are in memory, so the sum cannot overflow.
    let places: Vec<_> = processes.iter().map(|process| take(process.ranks.len())).collect();
    if next <= MOST_RANKS {
        return Ok(places);
    }
    let count = processes.len();
    Err(Error::InvalidInput(format!(
        "{count} processes have {next} ranks together, and {MOST_RANKS} are the most; start fewer"
    )))
}

/// Returns the first GPU that two ranks share, with the text for the user on both; `None` if no GPU is shared.
pub(super) fn shared_gpu(processes: &[Process]) -> Option<(&str, [String; 2])> {
    let mut seen: HashMap<&str, (usize, &Process, usize)> = HashMap::new();
    let mut first = 0;
    for process in processes {
        for (place, gpu) in process.gpus.iter().enumerate() {
            let here = (first + place, process, place);
            if let Some(before) = seen.insert(gpu, here) {
                let name = |(rank, process, place): (usize, &Process, usize)| {
                    format!("rank {rank} ({})", process.label(place))
                };
                return Some((gpu, [name(before), name(here)]));
            }
        }
        first += process.ranks.len();
    }
    None
}

/// The processes that are missing and those that have arrived, as text for the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MissingPeers {
    pub missing: String,
    pub there: String,
}

impl MissingPeers {
    pub(super) fn to_bytes(&self, key: &str) -> Result<Vec<u8>> {
        to_json(key, self)
    }

    /// # Errors
    /// [`Error::InvalidInput`] if `bytes` are not a valid message.
    pub(super) fn from_bytes(key: &str, bytes: &[u8]) -> Result<Self> {
        let Self { missing, there } = from_json(key, bytes)?;
        let [missing, there] = [missing, there].map(|text| escaped_line(&text).into_owned());
        Ok(Self { missing, there })
    }
}

/// The report of a failing rank, for the other processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FailureReport {
    pub rank: usize,
    /// See [`ReportedFailure::tied`].
    #[serde(default)]
    pub tied: Vec<usize>,
    pub operation: String,
    pub sequence: u64,
    pub error: String,
    /// The number of [`ReportedFailure::stopped`].
    #[serde(default)]
    pub stopped: Option<usize>,
}

impl FailureReport {
    pub(super) fn new(rank: usize, at: OpId, error: &str) -> Self {
        let OpId { operation, sequence } = at;
        let (operation, tied) = (operation.to_string(), Vec::new());
        Self { rank, tied, operation, sequence, error: error.into(), stopped: None }
    }

    pub(super) fn of(failure: &ReportedFailure) -> Self {
        let ReportedFailure { rank, tied, at, error, stopped, .. } = failure;
        let stopped = stopped.map(|reason| reason as usize);
        Self { tied: tied.clone(), stopped, ..Self::new(*rank, *at, error) }
    }

    /// Returns what the rank was doing.
    pub(super) fn at(&self) -> OpId {
        OpId::named(&self.operation, self.sequence)
    }

    pub(super) fn to_bytes(&self, key: &str) -> Result<Vec<u8>> {
        to_json(key, self)
    }

    /// Reads a report of a run with `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if `bytes` are not a valid message.
    pub(super) fn from_bytes(key: &str, bytes: &[u8], world_size: usize) -> Result<Self> {
        let report: Self = from_json(key, bytes)?;
        // Users of the library print this text too.
        let error = escaped_line(&report.error).into_owned();
        let rank = report.rank;
        if report.tied.iter().chain([&rank]).all(|&rank| rank < world_size) {
            return Ok(Self { error, ..report });
        }
        Err(unreadable(key, &format!("rank {rank} of {world_size} has failed: {error}")))
    }
}

pub(super) fn unreadable(key: &str, why: &str) -> Error {
    Error::InvalidInput(format!(
        "store key {key:?} holds an invalid message: {why}; another program may use the same store: give each run a \
         store of its own"
    ))
}

pub(super) fn to_json(key: &str, message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message)
        .map_err(|error| Error::Internal(format!("store key {key:?}: {error}")))
}

pub(super) fn from_json<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| unreadable(key, &error.to_string()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;
    use strum::IntoEnumIterator;

    use super::*;
    use crate::operation::Operation;

    const KEY: &str = "some/key";

    /// Reads `bytes` as each kind of message: none may panic, and every error names the key.
    fn read_all(bytes: &[u8], count: usize) {
        let refused = [
            Process::from_bytes(KEY, bytes).err(),
            MissingPeers::from_bytes(KEY, bytes).err(),
            FailureReport::from_bytes(KEY, bytes, count).err(),
        ];
        for error in refused.into_iter().flatten() {
            assert!(error.to_string().contains(KEY), "{error}");
        }
        if let Ok(process) = Process::from_bytes(KEY, bytes) {
            let twice = [process.clone(), process];
            assert_eq!(places(&twice).is_ok(), 2 * twice[0].ranks.len() <= MOST_RANKS);
            assert_eq!(shared_gpu(&twice).is_some(), !twice[0].gpus.is_empty());
        }
        if let Ok(report) = FailureReport::from_bytes(KEY, bytes, count) {
            assert!(report.rank < count);
            report.at().packed();
        }
    }

    fn at() -> impl Strategy<Value = OpId> {
        let operations = Operation::iter().collect::<Vec<_>>();
        (prop::sample::select(operations), 0..1u64 << 56)
            .prop_map(|(operation, sequence)| OpId { operation, sequence })
    }

    fn process() -> impl Strategy<Value = Process> {
        let texts = (".*", ".*", ".*", prop::collection::vec(".*", 1..4));
        (texts, any::<u32>(), any::<usize>()).prop_map(|(texts, pid, first_local)| {
            let (version, host, backend, ranks) = texts;
            let gpus = ranks.clone();
            let options = vec![(host.clone(), backend.clone())];
            Process { version, host, pid, backend, first_local, ranks, gpus, options }
        })
    }

    /// Each kind of message as bytes, with the number of ranks of its run.
    fn written() -> impl Strategy<Value = (Vec<u8>, usize)> {
        let report = (0..9usize, at(), ".*").prop_map(|(rank, at, error)| {
            (FailureReport::new(rank, at, &error).to_bytes(KEY).unwrap(), 9)
        });
        let absence = (".*", ".*").prop_map(|(missing, there)| {
            (MissingPeers { missing, there }.to_bytes(KEY).unwrap(), 1)
        });
        let process = process().prop_map(|process| (process.to_bytes(KEY).unwrap(), 1));
        prop_oneof![report, absence, process]
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
                changes.iter().for_each(|(place, byte)| bytes[place.index(whole)] = *byte);
            }
            if cut {
                bytes.truncate(len.index(whole + 1));
            }
            read_all(&bytes, count);
        }

        #[test]
        fn messages_round_trip_and_errors_are_escaped(
            process in process(),
            report in (0..9usize, at(), ".*"),
        ) {
            let bytes = process.to_bytes(KEY).unwrap();
            prop_assert_eq!(Process::from_bytes(KEY, &bytes).unwrap(), process);
            let (rank, at, error) = report;
            let report = FailureReport::new(rank, at, &error);
            let read = FailureReport::from_bytes(KEY, &report.to_bytes(KEY).unwrap(), 9).unwrap();
            prop_assert_eq!(read.at(), at);
            prop_assert!(!read.error.contains(char::is_control));
            prop_assert_eq!(read, FailureReport { error: escaped_line(&error).into_owned(), ..report });
        }
    }

    fn crowd(count: usize) -> Process {
        Process {
            version: String::new(),
            host: "a".into(),
            pid: count as u32,
            backend: String::new(),
            first_local: 0,
            ranks: (0..count).map(|rank| format!("GPU:{rank}")).collect(),
            gpus: Vec::new(),
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
        assert_eq!(shared_gpu(&[with(&["x", "y"]), crowd(3), with(&["z"])]), None);
        let ranks = [with(&["x", "y"]), crowd(3), with(&["z", "y", "x"])];
        let both = ["rank 1 (GPU:1 on a, process 2)", "rank 6 (GPU:1 on a, process 3)"];
        assert_eq!(shared_gpu(&ranks), Some(("y", both.map(String::from))));
    }

    #[test]
    fn numbers_beyond_the_run_are_refused() {
        let report = FailureReport::new(3, OpId { operation: Operation::Step, sequence: 1 }, "why");
        let error = FailureReport::from_bytes(KEY, &report.to_bytes(KEY).unwrap(), 3)
            .unwrap_err()
            .to_string();
        assert!(error.contains("rank 3 of 3 has failed: why"), "{error}");
        for count in [0, MOST_RANKS + 1] {
            let bytes = crowd(count).to_bytes(KEY).unwrap();
            let error = Process::from_bytes(KEY, &bytes).unwrap_err().to_string();
            assert!(error.contains(&format!("a process with {count} ranks")), "{error}");
        }
        let bytes = Process { gpus: vec!["x".into(); 3], ..crowd(2) }.to_bytes(KEY).unwrap();
        let error = Process::from_bytes(KEY, &bytes).unwrap_err().to_string();
        assert!(error.contains("a process with 2 ranks and 3 GPUs"), "{error}");
        let error = places(&[crowd(MOST_RANKS), crowd(1)]).unwrap_err().to_string();
        assert!(error.contains("2 processes have 65537 ranks together"), "{error}");
        assert_eq!(places(&[crowd(2), crowd(1)]).unwrap(), [0..2, 2..3]);
    }

    #[test]
    fn nodes_are_numbered_by_their_first_process() {
        let of = |host: &str, first_local| Process {
            version: String::new(),
            host: host.into(),
            pid: 0,
            backend: String::new(),
            first_local,
            ranks: vec!["CPU:0".into()],
            gpus: Vec::new(),
            options: Vec::new(),
        };
        let nodes =
            |all: &[Process]| (0..all.len()).map(|mine| node_of(all, mine)).collect::<Vec<_>>();
        let (a, b) = ("a", "b");
        assert_eq!(nodes(&[of(a, 0), of(a, 1), of(b, 0), of(b, 1)]), [0, 0, 1, 1]);
        // Slurm's `--distribution=cyclic`.
        let cyclic = [of(a, 0), of(b, 0), of(a, 1), of(b, 1)];
        assert_eq!(nodes(&cyclic), [0, 1, 0, 1]);
        assert_eq!([0, 2].map(|mine| ranks_of_machine(&cyclic, mine)), [[0, 2], [1, 2]]);
        // Two processes of one host that count as a machine each, and a process elsewhere.
        assert_eq!(nodes(&[of(a, 0), of(b, 0), of(a, 0)]), [0, 1, 2]);
        // No process counts from 0; no launcher does this.
        assert_eq!(nodes(&[of(a, 1), of(a, 2)]), [0, 0]);
    }
}
