//! An exchange of texts through the store, for processes that have no other connection yet.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::store_message::{from_json, to_json};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::TcpStore;
use crate::runtime::Instant;

/// The extra time that the others wait for process 0.
const MARGIN: Duration = Duration::from_secs(10);

/// What all processes have published.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Gathered {
    /// Their texts, in the order of the processes.
    All(Vec<String>),
    /// The first process that has published nothing in time.
    Missing(usize),
}

impl Gathered {
    /// Publishes `text` of process `mine` under `key`, and returns what all `count` processes have published there. All
    /// must call it. Process 0 collects, so that the store is not asked by all for all. Waits for `timeout`, and a little
    /// longer for process 0.
    ///
    /// # Errors
    /// The errors of the store, [`Error::Input`] for data that no process of the run stores.
    pub(crate) fn of(
        store: &TcpStore,
        key: &str,
        mine: usize,
        count: usize,
        text: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let key_of = |process: usize| format!("{key}/{process}");
        store.set(&key_of(mine), text.as_bytes())?;
        if mine == 0 {
            let gathered = collect(store, count, key_of, timeout)?;
            store.set(key, &to_json(key, &gathered)?)?;
            return Ok(gathered);
        }
        match store.get(key, timeout.saturating_add(MARGIN))? {
            Some(bytes) => from_json(key, &bytes),
            None => Ok(Self::Missing(0)),
        }
    }
}

fn collect(
    store: &TcpStore,
    count: usize,
    key_of: impl Fn(usize) -> String,
    timeout: Duration,
) -> Result<Gathered> {
    let began = Instant::now();
    let mut all = Vec::new();
    for process in 0..count {
        let left = timeout.saturating_sub(began.elapsed());
        match store.get(&key_of(process), left)? {
            Some(text) => all.push(String::from_utf8_lossy(&text).into_owned()),
            None => return Ok(Gathered::Missing(process)),
        }
    }
    Ok(Gathered::All(all))
}
