//! `--max-restarts`: the messages between the parent process, which restarts the ranks (`launch/processes/mod.rs`), and
//! each start, through the store of the parent.
//!
//! If the ranks of a start are threads that have all ended, its process asks for the next start.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::messages::{from_json, to_json};
use super::processes::store_prefix;
use super::{Launch, MasterEndpoint};
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::os;
use crate::runtime::MAX_WAIT;

/// The message of the parent process to each start after the first.
const RESTARTS: &str = "restarts";

/// Key of a start that waits for the next one in its process.
const WAITS: &str = "waits";

/// Key of the answer of the parent process to it.
const ANSWER: &str = "answer";

/// Longest wait for the parent process. A machine under load may take seconds; without its parent a process ends.
pub(crate) const PARENT_TIMEOUT: Duration = Duration::from_secs(30);

/// The starts of a run before this one.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Restarts {
    /// The reason of each restart, the first one first.
    pub reasons: Vec<String>,
    /// The time from the start of the run to the last restart.
    pub elapsed: Duration,
    /// Whether an earlier start has opened the checkpoint folder. The newest checkpoint there is then this run's.
    pub saves: bool,
    /// Whether an earlier start has reported to the user that all ranks have connected.
    pub started: bool,
}

impl Restarts {
    /// Key that a start sets once it has opened its checkpoint folder.
    #[doc(hidden)]
    pub const SAVES: &str = "saves";

    /// Key that a start sets once it has reported to the user that all ranks have connected.
    #[doc(hidden)]
    pub const STARTED: &str = "started";

    /// Returns the starts before the one that `launch` describes; empty if no parent process restarts this one.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the parent process does not answer.
    #[doc(hidden)]
    pub fn before(launch: &Launch) -> Result<Self> {
        let (Some(parent), 1..) = (&launch.parent, launch.restart_count) else {
            return Ok(Self::default());
        };
        match connect(parent)?.get(RESTARTS, PARENT_TIMEOUT)? {
            Some(bytes) => from_json(RESTARTS, &bytes),
            None => Ok(Self::default()),
        }
    }

    /// Sets `key` in the store of the parent process, if it restarts this one.
    ///
    /// # Errors
    /// The errors of [`Restarts::before`].
    #[doc(hidden)]
    pub fn note(launch: &Launch, key: &str) -> Result<()> {
        let (Some(parent), 1..) = (&launch.parent, launch.max_restarts) else { return Ok(()) };
        // The store answers this request, so the key has arrived.
        connect(parent)?.add(key, 1).map(drop)
    }

    /// Asks the parent process whether the ranks are restarted in this process. It must have got the error of this start:
    /// see [`ChildError::leave`](super::ChildError::leave). Waits for the answer without a limit, because the parent may be
    /// stopped, or write to somebody who does not read; if it ends, so does this process.
    ///
    /// # Errors
    /// The errors of [`Restarts::before`], and that the parent process cannot be woken.
    #[doc(hidden)]
    pub fn ask_to_stay(launch: &Launch) -> Result<bool> {
        let Some(parent) = &launch.parent else { return Ok(false) };
        let store = connect(parent)?.under(&store_prefix(launch.restart_count));
        store.add(WAITS, 1)?; // The store answers this request, so the key has arrived.
        os::wake_parent()
            .map_err(|error| Error::unsupported(format!("waking the parent: {error}")))?;
        let answer = store.get(ANSWER, MAX_WAIT)?;
        Ok(answer.is_some_and(|answer| answer == [u8::from(true)]))
    }

    /// Returns whether a process has called [`ask_to_stay`](Self::ask_to_stay) and waits for the answer. `store` has the
    /// messages of its start.
    pub(crate) fn is_asked(store: &TcpStore) -> Result<bool> {
        Ok(store.check(WAITS)? && !store.check(ANSWER)?)
    }

    /// Answers the process that has asked in `store`.
    pub(crate) fn answer(store: &TcpStore, stays: bool) -> Result<()> {
        store.set(ANSWER, &[u8::from(stays)])
    }

    /// Adds the `reason` of the next restart, and stores all of this in `store` for the next start.
    #[doc(hidden)]
    pub fn add(&mut self, reason: String, elapsed: Duration, store: &TcpStore) -> Result<()> {
        self.reasons.push(reason);
        self.elapsed = elapsed;
        self.saves = store.check(Self::SAVES)?;
        self.started = store.check(Self::STARTED)?;
        store.set(RESTARTS, &to_json(RESTARTS, self)?)
    }
}

/// Opens a connection to the store of the process that started this one.
pub(crate) fn connect(parent: &MasterEndpoint) -> Result<TcpStore> {
    TcpStore::connect(&parent.addr, parent.port, PARENT_TIMEOUT)
}
