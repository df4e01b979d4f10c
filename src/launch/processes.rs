//! `--spawn=processes`: a process for each rank of this machine, as `torch.multiprocessing.spawn` starts them.

use std::env;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded, unbounded};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGCHLD, SIGKILL, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::signal_name;

use super::environment::variables_of_spawned;
use super::signals::{SIGNALS, end_at_second_interrupt, reason_of};
use super::watch::{tell_ended, waited_for};
use super::{Master, Placement, world};
use crate::error::{Error, Result};
use crate::observe::Failure;
use crate::process_group::rank_label;
use crate::sync::StopReason;
use crate::torch::{self, TcpStore};

/// After the grace period the processes end by themselves; after so long they are asked to, and after as long again
/// killed.
const MERCY: Duration = Duration::from_secs(5);

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
    /// Leaves it with the process whose store is at `parent`.
    ///
    /// # Errors
    /// [`Error::Store`] when nobody takes it.
    pub(crate) fn leave(&self, parent: &Master, rank: usize) -> Result<()> {
        let (_open, never) = bounded(0);
        let store = TcpStore::connect(&parent.addr, parent.port, MERCY, never)?;
        store.set(&report_of(rank), &serde_json::to_vec(self).unwrap_or_default())?;
        // That it has arrived is known from the answer to the next request.
        store.check(&[report_of(rank)]).map(drop)
    }
}

fn report_of(rank: usize) -> String {
    format!("report/{rank}")
}

/// How all the processes have ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// As they were to, or as they were asked to.
    Well(Option<StopReason>),
    /// The first failure.
    Badly(Report),
}

/// Starts the processes of one run and waits for them; trains nothing.
///
/// Each runs this very program with the same arguments, and finds out from its environment which rank it is. They meet
/// in a store that this process serves, so that no port is chosen before it is listened at. Should this process end,
/// however that is, the system kills them. They are a process group each: Ctrl-C reaches this process alone, which
/// passes it on.
#[derive(Debug)]
pub(crate) struct SpawnProcesses<'a> {
    /// Where the ranks run.
    pub placement: &'a Placement,
    /// How long a request to the store may take.
    pub timeout: Duration,
    /// How long the others get to come back after one has failed.
    pub grace_period: Duration,
    /// Whether they stop at a signal, all after the same step. Otherwise signals end this process, and so them.
    pub stops: bool,
}

impl SpawnProcesses<'_> {
    /// Returns when all have ended.
    ///
    /// # Errors
    /// [`Error::Store`] when the store cannot be served, [`Error::Input`] when processes cannot be started.
    pub(crate) fn run(&self) -> Result<Ended> {
        let (_open, never) = bounded(0);
        let store = TcpStore::serve("127.0.0.1", 0, self.timeout, never)?;
        let cannot = |error: io::Error| {
            Error::Input(format!("--spawn=processes: a process cannot be started: {error}"))
        };
        let (handle, signals) = self.listen().map_err(cannot)?;
        let mut all = Processes { children: Vec::new(), ended: Vec::new() };
        for rank in 0..self.placement.devices.len() {
            // Those that are there end with this process.
            all.children.push(Some(self.start(rank, store.port()).map_err(cannot)?));
        }
        self.wait(&mut all, &store, &signals);
        handle.close();
        Ok(self.result(&all, &store))
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
        thread::Builder::new().name("signals".into()).spawn(listen)?;
        Ok((handle, events))
    }

    fn start(&self, rank: usize, port: u16) -> io::Result<Child> {
        let Placement { devices, threads_per_rank, .. } = self.placement;
        let mut command = Command::new(env::current_exe()?);
        command.args(env::args_os().skip(1)).stdin(Stdio::null()).process_group(0);
        for (name, value) in variables_of_spawned([rank, devices.len(), *threads_per_rank], port) {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        torch::tie_to_this_process(&mut command, if self.stops { &SIGNALS } else { &[] });
        command.spawn()
    }

    /// Until all have ended: passes signals on, and ends who does not come back after a failure.
    fn wait(&self, all: &mut Processes, store: &TcpStore, signals: &Receiver<i32>) {
        let mut last_words = [SIGTERM, SIGKILL].into_iter();
        let mut deadline: Option<Instant> = None;
        while all.are_there() {
            let signal = match deadline {
                None => signals.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => signals.recv_deadline(deadline),
            };
            match signal {
                Ok(SIGCHLD) => {}
                Ok(signal) => all.send(signal),
                Err(_) => {
                    all.send(last_words.next().unwrap_or(SIGKILL));
                    deadline = Some(Instant::now() + MERCY);
                }
            }
            all.reap();
            if let (None, Some(&(rank, pid, status))) = (deadline, all.first_failure()) {
                deadline = Some(Instant::now() + self.grace_period.saturating_add(MERCY));
                // Who is killed tells nobody. What fails here the others find out as they would on several machines.
                let _ = self.tell(store, rank, &how(rank, pid, status));
            }
        }
    }

    /// Tells the others that `rank` has ended, and this process what it was last seen doing.
    fn tell(&self, store: &TcpStore, rank: usize, error: &str) -> Result<()> {
        let store_of_run = store.under(&world::prefix("none", 0));
        world::tell_absent(&store_of_run, rank)?;
        if store.check(&[report_of(rank)])? {
            // It has told itself.
            return tell_ended(&store_of_run, rank, None, error).map(drop);
        }
        let waits = waited_for(&store_of_run, rank, self.placement.devices.len())?;
        let (waits, at) =
            waits.map_or_else(Default::default, |(waits, at)| (format!("; {waits}"), at));
        let error = &(error.to_owned() + &waits);
        let at = tell_ended(&store_of_run, rank, at, error)?;
        let failure = Some(Failure {
            rank: Some(rank),
            ranks: Vec::new(),
            device: rank_label(self.placement.devices[rank], rank),
            operation: at.operation.to_string(),
            sequence: at.sequence,
            error: error.clone(),
        });
        let report = Report { text: error.clone(), wrong_input: false, failure };
        store.set(&report_of(rank), &serde_json::to_vec(&report).unwrap_or_default())
    }

    /// The report of the first that has failed; better that of the rank to blame, if it has left one.
    fn result(&self, all: &Processes, store: &TcpStore) -> Ended {
        let Some(&(rank, pid, status)) = all.first_failure() else {
            let of_rank_0 = all.ended.iter().find(|(rank, ..)| *rank == 0);
            let code = of_rank_0.and_then(|(.., status)| status.code());
            return Ended::Well(code.and_then(reason_of).flatten());
        };
        let read = |rank: usize| -> Option<Report> {
            // A get without time to wait may find nothing where there is something.
            store.check(&[report_of(rank)]).ok().filter(|is_there| *is_there)?;
            let text = store.get(&report_of(rank), MERCY).ok()??;
            serde_json::from_slice(&text).ok()
        };
        let blamed = |report: &Report| report.failure.as_ref().and_then(|failure| failure.rank);
        let first = read(rank)
            .unwrap_or_else(|| Report { text: how(rank, pid, status), ..Report::default() });
        let of_blamed = blamed(&first).filter(|it| *it != rank).and_then(read);
        Ended::Badly(of_blamed.filter(|it| blamed(it) == blamed(&first)).unwrap_or(first))
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
            let _ = torch::send_signal(child, signal);
        }
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

/// How a process has ended.
fn how(rank: usize, pid: u32, status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name =
                signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string);
            format!("rank {rank} (process {pid}) was killed by {name}")
        }
        (None, code) => {
            let code = code.unwrap_or_default();
            format!("rank {rank} (process {pid}) ended with exit code {code}")
        }
    }
}
