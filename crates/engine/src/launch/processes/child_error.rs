//! The error of a child process, which reaches its parent process through the parent's store.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::ffi::TcpStore;
use crate::launch::messages::{from_json, to_json};
use crate::launch::{MasterEndpoint, restarts};
use crate::runtime::RankFailure;

/// The error of a child process, which only its parent process prints.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[doc(hidden)]
pub struct ChildError {
    /// The text for the user.
    pub text: String,
    /// What has failed.
    pub kind: ErrorKind,
    /// Number of failures in a row at the same position, as the parent process counts them; `None` if this is the first
    /// there.
    #[serde(skip)]
    pub repeated: Option<usize>,
}

/// What failed in a child process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[doc(hidden)]
pub enum ErrorKind {
    /// The check of its input.
    WrongInput,
    /// Ranks.
    Ranks(RankFailure),
    /// The process, which had all ranks and left no error.
    Process,
    /// Something else, such as writing a file.
    Other,
}

impl ChildError {
    /// Creates the error of a failure that is the first at its position.
    #[doc(hidden)]
    pub fn new(text: String, kind: ErrorKind) -> Self {
        Self { text, kind, repeated: None }
    }

    /// Returns the failure of the ranks, if they have failed.
    #[doc(hidden)]
    pub fn failure(&self) -> Option<&RankFailure> {
        match &self.kind {
            ErrorKind::Ranks(failure) => Some(failure),
            ErrorKind::WrongInput | ErrorKind::Process | ErrorKind::Other => None,
        }
    }

    /// Returns `rank 1 failed again in step #12` if the failure before was there as well; else `None`.
    #[doc(hidden)]
    pub fn again(&self) -> Option<String> {
        self.repeated.and(self.failure()?.again())
    }

    /// Stores this as the error of process `rank` of the start `start`, in the parent process's store at `parent`.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the parent process does not answer.
    #[doc(hidden)]
    pub fn leave(&self, parent: &MasterEndpoint, start: usize, rank: usize) -> Result<()> {
        let store = restarts::connect(parent)?.under(&store_prefix(start));
        let key = key(rank);
        // The store answers this request, so the error has arrived.
        store.set_new(&key, &to_json(&key, self)?).map(drop)
    }

    /// Returns whether `store`, which holds the errors of one start, has one of process `rank`.
    #[doc(hidden)]
    pub fn is_in(store: &TcpStore, rank: usize) -> Result<bool> {
        store.check(&key(rank))
    }

    /// Reads the error of process `rank`. `None` if there is none.
    #[doc(hidden)]
    pub fn read(store: &TcpStore, rank: usize) -> Option<Self> {
        let key = key(rank);
        let text = store.get(&key, Duration::ZERO).ok()??;
        from_json(&key, &text).ok()
    }
}

/// Returns the key prefix of the errors of a start.
pub(crate) fn store_prefix(start: usize) -> String {
    format!("start/{start}")
}

fn key(rank: usize) -> String {
    format!("error/{rank}")
}

/// Returns how many of the failures at `positions`, the last one included, were in a row at its position; `None` if it
/// is the first there. A run that fails again where it failed before has made no progress.
pub(crate) fn failures_in_a_row(positions: &[Option<String>]) -> Option<usize> {
    let last = positions.last()?.as_ref()?;
    let count =
        positions.iter().rev().take_while(|position| position.as_ref() == Some(last)).count();
    (count > 1).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_count_restarts_at_another_step() {
        let steps =
            [None, None, Some(3), Some(3), Some(3), Some(4), Some(3), Some(3), None, Some(3)];
        let positions = steps.map(|step: Option<u64>| step.map(|step| format!("step #{step}")));
        let counts: Vec<_> = (1..=10).map(|count| failures_in_a_row(&positions[..count])).collect();
        let expected = [None, None, None, Some(2), Some(3), None, None, Some(2), None, None];
        assert_eq!(counts, expected);
    }
}
