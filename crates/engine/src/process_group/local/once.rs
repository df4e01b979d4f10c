//! Values that one rank of the process makes for several of its ranks.

use std::collections::HashMap;
use std::hash::Hash;
use std::thread::{self, Thread};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::runtime::{Peers, RunContext};

/// Values that not every rank has fetched.
pub(crate) struct OncePerProcess<K, T>(Mutex<HashMap<K, Entry<T>>>);

/// A value that one rank makes.
struct Entry<T> {
    /// `None` while it is being made. The text is the error of the rank that could not make it.
    made: Option<Result<T, String>>,
    /// The global rank that makes it.
    maker: usize,
    /// How many ranks have not fetched it yet.
    left: usize,
    /// The ranks' threads that wait for it.
    waiting: Vec<Thread>,
}

impl<K, T> Default for OncePerProcess<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Copy, T: Clone> OncePerProcess<K, T> {
    /// Returns the same value to each of `ranks` ranks of `run`. The first rank to call it makes the value, the others
    /// wait. `rank` is the calling one, on its own thread.
    ///
    /// # Errors
    /// The errors of `make`; [`Error::Cancelled`] on the ranks that wait for a rank that fails; [`Error::Timeout`] if the
    /// value is not made in time.
    pub(crate) fn fetch(
        &self,
        key: K,
        ranks: usize,
        run: &RunContext,
        rank: usize,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut is_mine = false;
        self.0.lock().entry(key).or_insert_with(|| {
            is_mine = true;
            Entry { made: None, maker: rank, left: ranks, waiting: Vec::new() }
        });
        if !is_mine {
            return self.wait(key, run, rank);
        }
        // Without the lock: this may wait for other processes.
        let made = make();
        let shared = match &made {
            Ok(value) => Ok(value.clone()),
            Err(error) => Err(error.to_string()),
        };
        let mut entries = self.0.lock();
        if let Some(entry) = entries.get_mut(&key) {
            entry.made = Some(shared);
            entry.waiting.drain(..).for_each(|waiting| waiting.unpark());
        }
        Self::count(&mut entries, key);
        made
    }

    fn wait(&self, key: K, run: &RunContext, rank: usize) -> Result<T> {
        let is_made = || self.0.lock().get(&key).is_none_or(|entry| entry.made.is_some());
        // The maker may wait for other processes. That has time-outs of its own, and names what is missing.
        let may_time_out = || run.peer_status.is_none();
        loop {
            let maker = {
                let mut entries = self.0.lock();
                let Some(entry) = entries.get_mut(&key) else {
                    return Err(Error::Internal("a value was fetched by too many ranks".into()));
                };
                let by = entry.maker;
                if let Some(made) = entry.made.clone() {
                    Self::count(&mut entries, key);
                    return made.map_err(|cause| Error::Cancelled { by, cause });
                }
                entry.waiting.push(thread::current());
                by
            };
            let peers = Peers { ranks: &[maker], are_elsewhere: false, limit: None };
            run.wait_for_peers(rank, peers, run.activity[rank].now(), is_made, may_time_out)?;
            run.check(rank)?;
        }
    }

    /// Counts a rank that has fetched the value of `key`; the last one removes it.
    fn count(entries: &mut HashMap<K, Entry<T>>, key: K) {
        if let Some(entry) = entries.get_mut(&key) {
            entry.left -= 1;
            if entry.left == 0 {
                entries.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)] // threads that wait for one rank are no ranks

    use std::sync::Arc;
    use std::time::Duration;

    use crossbeam::channel::bounded;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Rank 0 makes a value until it gets the result; rank 1 fetches it. Returns what rank 1 gets, and whether it has made
    /// the value itself.
    fn fetch_beside(end: impl FnOnce(&RunContext, &dyn Fn(Result<u8>))) -> (Result<u8>, bool) {
        let once = Arc::<OncePerProcess<u8, u8>>::default();
        let run = Arc::new(RunContext::new(2, TIMEOUT, None));
        let ((begun, has_begun), (result, results)) = (bounded(1), bounded::<Result<u8>>(1));
        let (its, of) = (once.clone(), run.clone());
        let maker = thread::spawn(move || {
            of.start(0);
            its.fetch(7, 2, &of, 0, || {
                begun.send(()).unwrap();
                results.recv().unwrap()
            })
        });
        has_begun.recv_timeout(TIMEOUT).unwrap();
        let (its, of, (sender, fetched)) = (once.clone(), run.clone(), bounded(1));
        let waiter = thread::spawn(move || {
            of.start(1);
            let mut made = false;
            let value = its.fetch(7, 2, &of, 1, || {
                made = true;
                Ok(0)
            });
            sender.send((value, made)).unwrap();
        });
        while once.0.lock()[&7].waiting.is_empty() {
            thread::yield_now();
        }
        end(&run, &|value| result.send(value).unwrap());
        let fetched = fetched.recv_timeout(TIMEOUT).expect("it ends");
        let _ = result.send(Ok(1)); // the maker may have got its result already
        waiter.join().unwrap();
        let _ = maker.join().unwrap();
        fetched
    }

    #[test]
    fn value_is_made_once_and_its_failure_is_that_of_all() {
        assert!(matches!(fetch_beside(|_, give| give(Ok(9))), (Ok(9), false)));
        let fail = |_: &RunContext, give: &dyn Fn(Result<u8>)| {
            give(Err(Error::unsupported("the cause".into())));
        };
        let (error, made) = fetch_beside(fail);
        let error = error.unwrap_err();
        assert!(matches!(&error, Error::Cancelled { by: 0, .. }) && !made, "{error}");
        assert!(error.to_string().contains("the cause"), "{error}");
    }

    #[test]
    fn cancel_ends_the_wait_for_a_value() {
        let cancel = |run: &RunContext, _: &dyn Fn(Result<u8>)| {
            run.report(0, None, "the cause".into());
        };
        let (error, made) = fetch_beside(cancel);
        assert!(matches!(error, Err(Error::Cancelled { by: 0, .. })) && !made, "{error:?}");
    }
}
