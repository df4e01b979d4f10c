//! What concerns the process as a whole: where libtorch came from, processes that it starts, and how to leave.

use std::ffi::CStr;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};

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

/// Has a write that reaches the limit on file sizes (`ulimit -f`) fail as any other, instead of ending the process with
/// SIGXFSZ, which leaves half a file behind.
pub fn ignore_file_size_signal() {
    // SAFETY: takes numbers; before other threads there is nobody who sees the change halfway.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Has the system kill the process that `command` starts when this one ends, however that is, and hold back `held`
/// signals until it calls [`release_signals`]. The thread that starts it must live on as long as this process does: to
/// the system the end of that thread is the end of its parent.
pub(crate) fn tie_to_this_process(command: &mut Command, held: &'static [i32]) {
    let parent = std::process::id();
    let prepare = move || {
        // SAFETY: takes numbers, and changes nothing but this process.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: takes nothing, and cannot fail.
        if unsafe { libc::getppid() } as u32 != parent {
            // It has ended before it could be tied to.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        mask(libc::SIG_BLOCK, held)
    };
    // SAFETY: between fork and exec `prepare` makes system calls, and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}

/// Runs `f` on this thread under another name, of up to 15 bytes, which the threads that it starts inherit: for `top -H`.
pub(super) fn named<T>(name: &CStr, f: impl FnOnce() -> T) -> T {
    let mut before = [0u8; 16];
    // SAFETY: as many bytes as a name has, in both directions; a system that refuses has names as they were.
    unsafe {
        libc::prctl(libc::PR_GET_NAME, before.as_mut_ptr());
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
    let result = f();
    // SAFETY: as above.
    unsafe { libc::prctl(libc::PR_SET_NAME, before.as_ptr()) };
    result
}

/// Lets signals through to this thread that who started the process has held back until it can handle them.
///
/// # Errors
/// When the system refuses.
pub(crate) fn release_signals(signals: &[i32]) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, signals)
}

fn mask(how: i32, signals: &[i32]) -> io::Result<()> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set, to which the other calls add and from which they read.
    let refused = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        libc::pthread_sigmask(how, set.as_ptr(), std::ptr::null_mut())
    };
    if refused == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(refused)) }
}

/// Sends `signal` to `child`, if it has not ended.
///
/// # Errors
/// When the system refuses.
pub(crate) fn send_signal(child: &mut Child, signal: i32) -> io::Result<()> {
    if child.try_wait()?.is_some() {
        return Ok(());
    }
    // SAFETY: takes numbers; the process is ours until it is waited for, so the number is not another's.
    if unsafe { libc::kill(child.id() as i32, signal) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
