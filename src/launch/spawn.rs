//! `spawn`: a thread for each rank, and what happens when one of them fails.

use std::mem;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, never, unbounded};
use crossbeam::select;
use tch::Device;

use super::rank_thread::{Ended, RankThread};
use super::rendezvous;
use super::stall::{Tell, stalled, table};
use super::watch::Stay;
use super::{Placement, Rank, RankFailure, SpawnError, StuckRank, World};
use crate::observe::{LogFormat, Printer, TRACED, trace_output, write_trace};
use crate::operation::Operation;
use crate::process_group::rank_label;
use crate::sync::{Failure, Fault, History, Run, Stop, Timeline};
#[cfg(doc)]
use crate::torch;

/// NCCL's initialisation and the freeing of deep autograd graphs need more than Rust's 2 MiB. Only what
/// is used becomes memory.
const STACK_BYTES: usize = 64 << 20;

/// A wait that nobody sees the end of; longer ones cannot be added to a point in time.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Runs `f` on `world_size` CPU ranks and returns what each has returned, in the order of the ranks: [`Spawn`] with
/// its defaults.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// let squares = ddp_mp::spawn(4, |rank| Ok(rank.rank() * rank.rank()))?;
/// assert_eq!(squares, [0, 1, 4, 9]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`Spawn::run`].
pub fn spawn<T, F>(world_size: usize, f: F) -> Result<Vec<T>, Box<SpawnError>>
where
    T: Send + 'static,
    F: Fn(&Rank) -> anyhow::Result<T> + Send + Sync + 'static,
{
    Spawn::new(world_size).run(f)
}

/// How to start the ranks. Follows `torch.multiprocessing.spawn`, with threads for processes:
///
/// * Nothing is pickled: `f` is shared, and what it captures exists once.
/// * The first rank that returns an error or panics ends the run. A thread cannot be killed, so the
///   others are asked to stop: whatever of this crate they wait in returns
///   [`Error::Cancelled`](crate::Error::Cancelled) at once, and they end at their next `?`. A rank that computes goes on until
///   its next collective. One that does not come back within the grace period is named in the error,
///   and its thread is left behind: exit the process then.
/// * What takes the process down (a segmentation fault, `abort`, the out-of-memory killer) takes all
///   ranks down. In exchange no rank can be orphaned.
/// * What `f` returns on each rank is handed to the caller, where PyTorch drops it.
#[derive(Debug, Clone)]
pub struct Spawn {
    devices: Vec<Device>,
    threads_per_rank: usize,
    timeout: Duration,
    grace_period: Duration,
    fault: Option<Fault>,
    check_collectives: bool,
    world: Option<Arc<World>>,
    stall_warning: Duration,
    asks: Receiver<()>,
    tell: Tell,
    stop: Option<Arc<Stop>>,
    trace: Option<PathBuf>,
    history: Option<Arc<OnceLock<History>>>,
}

impl Spawn {
    /// `world_size` ranks on the CPU.
    pub fn new(world_size: usize) -> Self {
        Self::on(vec![Device::Cpu; world_size])
    }

    /// One rank for each of `devices`. Before GPUs can be used, [`cuda::load`](torch::cuda::load) must
    /// have been called.
    pub fn on(devices: Vec<Device>) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            threads_per_rank: (cores / devices.len().max(1)).max(1),
            devices,
            timeout: Self::TIMEOUT,
            grace_period: Self::GRACE_PERIOD,
            fault: None,
            check_collectives: false,
            world: None,
            stall_warning: Self::STALL_WARNING,
            asks: never(),
            tell: Tell::new(|text| Printer::new(LogFormat::Text).note(text)),
            stop: None,
            trace: None,
            history: None,
        }
    }

    /// The ranks of `placement`.
    pub fn at(placement: &Placement) -> Self {
        Self::on(placement.devices.clone()).threads_per_rank(placement.threads_per_rank)
    }

    /// How long a rank waits for the others, unless told otherwise: PyTorch's 10 minutes for NCCL.
    pub const TIMEOUT: Duration = Duration::from_secs(600);

    /// After how long in a collective who is missing is told, unless told otherwise.
    pub const STALL_WARNING: Duration = Duration::from_secs(10);

    /// How long ranks get to come back after a failure, unless told otherwise: PyTorch's 30 seconds.
    pub const GRACE_PERIOD: Duration = Duration::from_secs(30);

    /// How many threads libtorch uses in each rank; otherwise the cores, divided by the ranks.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = threads;
        self
    }

    /// How long a rank waits in a collective for the others before that is an error; at most a hundred
    /// years.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(LONGEST);
        self
    }

    /// How long the others get to come back after one rank has failed; at most a hundred years.
    pub fn grace_period(mut self, grace_period: Duration) -> Self {
        self.grace_period = grace_period.min(LONGEST);
        self
    }

    /// After how long in a collective `tell` hears who is missing there, once, instead of after
    /// [`Spawn::STALL_WARNING`] stderr. It may have several lines.
    pub fn stall_warning(
        mut self,
        limit: Duration,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        self.stall_warning = limit.min(LONGEST);
        self.tell = Tell::new(tell);
        self
    }

    /// Has whoever is told of stalls hear what each rank does, whenever something arrives in `asks`.
    pub fn table_when(mut self, asks: Receiver<()>) -> Self {
        self.asks = asks;
        self
    }

    /// Writes what each rank has done, and when, to the file `path` for Perfetto and chrome://tracing, when all have
    /// ended, well or not; several processes write a file each. Whoever is told of stalls hears if that fails. Training
    /// steps are seen that begin with [`ProcessGroup::enter_step`](crate::ProcessGroup::enter_step).
    pub fn trace(self, path: impl Into<PathBuf>) -> Self {
        Self { trace: Some(path.into()), ..self }
    }

    /// Keeps more of what the ranks do, and leaves it in `history` when all have ended.
    pub(crate) fn history(self, history: Option<Arc<OnceLock<History>>>) -> Self {
        Self { history, ..self }
    }

    /// Makes the ranks part of a run of several processes, in which they come after those of the processes before.
    pub fn world(mut self, world: Option<Arc<World>>) -> Self {
        self.world = world;
        self
    }

    /// Lets the signals that ask `stop` also end the time for which this process serves the store to others.
    pub(crate) fn stop(self, stop: Arc<Stop>) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Makes one rank fail, to see what happens.
    pub fn fault(mut self, fault: Option<Fault>) -> Self {
        self.fault = fault;
        self
    }

    /// Compares what the ranks call at every collective also with `nccl`, where that costs a little: a
    /// difference is then an error that says who called what, instead of a hang or worse. Other backends
    /// always do.
    pub fn check_collectives(mut self, check: bool) -> Self {
        self.check_collectives = check;
        self
    }

    /// Starts the ranks, runs `f` on each, and returns when all have ended: what `f` has returned on each rank of this
    /// process, in the order of the ranks.
    ///
    /// # Errors
    /// The first failure of a rank, and which ranks did not come back; see [`Spawn`].
    pub fn run<T, F>(self, f: F) -> Result<Vec<T>, Box<SpawnError>>
    where
        T: Send + 'static,
        F: Fn(&Rank) -> anyhow::Result<T> + Send + Sync + 'static,
    {
        let count = self.devices.len();
        let world_size = self.world.as_ref().map_or(count, |world| world.world_size());
        let mut run = Run::new(world_size, self.timeout, self.fault);
        run.check_collectives = self.check_collectives;
        if self.trace.is_some() || self.history.is_some() {
            run.timeline = Timeline::new(world_size, TRACED);
        }
        if let Some(world) = &self.world {
            run.ranks_here = world.ranks_of_machine();
            run.elsewhere = Some(world.watch().elsewhere());
            for rank in (0..world_size).filter(|rank| !world.ranks_here().contains(rank)) {
                run.activity[rank].enter(Operation::Start, 0); // until more is known
            }
        }
        let run = Arc::new(run);
        let (ended, ends) = unbounded();
        let f = Arc::new(f);

        let mut threads: Vec<Thread<T>> = Vec::with_capacity(count);
        let (first, first_local) =
            (self.first(), self.world.as_ref().map_or(0, |it| it.first_local()));
        if let Some(world) = &self.world
            && let Err(error) = world.watch().start(&run)
        {
            run.report(first, Some(&error), error.to_string());
        }
        for (local_rank, rendezvous) in rendezvous::channels(count).into_iter().enumerate() {
            let rank = first + local_rank;
            let start = RankThread {
                rank,
                local_rank: first_local + local_rank,
                first,
                device: self.devices[local_rank],
                world: self.world.clone(),
                threads: self.threads_per_rank,
                rendezvous,
                run: run.clone(),
                ended: ended.clone(),
            };
            let f = f.clone();
            let thread = thread::Builder::new()
                .name(format!("rank{rank}"))
                .stack_size(STACK_BYTES)
                .spawn(move || start.main(&*f));
            match thread {
                Ok(thread) => threads.push(Thread::Runs(thread)),
                Err(error) => {
                    run.activity[rank].enter(Operation::Start, 0);
                    run.report(rank, None, format!("its thread cannot be started: {error}"));
                    break;
                }
            }
        }
        drop(ended);
        let table = self.wait(&run, &ends, &mut threads);
        if let Some(world) = &self.world {
            let failed = run.cancel.cancelled_by().is_some();
            let asked_to_end = || self.stop.as_ref().is_some_and(|it| it.asked_for().is_some());
            let stay = Stay { patience: self.grace_period, failed, asked_to_end: &asked_to_end };
            world.leave(stay);
        }
        self.leave_history(&run);
        self.result(&run, threads, table)
    }

    /// What the ranks have done goes to whoever wants it.
    fn leave_history(&self, run: &Run) {
        if self.trace.is_none() && self.history.is_none() {
            return;
        }
        let world = self.world.as_ref();
        let process = world.map_or([0, 1], |world| [world.process(), world.num_processes()]);
        let here = self.first()..self.first() + self.devices.len();
        let clock = world.and_then(|world| world.clock());
        let history = History::of(run, here, |rank| self.device(rank), process, clock);
        if let Some(path) = &self.trace {
            let written = trace_output(path, process)
                .and_then(|it| it.write(|file| write_trace(&history, file)));
            if let Err(error) = written {
                self.tell.tell(&format!("the trace {} cannot be written: {error}", path.display()));
            }
        }
        if let Some(slot) = &self.history {
            let _ = slot.set(history); // a second run of the same keeps the first one's
        }
    }

    /// What is said of a rank's device.
    fn device(&self, rank: usize) -> String {
        match &self.world {
            Some(world) => world.label(rank),
            None => rank_label(self.devices[rank], rank),
        }
    }

    /// The first rank of this process.
    fn first(&self) -> usize {
        self.world.as_ref().map_or(0, |world| world.ranks_here().start)
    }

    /// What the ranks have returned, or the first failure, with all that is known about it.
    fn result<T>(
        &self,
        run: &Run,
        threads: Vec<Thread<T>>,
        table: Option<String>,
    ) -> Result<Vec<T>, Box<SpawnError>> {
        let first = self.first();
        let mut failures = run.failures();
        let table = table.filter(|_| failures.first().is_some_and(|it| it.waited));
        let mut failures =
            failures.drain(..).map(|Failure { rank, tied, at, error, .. }| RankFailure {
                rank,
                tied: tied.into_iter().map(|rank| (rank, self.device(rank))).collect(),
                device: self.device(rank),
                at,
                error,
            });
        let Some(failure) = failures.next() else {
            // Without a failure every rank has started and ended, and has returned something.
            return Ok(threads.into_iter().filter_map(Thread::value).collect());
        };
        let still_running = threads.iter().zip(first..).filter(|(thread, _)| thread.runs());
        let still_running = still_running.map(|(_, rank)| rank);
        Err(Box::new(SpawnError {
            failure,
            also_failed: failures.collect(),
            stuck: still_running
                .map(|rank| StuckRank {
                    rank,
                    device: self.device(rank),
                    last_seen: run.activity[rank].now(),
                })
                .collect(),
            grace_period: self.grace_period,
            table,
        }))
    }

    /// Joins the threads as they end; gives up on the rest when the grace period is over. Threads that still run
    /// did not come back. Returns what each rank was doing when the run failed, if it has.
    fn wait<T>(
        &self,
        run: &Run,
        ends: &Receiver<Ended<T>>,
        threads: &mut [Thread<T>],
    ) -> Option<String> {
        let (mut running, first) = (threads.len(), self.first());
        let mut join = |Ended { rank, value }| {
            if let Thread::Runs(thread) =
                mem::replace(&mut threads[rank - first], Thread::Ended(value))
            {
                // Panics of `f` were caught, and this thread has said that it is past everything else.
                let _ = thread.join();
            }
        };
        let here = first..first + running;
        let mut told = None;
        while running > 0 && run.cancel.cancelled_by().is_none() {
            select! {
                recv(self.asks) -> _ => {
                    self.tell.tell(&format!("what each rank does\n{}", table(run, here.clone())));
                    continue;
                }
                default(self.stall_warning.div_f64(8.0).clamp(LOOK.0, LOOK.1)) => {
                    if let Some(stall) = stalled(run, here.clone(), self.stall_warning)
                        && told != Some(stall)
                        && let Some(text) = stall.text(run, here.clone(), self.stall_warning)
                    {
                        self.tell.tell(&text);
                        told = Some(stall);
                    }
                    continue;
                }
                recv(ends) -> ended => match ended {
                    Ok(ended) => join(ended),
                    Err(_) => return None,
                },
                recv(run.cancel.tripped()) -> _ => break,
            }
            running -= 1;
        }
        let table = run.cancel.cancelled_by().map(|_| {
            if run.failures().first().is_some_and(|it| it.waited) {
                run.ask();
            }
            table(run, here)
        });
        let deadline = Instant::now() + self.grace_period;
        while running > 0 {
            let Ok(ended) = ends.recv_deadline(deadline) else { break };
            join(ended);
            running -= 1;
        }
        table
    }
}

/// How often somebody looks for stalls, at most and at least.
const LOOK: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// A rank's thread, as the one that has started it sees it.
enum Thread<T> {
    /// It runs, or has not been joined yet.
    Runs(JoinHandle<()>),
    /// It is gone; with what its function returned, unless that failed.
    Ended(Option<T>),
}

impl<T> Thread<T> {
    fn runs(&self) -> bool {
        matches!(self, Thread::Runs(_))
    }

    fn value(self) -> Option<T> {
        match self {
            Thread::Runs(_) => None,
            Thread::Ended(value) => value,
        }
    }
}
