//! The atomics, locks and threads for waits between ranks: from the standard library and parking_lot, or from the model
//! checker loom. loom tries every order in which threads can run (tests/loom).

#[cfg(not(loom))]
use std::time::Duration;

#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(loom))]
use rustix::thread::{Timespec, futex};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    thread::{Thread, available_parallelism, current, park, park_timeout, yield_now},
};

/// A count of notifications that threads wait for. It may lie in memory that processes share.
#[cfg(not(loom))]
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Event(AtomicU32);

#[cfg(not(loom))]
impl Event {
    /// Returns the number of notifications so far.
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Counts a notification, and wakes the threads that wait for one.
    pub(crate) fn notify(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.0, futex::Flags::empty(), u32::MAX >> 1); // fails for no valid address
    }

    /// Waits until there are more notifications than `seen`, or `limit` has passed. May return earlier.
    pub(crate) fn wait(&self, seen: u32, limit: Option<Duration>) {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // An error says that the count has changed, the limit has passed, or a signal has come: the caller looks again.
        let _ = futex::wait(&self.0, futex::Flags::empty(), seen, limit.as_ref());
    }
}

/// `std::cell::UnsafeCell` with loom's interface, which lets loom see each read and write.
#[cfg(not(loom))]
#[derive(Debug, Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

#[cfg(loom)]
pub(crate) use crate::loom_primitives::*;
