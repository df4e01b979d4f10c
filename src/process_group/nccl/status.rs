//! The results of NCCL's functions, as this library's errors.

use std::ffi::CStr;

use cudarc::nccl::sys::{self, ncclResult_t};

use crate::error::{Error, Result};

/// Returns whether `result` is an error. "In progress" is none.
pub(super) fn is_failure(result: &ncclResult_t) -> bool {
    !matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}

/// Turns NCCL's result into an error with NCCL's own message. "In progress" is no error.
pub(super) fn check(call: &'static str, result: ncclResult_t, comm: sys::ncclComm_t) -> Result<()> {
    if !is_failure(&result) {
        return Ok(());
    }
    // SAFETY: both functions return NCCL's strings, which live as long as the library. A null communicator is allowed,
    // and selects the last error of this thread.
    let (what, last) = unsafe {
        let text = |string| CStr::from_ptr(string).to_string_lossy().into_owned();
        let last = sys::ncclGetLastError(comm);
        (
            text(sys::ncclGetErrorString(result)),
            if last.is_null() { String::new() } else { text(last) },
        )
    };
    let reason = if last.is_empty() { what } else { format!("{what} ({})", last.trim()) };
    Err(Error::Nccl { call, reason })
}
