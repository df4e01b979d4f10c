//! `--spawn=processes`: a process for each rank of this machine, as `torch.multiprocessing.spawn` starts them; and
//! `--max-restarts`, which starts them again after a failure, or one process with all ranks as threads.

use std::env;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded, unbounded};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGCHLD, SIGKILL, SIGTERM, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::signal_name;

use super::heartbeat_monitor::{tell_ended, waited_for};
use super::in_a_row::InARow;
use super::launchers::{variables_of_spawned, variables_of_threads};
use super::restarts::{self, Restarts};
use super::signals::{SIGNALS, end_at_second_interrupt, reason_of};
use super::world::files_of_store;
use super::{MasterEndpoint, Placement, world};
use crate::error::{Error, Result};
use crate::ffi::limits::{not_started, require_files};
use crate::ffi::{self, TcpStore};
use crate::process_group::rank_label;
use crate::runtime::{self, StopReason};
use crate::telemetry::Failure;

/// After the grace period the processes end by themselves; after so long they are asked to, and after as long again
/// killed.
const TERM_TIMEOUT: Duration = Duration::from_secs(5);

/// The exit code of a process that refuses its input.
const WRONG_INPUT: i32 = 2;

fn refuses_input(status: ExitStatus) -> bool {
    status.code() == Some(WRONG_INPUT)
}

/// What a process says of its failure to the one that has started it, which alone tells the user.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// What the user is told.
    pub text: String,
    /// Whether what was asked for is wrong.
    pub wrong_input: bool,
    /// The event, if ranks have failed.
    pub failure: Option<Failure>,
}

impl Report {
    /// Leaves it, as the report of process `rank` of start number `start`, with the process whose store is at `parent`.
    ///
    /// # Errors
    /// [`Error::Store`] when nobody takes it.
    pub(crate) fn leave(&self, parent: &MasterEndpoint, start: usize, rank: usize) -> Result<()> {
        let store = restarts::connect(parent)?.under(&of_start(start));
        store.set(&report_of(rank), &serde_json::to_vec(self).unwrap_or_default())?;
        // That it has arrived is known from the answer to the next request.
        store.check(&[report_of(rank)]).map(drop)
    }
}

/// Returns the prefix of the reports of a start.
fn of_start(start: usize) -> String {
    format!("start/{start}")
}

fn report_of(rank: usize) -> String {
    format!("report/{rank}")
}

/// How all the processes have ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// As they were to, or as they were asked to.
    Well(Option<StopReason>),
    /// The first failure of the last start, and the reason of each restart before.
    Badly(Box<Report>, Vec<String>),
}

/// The processes to start.
#[derive(Debug)]
pub(crate) enum Children<'a> {
    /// One process for each rank of this placement.
    Ranks(&'a Placement),
    /// One process with all ranks as threads.
    Threads,
}

/// Starts the processes of one run and waits for them; trains nothing.
///
/// Each runs this very program with the same arguments, and finds out from its environment which rank it is. They meet
/// in a store that this process serves, so that no port is chosen before it is listened at. Should this process end,
/// however that is, the system kills them. They are a process group each: Ctrl-C reaches this process alone, which
/// passes it on.
#[derive(Debug)]
pub(crate) struct SpawnProcesses<'a> {
    /// What the processes are.
    pub children: Children<'a>,
    /// How long a request to the store may take.
    pub timeout: Duration,
    /// How long the others get to come back after one has failed.
    pub grace_period: Duration,
    /// Whether they stop at a signal, all after the same step. Otherwise signals end this process, and so them.
    pub stops: bool,
    /// How often the processes are started again after a failure.
    pub max_restarts: usize,
}

impl SpawnProcesses<'_> {
    /// Returns when all have ended, and are not started again. Wrong input, and a run that was asked to stop, never are.
    /// Calls `before_restart` with the number of each restart and the failure before it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store cannot be served, [`Error::Input`] when processes cannot be started.
    pub(crate) fn run(&self, before_restart: impl Fn(usize, &Report)) -> Result<Ended> {
        require_files(files_of_store(self.count()), "serving a store to the ranks")?;
        let (_open, never) = bounded(0);
        let store = TcpStore::serve("127.0.0.1", 0, self.timeout, never)?;
        let (handle, signals) = self.listen().map_err(cannot_start)?;
        let ended = self.run_starts(&store, &signals, before_restart);
        handle.close();
        ended
    }

    fn run_starts(
        &self,
        store: &TcpStore,
        signals: &Receiver<i32>,
        before_restart: impl Fn(usize, &Report),
    ) -> Result<Ended> {
        let (began, mut restarts) = (Instant::now(), Restarts::default());
        let mut in_a_row = InARow::default();
        loop {
            let number = restarts.reasons.len();
            let start = Start { spawn: self, store: store.under(&of_start(number)), number };
            let mut all = start.begin(store)?;
            let mut stops = start.wait(&mut all, store, signals);
            let Some(mut report) = start.failure(&all) else {
                return Ok(Ended::Well(all.reason_of_rank_0()));
            };
            stops |= signals.try_iter().any(asks_to_stop);
            if let Some(failure) = &mut report.failure {
                failure.repeated = in_a_row.count(failure);
            }
            if report.wrong_input || stops || number == self.max_restarts {
                return Ok(Ended::Badly(Box::new(report), restarts.reasons));
            }
            before_restart(number + 1, &report);
            let reason = report.text.lines().next().unwrap_or_default().into();
            restarts.add(reason, began.elapsed(), store)?;
        }
    }

    fn count(&self) -> usize {
        match self.children {
            Children::Ranks(placement) => placement.devices.len(),
            Children::Threads => 1,
        }
    }

    /// Signals from now on.
    fn listen(&self) -> io::Result<(Handle, Receiver<i32>)> {
        let mut heeded = vec![SIGCHLD];
        if self.stops {
            end_at_second_interrupt()?;
            heeded.extend(SIGNALS);
        }
        let mut signals = Signals::new(heeded)?;
        let (happened, events) = unbounded();
        let handle = signals.handle();
        let listen = move || signals.forever().try_for_each(|signal| happened.send(signal));
        let thread = thread::Builder::new().name("signals".into());
        thread.spawn(listen)?;
        Ok((handle, events))
    }

    /// How process `rank` has ended.
    fn how(&self, rank: usize, pid: u32, status: ExitStatus) -> String {
        let who = match self.children {
            Children::Ranks(_) => format!("rank {rank} (process {pid})"),
            Children::Threads => format!("the process of all ranks (process {pid})"),
        };
        match (status.signal(), status.code()) {
            (Some(signal), _) => {
                let name =
                    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string);
                format!("{who} was killed by {name}")
            }
            (None, code) => format!("{who} ended with exit code {}", code.unwrap_or_default()),
        }
    }
}

fn cannot_start(error: io::Error) -> Error {
    Error::Input(not_started("what the ranks need, a process or a thread,", &error))
}

fn asks_to_stop(signal: i32) -> bool {
    signal != SIGCHLD && signal != SIGUSR2
}

/// Returns a command that starts this program, without arguments; if another file has taken its place since it was
/// started, the one that runs.
fn this_program() -> io::Result<Command> {
    let file = env::current_exe()?;
    let mut command =
        Command::new(if file.exists() { file } else { PathBuf::from("/proc/self/exe") });
    if ffi::is_run_by_linker() {
        command.args(env::args_os().take(1)); // the file is the linker's
    }
    Ok(command)
}

/// One start of all processes.
struct Start<'a> {
    spawn: &'a SpawnProcesses<'a>,
    /// With the reports of this start.
    store: TcpStore,
    number: usize,
}

impl Start<'_> {
    /// Starts the processes, whose store is `store`. If one cannot be started, none is left.
    fn begin(&self, store: &TcpStore) -> Result<Processes> {
        let mut all = Processes { children: Vec::new(), ended: Vec::new() };
        for rank in 0..self.spawn.count() {
            match self.start(rank, store.port()) {
                Ok(child) => all.children.push(Some(child)),
                Err(error) => {
                    all.kill();
                    return Err(cannot_start(error));
                }
            }
        }
        Ok(all)
    }

    fn start(&self, rank: usize, port: u16) -> io::Result<Child> {
        let mut command = this_program()?;
        command.args(env::args_os().skip(1)).stdin(Stdio::null()).process_group(0);
        let restarts = [self.number, self.spawn.max_restarts];
        let variables = match self.spawn.children {
            Children::Ranks(Placement { devices, threads_per_rank, .. }) => {
                variables_of_spawned([rank, devices.len(), *threads_per_rank], port, restarts)
            }
            Children::Threads => variables_of_threads(port, restarts),
        };
        for (name, value) in variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let held: &[i32] = if self.spawn.stops { &SIGNALS } else { &[] };
        ffi::tie_to_this_process(&mut command, held);
        command.spawn()
    }

    /// Waits until all processes have ended. Forwards signals, and kills processes that do not exit after a failure.
    /// Returns whether a signal has asked the run to stop.
    fn wait(&self, all: &mut Processes, store: &TcpStore, signals: &Receiver<i32>) -> bool {
        let mut stops = false;
        let mut last_words = [SIGTERM, SIGKILL].into_iter();
        let mut deadline: Option<Instant> = None;
        while all.are_there() {
            let signal = match deadline {
                None => signals.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => signals.recv_deadline(deadline),
            };
            match signal {
                Ok(SIGCHLD) => {}
                Ok(signal) => {
                    stops |= asks_to_stop(signal);
                    all.send(signal);
                }
                Err(_) => {
                    all.send(last_words.next().unwrap_or(SIGKILL));
                    deadline = Some(runtime::deadline(TERM_TIMEOUT));
                }
            }
            all.reap();
            if let (None, Some(&(rank, pid, status))) = (deadline, all.first_failure()) {
                deadline =
                    Some(runtime::deadline(self.spawn.grace_period.saturating_add(TERM_TIMEOUT)));
                if let Children::Ranks(placement) = self.spawn.children {
                    // Who is killed tells nobody. What fails here the others find out as they would on several machines.
                    let how = self.spawn.how(rank, pid, status);
                    let _ = self.tell(placement, store, rank, status, &how);
                }
            }
        }
        stops
    }

    /// Tells the others that `rank` has ended, and this process what it was last seen doing.
    fn tell(
        &self,
        placement: &Placement,
        store: &TcpStore,
        rank: usize,
        status: ExitStatus,
        error: &str,
    ) -> Result<()> {
        let store_of_run = store.under(&world::prefix("none", self.number as i64));
        world::tell_absent(&store_of_run, rank)?;
        if refuses_input(status) || self.store.check(&[report_of(rank)])? {
            // It has told itself, this process or the user.
            return tell_ended(&store_of_run, rank, None, error).map(drop);
        }
        let waits = waited_for(&store_of_run, rank, placement.devices.len())?;
        let (waits, at) =
            waits.map_or_else(Default::default, |(waits, at)| (format!("; {waits}"), at));
        let error = &(error.to_owned() + &waits);
        let at = tell_ended(&store_of_run, rank, at, error)?;
        let failure = Some(Failure {
            rank: Some(rank),
            device: Some(rank_label(placement.devices[rank], rank)),
            operation: Some(at.operation.to_string()),
            sequence: Some(at.sequence),
            error: error.clone(),
            ..Failure::default()
        });
        let report = Report { text: error.clone(), wrong_input: false, failure };
        self.store.set(&report_of(rank), &serde_json::to_vec(&report).unwrap_or_default())
    }

    /// Returns the report of the first that has failed; better that of the rank to blame, if it has left one.
    fn failure(&self, all: &Processes) -> Option<Report> {
        let &(rank, pid, status) = all.first_failure()?;
        let read = |rank: usize| -> Option<Report> {
            // A get without time to wait may find nothing where there is something.
            self.store.check(&[report_of(rank)]).ok().filter(|is_there| *is_there)?;
            let text = self.store.get(&report_of(rank), TERM_TIMEOUT).ok()??;
            serde_json::from_slice(&text).ok()
        };
        let blamed = |report: &Report| report.failure.as_ref().and_then(|failure| failure.rank);
        let first = read(rank).unwrap_or_else(|| self.unreported(rank, pid, status));
        let of_blamed = blamed(&first).filter(|it| *it != rank).and_then(read);
        Some(of_blamed.filter(|it| blamed(it) == blamed(&first)).unwrap_or(first))
    }

    /// Returns the report of a process that ended without one.
    fn unreported(&self, rank: usize, pid: u32, status: ExitStatus) -> Report {
        let text = self.spawn.how(rank, pid, status);
        let (rank, device) = match self.spawn.children {
            Children::Ranks(placement) => {
                (Some(rank), Some(rank_label(placement.devices[rank], rank)))
            }
            Children::Threads => (None, None),
        };
        let wrong_input = refuses_input(status);
        let failure = Failure { rank, device, error: text.clone(), ..Failure::default() };
        Report { text, wrong_input, failure: (!wrong_input).then_some(failure) }
    }
}

/// The processes by their ranks.
struct Processes {
    /// None of those that have ended.
    children: Vec<Option<Child>>,
    /// In the order of time: rank, process and how.
    ended: Vec<(usize, u32, ExitStatus)>,
}

impl Processes {
    fn are_there(&self) -> bool {
        self.children.iter().any(Option::is_some)
    }

    fn send(&mut self, signal: i32) {
        for child in self.children.iter_mut().flatten() {
            // Refused only if it has ended.
            let _ = ffi::send_signal(child, signal);
        }
    }

    /// Ends all of them at once.
    fn kill(&mut self) {
        for child in self.children.iter_mut().flatten() {
            // Refused only if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Why the run has stopped before its last epoch, if it has ended well.
    fn reason_of_rank_0(&self) -> Option<StopReason> {
        let of_rank_0 = self.ended.iter().find(|(rank, ..)| *rank == 0);
        of_rank_0.and_then(|(.., status)| status.code()).and_then(reason_of).flatten()
    }

    /// Looks who has ended.
    fn reap(&mut self) {
        for (rank, place) in self.children.iter_mut().enumerate() {
            if let Some(child) = place
                && let Ok(Some(status)) = child.try_wait()
            {
                self.ended.push((rank, child.id(), status));
                *place = None;
            }
        }
    }

    /// The first that has ended neither well nor because it was asked to stop.
    fn first_failure(&self) -> Option<&(usize, u32, ExitStatus)> {
        self.ended.iter().find(|(.., status)| status.code().and_then(reason_of).is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BackendChoice, NodeSlice, Nproc, place};
    use super::*;
    use crate::ffi::cuda::Cuda;

    #[test]
    fn a_process_that_refuses_its_input_has_the_run_refuse_it() {
        let (count, no_gpu) = (Nproc::Count(2), Cuda::default());
        let placement = place(count, BackendChoice::Threaded, &no_gpu, &NodeSlice::all(8)).unwrap();
        let time = Duration::from_secs(5);
        let spawn = SpawnProcesses {
            children: Children::Ranks(&placement),
            timeout: time,
            grace_period: time,
            stops: true,
            max_restarts: 3,
        };
        let (_open, never) = bounded(0);
        let store = TcpStore::serve("127.0.0.1", 0, time, never).unwrap();
        for (number, code) in [2, 1].into_iter().enumerate() {
            let start = Start { spawn: &spawn, store: store.under(&of_start(number)), number };
            // As a process ends whose --config is another by now: before it has joined.
            let exit = format!("exit {code}");
            let status = Command::new("sh").args(["-c", &exit]).status().unwrap();
            start.tell(&placement, &store, 1, status, "ended").unwrap();
            let all = Processes { children: Vec::new(), ended: vec![(1, 7, status)] };
            let report = start.failure(&all).unwrap();
            assert_eq!(report.wrong_input, code == 2, "{report:?}");
            assert_eq!(report.failure.is_none(), code == 2, "{report:?}");
        }
    }
}
