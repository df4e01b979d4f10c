//! Functions for the whole process: signals, child processes, names of threads, and the exit.

use std::ffi::{c_char, c_int};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process,
    set_parent_process_death_signal, waitid,
};

/// Ends the process at once with `code`, after all output has been flushed.
///
/// Skips libtorch's static destructors, which take a quarter of a short run. They are not needed: all ranks have
/// been joined, and have freed their objects. If a rank is stuck, running destructors under it would crash.
pub fn exit(code: u8) -> ! {
    // An error here could not be reported any more.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: `_exit` takes any number and does not return.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Makes a write beyond the file size limit (`ulimit -f`) return an error. By default SIGXFSZ would end the process,
/// and leave a partial file.
pub fn ignore_file_size_signal() {
    // SAFETY: takes numbers; no other threads run yet that could see the change halfway.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// The signals that training handles, and that would end a process which does not handle them yet.
const USER_SIGNALS: [i32; 2] = [libc::SIGUSR1, libc::SIGUSR2];

/// Ends the process if its working directory was deleted: MKL, which libtorch initializes before `main`, would end it with an
/// error that names a file of libtorch. Run this from `.preinit_array`.
pub extern "C" fn check_working_directory(
    _argc: c_int,
    _argv: *const *const c_char,
    _envp: *const *const c_char,
) {
    const TEXT: &[u8] = b"ddp-mp: the working directory was deleted; change to another (cd)\n";
    let mut path = [0u8; libc::PATH_MAX as usize];
    // SAFETY: the buffers have these lengths; `_exit` takes any number and does not return.
    unsafe {
        if libc::getcwd(path.as_mut_ptr().cast(), path.len()).is_null()
            && *libc::__errno_location() == libc::ENOENT
        {
            libc::write(libc::STDERR_FILENO, TEXT.as_ptr().cast(), TEXT.len());
            libc::_exit(2);
        }
    }
}

/// Blocks SIGUSR1 and SIGUSR2, which schedulers send. One that arrives before training handles it waits until then. Run
/// this from `.preinit_array`: a program that replaces itself keeps the blocked signals.
pub extern "C" fn hold_user_signals(
    _argc: c_int,
    _argv: *const *const c_char,
    _envp: *const *const c_char,
) {
    hold_signals_of_user();
}

/// Blocks these signals in a program that did not do so before `main`.
#[doc(hidden)]
pub fn hold_signals_of_user() {
    // If the system refuses, the signals end the process, as in any program.
    let _ = mask(libc::SIG_BLOCK, &USER_SIGNALS);
}

/// Unblocks the signals of [`hold_user_signals`], in a program that does not handle them.
pub fn release_user_signals() {
    let _ = mask(libc::SIG_UNBLOCK, &USER_SIGNALS); // fails only for an unknown signal
}

/// Makes the kernel kill the process that `command` starts when this process ends for any reason. Also blocks the
/// signals `held` in it until it calls `release_signals`. The thread that starts it must live until this process
/// ends: the kernel treats the end of that thread as the end of the parent.
#[doc(hidden)]
pub fn tie_to_this_process(command: &mut Command, held: &'static [i32]) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(parent) {
            // The parent ended before that call.
            return Err(Errno::SRCH.into());
        }
        mask(libc::SIG_BLOCK, held)
    };
    // SAFETY: between fork and exec `prepare` makes system calls, and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}

/// Returns whether this process ignores `signal`, as `nohup` and `&` in a script have their programs do. It must stay so.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call writes a `sigaction`, of which zeros are a valid one; without a new one it changes nothing.
    let handler = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction
    };
    handler == libc::SIG_IGN
}

/// Unblocks signals for this thread. The parent process blocked them until this process can handle them.
///
/// # Errors
/// If the system call fails.
pub(crate) fn release_signals(signals: &[i32]) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, signals)
}

/// Blocks or unblocks `signals` for this thread.
///
/// # Errors
/// If the system call fails.
pub(super) fn mask(how: i32, signals: &[i32]) -> io::Result<()> {
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

/// Waits until the child process `process` has ended, and leaves its status for the owner of its
/// [`Child`].
#[doc(hidden)]
pub fn wait_for_end(process: u32) {
    let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) else { return };
    let ends = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(Errno::INTR) = waitid(WaitId::Pid(pid), ends) {}
}

/// Wakes a parent process that waits for the end of its child processes.
///
/// # Errors
/// If the system call fails.
pub(crate) fn wake_parent() -> io::Result<()> {
    let parent = getppid().ok_or(Errno::SRCH)?;
    Ok(kill_process(parent, Signal::CHILD)?)
}

/// Sends `signal` to `child`, if it has not ended.
///
/// # Errors
/// If the system call fails.
pub(crate) fn send_signal(child: &mut Child, signal: i32) -> io::Result<()> {
    if child.try_wait()?.is_some() {
        return Ok(());
    }
    let signal = Signal::from_named_raw(signal).ok_or(Errno::INVAL)?;
    // The process is ours until it is waited for, so the number is not another's.
    Ok(kill_process(Pid::from_child(child), signal)?)
}
