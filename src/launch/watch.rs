//! How the processes of a run watch over each other: a thread in each says through the store that it lives and what its
//! ranks do, and tells its own ranks when one elsewhere has failed.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{
    Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, never, select_biased,
};

use super::messages::{Beat, Told};
use crate::error::{Error, LateRank, Result};
use crate::operation::{At, Operation};
use crate::sync::{Elsewhere, Run};
use crate::torch::TcpStore;

/// How often a process says that it lives.
const BEAT: Duration = Duration::from_millis(500);

/// Who has said nothing for so long does not answer any more.
const SILENCE: Duration = Duration::from_millis(2000);

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
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Mutex<Option<Thread>>,
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

impl Watch {
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
        Ok(Self { shared: Arc::new(shared), thread: Mutex::default() })
    }

    /// What [`Run`] asks about ranks elsewhere.
    pub(super) fn elsewhere(&self) -> Arc<dyn Elsewhere> {
        self.shared.clone()
    }

    /// Begins to watch over `run`.
    ///
    /// # Errors
    /// [`Error::Input`] when no thread can be started.
    pub(super) fn start(&self, run: &Arc<Run>) -> Result<()> {
        let (stop, stopped) = bounded(0);
        let (shared, run) = (self.shared.clone(), run.clone());
        let thread = thread::Builder::new().name("watch".into());
        let thread = thread
            .spawn(move || shared.watch(&run, &stopped))
            .map_err(|error| Error::Input(format!("a thread cannot be started: {error}")))?;
        *self.thread() = Some((stop, thread));
        Ok(())
    }

    fn thread(&self) -> MutexGuard<'_, Option<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others that this process ends before its ranks have begun. By a process that has not begun to watch.
    pub(super) fn tell_of_start(&self, error: &str) -> Result<()> {
        let Shared { store, mine, ranks, .. } = &*self.shared;
        tell(store, ranks[*mine].start, At { operation: Operation::Start, sequence: 0 }, error)
    }

    /// Ends the watch. With `stay` this returns when all other processes have left too, do not answer, or when
    /// that time is over.
    pub(super) fn leave(&self, stay: Option<Duration>) {
        if let Some((stop, thread)) = self.thread().take() {
            drop(stop);
            let _ = thread.join();
        }
        let (began, shared) = (Instant::now(), &self.shared);
        let store = shared.hasty(never());
        // What fails here fails because the others are gone.
        let _ = store.add("left", 1);
        let Some(stay) = stay else { return };
        let all = shared.ranks.len() as i64;
        let have_left = || !store.add("left", 0).is_ok_and(|left| left < all);
        let beats =
            || shared.others().map(|it| shared.beat_of(&store, it).ok()).collect::<Vec<_>>();
        let mut before = beats();
        let mut looked = Instant::now();
        while !have_left() && began.elapsed() < stay {
            thread::park_timeout(SILENCE / 100); // the store has no event for it
            if looked.elapsed() < SILENCE {
                continue;
            }
            let now = beats();
            if now == before {
                break; // nobody is there who has not left
            }
            (before, looked) = (now, Instant::now());
        }
    }
}

impl Shared {
    /// The store for who cannot wait long: one that takes longer is out of reach.
    fn hasty(&self, cancelled: Receiver<Infallible>) -> TcpStore {
        self.store.patient(SILENCE, cancelled)
    }

    /// Until `stopped` closes.
    fn watch(&self, run: &Arc<Run>, stopped: &Receiver<Infallible>) {
        let store = self.store.patient(run.timeout, stopped.clone());
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
                match stopped.recv_timeout(BEAT) {
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
                default(BEAT) => {}
            }
        }
    }

    /// The store is gone: that is a failure of who serves it. If that is no rank, this process can only say what it
    /// was doing itself.
    fn report_loss(&self, run: &Run, error: &Error) {
        let rank = self.server.rank.unwrap_or(self.ranks[self.mine].start);
        let at = Some(run.activity[rank].now());
        run.report_at(rank, at, None, format!("{} is gone: {error}", self.server.name));
    }

    /// Says that this process lives, and what its ranks do.
    fn beat(&self, store: &TcpStore, run: &Run) -> Result<()> {
        let number = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        let doing = run.activity[self.ranks[self.mine].clone()].iter().map(|it| it.now()).collect();
        store.set(&alive(self.mine), &Beat { number, doing }.to_bytes())
    }

    /// Tells the others what has failed here first, unless somebody was faster.
    fn tell(&self, run: &Run) {
        if let Some((rank, at, error)) =
            run.failures().first().map(|it| (it.rank, it.at, it.error.clone()))
        {
            // If the store is gone, they notice that.
            let _ = tell(&self.hasty(never()), rank, at, &error);
        }
    }

    /// Has this process's ranks stop, if one elsewhere has failed.
    fn hear(&self, store: &TcpStore, run: &Run, known: &mut bool) -> Result<()> {
        if *known {
            return Ok(());
        }
        if !store.check(&[FAILURE.into()])? {
            return self.follow_server(store, run);
        }
        *known = true;
        let text = store.get(FAILURE, SILENCE)?.unwrap_or_default();
        match Told::from_bytes(FAILURE, &text, run.activity.len()) {
            Ok(told) => {
                run.activity[told.rank].restore(told.at());
                run.report_at(told.rank, Some(told.at()), None, told.error);
            }
            Err(error) => run.report(self.ranks[self.mine].start, None, error.to_string()),
        }
        Ok(())
    }

    /// Keeps what the ranks of the process that serves the store do: when it is gone, nobody can ask any more.
    fn follow_server(&self, store: &TcpStore, run: &Run) -> Result<()> {
        let is_server = |ranks: &Range<usize>| self.server.rank == Some(ranks.start);
        let Some(process) = self.ranks.iter().position(is_server) else { return Ok(()) };
        if process != self.mine
            && let Some(beat) = self.beat_of(store, process)?
        {
            self.note(run, process, &beat);
        }
        Ok(())
    }

    fn note(&self, run: &Run, process: usize, beat: &Beat) {
        for (rank, at) in self.ranks[process].clone().zip(&beat.doing) {
            run.activity[rank].restore(*at);
        }
    }

    /// What a process has said last; none if it has said nothing, or nothing that can be read.
    fn beat_of(&self, store: &TcpStore, process: usize) -> Result<Option<Beat>> {
        let key = alive(process);
        if !store.check(std::slice::from_ref(&key))? {
            return Ok(None);
        }
        let message = store.get(&key, SILENCE)?.unwrap_or_default();
        Ok(Beat::from_bytes(&key, &message, self.ranks[process].len()).ok())
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(|&process| process != self.mine)
    }

    /// All other processes' beats, noted.
    fn beats_elsewhere(&self, store: &TcpStore, run: &Run) -> Result<Vec<Option<u64>>> {
        let ask = |process| {
            let beat = self.beat_of(store, process)?;
            beat.iter().for_each(|beat| self.note(run, process, beat));
            Ok(beat.map(|beat| beat.number))
        };
        self.others().map(ask).collect()
    }
}

/// Tells the processes of `store` that `rank`, the only one of its process, has ended, unless something is known to have
/// failed. For who has started them and sees that. Returns what the rank was last seen doing.
pub(super) fn tell_ended(store: &TcpStore, rank: usize, error: &str) -> Result<At> {
    let key = alive(rank);
    let has_said = store.check(std::slice::from_ref(&key))?;
    let beat = if has_said { store.get(&key, SILENCE)? } else { None }.unwrap_or_default();
    let doing = Beat::from_bytes(&key, &beat, 1).ok().and_then(|beat| beat.doing.first().copied());
    let at = doing.unwrap_or(At { operation: Operation::Start, sequence: 0 });
    tell(store, rank, at, error)?;
    Ok(at)
}

/// Tells the processes of `store` what has failed first, unless somebody was faster.
fn tell(store: &TcpStore, rank: usize, at: At, error: &str) -> Result<()> {
    store.compare_set(FAILURE, b"", &Told::new(rank, at, error).to_bytes(FAILURE)?).map(drop)
}

fn alive(process: usize) -> String {
    format!("alive/{process}")
}

impl Elsewhere for Shared {
    /// Asks twice, so that who has said nothing new in between is known to be silent. If the store does not answer,
    /// that is who serves it.
    fn look(&self, run: &Run) -> Vec<LateRank> {
        let cancelled = run.cancel.tripped();
        let store = self.hasty(cancelled.clone());
        let twice = self.beats_elsewhere(&store, run).and_then(|before| {
            // Nothing tells that nothing comes but time.
            select_biased! {
                recv(cancelled) -> _ => Ok((before.clone(), Vec::new())),
                default(SILENCE) => Ok((before, self.beats_elsewhere(&store, run)?)),
            }
        });
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
            |rank: usize| LateRank { rank, last_seen: run.activity[rank].now(), silent: true };
        ranks.map(seen).collect()
    }
}

#[cfg(test)]
mod tests;
