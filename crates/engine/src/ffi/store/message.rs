//! Messages in the store, as JSON. Each has a key, which errors name.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Returns the error of a message that no process of the run stores.
pub(crate) fn unreadable(key: &str, why: &str) -> Error {
    Error::data(format!(
        "store key {key:?} holds an invalid message: {why}; another program may use the same store: give each run a \
         store of its own"
    ))
}

pub(crate) fn to_json(key: &str, message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message)
        .map_err(|error| Error::Internal(format!("store key {key:?}: {error}")))
}

pub(crate) fn from_json<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| unreadable(key, &error.to_string()))
}
