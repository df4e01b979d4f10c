//! The rendezvous of the processes of a run in their store. Each publishes what it is, reads what the others are, and
//! checks that they fit each other.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::messages::{
    PROCESS, Process, check_same, from_json, name_shared_gpus, rank_ranges, shared_gpu, to_json,
};
use super::{Launch, LaunchKind, Processes};
use crate::error::{Error, Result, escaped_line};
use crate::ffi::TcpStore;
use crate::ffi::store::{Gathered, key_of};
use crate::process_group::{Backend, Devices};
use crate::runtime::Instant;

/// The rendezvous of this process with the others of its run.
pub(super) struct ProcessRendezvous<'a> {
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

impl ProcessRendezvous<'_> {
    /// Waits for all processes. Returns what they are, and the ranks of each.
    ///
    /// # Errors
    /// [`Error::Input`] when the processes do not fit each other, [`Error::PeersMissing`], [`Error::Store`].
    pub(super) fn meet(&self) -> Result<(Vec<Process>, Vec<Range<usize>>)> {
        let mine = self.launch.processes.index;
        let checked = self.exchange_processes().and_then(|mut processes| {
            if processes[mine].nonce != self.me.nonce {
                return Err(self.twice());
            }
            name_shared_gpus(&mut processes);
            let ranks = check(&processes, self.me)?;
            Ok((processes, ranks))
        });
        checked.inspect_err(|error| {
            // A process that does not get this error has found it by itself, or will.
            let _ = self.end(error);
        })
    }

    /// Returns the error of a process whose index another one has, too.
    fn twice(&self) -> Error {
        let Processes { index, count, .. } = self.launch.processes;
        let remedy = match self.launch.kind {
            LaunchKind::ByHand => "give each machine its own --node-rank".into(),
            _ => format!("if two runs meet here, {HOW_TO_CHANGE_PORT}"),
        };
        Error::mismatch(format!("two processes have the index {index} of {count}; {remedy}"))
    }

    fn time_left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }

    /// Checks that this process and process 0 were started for the same run. Process 0 publishes which run that is.
    ///
    /// # Errors
    /// [`Error::Input`], in all processes that wait for this one: it has the number of one of them.
    fn check_run(&self) -> Result<()> {
        let launch = self.launch;
        let (mine, count) = (launch.processes.index, launch.processes.count);
        if launch.kind == LaunchKind::Spawned {
            return Ok(()); // one process has started all
        }
        if mine == 0 {
            let run = Run { run_id: launch.run_id.clone(), processes: count };
            return self.common.set(RUN, &to_json(RUN, &run)?);
        }
        let Some(bytes) = self.common.get(RUN, self.time_left())? else {
            return Err(process_0_missing(launch, self.timeout));
        };
        let Run { run_id, processes } = from_json(RUN, &bytes)?;
        if run_id != launch.run_id {
            return Err(Error::mismatch(format!(
                "process 0 belongs to run {:?}, and process {mine} to run {:?}; start all processes of a run with one \
                 launcher, and let each run have a port of its own: {HOW_TO_CHANGE_PORT}",
                escaped_line(&run_id),
                launch.run_id
            )));
        }
        if processes == count {
            return Ok(());
        }
        let by_hand = launch.kind == LaunchKind::ByHand;
        let name = if by_hand { "--nnodes" } else { "the number of processes" };
        let differs = format!("{name} is {processes} for process 0 and {count} for process {mine}");
        if mine >= processes {
            // The run does not wait for this process.
            return Err(Error::mismatch(format!(
                "{differs}: process {mine} is not part of a run of {processes} processes, numbered from 0; start all \
                 with the same number"
            )));
        }
        let differs = differs + "; start all with the same number";
        Gathered::<Process>::Refused(differs.clone()).decide(self.store, PROCESS)?;
        Err(Error::mismatch(differs))
    }

    /// Stores what this process is, and reads what the others are.
    fn exchange_processes(&self) -> Result<Vec<Process>> {
        let Self { store, launch, me, .. } = self;
        let (mine, count) = (launch.processes.index, launch.processes.count);
        self.check_run()?;
        let (key, message) = (key_of(PROCESS, mine), to_json(PROCESS, me)?);
        if store.set_once(&key, &message)? != message {
            return Err(self.twice());
        }
        let absent = |missing: Vec<usize>| self.peers_missing(&missing);
        // One process compares the options of all: with them, thousands of processes do not fit one value.
        let end = |mut all: Vec<Process>| match check_same(&all) {
            Err(error) => Gathered::Refused(error.to_string()),
            Ok(()) => {
                all.iter_mut().for_each(|process| process.options.clear());
                Gathered::All(all)
            }
        };
        let all = Gathered::of(store, PROCESS, [mine, count], *me, self.time_left(), absent, end)?;
        all.iter().try_for_each(Process::check)?;
        Ok(all)
    }

    /// Returns the error of a run for which the processes `missing` have not arrived.
    fn peers_missing(&self, missing: &[usize]) -> Error {
        let count = self.launch.processes.count;
        let name = |process: usize| {
            let bytes = self.store.get(&key_of(PROCESS, process), Duration::ZERO).ok()??;
            let Process { host, pid, .. } = from_json(PROCESS, &bytes).ok()?;
            Some(format!("{process} (on {}, process {pid})", escaped_line(&host)))
        };
        let there = (0..count).filter(|process| !missing.contains(process)).filter_map(name);
        Error::PeersMissing {
            missing: missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            count,
            waited: self.began.elapsed().min(self.timeout),
            there: there.collect::<Vec<_>>().join(", "),
        }
    }

    /// Ends the rendezvous of a process that has found that the run cannot begin. The process that serves the store
    /// stays until the others that have arrived have found the same.
    pub(super) fn end(&self, error: &Error) -> Result<()> {
        let Processes { index, count, .. } = self.launch.processes;
        if !self.serves {
            return self.store.add(&acknowledged(index), 1).map(drop);
        }
        if !matches!(error, Error::PeersMissing { .. } | Error::Input { .. }) {
            return Ok(()); // the store is gone already
        }
        let has_arrived =
            |process: &usize| self.store.check(&key_of(PROCESS, *process)).unwrap_or(false);
        let others: Vec<String> = (1..count).filter(has_arrived).map(acknowledged).collect();
        self.store.wait(&others, ACKNOWLEDGE_TIMEOUT).map(drop)
    }
}

/// Returns the key that a process sets once it has found that the run cannot begin.
fn acknowledged(process: usize) -> String {
    format!("acknowledged/{process}")
}

/// Returns the error of a process for which process 0 has not arrived within `waited`.
pub(super) fn process_0_missing(launch: &Launch, waited: Duration) -> Error {
    let Processes { index, count, .. } = launch.processes;
    let there = format!("{index}, which is this one");
    Error::PeersMissing { missing: "0".into(), count, waited, there }
}

/// Checks that `processes` can train together. Returns the ranks of each.
///
/// # Errors
/// [`Error::Input`] with the reason, the same in all processes.
fn check(processes: &[Process], me: &Process) -> Result<Vec<Range<usize>>> {
    check_same(processes)?;
    let backend: Backend = me.backend.parse()?;
    // All processes find the same reason, whatever NCCL each of them has.
    let unshareable = processes.iter().find_map(|process| process.unshareable.as_ref());
    if let Some(reason) = unshareable.filter(|_| backend.devices() == Devices::OwnGpu) {
        check_own_gpus(processes, reason)?;
    }
    rank_ranges(processes)
}

/// Refuses two ranks with one GPU, which they cannot share for this `reason`.
fn check_own_gpus(processes: &[Process], reason: &str) -> Result<()> {
    let Some((gpu, [one, other])) = shared_gpu(processes, true) else { return Ok(()) };
    Err(Error::mismatch(format!(
        "{one} and {other} have the same GPU, {gpu}, and {reason}; start fewer, or have each process see its own \
         (CUDA_VISIBLE_DEVICES, srun --gpus-per-task)"
    )))
}

/// Returns the key prefix of one start of a run.
pub(super) fn prefix(run_id: &str, start: i64) -> String {
    format!("ddp-mp/{run_id}/{start}")
}

/// Reports to the processes that still wait for `process` that it will not arrive.
pub(crate) fn report_absent(store: &TcpStore, process: usize) -> Result<()> {
    Gathered::<Process>::Missing(vec![process]).decide(store, PROCESS).map(drop)
}

/// Returns how many files the store opens for this number of processes: its own, and the connections of each.
pub(super) fn files_of_store(processes: usize) -> usize {
    8 + 8 * processes
}

/// The remedy for a port at which other processes meet.
pub(super) const HOW_TO_CHANGE_PORT: &str =
    "give torchrun, or without it all processes, another --master-port or MASTER_PORT";

/// How long the process that serves the store waits until the others have read why the run cannot begin.
const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(3);

/// Key beside those of the run: what process 0 was started for.
const RUN: &str = "run";

#[cfg(test)]
mod tests {
    use std::thread;

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
        meet_with(store, launch, Vec::new())
    }

    fn meet_with(
        store: &TcpStore,
        launch: &Launch,
        options: Vec<(String, String)>,
    ) -> Result<usize, String> {
        let me = Process {
            version: String::new(),
            host: "a".into(),
            pid: launch.processes.index as u32,
            nonce: 0,
            backend: "gloo".into(),
            first_local: 0,
            ranks: vec!["CPU:0".into()],
            gpus: Vec::new(),
            nccl_host: None,
            unshareable: None,
            options,
        };
        let rendezvous = ProcessRendezvous {
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
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let expected = "--nnodes is 3 for process 0 and 2 for process 1";
        let [first, second] = [by_hand(0, 3, "none"), by_hand(1, 2, "none")];
        thread::scope(|scope| {
            let first = scope.spawn(|| meet(&store, &first));
            while !store.check("ddp-mp/run").unwrap() {
                thread::yield_now();
            }
            for error in [meet(&store, &second), first.join().unwrap()] {
                assert!(error.as_ref().is_err_and(|it| it.contains(expected)), "{error:?}");
            }
        });
    }

    /// A value of the store is too short for the options of both.
    #[test]
    fn options_are_compared_however_long_they_are() {
        let differ =
            "--lr is 0.1 for process 0 (on a, process 0), and 1.0 for process 1 (on a, process 1)";
        for (lr, expected) in [("0.1", "Ok(2)"), ("1.0", differ)] {
            let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
            let ends = thread::scope(|scope| {
                let all = [(0, "0.1"), (1, lr)].map(|(index, lr)| {
                    let (store, launch) = (&store, by_hand(index, 2, "none"));
                    let long = ("--long".to_owned(), "x".repeat(5 << 20));
                    let options = vec![long, ("--lr".to_owned(), lr.to_owned())];
                    scope.spawn(move || meet_with(store, &launch, options))
                });
                all.map(|thread| format!("{:?}", thread.join().unwrap()))
            });
            assert!(ends.iter().all(|end| end.contains(expected)), "{ends:?}");
        }
    }

    #[test]
    fn process_of_another_run_learns_what_the_run_is() {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let [first, second] = [0, 1].map(|index| by_hand(index, 2, "none"));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| meet(&store, &first));
            while !store.check("ddp-mp/none/0/process/0").unwrap() {
                thread::yield_now();
            }
            for (stray, expected) in [
                (by_hand(2, 3, "none"), "process 2 is not part of a run of 2 processes"),
                (
                    by_hand(1, 2, "job"),
                    "process 0 belongs to run \"none\", and process 1 to run \"job\"",
                ),
            ] {
                let error = meet(&store, &stray);
                assert!(error.as_ref().is_err_and(|it| it.contains(expected)), "{error:?}");
            }
            // The run goes on without them.
            assert_eq!([meet(&store, &second), waiting.join().unwrap()], [Ok(2), Ok(2)]);
        });
    }
}
