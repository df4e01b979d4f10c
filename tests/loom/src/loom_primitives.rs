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

atomics! { AtomicBool: bool; AtomicU64: u64; AtomicUsize: usize; }

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
