//! Which libtorch is loaded, from where, and whether it is the one that this binary was built for.

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Once;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, Shown};

unsafe extern "C" {
    fn ddp_torch_version() -> *const c_char;
    fn ddp_loaded_torch_version() -> *const c_char;
    fn ddp_library_file(address: *const c_void) -> *const c_char;
    fn ddp_leave_out_unordered_cudnn();
}

/// Returns the version of libtorch that this binary was built for, such as `2.13.0`.
pub fn version() -> String {
    // SAFETY: takes nothing, and returns a string literal.
    unsafe { text(ddp_torch_version()) }.unwrap_or_default()
}

/// Returns the folder that libtorch was loaded from. `None` if not known.
pub fn library_folder() -> Option<PathBuf> {
    library_file(ptr::null())?.parent().map(PathBuf::from)
}

/// Returns the file of the loaded library that has `address`, and of libtorch for null. `None` if not known.
pub(crate) fn library_file(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: the loader only compares the address. The string belongs to it, and lives as long as the library.
    unsafe { text(ddp_library_file(address)) }.map(PathBuf::from)
}

/// Checks that the loaded libtorch has the version that this binary was built for. Another version has other classes and
/// functions: to use it could crash, or give wrong numbers.
///
/// # Errors
/// [`Error::Input`] if it has another one.
pub fn check_version() -> Result<()> {
    // SAFETY: the string belongs to libtorch's table of build options, which stays.
    let loaded = unsafe { text(ddp_loaded_torch_version()) }.unwrap_or_default();
    let folder = library_folder().unwrap_or_default();
    match mismatch(&version(), &loaded, &folder) {
        Some(problem) => Err(Error::unsupported(problem)),
        None => Ok(()),
    }
}

/// Has libtorch choose kernels that repeat their bits. Call this before threads compute.
///
/// MKL chooses its kernels for elementwise functions, such as tanh, in the first call of such a function, without a lock: it
/// stores the type of the processor, and then replaces it by the index of the kernels for that type. A thread that reads it
/// in between uses other kernels, whose results have other bits.
///
/// cuDNN has convolutions that add up in an order that varies. libtorch leaves them out, as with PyTorch's
/// `torch.backends.cudnn.deterministic`.
pub(crate) fn choose_kernels() {
    static CHOSEN: Once = Once::new();
    // This fails only without memory for one number. Then the ranks fail, too, and say so.
    CHOSEN.call_once(|| {
        // SAFETY: sets a flag of libtorch, before threads read it.
        unsafe { ddp_leave_out_unordered_cudnn() };
        let one = Tensor::f_zeros([1], (Kind::Float, Device::Cpu));
        let _ = one.and_then(|one| one.f_tanh());
    });
}

/// Returns what is wrong with a libtorch of the version `loaded` in `folder`, for a binary that was built for `built`.
fn mismatch(built: &str, loaded: &str, folder: &Path) -> Option<String> {
    // Patches keep the functions and classes.
    let minor = |version: &str| version.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
    let wanted = minor(built);
    (minor(loaded) != wanted).then(|| {
        let loaded = if loaded.is_empty() { "of an unknown version" } else { loaded };
        format!(
            "the libtorch in {} is {loaded}, but this program was built for {built}; install {wanted} (pip install \
             'torch=={wanted}.*'), remove the folder from LD_LIBRARY_PATH if it is there, or build the program with the \
             tch that fits this libtorch",
            folder.shown()
        )
    })
}

/// Returns a copy of a C string. `None` if it is null.
///
/// # Safety
/// `string` is null, or a string that lives until this returns.
unsafe fn text(string: *const c_char) -> Option<String> {
    // SAFETY: not null, and alive.
    (!string.is_null()).then(|| unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_libtorch_is_the_one_that_was_built_for() {
        check_version().unwrap();
    }

    #[test]
    fn another_minor_version_is_a_mismatch() {
        let told = |loaded| mismatch("2.13.0", loaded, Path::new("/env/torch/lib"));
        assert_eq!(told("2.13.0"), None);
        assert_eq!(told("2.13.1+cpu"), None);
        for (loaded, text) in [
            (
                "2.11.0",
                "the libtorch in /env/torch/lib is 2.11.0, but this program was built for 2.13.0",
            ),
            (
                "2.1.3",
                "is 2.1.3, but this program was built for 2.13.0; install 2.13 (pip install 'torch==2.13.*')",
            ),
            ("", "the libtorch in /env/torch/lib is of an unknown version, but"),
        ] {
            let told = told(loaded).unwrap();
            assert!(told.contains(text), "{told}");
        }
    }
}
