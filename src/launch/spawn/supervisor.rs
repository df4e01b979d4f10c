//! The supervisor of the ranks: starts, watches and joins their threads, and keeps the first failure.

use std::io;
use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, unbounded};
use crossbeam::select;

use super::stopping::Stopping;
use super::{Spawn, leave_failure};
use crate::error::{Result, Shown};
use crate::ffi::{check_version, give_back_memory};
use crate::launch::heartbeat_monitor::Stay;
use crate::launch::rank_thread::{Ended, RankThread};
use crate::launch::stall::{stalled, status_table};
use crate::launch::{Binding, LocalRanks, RankFailure, SpawnError, StuckRank, rendezvous};
use crate::operation::Operation;
use crate::os::affinity::CpuList;
use crate::os::limits::not_started;
use crate::process_group::rank_label;
use crate::runtime::{FlightRecorder, FlightRecorderDump, ReportedFailure, RunContext, deadline};
use crate::telemetry::{TRACED, trace_output, write_trace};

/// The stack size of a rank's thread. NCCL's initialisation and the freeing of deep autograd graphs need more than
/// Rust's 2 MiB. Only the used part takes memory.
const STACK_BYTES: usize = 64 << 20;

impl Spawn {
    /// Starts a thread for each rank with `start`. Returns when all have ended and have been joined with `join`, or
    /// when the grace period after a failure is over. Returns the results of the ranks, in rank order.
    pub(super) fn supervise<T, J>(
        &self,
        mut start: impl FnMut(thread::Builder, RankThread<T>) -> io::Result<J>,
        join: impl Fn(J),
    ) -> Result<Vec<T>, Box<SpawnError>> {
        let count = self.devices.len();
        let world_size = self.world_size();
        let mut run = RunContext::new(world_size, self.timeout, self.fault);
        run.check_collectives = self.check_collectives;
        if self.trace.is_some() || self.dump.is_some() {
            run.flight_recorder = FlightRecorder::new(world_size, TRACED);
        }
        if let Some(world) = &self.world {
            run.ranks_here = world.ranks_of_machine()[1];
            run.peer_status = Some(world.heartbeat_monitor().elsewhere());
            for rank in (0..world_size).filter(|rank| !world.ranks_here().contains(rank)) {
                run.activity[rank].enter(Operation::Start, 0); // until more is known
            }
        }
        let run = Arc::new(run);
        let (ended, ends) = unbounded();

        let mut threads: Vec<Thread<T, J>> = Vec::with_capacity(count);
        let (first, first_local) =
            (self.first(), self.world.as_ref().map_or(0, |world| world.first_local()));
        if let Some(world) = &self.world
            && let Err(error) = world.heartbeat_monitor().start(&run)
        {
            run.report(first, Some(&error), error.to_string());
        }
        let cpus = self.cpus().unwrap_or_else(|error| {
            run.report(first, Some(&error), error.to_string());
            Vec::new()
        });
        // Before the ranks print their first lines, which would be lost on the view's screen.
        let view = self.view.as_ref().and_then(|view| {
            let labels = (0..world_size).map(|rank| self.device(rank)).collect();
            view.start(&run, first..first + count, labels, self.stop.clone())
        });
        // Ahead of the ranks, which use libtorch.
        let libtorch = check_version();
        if let Err(error) = &libtorch {
            run.report(first, Some(error), error.to_string());
        }
        let startable = if libtorch.is_ok() { count } else { 0 };
        for (local_rank, rendezvous) in rendezvous::channels(startable).into_iter().enumerate() {
            let rank = first + local_rank;
            let thread = RankThread {
                rank,
                local_rank: first_local + local_rank,
                first,
                device: self.devices[local_rank],
                world: self.world.clone(),
                threads: self.threads_per_rank,
                bind: self.bind,
                cpus: cpus.get(local_rank).cloned(),
                backend: self.backend,
                rendezvous,
                run: run.clone(),
                ended: ended.clone(),
            };
            let builder =
                thread::Builder::new().name(format!("rank{rank}")).stack_size(STACK_BYTES);
            match start(builder, thread) {
                Ok(thread) => threads.push(Thread::Runs(thread)),
                Err(error) => {
                    run.activity[rank].enter(Operation::Start, 0);
                    run.report(rank, None, not_started("its thread", &error));
                    break;
                }
            }
        }
        drop(ended);
        let table = self.wait(&run, &ends, &mut threads, join);
        drop(view);
        give_back_memory();
        if let Some(world) = &self.world {
            let failed = run.cancel.cancelled_by().is_some();
            let asked_to_end =
                || self.stop.as_ref().is_some_and(|stop| stop.request_reason().is_some());
            let stay = Stay { patience: self.grace_period, failed, asked_to_end: &asked_to_end };
            world.leave(stay);
        }
        self.leave_history(&run);
        let result = self.result(&run, threads, table);
        if let (Err(error), Some(launch)) = (&result, &self.launch) {
            leave_failure(launch, &error.to_string(), |text| self.tell.notify(text));
        }
        result
    }

    /// Returns the CPUs of each rank of this process; none if the ranks are not bound.
    fn cpus(&self) -> Result<Vec<CpuList>> {
        let count = self.devices.len();
        let whole_machine = [0, count];
        let world = self.world.as_ref();
        let [first, on_machine] = world.map_or(whole_machine, |world| world.ranks_of_machine());
        let Some(&device) = self.devices.first() else { return Ok(Vec::new()) };
        let here = first..first + count;
        let ranks = LocalRanks { here, on_machine, threads: self.threads_per_rank, device };
        Ok(match self.bind.binding(&ranks)? {
            Binding::Bound(cpus) => cpus,
            Binding::Unbound(_) => Vec::new(),
        })
    }

    /// Writes the trace and stores the flight recorder's dump, if either was requested.
    fn leave_history(&self, run: &RunContext) {
        if self.trace.is_none() && self.dump.is_none() {
            return;
        }
        let world = self.world.as_ref();
        let process = world.map_or([0, 1], |world| [world.process(), world.num_processes()]);
        let here = self.first()..self.first() + self.devices.len();
        let clock = world.and_then(|world| world.clock());
        let dump = FlightRecorderDump::of(run, here, |rank| self.device(rank), process, clock);
        if let Some(path) = &self.trace {
            let written = trace_output(path, process)
                .and_then(|output| output.write(|file| write_trace(&dump, file)));
            if let Err(error) = written {
                self.tell.notify(&format!("the trace {} cannot be written: {error}", path.shown()));
            }
        }
        if let Some(slot) = &self.dump {
            let _ = slot.set(dump); // a second run keeps the first one's dump
        }
    }

    /// Returns the name of a rank's device, for the user.
    fn device(&self, rank: usize) -> String {
        match &self.world {
            Some(world) => world.label(rank),
            None => rank_label(self.devices[rank], rank),
        }
    }

    /// Returns the first rank of this process.
    fn first(&self) -> usize {
        self.world.as_ref().map_or(0, |world| world.ranks_here().start)
    }

    /// Returns a failure with the devices of its ranks.
    fn named(
        &self,
        ReportedFailure { rank, tied, at, error, .. }: &ReportedFailure,
    ) -> RankFailure {
        let tied = tied.iter().map(|&rank| (rank, self.device(rank))).collect();
        let (rank, device, at, error) = (*rank, self.device(*rank), *at, error.clone());
        RankFailure { rank, tied, device, at, error }
    }

    /// Returns the results of the ranks, or the first failure with everything known about it.
    fn result<T, J>(
        &self,
        run: &RunContext,
        threads: Vec<Thread<T, J>>,
        table: Option<String>,
    ) -> Result<Vec<T>, Box<SpawnError>> {
        let first = self.first();
        let mut failures = run.failures();
        let stopped = failures.first().and_then(|failure| failure.stopped);
        let table = table.filter(|_| failures.first().is_some_and(|failure| failure.waited));
        let mut failures = failures.drain(..).map(|failure| self.named(&failure));
        let Some(failure) = failures.next() else {
            // Without a failure, every rank has started, ended and returned a value.
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
            stopped,
        }))
    }

    /// Joins the threads as they end, and gives up on the rest when the grace period is over. A thread that still
    /// runs then did not come back. Returns the status table of the ranks at the failure; `None` without a failure.
    fn wait<T, J>(
        &self,
        run: &RunContext,
        ends: &Receiver<Ended<T>>,
        threads: &mut [Thread<T, J>],
        join_thread: impl Fn(J),
    ) -> Option<String> {
        let (mut running, first) = (threads.len(), self.first());
        let mut join = |Ended { rank, value }| {
            if let Thread::Runs(thread) =
                mem::replace(&mut threads[rank - first], Thread::Ended(value))
            {
                join_thread(thread); // this is its last act, and it cannot have panicked
            }
        };
        let here = first..first + running;
        let poll =
            self.stall_warning.div_f64(8.0).clamp(STALL_POLL_INTERVALS.0, STALL_POLL_INTERVALS.1);
        let (mut last_notice, mut last_look, mut stopping) = (None, Instant::now(), None);
        while running > 0 && run.cancel.cancelled_by().is_none() {
            select! {
                recv(self.asks) -> _ => {
                    self.tell.notify(&format!("what each rank does\n{}", status_table(run, here.clone(), &run.remote_snapshots)));
                    continue;
                }
                default(poll.min(STOP_POLL_INTERVAL)) => {
                    let mut limit = (last_look.elapsed() >= poll).then_some(self.stall_warning);
                    if stopping.is_none() {
                        stopping = self.stop.as_deref().and_then(Stopping::begin);
                        if stopping.is_some() {
                            // The user learns what the stop waits for, also if that is known from an earlier warning.
                            limit = Some(self.stall_warning.min(STALL_POLL_INTERVALS.1));
                            last_notice = None;
                        }
                    }
                    if let Some(stopping) = &mut stopping
                        && let Some(hang) = stopping.hang(run, self.grace_period)
                    {
                        run.report_failure(hang);
                        continue;
                    }
                    if let Some(limit) = limit {
                        last_look = Instant::now();
                        if let Some(stall) = stalled(run, here.clone(), limit)
                            && last_notice != Some(stall)
                            && let Some(text) = stall.text(run, here.clone(), limit)
                        {
                            self.tell.notify(&text);
                            last_notice = Some(stall);
                        }
                    }
                    continue;
                }
                recv(ends) -> ended => match ended {
                    Ok(ended) => join(ended),
                    Err(_) => {
                        run.report(first, None, "a rank's thread has ended without a result".into());
                        break;
                    }
                },
                recv(run.cancel.tripped()) -> _ => break,
            }
            running -= 1;
        }
        let table = run.cancel.cancelled_by().map(|_| {
            if run.failures().first().is_some_and(|failure| failure.waited) {
                run.poll_peers();
            }
            status_table(run, here.clone(), &run.remote_snapshots)
        });
        // Ranks that hang after a signal have had their grace period. A checkpoint that is being written is completed.
        let saves = here.clone().any(|rank| run.activity[rank].now().operation == Operation::Save);
        let hangs =
            !saves && run.failures().first().is_some_and(|failure| failure.stopped.is_some());
        let grace_period =
            if hangs { self.grace_period.min(AFTER_HANG) } else { self.grace_period };
        let end = deadline(grace_period);
        // A rank may hang in a library, such as NCCL's abort, so the failure is shown before the grace period is over.
        let notice = deadline(NOTICE_AFTER);
        let mut is_shown = notice >= end;
        while running > 0 {
            match ends.recv_deadline(if is_shown { end } else { notice }) {
                Ok(ended) => {
                    join(ended);
                    running -= 1;
                }
                Err(_) if is_shown => break,
                Err(_) => {
                    is_shown = true;
                    let failure = run.failures().first().map(|failure| self.named(failure));
                    if let Some(failure) = failure {
                        self.tell.notify(&format!(
                            "{failure}; {running} ranks of this process are still blocked after {NOTICE_AFTER:?}; \
                             the process ends {grace_period:?} (--grace-period) after the failure"
                        ));
                    }
                }
            }
        }
        table
    }
}

/// The shortest and the longest interval between checks for stalls.
const STALL_POLL_INTERVALS: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_secs(1));

/// The interval between checks for a request to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long the other ranks get to come back from their collectives when some hang after a signal.
const AFTER_HANG: Duration = Duration::from_secs(1);

/// The time from a failure until the user learns of it although ranks have not come back.
const NOTICE_AFTER: Duration = Duration::from_secs(3);

/// A rank's thread, as seen by the supervisor.
enum Thread<T, J> {
    /// Runs, or has not been joined yet.
    Runs(J),
    /// Has ended, with the result of its function; `None` if that failed.
    Ended(Option<T>),
}

impl<T, J> Thread<T, J> {
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
