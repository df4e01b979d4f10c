//! The id with which the ranks of a communicator find each other.

use std::ffi::c_char;
use std::time::Duration;

use cudarc::nccl::sys;

use super::library::require_library;
use super::status::check;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;

/// The id that one rank creates and all ranks need to join a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct UniqueId(pub(super) sys::ncclUniqueId);

impl UniqueId {
    /// Creates a new id. Follows `ncclGetUniqueId`.
    pub(super) fn new() -> Result<Self> {
        require_library()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: the library is there, and fills the id it is given.
        let result = unsafe { sys::ncclGetUniqueId(&mut id) };
        check("ncclGetUniqueId", result)?;
        Ok(Self(id))
    }

    /// Returns the id that all processes of a group share under `key` of their store. The process with `makes_it`
    /// creates it. The others wait for it up to `timeout`, and then fail with `late`.
    pub(super) fn through(
        store: &TcpStore,
        key: &str,
        makes_it: bool,
        timeout: Duration,
        late: impl FnOnce() -> Error,
    ) -> Result<Self> {
        if makes_it {
            let id = Self::new()?;
            store.set(key, &id.0.internal.map(|byte| byte as u8))?;
            return Ok(id);
        }
        let id = store.get(key, timeout)?.ok_or_else(late)?;
        Self::from_bytes(key, &id).map_err(|reason| Error::Nccl { call: "ncclGetUniqueId", reason })
    }

    pub(super) fn from_bytes(key: &str, bytes: &[u8]) -> std::result::Result<Self, String> {
        let id = <[u8; 128]>::try_from(bytes).map_err(|_| {
            format!(
                "store key {key:?} holds {} bytes instead of the 128 of an id; another program may use the same \
                 store: give each run a store of its own",
                bytes.len()
            )
        })?;
        Ok(Self(sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) }))
    }
}
