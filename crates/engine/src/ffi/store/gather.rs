//! An exchange of messages through the store, for processes that have no other connection yet.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::TcpStore;
use super::message::{from_json, to_json, unreadable};
use crate::error::{Error, Result, escaped_line};

/// How an exchange ends. The first process that finds it out decides for all.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Gathered<T> {
    /// The values that all processes have published, in their order.
    All(Vec<T>),
    /// These processes have published nothing in time.
    Missing(Vec<usize>),
    /// The processes do not fit each other, for this reason.
    Refused(String),
}

impl<T: Serialize + DeserializeOwned> Gathered<T> {
    /// Publishes `value` of process `mine` under `key`, and returns what all `count` processes have published there. All
    /// must call it. Each waits for `timeout`. The process that finds that all are there ends the exchange for all, as `end`
    /// says: with [`Gathered::All`], perhaps without a part that only this process needs, or [`Gathered::Refused`].
    ///
    /// # Errors
    /// The error that `absent` returns for the missing processes, [`Error::Input`] for processes that do not fit each
    /// other and for data that no process of the run stores, the errors of the store.
    pub(crate) fn of(
        store: &TcpStore,
        key: &str,
        [mine, count]: [usize; 2],
        value: &T,
        timeout: Duration,
        absent: impl FnOnce(Vec<usize>) -> Error,
        end: impl FnOnce(Vec<T>) -> Self,
    ) -> Result<Vec<T>> {
        let own = key_of(key, mine);
        store.set(&own, &to_json(&own, value)?)?;
        let is_last = store.add(&format!("{key}/arrived"), 1)? == count as i64;
        let decided = if is_last { None } else { store.get(key, timeout)? };
        let decided = match decided {
            Some(decided) => decided,
            None => {
                let (mut all, mut missing) = (Vec::new(), Vec::new());
                for process in 0..count {
                    let key = key_of(key, process);
                    match store.get(&key, Duration::ZERO)? {
                        Some(bytes) => all.push(from_json(&key, &bytes)?),
                        None => missing.push(process),
                    }
                }
                let ended = if missing.is_empty() { end(all) } else { Self::Missing(missing) };
                ended.decide(store, key)?
            }
        };
        match from_json(key, &decided)? {
            Self::All(all) if all.len() == count => Ok(all),
            Self::Missing(missing) if missing.iter().max().is_some_and(|last| *last < count) => {
                Err(absent(missing))
            }
            Self::Refused(why) => Err(Error::mismatch(escaped_line(&why).into_owned())),
            Self::All(_) | Self::Missing(_) => {
                Err(unreadable(key, "it is for another number of processes"))
            }
        }
    }

    /// Ends the exchange under `key` with this, unless it has ended. Returns the message that counts.
    pub(crate) fn decide(&self, store: &TcpStore, key: &str) -> Result<Vec<u8>> {
        store.set_once(key, &to_json(key, self)?)
    }
}

/// Returns the key of what a process has published under `key`.
pub(crate) fn key_of(key: &str, process: usize) -> String {
    format!("{key}/{process}")
}
