//! The report of a process's failure to its parent process, through the parent's store.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::ffi::TcpStore;
use crate::launch::{MasterEndpoint, restarts};
use crate::telemetry::Failure;

/// The report of a process's failure to its parent process, which alone prints it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The text for the user.
    pub text: String,
    /// Whether the input is wrong, rather than the run.
    pub wrong_input: bool,
    /// The failure event, if ranks have failed.
    pub failure: Option<Failure>,
}

impl Report {
    /// Stores this as the report of process `rank` of start number `start`, in the parent process's store at
    /// `parent`.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the parent process does not answer.
    pub(crate) fn leave(&self, parent: &MasterEndpoint, start: usize, rank: usize) -> Result<()> {
        let store = restarts::connect(parent)?.under(&store_prefix(start));
        self.store(&store, rank)?;
        // The answer to the next request shows that the report has arrived.
        Self::is_in(&store, rank).map(drop)
    }

    /// Stores this as the report of process `rank` in `store`, which holds the reports of one start.
    pub(super) fn store(&self, store: &TcpStore, rank: usize) -> Result<()> {
        store.set(&key(rank), &serde_json::to_vec(self).unwrap_or_default())
    }

    /// Returns whether `store` has a report of process `rank`.
    pub(super) fn is_in(store: &TcpStore, rank: usize) -> Result<bool> {
        store.check(&[key(rank)])
    }

    /// Reads the report of process `rank` within `timeout`. `None` if there is none.
    pub(super) fn read(store: &TcpStore, rank: usize, timeout: Duration) -> Option<Self> {
        // A `get` without a timeout may miss a key that exists.
        Self::is_in(store, rank).ok().filter(|is_there| *is_there)?;
        let text = store.get(&key(rank), timeout).ok()??;
        serde_json::from_slice(&text).ok()
    }
}

/// Returns the key prefix of the reports of a start.
pub(super) fn store_prefix(start: usize) -> String {
    format!("start/{start}")
}

fn key(rank: usize) -> String {
    format!("report/{rank}")
}
