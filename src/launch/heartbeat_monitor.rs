//! How the processes of a run watch over each other: a thread in each says through the store that it lives and what its
//! ranks do, and tells its own ranks when one elsewhere has failed.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{
    Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, never, select_biased,
};

use super::heartbeat::{Heartbeat, RankStatus};
use super::messages::FailureReport;
use super::stall;
use crate::error::{Error, MissingRank, Result};
use crate::ffi::TcpStore;
use crate::ffi::limits::not_started;
use crate::operation::{OpId, Operation};
use crate::runtime::{self, Failure, OpSnapshot, PeerStatus, RunContext};

/// How often a process says that it lives.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// Who has said nothing for so long does not answer any more.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(2000);

/// Where a failing rank leaves what the others should know.
const FAILURE: &str = "failure";

/// Who serves the store.
#[derive(Debug)]
pub(super) struct Server {
    /// The first rank of that process, if it has any.
    pub rank: Option<usize>,
    /// For the user.
    pub name: String,
}

/// This process's side of it.
#[derive(Debug)]
pub(super) struct HeartbeatMonitor {
    shared: Arc<Shared>,
    thread: Mutex<Option<Thread>>,
    /// Whether a run has begun. What it leaves in the store would mislead another one.
    has_begun: AtomicBool,
}

/// What ends the thread, and the thread.
type Thread = (Sender<Infallible>, JoinHandle<()>);

#[derive(Debug)]
struct Shared {
    /// With the run's own patience.
    store: TcpStore,
    mine: usize,
    ranks: Vec<Range<usize>>,
    server: Server,
    beats: AtomicU64,
}

impl HeartbeatMonitor {
    /// For process `mine` of those that have these `ranks`.
    /// `server` is who serves their store.
    pub(super) fn new(
        store: &TcpStore,
        server: Server,
        mine: usize,
        ranks: &[Range<usize>],
    ) -> Result<Self> {
        let store = store.another_connection()?;
        let shared = Shared { store, mine, ranks: ranks.into(), server, beats: AtomicU64::new(0) };
        let (thread, has_begun) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { shared: Arc::new(shared), thread, has_begun })
    }

    /// What [`RunContext`] asks about ranks elsewhere.
    pub(super) fn elsewhere(&self) -> Arc<dyn PeerStatus> {
        self.shared.clone()
    }

    /// Begins to watch over `run`.
    ///
    /// # Errors
    /// [`Error::Input`] when no thread can be started, and for a second run.
    pub(super) fn start(&self, run: &Arc<RunContext>) -> Result<()> {
        if self.has_begun.swap(true, Ordering::Relaxed) {
            return Err(Error::Input(
                "these processes joined the launch for one run, which is over; do all work in one function of the \
                 ranks, or join the launch again"
                    .into(),
            ));
        }
        let (stop, stopped) = bounded(0);
        let (shared, run) = (self.shared.clone(), run.clone());
        let thread = thread::Builder::new().name("watch".into());
        let thread = thread.spawn(move || shared.watch(&run, &stopped)).map_err(|error| {
            Error::Input(not_started("the thread that sends heartbeats", &error))
        })?;
        *self.thread() = Some((stop, thread));
        Ok(())
    }

    fn thread(&self) -> MutexGuard<'_, Option<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others that this process ends before its ranks have begun. By a process that has not begun to watch.
    pub(super) fn tell_of_start(&self, error: &str) -> Result<()> {
        let Shared { store, mine, ranks, .. } = &*self.shared;
        let at = OpId { operation: Operation::Start, sequence: 0 };
        tell(store, &FailureReport::new(ranks[*mine].start, at, error))
    }

    /// Ends the watch. The process that serves the store passes `stay`, and this returns when the others need the
    /// store no longer.
    pub(super) fn leave(&self, stay: Option<Stay<'_>>) {
        if let Some((stop, thread)) = self.thread().take() {
            drop(stop);
            let _ = thread.join();
        }
        let store = self.shared.with_short_timeout(never());
        // What fails here fails because the others are gone.
        let _ = store.add("left", 1);
        if let Some(stay) = stay {
            self.shared.stay(&store, stay);
        }
    }
}

/// How long the process that serves the store stays after its own ranks have ended.
pub(super) struct Stay<'a> {
    /// How long the others may be silent; once the run has failed or `asked_to_end`, how long they get in all.
    pub patience: Duration,
    /// Whether the run has failed.
    pub failed: bool,
    /// Whether a signal asks this process to end.
    pub asked_to_end: &'a dyn Fn() -> bool,
}

impl Shared {
    /// The store for who cannot wait long: one that takes longer is out of reach.
    fn with_short_timeout(&self, cancelled: Receiver<Infallible>) -> TcpStore {
        self.store.with_timeout(HEARTBEAT_TIMEOUT, cancelled)
    }

    /// Returns when all other processes have left, or send no heartbeat any more, or when their time is over.
    fn stay(&self, store: &TcpStore, stay: Stay<'_>) {
        let Stay { patience, failed, asked_to_end } = stay;
        let all = self.ranks.len() as i64;
        let have_left = || !store.add("left", 0).is_ok_and(|left| left < all);
        let beats = || self.others().map(|it| self.beat_of(store, it).ok()).collect::<Vec<_>>();
        let mut deadline: Option<Instant> = None;
        let (mut before, mut heard, mut looked) = (beats(), Instant::now(), Instant::now());
        while !have_left() {
            if deadline.is_none() && (failed || asked_to_end()) {
                deadline = Some(runtime::deadline(patience));
            }
            let limit = if deadline.is_some() {
                HEARTBEAT_TIMEOUT
            } else {
                patience.max(HEARTBEAT_TIMEOUT)
            };
            if heard.elapsed() >= limit || deadline.is_some_and(|it| Instant::now() >= it) {
                break;
            }
            thread::park_timeout(HEARTBEAT_TIMEOUT / 100); // the store has no event for it
            if looked.elapsed() >= HEARTBEAT_INTERVAL {
                let now = beats();
                looked = Instant::now();
                if now != before {
                    (before, heard) = (now, looked);
                }
            }
        }
    }

    /// Until `stopped` closes.
    fn watch(&self, run: &Arc<RunContext>, stopped: &Receiver<Infallible>) {
        let store = self.store.with_timeout(run.timeout, stopped.clone());
        let mut told = false;
        loop {
            if !told && run.cancel.cancelled_by().is_some() {
                self.tell(run);
                told = true;
            }
            let said = self.beat(&store, run).and_then(|()| self.hear(&store, run, &mut told));
            let stops = stopped.try_recv() == Err(TryRecvError::Disconnected);
            if let Err(error) = said
                && !stops
            {
                if !told {
                    self.report_loss(run, &error);
                }
                return;
            }
            if told {
                match stopped.recv_timeout(HEARTBEAT_INTERVAL) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    _ => continue,
                }
            }
            select_biased! {
                recv(stopped) -> _ => {
                    // A failure of the last moment.
                    if run.cancel.cancelled_by().is_some() {
                        self.tell(run);
                    }
                    return;
                }
                recv(run.cancel.tripped()) -> _ => {}
                default(HEARTBEAT_INTERVAL) => {}
            }
        }
    }

    /// The store is gone: that is a failure of who serves it. If that is no rank, this process can only say what it
    /// was doing itself.
    fn report_loss(&self, run: &RunContext, error: &Error) {
        let rank = self.server.rank.unwrap_or(self.ranks[self.mine].start);
        // What it said last is older than what this process has come to with it.
        let step = self.ranks[self.mine].clone().find_map(|mine| run.flight_recorder.step_of(mine));
        let at = step.map(|sequence| OpId { operation: Operation::Step, sequence });
        let at = at.or_else(|| Some(run.activity[rank].now()));
        run.report_at(rank, at, None, format!("{} is gone: {error}", self.server.name));
    }

    /// Says that this process lives, and what its ranks do.
    fn beat(&self, store: &TcpStore, run: &RunContext) -> Result<()> {
        let number = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        let ranks = self.ranks[self.mine].clone().map(|rank| RankStatus::of(run, rank)).collect();
        let key = alive(self.mine);
        store.set(&key, &Heartbeat { number, ranks }.to_bytes(&key)?)
    }

    /// Tells the others what has failed here first, unless somebody was faster.
    fn tell(&self, run: &RunContext) {
        let told = run.failures().first().map(FailureReport::of);
        if let Some(told) = told {
            // If the store is gone, they notice that.
            let _ = tell(&self.with_short_timeout(never()), &told);
        }
    }

    /// Has this process's ranks stop, if one elsewhere has failed.
    fn hear(&self, store: &TcpStore, run: &RunContext, known: &mut bool) -> Result<()> {
        if *known {
            return Ok(());
        }
        *known = self.hear_of_failure(store, run)?;
        if *known { Ok(()) } else { self.follow_server(store, run) }
    }

    /// Reports the failure that another process has written to the store. Returns whether there is one.
    fn hear_of_failure(&self, store: &TcpStore, run: &RunContext) -> Result<bool> {
        if !store.check(&[FAILURE.into()])? {
            return Ok(false);
        }
        let text = store.get(FAILURE, HEARTBEAT_TIMEOUT)?.unwrap_or_default();
        match FailureReport::from_bytes(FAILURE, &text, run.activity.len()) {
            Ok(told) => {
                run.activity[told.rank].restore(told.at());
                let at = told.at();
                let FailureReport { rank, tied, error, .. } = told;
                run.report_told(Failure { rank, tied, at, error, waited: false });
            }
            Err(error) => run.report(self.ranks[self.mine].start, None, error.to_string()),
        }
        Ok(true)
    }

    /// Keeps what the ranks of the process that serves the store do: when it is gone, nobody can ask any more.
    fn follow_server(&self, store: &TcpStore, run: &RunContext) -> Result<()> {
        let is_server = |ranks: &Range<usize>| self.server.rank == Some(ranks.start);
        let Some(process) = self.ranks.iter().position(is_server) else { return Ok(()) };
        if process != self.mine
            && let Some(beat) = self.beat_of(store, process)?
        {
            self.note(run, process, &beat);
        }
        Ok(())
    }

    fn note(&self, run: &RunContext, process: usize, beat: &Heartbeat) {
        for (rank, doing) in self.ranks[process].clone().zip(&beat.ranks) {
            run.activity[rank].restore(doing.at());
            run.remote_snapshots.note(rank, &doing.seen);
        }
    }

    /// What a process has said last; none if it has said nothing, or nothing that can be read.
    fn beat_of(&self, store: &TcpStore, process: usize) -> Result<Option<Heartbeat>> {
        beat_of(store, process, self.ranks[process].len())
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(|&process| process != self.mine)
    }

    /// All other processes' beats, noted.
    fn beats_elsewhere(&self, store: &TcpStore, run: &RunContext) -> Result<Vec<Option<u64>>> {
        let ask = |process| {
            let beat = self.beat_of(store, process)?;
            beat.iter().for_each(|beat| self.note(run, process, beat));
            Ok(beat.map(|beat| beat.number))
        };
        self.others().map(ask).collect()
    }
}

/// What a process of so many ranks has said last; none if it has said nothing, or nothing that can be read.
fn beat_of(store: &TcpStore, process: usize, ranks: usize) -> Result<Option<Heartbeat>> {
    let key = alive(process);
    if !store.check(std::slice::from_ref(&key))? {
        return Ok(None);
    }
    let message = store.get(&key, HEARTBEAT_TIMEOUT)?.unwrap_or_default();
    Ok(Heartbeat::from_bytes(&key, &message, ranks).ok())
}

/// Tells the processes of `store`, of one rank each, that `rank` has ended, unless something is known to have failed.
/// For who has started them and sees that. Returns what the rank was last seen doing.
pub(super) fn tell_ended(
    store: &TcpStore,
    rank: usize,
    at: Option<OpId>,
    error: &str,
) -> Result<OpId> {
    let doing = || -> Result<Option<OpId>> {
        Ok(beat_of(store, rank, 1)?.and_then(|beat| beat.ranks.first().map(RankStatus::at)))
    };
    let at = at.map_or_else(doing, |at| Ok(Some(at)))?;
    let at = at.unwrap_or(OpId { operation: Operation::Start, sequence: 0 });
    tell(store, &FailureReport::new(rank, at, error))?;
    Ok(at)
}

/// What `rank` has not come to: in what the first that waits of the `count` processes of `store`, of one rank each, waits
/// since that one is gone, for the user, and its step. Its own last beat may be older.
pub(super) fn waited_for(
    store: &TcpStore,
    rank: usize,
    count: usize,
) -> Result<Option<(String, Option<OpId>)>> {
    let beats = || -> Result<Vec<Option<Heartbeat>>> {
        let others = (0..count).filter(|other| *other != rank);
        others.map(|other| beat_of(store, other, 1)).collect()
    };
    let (began, before) = (Instant::now(), beats()?);
    let mut now = beats()?;
    // What has been said since then is of a time in which it was gone.
    let is_old = |now: &[Option<Heartbeat>]| {
        let numbers = |beats: &[Option<Heartbeat>]| -> Vec<_> {
            beats.iter().map(|beat| beat.as_ref().map(|it| it.number)).collect()
        };
        let pairs = numbers(&before).into_iter().zip(numbers(now));
        pairs.into_iter().any(|(before, now)| before.is_some() && before == now)
    };
    while is_old(&now) && began.elapsed() < HEARTBEAT_TIMEOUT {
        thread::park_timeout(HEARTBEAT_INTERVAL / 50); // the store has no event for it
        now = beats()?;
    }
    let others = (0..count).filter(|other| *other != rank);
    for (other, beat) in others.zip(&now) {
        let Some(doing) = beat.as_ref().and_then(|beat| beat.ranks.first()) else { continue };
        if let Some(waits) = doing.seen.iter().find(|it| it.is_open_collective()) {
            let step = doing.seen.iter().find_map(OpSnapshot::step);
            let at = step.map(|sequence| OpId { operation: Operation::Step, sequence });
            let text =
                format!("rank {other} waits for it in {}", stall::within(waits, &doing.seen));
            return Ok(Some((text, at)));
        }
    }
    Ok(None)
}

/// Tells the processes of `store` what has failed first, unless somebody was faster.
fn tell(store: &TcpStore, told: &FailureReport) -> Result<()> {
    store.compare_set(FAILURE, b"", &told.to_bytes(FAILURE)?).map(drop)
}

fn alive(process: usize) -> String {
    format!("alive/{process}")
}

impl PeerStatus for Shared {
    /// Asks twice, so that who has said nothing new in between is known to be silent. If the store does not answer,
    /// that is who serves it.
    fn refresh(&self, run: &RunContext) -> Vec<MissingRank> {
        let cancelled = run.cancel.tripped();
        let store = self.with_short_timeout(cancelled.clone());
        let twice = self.beats_elsewhere(&store, run).and_then(|before| {
            // Nothing tells that nothing comes but time.
            select_biased! {
                recv(cancelled) -> _ => Ok((before.clone(), Vec::new())),
                default(HEARTBEAT_TIMEOUT) => Ok((before, self.beats_elsewhere(&store, run)?)),
            }
        });
        // A process that has timed out first ends its ranks: they are not late.
        if twice.is_ok() && run.cancel.cancelled_by().is_none() {
            let _ = self.hear_of_failure(&store, run); // a store that is gone is found by the watch
        }
        let silent: Vec<usize> = match twice {
            _ if run.cancel.cancelled_by().is_some() => Vec::new(),
            Ok((before, now)) => {
                let both = before.iter().zip(&now);
                let same = self.others().zip(both).filter(|(_, (before, now))| before == now);
                same.map(|(process, _)| process).collect()
            }
            Err(_) => {
                let serves = |process: &usize| self.server.rank == Some(self.ranks[*process].start);
                self.others().filter(serves).collect()
            }
        };
        let ranks = silent.into_iter().flat_map(|process| self.ranks[process].clone());
        let seen =
            |rank: usize| MissingRank { rank, last_seen: run.activity[rank].now(), silent: true };
        ranks.map(seen).collect()
    }

    fn poll(&self, run: &RunContext) {
        // What cannot be had is not there.
        let _ = self.beats_elsewhere(&self.with_short_timeout(never()), run);
    }
}

#[cfg(test)]
mod tests;
