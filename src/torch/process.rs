//! What concerns the process as a whole: where libtorch came from, and how to leave.

use std::io::Write;
use std::path::PathBuf;

use super::shim;

/// The version of libtorch that this binary was built for, such as `2.11.0`.
pub fn version() -> String {
    shim::torch_version()
}

/// The folder that libtorch was loaded from.
pub fn library_folder() -> Option<PathBuf> {
    PathBuf::from(shim::library_file()?).parent().map(PathBuf::from)
}

/// Ends the process at once with `code`, after all output has been flushed.
///
/// Libtorch's static destructors cost a quarter of a short run and have nothing to do: all ranks have
/// been joined, and what they owned has been freed on their threads. And where a rank is stuck,
/// running destructors under it would crash.
pub fn exit(code: u8) -> ! {
    // Nobody is left to tell if this fails.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: `_exit` takes any number and does not return.
    unsafe { libc::_exit(i32::from(code)) }
}
