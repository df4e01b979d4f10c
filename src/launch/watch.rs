//! How the processes of a run watch over each other: a thread in each says through the store that it lives and what its
//! ranks do, and tells its own ranks when one elsewhere has failed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded, select_biased};
use serde::{Deserialize, Serialize};

use crate::error::{Error, LateRank, Result};
use crate::operation::{At, Operation};
use crate::sync::{Elsewhere, Run};
use crate::torch::TcpStore;

/// How often a process says that it lives.
const BEAT: Duration = Duration::from_millis(500);

/// Who has said nothing for so long does not answer any more.
const SILENCE: Duration = Duration::from_millis(2000);

/// What a failing rank leaves for the others.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    rank: usize,
    operation: String,
    sequence: u64,
    error: String,
}

const FAILURE: &str = "failure";

/// This process's side of it.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Mutex<Option<Thread>>,
}

/// What ends the thread, and the thread.
type Thread = (Sender<()>, JoinHandle<()>);

#[derive(Debug)]
struct Shared {
    store: TcpStore,
    mine: usize,
    ranks: Vec<Range<usize>>,
    /// Who serves the store.
    server: String,
    beats: AtomicU64,
}

impl Watch {
    /// For process `mine` of those that have these `ranks`.
    /// `server` is who serves their store.
    pub(super) fn new(
        store: &TcpStore,
        server: String,
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

    /// Ends the watch. With `stay` this returns when all other processes have left too, do not answer, or when
    /// that time is over.
    pub(super) fn leave(&self, stay: Option<Duration>) {
        let Some((stop, thread)) = self.thread().take() else { return };
        drop(stop);
        let _ = thread.join();
        let (began, shared) = (Instant::now(), &self.shared);
        // What fails here fails because the others are gone.
        let _ = shared.store.add("left", 1);
        let Some(stay) = stay else { return };
        let all = shared.ranks.len() as i64;
        let have_left = || !shared.store.add("left", 0).is_ok_and(|left| left < all);
        let mut before = shared.beats_elsewhere();
        let mut looked = Instant::now();
        while !have_left() && began.elapsed() < stay {
            thread::park_timeout(SILENCE / 100); // the store has no event for it
            if looked.elapsed() < SILENCE {
                continue;
            }
            let now = shared.beats_elsewhere();
            if now == before {
                break; // nobody is there who has not left
            }
            (before, looked) = (now, Instant::now());
        }
    }
}

impl Shared {
    /// Until `stopped` closes.
    fn watch(&self, run: &Arc<Run>, stopped: &Receiver<()>) {
        let mut told = false;
        loop {
            if !told && run.cancel.cancelled_by().is_some() {
                self.tell(run);
                told = true;
            }
            if let Err(error) = self.beat(run).and_then(|()| self.hear(run, &mut told)) {
                if !told {
                    let rank = self.ranks[0].start;
                    let at = Some(run.activity[rank].now());
                    run.report_at(rank, at, None, format!("{} is gone: {error}", self.server));
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

    /// Says that this process lives, and what its ranks do.
    fn beat(&self, run: &Run) -> Result<()> {
        let beats = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        let doing = run.activity[self.ranks[self.mine].clone()].iter().map(|it| it.now().packed());
        let message: Vec<u8> =
            std::iter::once(beats).chain(doing).flat_map(u64::to_le_bytes).collect();
        self.store.set(&alive(self.mine), &message)
    }

    /// Tells the others what has failed here first, unless somebody was faster.
    fn tell(&self, run: &Run) {
        let told = run.failures().first().map(|failure| Told {
            rank: failure.rank,
            operation: failure.at.operation.to_string(),
            sequence: failure.at.sequence,
            error: failure.error.clone(),
        });
        let Some(told) = told else { return };
        if let Ok(text) = serde_json::to_vec(&told) {
            // If the store is gone, they notice that.
            let _ = self.store.compare_set(FAILURE, b"", &text);
        }
    }

    /// Has this process's ranks stop, if one elsewhere has failed.
    fn hear(&self, run: &Run, known: &mut bool) -> Result<()> {
        if *known || !self.store.check(&[FAILURE.into()])? {
            return Ok(());
        }
        *known = true;
        let text = self.store.get(FAILURE, SILENCE)?.unwrap_or_default();
        let Ok(Told { rank, operation, sequence, error }) = serde_json::from_slice(&text) else {
            let what = "another process has failed, and left something that cannot be read";
            run.report_at(self.ranks[0].start, None, None, what.into());
            return Ok(());
        };
        let rank = rank.min(run.activity.len() - 1);
        let at = At::named(&operation, sequence);
        run.activity[rank].restore(at);
        run.report_at(rank, Some(at), None, error);
        Ok(())
    }

    /// What each process has said last: its beats, and what its ranks do. None of what cannot be read.
    fn told(&self, process: usize) -> Option<(u64, Vec<At>)> {
        let message = self.store.get(&alive(process), Duration::ZERO).ok()??;
        let (numbers, rest) = message.as_chunks::<8>();
        let mut numbers = numbers.iter().copied().map(u64::from_le_bytes);
        let beats = numbers.next()?;
        let doing: Vec<At> = numbers.map(At::unpacked).collect::<Option<_>>()?;
        (rest.is_empty() && doing.len() == self.ranks[process].len()).then_some((beats, doing))
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(|&process| process != self.mine)
    }

    fn beats_elsewhere(&self) -> Vec<Option<u64>> {
        self.others().map(|process| self.told(process).map(|(beats, _)| beats)).collect()
    }
}

/// Tells the processes of `store` that `rank`, the only one of its process, has ended, unless something is known to have
/// failed. For who has started them and sees that. Returns what the rank was last seen doing.
pub(super) fn tell_ended(store: &TcpStore, rank: usize, error: &str) -> Result<At> {
    let has_said = store.check(&[alive(rank)])?;
    let beat = if has_said { store.get(&alive(rank), SILENCE)? } else { None }.unwrap_or_default();
    let doing = beat.as_chunks::<8>().0.get(1).copied().map(u64::from_le_bytes);
    let unknown = At { operation: Operation::Start, sequence: 0 };
    let at = doing.and_then(At::unpacked).unwrap_or(unknown);
    let At { operation, sequence } = at;
    let told = Told { rank, operation: operation.to_string(), sequence, error: error.into() };
    let text = serde_json::to_vec(&told).unwrap_or_default();
    store.compare_set(FAILURE, b"", &text)?;
    Ok(at)
}

fn alive(process: usize) -> String {
    format!("alive/{process}")
}

impl Elsewhere for Shared {
    /// Asks twice, so that who has said nothing new in between is known to be silent.
    fn look(&self) -> Vec<(LateRank, bool)> {
        let before = self.beats_elsewhere();
        // Nothing tells that nothing comes but time.
        let until = Instant::now() + SILENCE;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            thread::park_timeout(left);
        }
        let mut seen = Vec::new();
        for (process, before) in self.others().zip(before) {
            let told = self.told(process);
            let silent = told.as_ref().map(|(beats, _)| *beats) == before;
            let mut doing = told.map_or(Vec::new(), |(_, doing)| doing);
            let unknown = At { operation: Operation::Start, sequence: 0 };
            doing.resize(self.ranks[process].len(), unknown);
            for (rank, last_seen) in self.ranks[process].clone().zip(doing) {
                seen.push((LateRank { rank, last_seen, silent }, silent));
            }
        }
        seen
    }
}
