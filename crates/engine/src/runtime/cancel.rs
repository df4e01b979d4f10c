//! The token that a failing rank trips to end the waits of all other ranks.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Weak;

use crossbeam::channel::{Receiver, Sender, bounded};

use super::primitives::{AtomicUsize, Mutex, Ordering, Thread, current};

const NOBODY: usize = usize::MAX;

/// Events that threads wait for.
pub(crate) trait Notify: Debug + Send + Sync {
    /// Wakes the waiting threads, so that they check their conditions again.
    fn notify(&self);
}

/// A token that the first failing rank trips once and all ranks see.
///
/// A thread cannot be killed from outside, so every wait of this crate checks this token. A thread that parks is registered
/// here and gets unparked; an event that a thread waits for is notified. A thread that waits on a channel also selects on
/// [`CancelToken::tripped`].
#[derive(Debug)]
pub(crate) struct CancelToken {
    /// The rank that failed first, or `NOBODY`.
    by: AtomicUsize,
    /// The threads that may park; unparked when the token trips.
    threads: Mutex<Vec<Thread>>,
    /// Where threads wait for an event; notified when the token trips.
    events: Mutex<Vec<Weak<dyn Notify>>>,
    /// A channel without messages that closes when the token trips.
    closed_rx: Receiver<Infallible>,
    open_tx: Mutex<Option<Sender<Infallible>>>,
}

impl Default for CancelToken {
    fn default() -> Self {
        let (open_tx, closed_rx) = bounded(0);
        Self {
            by: AtomicUsize::new(NOBODY),
            threads: Mutex::new(Vec::new()),
            events: Mutex::new(Vec::new()),
            closed_rx,
            open_tx: Mutex::new(Some(open_tx)),
        }
    }
}

impl CancelToken {
    /// Trips the token in the name of rank `by`; only the first call counts.
    pub(super) fn cancel(&self, by: usize) {
        if self.by.compare_exchange(NOBODY, by, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            drop(self.open_tx.lock().take());
            self.wake_all();
        }
    }

    /// Returns the rank that failed first; `None` if no rank has failed.
    pub(crate) fn cancelled_by(&self) -> Option<usize> {
        match self.by.load(Ordering::SeqCst) {
            NOBODY => None,
            by => Some(by),
        }
    }

    /// Returns a channel without messages that closes when the token trips, for `select!`.
    pub(crate) fn tripped(&self) -> &Receiver<Infallible> {
        &self.closed_rx
    }

    /// Registers the calling thread, to be unparked when the token trips.
    pub(crate) fn register(&self) {
        self.threads.lock().push(current());
    }

    /// Removes the calling thread, which is about to end.
    pub(crate) fn deregister(&self) {
        let me = current().id();
        self.threads.lock().retain(|thread| thread.id() != me);
    }

    /// Registers events, to be notified when the token trips, for as long as they exist.
    pub(crate) fn register_events(&self, events: Weak<dyn Notify>) {
        let mut all = self.events.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(events);
    }

    /// Wakes every registered thread and every thread that waits for a registered event, so that it checks its condition
    /// again.
    pub(crate) fn wake_all(&self) {
        for thread in self.threads.lock().iter() {
            thread.unpark();
        }
        let events: Vec<_> = self.events.lock().iter().filter_map(Weak::upgrade).collect();
        events.iter().for_each(|events| events.notify());
    }
}
