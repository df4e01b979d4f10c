//! The rendezvous of the processes of a run in their store. Each publishes what it is, reads what the others are, and
//! checks that they fit each other.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::messages::{MissingPeers, Process, check_same, from_json, places, shared_gpu, to_json};
use super::{Launch, LaunchKind};
use crate::error::{Error, Result, escaped_line};
use crate::ffi::TcpStore;
use crate::process_group::{Backend, Devices};

/// The rendezvous of this process with the others of its run.
pub(super) struct Rendezvous<'a> {
    /// Under the prefix of this start of the run.
    pub store: &'a TcpStore,
    /// Where processes find each other that were started for different runs.
    pub common: TcpStore,
    pub launch: &'a Launch,
    pub me: &'a Process,
    /// When this process connected to the store. It waits until `timeout` after that.
    pub began: Instant,
    pub timeout: Duration,
    /// Whether this process serves the store.
    pub serves: bool,
}

/// What processes must agree on before they can find each other, as process 0 publishes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    run_id: String,
    processes: usize,
}

impl Rendezvous<'_> {
    /// Waits for all processes. Returns what they are, and the ranks of each.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when the processes do not fit each other, [`Error::PeersMissing`], [`Error::Store`].
    pub(super) fn meet(&self) -> Result<(Vec<Process>, Vec<Range<usize>>)> {
        let mine = self.launch.processes.index;
        let checked = self
            .exchange_processes()
            .and_then(|processes| check(&processes, self.me, mine).map(|ranks| (processes, ranks)));
        checked.inspect_err(|error| {
            // A process that does not get this error has found it by itself, or will.
            let _ = self.end(error);
        })
    }

    /// Checks that this process and process 0 were started for the same run, as far as is known yet.
    ///
    /// # Errors
    /// [`Error::InvalidInput`], in all processes that wait for this one: it has the number of one of them.
    fn check_run(&self) -> Result<()> {
        let (mine, count) = (self.launch.processes.index, self.launch.processes.count);
        if let Some(why) = self.common.get(REFUSED, Duration::ZERO)? {
            return Err(Error::InvalidInput(
                escaped_line(&String::from_utf8_lossy(&why)).into_owned(),
            ));
        }
        let Some(bytes) = self.common.get(RUN, Duration::ZERO)?.filter(|_| mine > 0) else {
            return Ok(());
        };
        let Run { run_id, processes } = from_json(RUN, &bytes)?;
        if run_id != self.launch.run_id {
            return Err(Error::InvalidInput(format!(
                "process 0 belongs to run {:?}, and process {mine} to run {:?}; start all processes of a run with one \
                 launcher, and give each run its own --master-port (MASTER_PORT)",
                escaped_line(&run_id),
                self.launch.run_id
            )));
        }
        if processes == count {
            return Ok(());
        }
        let name = name_of_count(&self.launch.kind);
        let differs = format!("{name} is {processes} for process 0 and {count} for process {mine}");
        if mine >= processes {
            // The run does not wait for this process.
            return Err(Error::InvalidInput(format!(
                "{differs}: process {mine} is not part of a run of {processes} processes, numbered from 0; start all \
                 with the same number"
            )));
        }
        let differs = differs + "; start all with the same number";
        self.common.set(REFUSED, differs.as_bytes())?;
        Err(Error::InvalidInput(differs))
    }

    /// Stores what this process is, and reads what the others are.
    fn exchange_processes(&self) -> Result<Vec<Process>> {
        let Self { store, launch, me, began, timeout, .. } = self;
        let (mine, count) = (launch.processes.index, launch.processes.count);
        if mine == 0 {
            let run = Run { run_id: launch.run_id.clone(), processes: count };
            self.common.set(RUN, &to_json(RUN, &run)?)?;
        }
        self.check_run()?;
        if store.add(&format!("arrivals/{mine}"), 1)? > 1 {
            return Err(Error::InvalidInput(format!(
                "two processes have the number {mine} of {count}; give each its own --node-rank (or RANK)"
            )));
        }
        store.set(&key_of(mine), &me.to_bytes(&key_of(mine))?)?;
        let keys: Vec<String> = (0..count).map(key_of).collect();
        let read = |process: &String| -> Result<Option<Process>> {
            if !store.check(std::slice::from_ref(process))? {
                return Ok(None);
            }
            let bytes = store.get(process, POLL_INTERVAL)?.unwrap_or_default();
            Process::from_bytes(process, &bytes).map(Some)
        };
        let all_arrived = loop {
            let left = timeout.saturating_sub(began.elapsed());
            if store.wait(&keys, left.min(POLL_INTERVAL))? {
                break true;
            }
            self.check_run()?;
            if let Some(bytes) = store.get(MISSING, Duration::ZERO)? {
                let MissingPeers { missing, there } = MissingPeers::from_bytes(MISSING, &bytes)?;
                return Err(Error::PeersMissing { missing, count, waited: began.elapsed(), there });
            }
            if left <= POLL_INTERVAL {
                break false;
            }
        };
        let all = keys.iter().map(read).collect::<Result<Vec<_>>>()?;
        self.check_run()?;
        if all_arrived && let Some(all) = all.iter().cloned().collect::<Option<Vec<_>>>() {
            return Ok(all);
        }
        let numbered = || all.iter().enumerate();
        let missing = numbered().filter(|(_, process)| process.is_none());
        let there = numbered().filter_map(|(number, process)| {
            let Process { host, pid, .. } = process.as_ref()?;
            Some(format!("{number} (on {host}, process {pid})"))
        });
        Err(Error::PeersMissing {
            missing: missing.map(|(number, _)| number.to_string()).collect::<Vec<_>>().join(", "),
            count,
            waited: *timeout,
            there: there.collect::<Vec<_>>().join(", "),
        })
    }

    /// Ends the rendezvous of a process that has found that the run cannot begin. The process that serves the store
    /// reports which processes are missing, and stays until the others have found the same.
    fn end(&self, error: &Error) -> Result<()> {
        let store = self.store;
        if !self.serves {
            return store.add(ACKNOWLEDGED, 1).map(drop);
        }
        let others = 1..self.launch.processes.count;
        let others = match error {
            Error::PeersMissing { missing, there, .. } => {
                let peers = MissingPeers { missing: missing.clone(), there: there.clone() };
                store.set(MISSING, &peers.to_bytes(MISSING)?)?;
                others.len() - missing.split(", ").count()
            }
            Error::InvalidInput(_) => {
                let has_arrived =
                    |process: &usize| store.check(&[key_of(*process)]).unwrap_or(false);
                others.filter(has_arrived).count()
            }
            _ => return Ok(()), // the store is gone already
        };
        let began = Instant::now();
        while store.add(ACKNOWLEDGED, 0)? < others as i64 && began.elapsed() < 3 * POLL_INTERVAL {
            thread::park_timeout(POLL_INTERVAL / 50); // the store has no event for it
        }
        Ok(())
    }
}

/// Returns the key of what a process is.
fn key_of(process: usize) -> String {
    format!("process/{process}")
}

/// Returns the name of the number of processes, as the user gives it.
pub(super) fn name_of_count(kind: &LaunchKind) -> &'static str {
    match kind {
        LaunchKind::ByHand => "--nnodes",
        _ => "the number of processes",
    }
}

/// Checks that `processes` can train together. Process `mine` is this one, `me`. Returns the ranks of each.
///
/// # Errors
/// [`Error::InvalidInput`] with the reason, the same in all processes.
fn check(processes: &[Process], me: &Process, mine: usize) -> Result<Vec<Range<usize>>> {
    if processes[mine] != *me {
        let count = processes.len();
        return Err(Error::InvalidInput(format!(
            "two processes have the number {mine} of {count}; give each its own --node-rank (or RANK)"
        )));
    }
    check_same(processes)?;
    let backend: Backend = me.backend.parse()?;
    if backend.devices() == Devices::OwnGpu
        && let Some((gpu, [one, other])) = shared_gpu(processes)
        && let Err(reason) = backend.check_shared_gpu()
    {
        return Err(Error::InvalidInput(format!(
            "{one} and {other} have the same GPU, {gpu}, and {reason}; start fewer, or have each process see its own \
             (CUDA_VISIBLE_DEVICES, srun --gpus-per-task)"
        )));
    }
    places(processes)
}

/// Returns the key prefix of one start of a run.
pub(super) fn prefix(run_id: &str, start: i64) -> String {
    format!("ddp-mp/{run_id}/{start}")
}

/// Reports to the processes that still wait for `process` that it will not arrive.
pub(super) fn report_absent(store: &TcpStore, process: usize) -> Result<()> {
    let there = "all others, or on their way".into();
    store.set(MISSING, &MissingPeers { missing: process.to_string(), there }.to_bytes(MISSING)?)
}

/// Returns how many files the store opens for this number of processes: its own, and the connections of each.
pub(super) fn files_of_store(processes: usize) -> usize {
    8 + 8 * processes
}

/// How long to wait for the other processes before checking whether one is reported missing.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Keys: the missing processes, by the one that serves the store; how many have seen that the run cannot begin.
const MISSING: &str = "missing";
const ACKNOWLEDGED: &str = "acknowledged";

/// Keys beside those of the run: what process 0 was started for; why another process does not fit it.
const RUN: &str = "run";
const REFUSED: &str = "refused";

#[cfg(test)]
mod tests {
    use crossbeam::channel::never;

    use super::super::{LaunchOptions, detect};
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn by_hand(node_rank: usize, nnodes: usize, run_id: &str) -> Launch {
        let addr = Some("127.0.0.1".into());
        let (nnodes, node_rank) = (Some(nnodes), Some(node_rank));
        let options = LaunchOptions { nnodes, node_rank, master_addr: addr, ..Default::default() };
        Launch { run_id: run_id.into(), ..detect(&|_| None, &options, 0).unwrap() }
    }

    fn meet(store: &TcpStore, launch: &Launch) -> Result<usize, String> {
        let me = Process {
            version: String::new(),
            host: "a".into(),
            pid: launch.processes.index as u32,
            backend: "gloo".into(),
            first_local: 0,
            ranks: vec!["CPU:0".into()],
            gpus: Vec::new(),
            options: Vec::new(),
        };
        let rendezvous = Rendezvous {
            store: &store.under(&prefix(&launch.run_id, 0)),
            common: store.under("ddp-mp"),
            launch,
            me: &me,
            began: Instant::now(),
            timeout: TIMEOUT,
            serves: false,
        };
        rendezvous.meet().map(|(all, _)| all.len()).map_err(|error| error.to_string())
    }

    /// Without a word from the other process, each would wait for a process that never comes.
    #[test]
    fn processes_that_disagree_on_their_number_end_at_once() {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT, never()).unwrap();
        let told = "--nnodes is 3 for process 0 and 2 for process 1";
        let [first, second] = [by_hand(0, 3, "none"), by_hand(1, 2, "none")];
        thread::scope(|scope| {
            let first = scope.spawn(|| meet(&store, &first));
            while !store.check(&["ddp-mp/run".into()]).unwrap() {
                thread::yield_now();
            }
            for error in [meet(&store, &second), first.join().unwrap()] {
                assert!(error.as_ref().is_err_and(|it| it.contains(told)), "{error:?}");
            }
        });
    }

    #[test]
    fn process_of_another_run_learns_what_the_run_is() {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT, never()).unwrap();
        let [first, second] = [0, 1].map(|number| by_hand(number, 2, "none"));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| meet(&store, &first));
            while !store.check(&["ddp-mp/none/0/process/0".into()]).unwrap() {
                thread::yield_now();
            }
            for (stray, told) in [
                (by_hand(2, 3, "none"), "process 2 is not part of a run of 2 processes"),
                (
                    by_hand(1, 2, "job"),
                    "process 0 belongs to run \"none\", and process 1 to run \"job\"",
                ),
            ] {
                let error = meet(&store, &stray);
                assert!(error.as_ref().is_err_and(|it| it.contains(told)), "{error:?}");
            }
            // The run goes on without them.
            assert_eq!([meet(&store, &second), waiting.join().unwrap()], [Ok(2), Ok(2)]);
        });
    }
}
