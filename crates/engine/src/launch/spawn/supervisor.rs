//! The supervisor of the ranks: starts their threads, has them watched, and returns their results or the first failure.

use std::sync::Arc;
use std::thread;

use crossbeam::channel::{Sender, unbounded};

use super::watching::{Thread, Watching};
use super::{RankFunction, Spawn, leave_error};
use crate::error::Result;
use crate::events::{Event, FlightRecorderDump, RanksActivity};
use crate::ffi::cuda::load_linear_algebra;
use crate::ffi::{check_version, choose_kernels, give_back_memory};
use crate::launch::heartbeat_monitor::Stay;
use crate::launch::rank::SharedBootstrap;
use crate::launch::rank_thread::RankThread;
use crate::launch::{JoinedLaunch, RankFailure, SpawnError, StuckRank};
use crate::operation::Operation;
use crate::os::affinity::CpuList;
use crate::os::limits::not_started;
use crate::runtime::{Failure, FlightRecorder, MOST_ENTRIES, RunContext};

/// The stack size of a rank's thread. NCCL's initialisation and the freeing of deep autograd graphs need more than
/// Rust's 2 MiB. Only the used part takes memory.
const STACK_BYTES: usize = 64 << 20;

/// Prepares this process for its ranks, which use libtorch. Returns the CPUs of each; none if they are not bound.
fn prepare(joined_launch: &JoinedLaunch, run: &Arc<RunContext>) -> Result<Vec<CpuList>> {
    if let Some(world) = &joined_launch.world {
        world.start(run)?;
    }
    check_version()?;
    choose_kernels();
    let devices = &joined_launch.placement.devices;
    if devices.len() > 1 && devices.iter().any(|device| device.is_cuda()) {
        load_linear_algebra();
    }
    joined_launch.cpus()
}

impl Spawn {
    /// Starts a thread for each rank, which runs `f`. Returns when all have ended and have been joined, or when the grace
    /// period after a failure is over. Returns the results of the ranks, in rank order.
    pub(super) fn supervise<T: Send + 'static>(
        &self,
        f: &RankFunction<T>,
    ) -> Result<Vec<T>, Box<SpawnError>> {
        let joined_launch = Arc::new(self.joined_launch.clone());
        let run = self.run_context();
        let cpus = prepare(&joined_launch, &run).inspect_err(|error| {
            run.report(joined_launch.ranks_here().start, Some(error), error.to_string());
        });
        // Before the ranks print their first lines, which would be lost on a screen that somebody draws on.
        self.show_ranks(&run);
        let (ended_tx, ended_rx) = unbounded();
        let mut threads = Vec::new();
        if let Ok(cpus) = cpus {
            threads = self.start_threads(f, &joined_launch, &run, &cpus, &ended_tx);
        }
        drop(ended_tx);
        let table = Watching::new(self, &run, &ended_rx, &mut threads).watch();
        self.tell_end(&run);
        give_back_memory();
        if let Some(world) = &joined_launch.world {
            let failed = run.cancel.cancelled_by().is_some();
            let asked_to_end =
                || self.stop.as_ref().is_some_and(|stop| stop.request_reason().is_some());
            let patience = joined_launch.grace_period;
            world.leave(Stay { patience, failed, asked_to_end: &asked_to_end });
        }
        let result = self.result(&run, threads, table);
        if let Err(error) = &result {
            let _ = self.observers.tell(&Event::failure(&error.failure)); // the caller gets the error
            if self.leaves_error {
                let launch = &joined_launch.launch;
                leave_error(launch, &error.to_string(), &self.observers);
            }
        }
        result
    }

    /// Starts the threads of the ranks on their `cpus`, until one cannot be started, which is reported. Each sends its index
    /// to `ended_tx` when it can be joined.
    fn start_threads<T: Send + 'static>(
        &self,
        f: &RankFunction<T>,
        joined_launch: &Arc<JoinedLaunch>,
        run: &Arc<RunContext>,
        cpus: &[CpuList],
        ended_tx: &Sender<usize>,
    ) -> Vec<Thread<T>> {
        let mut threads = Vec::new();
        let bootstrap = Arc::<SharedBootstrap>::default();
        for (index, rank) in joined_launch.ranks_here().enumerate() {
            let thread = RankThread {
                index,
                joined_launch: joined_launch.clone(),
                cpus: cpus.get(index).cloned(),
                bootstrap: bootstrap.clone(),
                run: run.clone(),
                observers: self.observers.clone(),
                ended_tx: ended_tx.clone(),
            };
            let builder =
                thread::Builder::new().name(format!("rank{rank}")).stack_size(STACK_BYTES);
            let f = f.clone();
            match builder.spawn(move || thread.main(&*f)) {
                Ok(thread) => threads.push(Thread::Runs(thread)),
                Err(error) => {
                    run.activity[rank].enter(Operation::Start, 0);
                    run.report(rank, None, not_started("its thread", &error));
                    break;
                }
            }
        }
        threads
    }

    /// Returns the state that the ranks are to share, before they start.
    fn run_context(&self) -> Arc<RunContext> {
        let world_size = self.world_size();
        let mut run = RunContext::new(world_size, self.timeout, self.fault.clone());
        run.local_ranks = self.joined_launch.ranks_here();
        run.grace_period = self.joined_launch.grace_period;
        run.check_collectives = self.check_collectives;
        run.simulated_cluster = self.simulated_cluster.clone();
        let wanted = self.observers.wants();
        run.is_watched = wanted.activity;
        if wanted.operations {
            run.flight_recorder = FlightRecorder::new(world_size, MOST_ENTRIES);
        }
        if let Some(world) = &self.joined_launch.world {
            run.ranks_here = world.ranks_on_machine();
            run.peer_status = Some(world.heartbeat_monitor.peer_status());
            for rank in (0..world_size).filter(|rank| !run.local_ranks.contains(rank)) {
                run.activity[rank].enter(Operation::Start, 0); // until more is known
            }
        }
        Arc::new(run)
    }

    /// Hands the ranks to the observers, before they start.
    fn show_ranks(&self, run: &Arc<RunContext>) {
        if self.observers.is_empty() {
            return;
        }
        let label = |rank| self.joined_launch.label(rank);
        let labels = (0..self.world_size()).map(label).collect();
        self.observers.watch(&RanksActivity::new(run, labels));
    }

    /// Tells that the ranks have ended, and what they did if anybody wants that.
    fn tell_end(&self, run: &RunContext) {
        let Self { joined_launch, observers, .. } = self;
        let clock = joined_launch.world.as_ref().and_then(|world| world.clock);
        let dump = || {
            let label = |rank| joined_launch.label(rank);
            Arc::new(FlightRecorderDump::of(run, label, joined_launch.process(), clock))
        };
        let operations = observers.wants().operations.then(dump);
        let _ = observers.tell(&Event::Ended { operations }); // whoever cannot take it keeps the error
    }

    /// Returns a failure with the devices of its ranks.
    pub(super) fn with_devices(&self, failure: &Failure) -> RankFailure {
        RankFailure::new(failure, |rank| self.joined_launch.label(rank))
    }

    /// Returns the results of the ranks, or the first failure with everything known about it.
    fn result<T>(
        &self,
        run: &RunContext,
        threads: Vec<Thread<T>>,
        table: Option<String>,
    ) -> Result<Vec<T>, Box<SpawnError>> {
        let first = self.joined_launch.ranks_here().start;
        let mut failures = run.failures();
        let stopped = failures.first().and_then(|failure| failure.stopped);
        let table = table.filter(|_| failures.first().is_some_and(|failure| failure.waited));
        let mut failures = failures.drain(..).map(|failure| self.with_devices(&failure));
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
                    device: self.joined_launch.label(rank),
                    last_seen: run.activity[rank].now(),
                })
                .collect(),
            grace_period: self.joined_launch.grace_period,
            table,
            stopped,
        }))
    }
}
