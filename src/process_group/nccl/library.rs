//! NCCL's library, which may be missing.

use cudarc::nccl::sys;

use super::status::check;
use crate::error::{Error, Result};

/// Returns NCCL's version, such as `2.28.9`. `None` if NCCL is not installed.
pub(crate) fn version() -> Option<String> {
    require_library().ok()?;
    let mut version = 0;
    // SAFETY: the library is there, and writes one number to a valid place.
    let result = unsafe { sys::ncclGetVersion(&mut version) };
    check("ncclGetVersion", result, std::ptr::null_mut()).ok()?;
    Some(format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100))
}

/// Returns an error if NCCL is not installed: cudarc would panic at the first call.
pub(super) fn require_library() -> Result<()> {
    // SAFETY: only tries to load the library.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(Error::InvalidInput(
        "backend nccl: libnccl was not found; fetch it with `make libtorch` on a machine with an NVIDIA \
         driver, or `pip install torch` for the wheel, or use --backend threaded"
            .into(),
    ))
}
