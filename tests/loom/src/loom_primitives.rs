//! loom's atomics, locks and threads, with what they need to stand in for the standard library's here.

use std::num::NonZero;
use std::ops::Deref;
use std::sync::TryLockError;

pub(crate) use loom::cell::UnsafeCell;
pub(crate) use loom::sync::MutexGuard;
pub(crate) use loom::sync::atomic::Ordering;
pub(crate) use loom::thread::{Thread, current, park};
/// Not loom's: that `Arc` counts rightly is not in question, and would multiply the orders.
pub(crate) use std::sync::Arc;

/// In a model no time passes, so a wait ends by an event only.
pub(crate) fn park_timeout(_: std::time::Duration) {
    park();
}

/// In a model threads take turns anyway.
pub(crate) fn yield_now() {}

/// Two ranks spin before they sleep; more give way.
pub(crate) fn available_parallelism() -> std::io::Result<NonZero<usize>> {
    Ok(NonZero::<usize>::MIN.saturating_add(1))
}

/// loom lets a `SeqCst` load overlook the newest `SeqCst` store where the older one that it returns is not
/// `SeqCst`, and first values are not. Here they are.
macro_rules! atomics {
    ($($name:ident: $value:ty;)*) => {$(
        #[derive(Debug)]
        pub(crate) struct $name(loom::sync::atomic::$name);

        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                let atomic = loom::sync::atomic::$name::new(value);
                atomic.store(value, Ordering::SeqCst);
                Self(atomic)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(Default::default())
            }
        }

        impl Deref for $name {
            type Target = loom::sync::atomic::$name;

            fn deref(&self) -> &Self::Target {
                &self.0
            }
        }
    )*};
}

atomics! { AtomicBool: bool; AtomicU32: u32; AtomicU64: u64; AtomicUsize: usize; }

/// A futex, made of a thread that parks: one thread at a time waits for an event here.
#[derive(Debug, Default)]
pub(crate) struct Event {
    count: AtomicU32,
    /// Not loom's lock: it stands for the kernel's, which a thread holds for no other event.
    waiting: std::sync::Mutex<Option<Thread>>,
}

impl Event {
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::SeqCst)
    }

    pub(crate) fn notify(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        let waiting = self.waiting.lock().unwrap().clone();
        waiting.iter().for_each(Thread::unpark);
    }

    pub(crate) fn wait(&self, seen: u32, _: Option<std::time::Duration>) {
        *self.waiting.lock().unwrap() = Some(current());
        // Another event may have unparked the thread before, which must not hide that this one does not.
        while self.count() == seen {
            park();
        }
    }
}

/// loom panics when a thread is unparked that waits in `lock`. In `yield_now` it may be.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        loop {
            match self.0.try_lock() {
                Ok(guard) => return guard,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => loom::thread::yield_now(),
            }
        }
    }
}
