//! One rank's NCCL communicator: it is joined without blocking, and ended in order.
//!
//! `ncclCommFinalize` lets launched work finish, its last messages to other machines included. `ncclCommAbort` cuts it
//! off. A communicator is aborted only if its run has failed. Otherwise [`Communicator::leave`] finalizes it without
//! waiting: another member may still need this rank before it leaves, too. [`end_all`] waits, at the rank's end.

use std::cell::RefCell;
use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::time::Duration;

use cudarc::nccl::sys::{self, ncclResult_t};

use super::library::{check, is_failure, require_library};
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::runtime::RunContext;

thread_local! {
    /// Communicators that the ranks of this thread have left, and that NCCL may not have finalized yet.
    static ENDING: RefCell<Vec<Communicator>> = const { RefCell::new(Vec::new()) };
}

/// A communicator of one rank. Aborted when it is dropped.
pub(super) struct Communicator {
    /// The handle for NCCL's functions.
    pub(super) comm: sys::ncclComm_t,
    run: Arc<RunContext>,
}

// SAFETY: a communicator may be used from any thread, by one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Creates a communicator that has not joined anything.
    pub(super) fn new(run: Arc<RunContext>) -> Self {
        Self { comm: std::ptr::null_mut(), run }
    }

    /// Starts to join the communicator `id` of `size` ranks as rank `rank`, with the thread's current device. Follows
    /// `ncclCommInitRankConfig`.
    pub(super) fn join(
        &mut self,
        UniqueId(id): UniqueId,
        size: usize,
        rank: usize,
    ) -> ncclResult_t {
        ENDING.with_borrow_mut(|ending| ending.retain_mut(|left| !left.try_end()));
        let (size, rank) = (size as c_int, rank as c_int);
        let mut config = non_blocking();
        // SAFETY: all pointers are to valid memory; NCCL copies the configuration. From here on `comm` is set, and
        // ended on every path.
        unsafe { sys::ncclCommInitRankConfig(&mut self.comm, size, id, rank, &mut config) }
    }

    /// Returns NCCL's own state of the communicator: success, in progress, or a failure. In progress if the watchdog has
    /// taken it: the run has failed then, which the caller's wait finds.
    pub(super) fn state(&self) -> ncclResult_t {
        if self.comm.is_null() {
            return ncclResult_t::ncclInProgress;
        }
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: `comm` is live, and `state` valid memory.
        match unsafe { sys::ncclCommGetAsyncError(self.comm, &mut state) } {
            ncclResult_t::ncclSuccess => state,
            failed => failed,
        }
    }

    /// Returns NCCL's error if the communicator has failed. `call` is the name of the call in the error.
    pub(super) fn check(&self, call: &'static str) -> Result<()> {
        check(call, self.state())
    }

    /// Leaves the communicator, without waiting. All launched work still finishes, unless the run has failed.
    pub(super) fn leave(self) {
        if self.comm.is_null() || self.run.cancel.cancelled_by().is_some() {
            return; // aborts
        }
        // SAFETY: `comm` is live, and nothing more is launched in it.
        if is_failure(&unsafe { sys::ncclCommFinalize(self.comm) }) {
            return;
        }
        // If the thread is about to end, this drops and so aborts it, because nothing would wait for it.
        let _ = ENDING.try_with(|ending| ending.borrow_mut().push(self));
    }

    /// Destroys the communicator if NCCL has finalized it. Returns whether it has ended.
    fn try_end(&mut self) -> bool {
        match self.state() {
            ncclResult_t::ncclInProgress => return false,
            ncclResult_t::ncclSuccess => {
                let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
                // SAFETY: `comm` is live and this is its last use. No caller is left for an error.
                unsafe { sys::ncclCommDestroy(comm) };
            }
            _ => {}
        }
        true
    }
}

impl Drop for Communicator {
    /// Aborts it: the other ranks may be gone, and only abort is sure to return then.
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // SAFETY: `comm` is live and this is its last use.
            unsafe { sys::ncclCommAbort(self.comm) };
        }
    }
}

/// Waits until NCCL has finalized all that `rank` has left, the run is cancelled, or its timeout has passed. Then
/// aborts the rest. All ranks call this, so that finalizing can end.
pub(super) fn end_all(run: &RunContext, rank: usize) {
    let left = RefCell::new(ENDING.take());
    // The rank's function is over, so no caller is left for an error.
    let _ = run.poll(rank, || {
        left.borrow_mut().retain_mut(|left| !left.try_end());
        Ok(left.borrow().is_empty())
    });
}

/// `NCCL_CONFIG_INITIALIZER` with `blocking = 0`: cudarc doesn't have the macro.
fn non_blocking() -> sys::ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 22809,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
    }
}

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
