//! NCCL's library, which may be missing, what the user has set for it, and the results of its functions.

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io::Write;
use std::mem;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, fs, io};

use cudarc::nccl::sys::{self, ncclResult_t};
use libloading::os::unix::{Library, RTLD_LAZY};
use rustix::fs::MemfdFlags;

use crate::error::{Error, Result, Shown};
#[cfg(doc)]
use crate::ffi::cuda;
use crate::ffi::cuda::dlerror;
use crate::ffi::library_file;
use crate::os::shared_memory::memory_file;

/// The NCCL that this process uses.
#[derive(Debug, Clone)]
#[doc(hidden)]
pub struct NcclLibrary {
    /// The version, such as `2.29.7`.
    pub version: String,
    /// The file; `None` if the loader does not know it.
    pub file: Option<PathBuf>,
}

/// Returns the NCCL that this process uses; `None` if NCCL is not installed. Call this after [`cuda::load`], which decides
/// it.
///
/// # Errors
/// [`Error::Input`] if it lacks functions.
#[doc(hidden)]
pub fn find() -> Result<Option<NcclLibrary>> {
    if !is_present() {
        return Ok(None);
    }
    require_library()?;
    Ok(Some(NcclLibrary { version: text(number()?), file: file() }))
}

/// Returns NCCL's version as NCCL numbers it, such as 22907. The library must be there.
fn number() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the library is there, and writes one number to a valid place.
    let result = unsafe { sys::ncclGetVersion(&mut version) };
    check("ncclGetVersion", result)?;
    Ok(version)
}

/// Returns a version as text.
fn text(version: i32) -> String {
    // Before 2.9 the minor version had one digit: 2804 is 2.8.4.
    let major = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

/// The first version with communicators that do not block.
const OLDEST: i32 = 21400;

/// The first version that lets several ranks have one GPU.
const SHARES_GPUS: i32 = 23003;

/// The variable that, set to 1, lets several ranks have one GPU.
const MULTI_RANK: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Checks that this NCCL and its settings let several ranks have one GPU. NCCL also lets ranks `between_processes` have one
/// that it takes to be on different hosts.
pub(super) fn check_shared_gpu(between_processes: bool) -> Result<()> {
    require_library()?;
    let found = number()?;
    if between_processes && host_id().is_some() {
        return Ok(()); // the processes compare what they have
    }
    let reason = if found < SHARES_GPUS {
        format!(
            "NCCL {} needs one for each rank (from {} on they may share one)",
            text(found),
            text(SHARES_GPUS)
        )
    } else if setting(MULTI_RANK).is_none_or(|(value, _)| value != "1") {
        format!("NCCL {} needs one for each rank unless {MULTI_RANK}=1 is set", text(found))
    } else {
        return Ok(());
    };
    Err(Error::unsupported(reason))
}

/// Returns the host that NCCL takes this process to be on, if `NCCL_HOSTID` names one.
#[doc(hidden)]
pub fn host_id() -> Option<String> {
    setting("NCCL_HOSTID").map(|(value, _)| value).filter(|host| !host.is_empty())
}

/// Returns an error if NCCL is not installed or too old, or if its settings make every call block.
pub(super) fn check_library() -> Result<()> {
    require_library()?;
    let found = number()?;
    if found < OLDEST {
        return Err(Error::unsupported(format!(
            "backend nccl: NCCL {} is too old: it has no communicators that do not block; install {} or newer (`pip \
             install torch` brings one), or use --backend threaded",
            text(found),
            text(OLDEST)
        )));
    }
    let Some((value, source)) = setting(COMM_BLOCKING) else { return Ok(()) };
    if matches!(value.trim(), "" | "0") {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "backend nccl: {COMM_BLOCKING}={value} in {source} makes NCCL's calls block, so that no timeout and no failure of \
         another rank can end them; remove it there, or set {COMM_BLOCKING}=0 in the environment"
    )))
}

/// The variable that overrides the configuration of a communicator.
const COMM_BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// Returns the value of the variable `name` that NCCL finds, and where.
fn setting(name: &str) -> Option<(String, String)> {
    if let Ok(value) = env::var(name) {
        return Some((value, "the environment".into()));
    }
    let own = env::var_os("NCCL_CONF_FILE").filter(|path| !path.is_empty()).map(PathBuf::from);
    let own = own.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".nccl.conf")));
    // NCCL keeps the value that it reads first.
    own.into_iter().chain(["/etc/nccl.conf".into()]).find_map(|path| {
        let text = fs::read_to_string(&path).ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        Some((value.into(), path.shown().into_owned()))
    })
}

/// Returns an error if NCCL is not installed or lacks functions, where cudarc would panic at a call.
pub(super) fn require_library() -> Result<()> {
    if !is_present() {
        let problem = LOADED.get().and_then(|loaded| loaded.as_ref().err());
        let why = problem.map_or(String::new(), |why| format!(" ({why})"));
        return Err(Error::unsupported(format!(
            "backend nccl: libnccl was not found{why}; fetch it with `make libtorch` on a machine with an NVIDIA driver, \
             or `pip install torch` for the wheel, or use --backend threaded"
        )));
    }
    if let Some(missing) = FUNCTIONS.iter().find(|name| !has_function(name)) {
        return Err(Error::unsupported(format!(
            "backend nccl: the libnccl in use{} has no {missing}: it is too old, or not NCCL; install {} or newer (`pip \
             install torch` brings one), check LD_LIBRARY_PATH and LD_PRELOAD, or use --backend threaded",
            file().map_or(String::new(), |file| format!(", {},", file.shown())),
            text(OLDEST)
        )));
    }
    Ok(())
}

/// Functions without which a library is not NCCL, or too old: the last one is as new as any that this program calls.
const FUNCTIONS: [&str; 3] = ["ncclGetVersion", "ncclGetErrorString", "ncclCommInitRankConfig"];

/// Returns whether the library that cudarc has loaded has this function.
fn has_function(name: &str) -> bool {
    // SAFETY: the function is not called.
    unsafe { sys::culib().get::<GetVersion>(name.as_bytes()).is_ok() }
}

/// Why NCCL could not be loaded as libtorch_cuda's, if it could not.
static LOADED: OnceLock<std::result::Result<(), String>> = OnceLock::new();

/// Loads NCCL, if it is installed.
fn is_present() -> bool {
    let _ = LOADED.get_or_init(load_alias); // `require_library` reports why not
    // SAFETY: only tries to load the library.
    unsafe { sys::is_culib_present() }
}

/// An empty library with the name `libnccl.so`, which needs `libtorch_cuda.so`. `build.rs` makes it.
static ALIAS_OF_LIBTORCH: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/nccl_aliases/libtorch_cuda.so/libnccl.so"));

/// The same, but it needs `libnccl.so.2`.
static ALIAS: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/nccl_aliases/libnccl.so.2/libnccl.so"));

/// Makes `libnccl.so`, which cudarc opens, a name of the NCCL that libtorch_cuda has: a library that it has loaded, or a
/// part of its own. Without either, of the system's `libnccl.so.2`.
///
/// The file names would not do that: libtorch_cuda finds its NCCL by a path of its own, and `libnccl.so` is searched in
/// LD_LIBRARY_PATH first. The process would have two NCCLs, and the second would call functions of the first.
///
/// If this fails, for the reason that it returns, cudarc searches.
fn load_alias() -> std::result::Result<(), String> {
    let alias = if libtorch_has_nccl() { ALIAS_OF_LIBTORCH } else { ALIAS };
    let in_memory = || {
        let mut file = File::from(memory_file("libnccl.so", MemfdFlags::CLOEXEC)?);
        file.write_all(alias)?;
        Ok(file)
    };
    let file = in_memory().map_err(|error: io::Error| error.to_string())?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // SAFETY: the alias has no code. What it needs is NCCL or libtorch_cuda; to load them runs their initialisers, as linking
    // to them would.
    let alias = unsafe { Library::open(Some(path), RTLD_LAZY) };
    mem::forget(alias.map_err(|error| dlerror(&error))?); // for the life of the process, as cudarc's
    Ok(())
}

/// Returns whether libtorch_cuda is loaded, and has NCCL or has loaded it.
fn libtorch_has_nccl() -> bool {
    // SAFETY: loads nothing. The name is that of a function, which is not called.
    unsafe {
        Library::open(Some("libtorch_cuda.so"), RTLD_LAZY | libc::RTLD_NOLOAD)
            .is_ok_and(|libtorch| libtorch.get::<GetVersion>(GET_VERSION).is_ok())
    }
}

/// The signature of `ncclGetVersion`.
type GetVersion = unsafe extern "C" fn(*mut c_int) -> ncclResult_t;

const GET_VERSION: &[u8] = b"ncclGetVersion\0";

/// Returns the file of the NCCL that is in use. The library must be there. `None` if the loader does not know it.
fn file() -> Option<PathBuf> {
    // SAFETY: a library that exports this name gives it this signature. cudarc never closes it.
    let version = unsafe { sys::culib().get::<GetVersion>(GET_VERSION) }.ok()?;
    library_file(*version as *const c_void)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_nccl_numbers_them() {
        let texts = [2804, 21304, 22907].map(text);
        assert_eq!(texts, ["2.8.4", "2.13.4", "2.29.7"]);
    }
}
