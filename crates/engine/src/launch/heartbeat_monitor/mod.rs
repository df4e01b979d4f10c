//! The heartbeat monitor: a thread in each process stores what its ranks do, and stops them when a rank elsewhere
//! fails.

mod peer_status;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, never, select_biased};
use parking_lot::Mutex;

use super::heartbeat::{Heartbeat, status_of};
use super::messages::{failure_from_bytes, to_json};
use super::stall;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::operation::{OpId, Operation};
use crate::os::limits::not_started;
use crate::process_group::ProcessMap;
use crate::runtime::{
    Deadline, Failure, HEARTBEAT_INTERVAL, Instant, OpEntry, PeerHeartbeat, PeerStatus, RunContext,
};

/// A process without a new heartbeat for this long counts as not answering. Also the timeout of short requests.
pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(2000);

/// The most processes whose heartbeats are read in one turn for somebody who watches all.
const MAX_VIEWED: usize = 256;

/// How long the heartbeats of others are read in one turn at most: this process's own must not wait.
const MAX_READING: Duration = Duration::from_millis(100);

/// Key of the first failure.
const FAILURE: &str = "failure";

/// The process that serves the store.
#[derive(Debug)]
pub(super) struct Server {
    /// The first rank of that process, if it has any.
    pub rank: Option<usize>,
    /// The name for error messages.
    pub name: String,
}

/// This process's part in the heartbeats.
#[derive(Debug)]
pub(super) struct HeartbeatMonitor {
    heartbeats: Arc<Heartbeats>,
    thread: Mutex<Option<Thread>>,
    /// Whether a run has begun. The keys that one run leaves in the store would mislead a second one.
    has_begun: AtomicBool,
}

/// The thread of the monitor.
#[derive(Debug)]
struct Thread {
    /// Its drop ends the thread.
    stop_tx: Sender<Infallible>,
    handle: JoinHandle<()>,
}

/// The heartbeats in the store, as the monitor and its thread read and send them.
#[derive(Debug)]
struct Heartbeats {
    /// Waits as long as the store of the launch does.
    store: TcpStore,
    map: ProcessMap,
    server: Server,
}

impl HeartbeatMonitor {
    /// Creates the monitor of a process of `map`. `server` serves the store.
    pub(super) fn new(store: &TcpStore, server: Server, map: &ProcessMap) -> Result<Self> {
        let store = store.another_connection()?;
        let heartbeats = Arc::new(Heartbeats { store, map: map.clone(), server });
        Ok(Self { heartbeats, thread: Mutex::default(), has_begun: AtomicBool::new(false) })
    }

    /// Returns the source from which [`RunContext`] gets the status of the ranks of other processes.
    pub(super) fn peer_status(&self) -> Arc<dyn PeerStatus> {
        self.heartbeats.clone()
    }

    /// Starts the heartbeat thread for `run`.
    ///
    /// # Errors
    /// [`Error::Input`] when no thread can be started, and for a second run.
    pub(super) fn start(&self, run: &Arc<RunContext>) -> Result<()> {
        if self.has_begun.swap(true, Ordering::Relaxed) {
            return Err(Error::usage(
                "these processes joined the launch for one run, which is over; do all work in one function of the \
                 ranks, or join the launch again"
                    .into(),
            ));
        }
        let (stop_tx, stop_rx) = bounded(0);
        let (heartbeats, run) = (self.heartbeats.clone(), run.clone());
        let thread = thread::Builder::new().name("watch".into());
        let handle = thread.spawn(move || heartbeats.watch(&run, &stop_rx)).map_err(|error| {
            Error::unsupported(not_started("the thread that sends heartbeats", &error))
        })?;
        *self.thread.lock() = Some(Thread { stop_tx, handle });
        Ok(())
    }

    /// Reports to the other processes that this one ends before its ranks have begun. Only for a process that has
    /// not started its heartbeat thread.
    pub(super) fn report_failed_start(&self, error: &str) -> Result<()> {
        let Heartbeats { store, map, .. } = &*self.heartbeats;
        let at = OpId { operation: Operation::Start, sequence: 0 };
        publish_failure(store, &Failure::new(map.here().start, at, error.into()))
    }

    /// Ends the heartbeat thread. The process that serves the store passes `stay`; this returns when the others no
    /// longer need the store.
    pub(super) fn leave(&self, stay: Option<Stay<'_>>) {
        let thread = self.thread.lock().take();
        if let Some(Thread { stop_tx, handle }) = thread {
            drop(stop_tx);
            let _ = handle.join();
        }
        let store = self.heartbeats.with_short_timeout(never());
        // If this fails, the other processes are gone.
        let _ = store.add(&left(self.heartbeats.map.mine), 1);
        if let Some(stay) = stay {
            self.heartbeats.stay(&store, stay);
        }
    }
}

/// How long the process that serves the store stays after its own ranks have ended.
pub(super) struct Stay<'a> {
    /// How long the other processes may be silent. Once the run has failed or `asked_to_end`, how long they get in
    /// all.
    pub patience: Duration,
    /// Whether the run has failed.
    pub failed: bool,
    /// Whether a signal asks this process to end.
    pub asked_to_end: &'a dyn Fn() -> bool,
}

impl Heartbeats {
    /// Returns the store with a short timeout: a store that takes longer counts as unreachable.
    fn with_short_timeout(&self, cancelled: Receiver<Infallible>) -> TcpStore {
        self.store.with_timeout(HEARTBEAT_TIMEOUT, cancelled)
    }

    /// Waits until all other processes have left, send no heartbeat any more, or have used up their time.
    fn stay(&self, store: &TcpStore, stay: Stay<'_>) {
        let Stay { patience, failed, asked_to_end } = stay;
        let others: Vec<String> = self.others().map(left).collect();
        let beats = || {
            self.others().map(|process| self.heartbeat_of(store, process).ok()).collect::<Vec<_>>()
        };
        let mut deadline: Option<Deadline> = None;
        let mut before = beats();
        let mut last_change = Instant::now();
        loop {
            if deadline.is_none() && (failed || asked_to_end()) {
                deadline = Some(Deadline::after(patience));
            }
            let time_left = deadline.map(|end| end.left());
            let interval =
                time_left.map_or(HEARTBEAT_INTERVAL, |left| left.min(HEARTBEAT_INTERVAL));
            // An error shows that the store, and with it this process's part, is over.
            if !matches!(store.wait(&others, interval), Ok(false)) {
                return;
            }
            let now = beats();
            if now != before {
                before = now;
                last_change = Instant::now();
            }
            let limit = if deadline.is_some() {
                HEARTBEAT_TIMEOUT
            } else {
                patience.max(HEARTBEAT_TIMEOUT)
            };
            if last_change.elapsed() >= limit || time_left.is_some_and(|left| left.is_zero()) {
                return;
            }
        }
    }

    /// Sends heartbeats and checks for failures, until `stop_rx` closes or the store is gone.
    fn watch(&self, run: &Arc<RunContext>, stop_rx: &Receiver<Infallible>) {
        let store = self.store.with_timeout(run.timeout, stop_rx.clone());
        let mut is_known = false;
        for turn in 0.. {
            if !is_known && run.cancel.cancelled_by().is_some() {
                self.send_failure(run);
                is_known = true;
            }
            let result = self.send_heartbeat(&store, run).and_then(|()| {
                if is_known { Ok(true) } else { self.read_store(&store, run, turn) }
            });
            match result {
                Ok(known) => is_known = known,
                Err(_) if stop_rx.try_recv() == Err(TryRecvError::Disconnected) => {}
                Err(error) => {
                    if !is_known {
                        self.report_loss(run, &error);
                    }
                    return;
                }
            }
            let failed = if is_known { never() } else { run.cancel.tripped().clone() };
            select_biased! {
                recv(stop_rx) -> _ => {
                    // A rank may have failed since the last check.
                    if !is_known && run.cancel.cancelled_by().is_some() {
                        self.send_failure(run);
                    }
                    return;
                }
                recv(failed) -> _ => {}
                default(HEARTBEAT_INTERVAL) => {}
            }
        }
    }

    /// Reports that the store is gone, as a failure of the process that serves it. If that process has no rank,
    /// this process can only report what it was doing itself.
    fn report_loss(&self, run: &RunContext, error: &Error) {
        let rank = self.server.rank.unwrap_or(self.map.here().start);
        // The server's last heartbeat is older than the step that this process has reached.
        let step = self.map.here().find_map(|mine| run.flight_recorder.step_of(mine));
        let at = step.map(|sequence| OpId { operation: Operation::Step, sequence });
        let at = at.or_else(|| Some(run.activity[rank].now()));
        run.report_at(rank, at, None, format!("{} is gone: {error}", self.server.name));
    }

    /// Stores this process's heartbeat.
    fn send_heartbeat(&self, store: &TcpStore, run: &RunContext) -> Result<()> {
        let (sent, suspended) = (run.flight_recorder.now(), Instant::suspended());
        let ranks = self.map.here().map(|rank| status_of(run, rank)).collect();
        let key = alive(self.map.mine);
        store.set(&key, &to_json(&key, &Heartbeat { sent, suspended, ranks })?)
    }

    /// Stores the first failure of this process, unless another process has already stored one.
    fn send_failure(&self, run: &RunContext) {
        let first = run.failures().first().cloned();
        if let Some(failure) = first {
            // If the store is gone, the other processes notice that themselves.
            let _ = publish_failure(&self.with_short_timeout(never()), &failure);
        }
    }

    /// Stops this process's ranks if a rank of another process has failed. Returns whether one has.
    fn read_store(&self, store: &TcpStore, run: &RunContext, turn: usize) -> Result<bool> {
        let has_failed = self.read_failure(store, run)?;
        if !has_failed {
            self.follow(store, run, turn)?;
        }
        Ok(has_failed)
    }

    /// Reports the failure that another process has written to the store. Returns whether there is one.
    fn read_failure(&self, store: &TcpStore, run: &RunContext) -> Result<bool> {
        let Some(text) = store.get(FAILURE, Duration::ZERO)? else { return Ok(false) };
        match failure_from_bytes(FAILURE, &text, run.activity.len()) {
            Ok(failure) => record_failure(run, failure),
            Err(error) => run.report(self.map.here().start, None, error.to_string()),
        }
        Ok(true)
    }

    /// Records what the ranks of the process that serves the store do: when that process is gone, its heartbeats cannot
    /// be read any more. Also records another process in turn, `turn`, whose clock is thereby known; or more of them, if
    /// somebody watches all.
    fn follow(&self, store: &TcpStore, run: &RunContext, turn: usize) -> Result<()> {
        let server = self.others().find(|process| self.serves(*process));
        let others = (self.map.processes.len() - 1).max(1);
        let count = if run.is_watched { others.min(MAX_VIEWED) } else { 1 };
        let next = self.others().cycle().skip(turn % others).take(count);
        let began = Instant::now();
        for process in server.into_iter().chain(next.filter(|next| server != Some(*next))) {
            if began.elapsed() > MAX_READING {
                break;
            }
            if let Some(heartbeat) = self.heartbeat_of(store, process)? {
                self.record_status(run, process, &heartbeat);
            }
        }
        Ok(())
    }

    fn record_status(&self, run: &RunContext, process: usize, heartbeat: &Heartbeat) {
        for (rank, status) in self.map.processes[process].clone().zip(&heartbeat.ranks) {
            run.activity[rank].restore_unless_done(status.at);
            let (&Heartbeat { sent, suspended, .. }, status) = (heartbeat, status.clone());
            run.remote_snapshots.note(rank, PeerHeartbeat { sent, suspended, status });
        }
    }

    /// Returns the last heartbeat of `process`; `None` if there is none that can be read.
    fn heartbeat_of(&self, store: &TcpStore, process: usize) -> Result<Option<Heartbeat>> {
        heartbeat_of(store, process, self.map.processes[process].len())
    }

    /// Returns whether `process` serves the store.
    fn serves(&self, process: usize) -> bool {
        self.server.rank == Some(self.map.processes[process].start)
    }

    fn others(&self) -> impl Iterator<Item = usize> + Clone {
        (0..self.map.processes.len()).filter(|&process| process != self.map.mine)
    }

    /// Reads and records the heartbeats of all other processes. Returns when each was sent; `None` without a heartbeat.
    fn heartbeats_of_others(
        &self,
        store: &TcpStore,
        run: &RunContext,
    ) -> Result<Vec<Option<Duration>>> {
        let ask = |process| {
            let heartbeat = self.heartbeat_of(store, process)?;
            heartbeat.iter().for_each(|heartbeat| self.record_status(run, process, heartbeat));
            Ok(heartbeat.map(|heartbeat| heartbeat.sent))
        };
        self.others().map(ask).collect()
    }
}

/// Records the failure of another process, and stops this one's ranks.
pub(super) fn record_failure(run: &RunContext, failure: Failure) {
    run.activity[failure.rank].restore(failure.at);
    run.report_failure(failure);
}

/// Returns the last heartbeat of `process`, which has `ranks` ranks; `None` if there is none that can be read.
fn heartbeat_of(store: &TcpStore, process: usize, ranks: usize) -> Result<Option<Heartbeat>> {
    let key = alive(process);
    let message = store.get(&key, Duration::ZERO)?;
    Ok(message.and_then(|message| Heartbeat::from_bytes(&key, &message, ranks).ok()))
}

/// Reports to the processes of `store`, of one rank each, that `rank` has ended, unless a failure is known already.
/// Called by their parent process. Returns what the rank was last seen doing.
pub(crate) fn report_ended(
    store: &TcpStore,
    rank: usize,
    at: Option<OpId>,
    error: &str,
) -> Result<OpId> {
    let status = || -> Result<Option<OpId>> {
        Ok(heartbeat_of(store, rank, 1)?
            .and_then(|heartbeat| heartbeat.ranks.first().map(|status| status.at)))
    };
    let at = at.map_or_else(status, |at| Ok(Some(at)))?;
    let at = at.unwrap_or(OpId { operation: Operation::Start, sequence: 0 });
    publish_failure(store, &Failure::new(rank, at, error.into()))?;
    Ok(at)
}

/// Returns the collective that another process waits in since a rank has ended, as text for the user, and its training
/// step. The `others` are processes that use `store`, with one rank each; `runs` returns whether one has not ended. `None`
/// if none of them waits. The ended rank's own last heartbeat may be older.
pub(crate) fn waited_for(
    store: &TcpStore,
    others: &[usize],
    mut runs: impl FnMut(usize) -> bool,
) -> Result<Option<(String, Option<OpId>)>> {
    let beats = || -> Result<Vec<Option<Heartbeat>>> {
        others.iter().map(|other| heartbeat_of(store, *other, 1)).collect()
    };
    let deadline = Deadline::after(HEARTBEAT_TIMEOUT);
    let before = beats()?;
    // Heartbeats sent after `before` was read were sent after the rank had ended. A process that has ended sends none.
    let sent = |heartbeat: &Option<Heartbeat>| heartbeat.as_ref().map(|beat| beat.sent);
    let now = loop {
        let running: Vec<bool> = others.iter().map(|other| runs(*other)).collect();
        let now = beats()?;
        let mut pairs = before.iter().zip(&now).zip(running);
        let is_old = pairs
            .any(|((before, now), runs)| runs && before.is_some() && sent(before) == sent(now));
        if !is_old || deadline.is_over() {
            break now;
        }
        thread::park_timeout(HEARTBEAT_INTERVAL / 50); // only time brings the next heartbeat
    };
    for (other, heartbeat) in others.iter().zip(&now) {
        let Some(status) = heartbeat.as_ref().and_then(|heartbeat| heartbeat.ranks.first()) else {
            continue;
        };
        if let Some(waits) = status.seen.iter().find(|op| op.group.is_some() && op.is_open()) {
            let step = status.seen.iter().find_map(OpEntry::step);
            let at = step.map(|sequence| OpId { operation: Operation::Step, sequence });
            let text =
                format!("rank {other} waits for it in {}", stall::within(waits, &status.seen));
            return Ok(Some((text, at)));
        }
    }
    Ok(None)
}

/// Publishes the first failure to the processes of `store`, unless another process has already stored one.
fn publish_failure(store: &TcpStore, failure: &Failure) -> Result<()> {
    store.set_new(FAILURE, &to_json(FAILURE, failure)?).map(drop)
}

/// Returns the key that a process sets when it no longer needs the store.
fn left(process: usize) -> String {
    format!("left/{process}")
}

/// Returns the key of a process's heartbeat.
fn alive(process: usize) -> String {
    format!("alive/{process}")
}

#[cfg(test)]
mod tests;
