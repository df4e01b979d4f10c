//! The results of NCCL's functions, as this library's errors.

use std::ffi::CStr;

use cudarc::nccl::sys::{self, ncclResult_t};

use crate::error::{Error, Result};

/// Returns whether `result` is an error. "In progress" is none.
pub(super) fn is_failure(result: &ncclResult_t) -> bool {
    !matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}

/// Turns NCCL's result into an error with NCCL's own message. "In progress" is no error.
///
/// NCCL keeps one last error for the whole process, whatever the communicator. Another rank may have written it, so the
/// error says whose it is.
pub(super) fn check(call: &'static str, result: ncclResult_t) -> Result<()> {
    if !is_failure(&result) {
        return Ok(());
    }
    // SAFETY: both functions return NCCL's strings, which live as long as the library. NCCL does not look at the
    // communicator.
    let (what, last) = unsafe {
        let text = |string| CStr::from_ptr(string).to_string_lossy().into_owned();
        let last = sys::ncclGetLastError(std::ptr::null_mut());
        (
            text(sys::ncclGetErrorString(result)),
            if last.is_null() { String::new() } else { text(last) },
        )
    };
    let reason = match last.trim() {
        "" => what,
        last => format!("{what}; NCCL's last error in this process: {last}"),
    };
    Err(Error::Nccl { call, reason })
}
