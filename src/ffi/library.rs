//! Which libtorch is loaded, and from where.

use std::path::PathBuf;

use super::shim;

/// Returns the version of libtorch that this binary was built for, such as `2.13.0`.
pub fn version() -> String {
    shim::torch_version()
}

/// Returns the folder that libtorch was loaded from. `None` if not known.
pub fn library_folder() -> Option<PathBuf> {
    PathBuf::from(shim::library_file()?).parent().map(PathBuf::from)
}
