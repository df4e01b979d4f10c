//! Values that one rank of the process makes for several of its ranks.

use std::collections::HashMap;
use std::hash::Hash;

use parking_lot::Mutex;

use crate::error::Result;

/// Values that not every rank has fetched, each with the number of ranks that still will.
#[derive(Debug)]
pub(crate) struct OncePerProcess<K, T>(Mutex<HashMap<K, (T, usize)>>);

impl<K, T> Default for OncePerProcess<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, T: Clone> OncePerProcess<K, T> {
    /// Returns the same value to each of `ranks` ranks. The first rank to call it makes the value.
    ///
    /// # Errors
    /// The errors of `make`.
    pub(crate) fn fetch(
        &self,
        key: K,
        ranks: usize,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut waiting = self.0.lock();
        let (value, left) = match waiting.remove(&key) {
            Some((value, left)) => (value, left - 1),
            None => (make()?, ranks - 1),
        };
        if left > 0 {
            waiting.insert(key, (value.clone(), left));
        }
        Ok(value)
    }
}
