//! `--max-restarts`: the messages between the parent process, which restarts the ranks (`launch/processes/mod.rs`), and
//! each start, through the store of the parent.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::messages::{from_json, to_json};
use super::{Launch, MasterEndpoint};
use crate::error::Result;
use crate::ffi::TcpStore;

/// The message of the parent process to each start after the first.
const RESTARTS: &str = "restarts";

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
