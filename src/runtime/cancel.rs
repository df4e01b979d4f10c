//! The token that a failing rank trips, so that the others leave whatever they wait in.

use std::convert::Infallible;
use std::sync::PoisonError;

use crossbeam::channel::{Receiver, Sender, bounded};

use super::primitives::{AtomicUsize, Mutex, Ordering, Thread, current};

const NOBODY: usize = usize::MAX;

/// Tripped once, by the first rank that fails; seen by all.
///
/// A thread cannot be killed from outside, so every wait of this crate asks this token:
/// a thread that parks is registered here and gets unparked, and a thread that waits on a
/// channel selects on [`CancelToken::tripped`] as well.
#[derive(Debug)]
pub(crate) struct CancelToken {
    /// The rank that failed first, or `NOBODY`.
    by: AtomicUsize,
    /// Who parks: woken when the token trips.
    threads: Mutex<Vec<Thread>>,
    /// Nothing is ever sent; the channel closes when the token trips.
    closes: Receiver<Infallible>,
    keeps_open: Mutex<Option<Sender<Infallible>>>,
}

impl Default for CancelToken {
    fn default() -> Self {
        let (sender, closes) = bounded(0);
        Self {
            by: AtomicUsize::new(NOBODY),
            threads: Mutex::new(Vec::new()),
            closes,
            keeps_open: Mutex::new(Some(sender)),
        }
    }
}

impl CancelToken {
    /// Trips the token in the name of rank `by`; only the first call counts.
    pub(super) fn cancel(&self, by: usize) {
        if self.by.compare_exchange(NOBODY, by, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            drop(self.keeps_open.lock().unwrap_or_else(PoisonError::into_inner).take());
            self.wake_all();
        }
    }

    /// The rank that failed first, if one did.
    pub(crate) fn cancelled_by(&self) -> Option<usize> {
        match self.by.load(Ordering::SeqCst) {
            NOBODY => None,
            by => Some(by),
        }
    }

    /// A channel on which nothing arrives and which closes when the token trips: for `select!`.
    pub(crate) fn tripped(&self) -> &Receiver<Infallible> {
        &self.closes
    }

    /// Registers the calling thread: it will be unparked when the token trips.
    pub(crate) fn register(&self) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(current());
    }

    /// Forgets the calling thread, which ends.
    pub(crate) fn deregister(&self) {
        let me = current().id();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.id() != me);
    }

    /// Lets every registered thread look again at what it waits for.
    pub(crate) fn wake_all(&self) {
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            thread.unpark();
        }
    }
}
