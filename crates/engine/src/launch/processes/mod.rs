//! `--spawn=processes`: a process for each rank of this machine, as `torch.multiprocessing.spawn` starts them. Also
//! `--max-restarts`, which restarts them after a failure, or restarts one process with all ranks as threads: a new process,
//! or the same one if its threads have all ended.

mod child_error;
mod held_output;
mod running;

use std::env;
use std::fs;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, unbounded};
use serde_with::SerializeDisplay;
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::{emulate_default_handler, signal_name};
use strum::{Display, EnumString, VariantNames};

use super::Placement;
use super::heartbeat_monitor::{report_ended, waited_for};
use super::launchers::{PARENT_START, ParentStart};
use super::process_rendezvous::{files_of_store, prefix, report_absent};
use super::restarts::{PARENT_TIMEOUT, Restarts};
use super::signals::{SAME_REQUEST, SIGNALS, code_of, end_at_second_interrupt};
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::operation::{OpId, Operation};
use crate::os::{
    self,
    limits::{not_started, require_files},
    terminal::LentTerminal,
};
use crate::runtime::{Deadline, RankFailure, StopReason};
use child_error::failures_in_a_row;
pub(super) use child_error::store_prefix;
pub use child_error::{ChildError, ErrorKind};
use held_output::OutputOfProcesses;
use running::RunningProcesses;

/// How long a process may run past the grace period before it gets SIGTERM, and after that before it gets SIGKILL.
const TERM_TIMEOUT: Duration = Duration::from_secs(5);

/// The exit code of a process that rejects its input.
const WRONG_INPUT: i32 = 2;

fn refuses_input(status: ExitStatus) -> bool {
    status.code() == Some(WRONG_INPUT)
}

/// The outcome of all the processes.
#[derive(Debug)]
#[doc(hidden)]
pub enum ProcessesEnd {
    /// All trained to the end, or stopped because of this reason.
    Well(Option<StopReason>),
    /// The first failure of the last start, and the reason of each restart before.
    Badly(Box<ChildError>, Vec<String>),
}

/// Whether the ranks of a machine are threads or processes: `--spawn`.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum SpawnChoice {
    /// Threads of one process.
    #[default]
    Threads,
    /// Processes with one rank each, started by this one.
    Processes,
}

/// The processes to start.
#[derive(Debug)]
#[doc(hidden)]
pub enum Children<'a> {
    /// One process for each rank of this placement.
    Ranks(&'a Placement),
    /// One process with all ranks as threads.
    Threads,
}

/// Starts the processes of one run and waits for them; trains nothing itself.
///
/// Each process runs this program with the same arguments, and reads its rank from its environment. The processes
/// connect to a store that this process serves, so no port is chosen before it is bound. If this process ends, for
/// whatever reason, the system kills them. Each is in a process group of its own: Ctrl-C reaches only this process,
/// which forwards it.
#[derive(Debug)]
#[doc(hidden)]
pub struct SpawnProcesses<'a> {
    /// The processes to start.
    pub children: Children<'a>,
    /// How long a request to the store may take.
    pub timeout: Duration,
    /// How long the other processes get to exit after one has failed.
    pub grace_period: Duration,
    /// Whether the processes handle signals and all stop after the same step. Otherwise a signal ends this process,
    /// and therefore them.
    pub stops: bool,
    /// How many times the processes are restarted after a failure, at most.
    pub max_restarts: usize,
    /// [`Launch::state_dir`](super::Launch::state_dir).
    pub state_dir: Option<&'a Path>,
    /// Whether the process of rank 0 gets the terminal, to draw on it.
    pub lends_terminal: bool,
}

impl SpawnProcesses<'_> {
    /// Runs the processes until all have ended and are not restarted. Wrong input, and a run that was asked to
    /// stop, are never restarted. Calls `before_restart` with the number of each restart and the failure before it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store cannot be served, [`Error::Input`] when processes cannot be started.
    #[doc(hidden)]
    pub fn run(&self, before_restart: impl Fn(usize, &ChildError)) -> Result<ProcessesEnd> {
        require_files(files_of_store(self.count()), "serving a store to the ranks")?;
        let lent = self.lends_terminal.then(LentTerminal::new).flatten();
        // The limit is for this process. Those that it starts set their own.
        let store = TcpStore::serve("127.0.0.1", 0, self.timeout.max(PARENT_TIMEOUT))?;
        let (handle, signals) = self.listen().map_err(cannot_start)?;
        let ended = self.run_starts(&store, &signals, lent.as_ref(), before_restart);
        handle.close();
        ended
    }

    fn run_starts(
        &self,
        store: &TcpStore,
        signals: &Receiver<i32>,
        lent: Option<&LentTerminal>,
        before_restart: impl Fn(usize, &ChildError),
    ) -> Result<ProcessesEnd> {
        let (began, mut restarts) = (Instant::now(), Restarts::default());
        let mut positions = Vec::new();
        let mut stays = None;
        loop {
            let restart_count = restarts.reasons.len();
            let start = Start::new(self, store, signals, restart_count);
            let (mut all, asks) = match stays.take() {
                Some((all, before)) => (all, Some(before)),
                None => (start.begin()?, None),
            };
            if let (Some(lent), Some(Some(rank_0))) = (lent, all.children.first()) {
                lent.lend_to(rank_0.id());
            }
            if let Some(asks) = asks {
                Restarts::answer(&asks, true)?;
            }
            let mut stops = start.wait(&mut all)?;
            LentTerminal::take_back();
            all.print_output();
            let Some(mut error) = start.error(&all) else {
                return Ok(ProcessesEnd::Well(all.reason_of_rank_0()));
            };
            stops |= signals.try_iter().any(asks_to_stop);
            positions.push(error.failure().and_then(RankFailure::position));
            error.repeated = failures_in_a_row(&positions);
            let wrong_input = matches!(error.kind, ErrorKind::WrongInput);
            let mut is_over = wrong_input || stops || restart_count == self.max_restarts;
            // If the run fails again at the same position, the cause may be in the process.
            if all.are_there() && (is_over || error.repeated.is_some()) {
                is_over |= start.refuse_restart(&mut all)?;
            }
            if is_over {
                return Ok(ProcessesEnd::Badly(Box::new(error), restarts.reasons));
            }
            before_restart(restart_count + 1, &error);
            let reason = error.text.lines().next().unwrap_or_default().into();
            restarts.add(reason, began.elapsed(), store)?;
            all.reap(); // it may have been killed meanwhile
            stays = all.are_there().then_some((all, start.messages));
        }
    }

    fn count(&self) -> usize {
        match self.children {
            Children::Ranks(placement) => placement.devices.len(),
            Children::Threads => 1,
        }
    }

    /// Starts a thread that receives signals. Returns the signals from now on, and the handle that ends the thread.
    fn listen(&self) -> io::Result<(Handle, Receiver<i32>)> {
        let mut handled = vec![SIGTSTP];
        if self.stops {
            end_at_second_interrupt()?;
            handled.extend(SIGNALS);
        }
        handled.retain(|signal| !os::is_ignored(*signal));
        handled.push(SIGCHLD);
        let mut signals = Signals::new(handled)?;
        os::release_signals(&SIGNALS)?;
        let (signals_tx, signals_rx) = unbounded();
        let handle = signals.handle();
        let listen = move || signals.forever().try_for_each(|signal| signals_tx.send(signal));
        let thread = thread::Builder::new().name("signals".into());
        thread.spawn(listen)?;
        Ok((handle, signals_rx))
    }

    /// Describes how process `rank` has ended.
    fn how(&self, rank: usize, pid: u32, status: ExitStatus) -> String {
        let who = match self.children {
            Children::Ranks(_) => format!("rank {rank} (process {pid})"),
            Children::Threads => format!("the process of all ranks (process {pid})"),
        };
        format!("{who} {}", how_ended(status))
    }
}

/// Describes how a process has ended, as what is to stand after its name.
#[doc(hidden)]
pub fn how_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name =
                signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string);
            format!("was killed by {name}")
        }
        (None, code) => format!("ended with exit code {}", code.unwrap_or_default()),
    }
}

fn cannot_start(error: io::Error) -> Error {
    Error::unsupported(not_started("what the ranks need, a process or a thread,", &error))
}

fn asks_to_stop(signal: i32) -> bool {
    ![SIGCHLD, SIGTSTP, SIGUSR2].contains(&signal)
}

/// Returns a command that starts this program, without arguments. If the file has been replaced or removed since,
/// the command starts the file that this process runs.
#[doc(hidden)]
pub fn this_program() -> io::Result<Command> {
    let file = env::current_exe()?;
    let mut command =
        Command::new(if file.exists() { file } else { PathBuf::from("/proc/self/exe") });
    if os::is_run_by_linker() {
        command.args(env::args_os().take(1)); // the executable is the dynamic linker
    }
    Ok(command)
}

/// One start of all ranks: in new processes, or in the one of the start before.
struct Start<'a> {
    spawn: &'a SpawnProcesses<'a>,
    /// The store of the run.
    store: &'a TcpStore,
    /// The part of it for the messages between this process and those of this start: their errors, and whether one of them
    /// makes the next start, too.
    messages: TcpStore,
    /// The signals to this process.
    signals: &'a Receiver<i32>,
    restart_count: usize,
}

impl<'a> Start<'a> {
    fn new(
        spawn: &'a SpawnProcesses<'a>,
        store: &'a TcpStore,
        signals: &'a Receiver<i32>,
        restart_count: usize,
    ) -> Self {
        let messages = store.under(&store_prefix(restart_count));
        Self { spawn, store, messages, signals, restart_count }
    }

    /// Starts the processes. If one cannot be started, kills the others.
    fn begin(&self) -> Result<RunningProcesses> {
        let output = self.spawn.lends_terminal.then(OutputOfProcesses::open).transpose();
        let output = output.map_err(cannot_start)?;
        let mut all = RunningProcesses { output, ..RunningProcesses::default() };
        for rank in 0..self.spawn.count() {
            match self.start(rank, all.output.as_ref()) {
                Ok(child) => all.children.push(Some(child)),
                Err(error) => {
                    all.kill();
                    all.print_output();
                    return Err(cannot_start(error));
                }
            }
        }
        Ok(all)
    }

    fn start(&self, rank: usize, output: Option<&OutputOfProcesses>) -> io::Result<Child> {
        let mut command = this_program()?;
        command.args(env::args_os().skip(1)).stdin(Stdio::null()).process_group(0);
        let (restart_count, max_restarts) = (self.restart_count, self.spawn.max_restarts);
        let (port, state_dir) = (self.store.port(), self.spawn.state_dir.map(PathBuf::from));
        let mut start = ParentStart { rank: None, port, restart_count, max_restarts, state_dir };
        if let Children::Ranks(Placement { devices, threads_per_rank, .. }) = self.spawn.children {
            start.rank = Some([rank, devices.len()]);
            command.env("OMP_NUM_THREADS", threads_per_rank.to_string());
        }
        command.env(PARENT_START, serde_json::to_string(&start)?);
        if let Some(output) = output.filter(|_| rank > 0) {
            output.capture(&mut command)?;
        }
        let held: &[i32] = if self.spawn.stops { &SIGNALS } else { &[] };
        os::tie_to_this_process(&mut command, held);
        command.spawn()
    }

    /// Waits until all processes have ended, or the one with all ranks waits for its restart. Forwards signals, and kills
    /// processes that do not exit after a failure. Returns whether a signal has asked the run to stop.
    ///
    /// # Errors
    /// [`Error::Store`] when the store does not say whether a process waits.
    fn wait(&self, all: &mut RunningProcesses) -> Result<bool> {
        let mut stops = false;
        let mut final_signals = [SIGTERM, SIGKILL].into_iter();
        let mut deadline: Option<Deadline> = None;
        let mut terminated: Option<Instant> = None;
        all.reap();
        while all.are_there() && !self.waits_for_restart()? {
            let signal = match deadline {
                None => self.signals.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => deadline.recv(self.signals),
            };
            match signal {
                Ok(SIGCHLD) => {}
                Ok(SIGTSTP) => {
                    // Ctrl-Z reaches this process alone. Without it the others would miss their store.
                    all.send(SIGSTOP);
                    let _ = emulate_default_handler(SIGTSTP); // returns when this process goes on
                    all.send(SIGCONT);
                }
                Ok(signal) => {
                    if signal == SIGTERM
                        && terminated.get_or_insert_with(Instant::now).elapsed() >= SAME_REQUEST
                    {
                        os::terminal::restore();
                        if let Some(state_dir) = self.spawn.state_dir {
                            let _ = fs::remove_dir_all(state_dir); // if this fails, it stays
                        }
                        os::exit(code_of(SIGTERM)); // the system kills the processes
                    }
                    stops |= asks_to_stop(signal);
                    all.send(signal);
                }
                Err(_) => {
                    all.send(final_signals.next().unwrap_or(SIGKILL));
                    deadline = Some(Deadline::after(TERM_TIMEOUT));
                }
            }
            all.reap();
            if let Some(None) = all.children.first() {
                LentTerminal::take_back(); // the user needs Ctrl-C while the others end
            }
            if deadline.is_none() && all.first_failure().is_some() {
                let patience = self.spawn.grace_period.saturating_add(TERM_TIMEOUT);
                deadline = Some(Deadline::after(patience));
                // A killed process cannot report its own end. If the report fails, the other processes notice the end
                // as they would across machines.
                all.first_error = self.report(all).ok().flatten();
            }
        }
        Ok(stops)
    }

    /// Returns whether the process with all ranks has ended this start, and waits for the next one.
    fn waits_for_restart(&self) -> Result<bool> {
        match self.spawn.children {
            Children::Threads => Restarts::is_asked(&self.messages),
            Children::Ranks(_) => Ok(false),
        }
    }

    /// Answers a process that waits for its restart that there is none, and waits for its end. Returns whether a signal has
    /// asked the run to stop.
    fn refuse_restart(&self, all: &mut RunningProcesses) -> Result<bool> {
        if Restarts::answer(&self.messages, false).is_err() {
            all.kill();
            return Ok(false);
        }
        self.wait(all)
    }

    /// Reports to the other processes that the first one has failed. Returns its error for the user, with what its rank
    /// was last seen doing; `None` if the rank has left its own error, or has printed it.
    fn report(&self, all: &mut RunningProcesses) -> Result<Option<ChildError>> {
        let (Some(&(rank, pid, status)), Children::Ranks(placement)) =
            (all.first_failure(), &self.spawn.children)
        else {
            return Ok(None);
        };
        let how = self.spawn.how(rank, pid, status);
        let store_of_run = self.store.under(&prefix("none", self.restart_count as i64));
        report_absent(&store_of_run, rank)?;
        if refuses_input(status) || ChildError::is_in(&self.messages, rank)? {
            report_ended(&store_of_run, rank, None, &how)?;
            return Ok(None);
        }
        let others: Vec<usize> =
            (0..placement.devices.len()).filter(|other| *other != rank).collect();
        let runs = |other: usize| {
            let child = all.children[other].as_mut();
            child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
        };
        let (text, step) = match waited_for(&store_of_run, &others, runs)? {
            Some((waits, step)) => (format!("{how}; {waits}"), step),
            None => (how, None),
        };
        let at = report_ended(&store_of_run, rank, step, &text)?;
        Ok(Some(ended_rank(placement, rank, at, text)))
    }

    /// Returns the error of the process that waits for its restart, or else of the first one that failed, or of the rank that
    /// its error blames, if that rank left one. `None` if no process has failed.
    fn error(&self, all: &RunningProcesses) -> Option<ChildError> {
        let read = |rank| ChildError::read(&self.messages, rank);
        if all.are_there() {
            let unknown = || "the ranks have failed, and their error cannot be read".into();
            return Some(read(0).unwrap_or_else(|| ChildError::new(unknown(), ErrorKind::Process)));
        }
        let &(rank, pid, status) = all.first_failure()?;
        let blamed = |error: &ChildError| {
            error.failure().filter(|failure| failure.tied.is_empty()).map(|failure| failure.rank)
        };
        let first = read(rank).or_else(|| all.first_error.clone());
        let first = first.unwrap_or_else(|| self.without_error(rank, pid, status));
        let blamed_error = blamed(&first).filter(|other| *other != rank).and_then(read);
        Some(blamed_error.filter(|error| blamed(error) == blamed(&first)).unwrap_or(first))
    }

    /// Returns the error of a process that has left none.
    fn without_error(&self, rank: usize, pid: u32, status: ExitStatus) -> ChildError {
        let text = self.spawn.how(rank, pid, status);
        match self.spawn.children {
            _ if refuses_input(status) => ChildError::new(text, ErrorKind::WrongInput),
            Children::Ranks(placement) => {
                ended_rank(placement, rank, OpId { operation: Operation::Start, sequence: 0 }, text)
            }
            Children::Threads => ChildError::new(text, ErrorKind::Process),
        }
    }
}

/// Returns the error of the process of `rank`, which ended in `at`. `text` says how.
fn ended_rank(placement: &Placement, rank: usize, at: OpId, text: String) -> ChildError {
    let device = placement.label(rank, 0);
    let failure = RankFailure { rank, tied: Vec::new(), device, at, error: text.clone() };
    ChildError::new(text, ErrorKind::Ranks(failure))
}

#[cfg(test)]
mod tests {
    use super::super::{BackendChoice, NodeSlice, Nproc, place};
    use super::*;
    use crate::ffi::cuda::Cuda;
    use crate::process_group::Backend;

    const TIME: Duration = Duration::from_secs(5);

    fn spawn_of(children: Children<'_>) -> SpawnProcesses<'_> {
        SpawnProcesses {
            children,
            timeout: TIME,
            grace_period: TIME,
            stops: true,
            max_restarts: 3,
            state_dir: None,
            lends_terminal: false,
        }
    }

    /// No signal would wake the parent again.
    #[test]
    fn wait_ends_if_the_store_does_not_answer() {
        let spawn = spawn_of(Children::Threads);
        let server = TcpStore::serve("127.0.0.1", 0, TIME).unwrap();
        let store = TcpStore::connect("127.0.0.1", server.port(), TIME).unwrap();
        let (_signals_tx, signals) = unbounded();
        let start = Start::new(&spawn, &store, &signals, 0);
        drop(server);
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let mut all =
            RunningProcesses { children: vec![Some(child)], ..RunningProcesses::default() };
        let waited = start.wait(&mut all);
        all.kill();
        assert!(matches!(waited, Err(Error::Store { .. })), "{waited:?}");
    }

    #[test]
    fn process_that_exits_with_2_makes_the_run_wrong_input() {
        let (count, no_gpu) = (Nproc::Count(2), Cuda::default());
        let placement =
            place(count, BackendChoice::Given(Backend::Threaded), &no_gpu, &NodeSlice::all(8))
                .unwrap();
        let spawn = spawn_of(Children::Ranks(&placement));
        let store = TcpStore::serve("127.0.0.1", 0, TIME).unwrap();
        let (_signals_tx, signals) = unbounded();
        for (restart_count, code) in [2, 1].into_iter().enumerate() {
            let start = Start::new(&spawn, &store, &signals, restart_count);
            // A process whose --config has changed meanwhile ends like this, before it has joined.
            let exit = format!("exit {code}");
            let status = Command::new("sh").args(["-c", &exit]).status().unwrap();
            let (ended, children) = (vec![(1, 7, status)], vec![None, None]);
            let mut all = RunningProcesses { ended, children, ..RunningProcesses::default() };
            all.first_error = start.report(&mut all).unwrap();
            let error = start.error(&all).unwrap();
            assert_eq!(matches!(error.kind, ErrorKind::WrongInput), code == 2, "{error:?}");
            assert_eq!(error.failure().is_none(), code == 2, "{error:?}");
        }
    }
}
