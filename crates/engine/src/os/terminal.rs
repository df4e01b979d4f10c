//! The terminal of stderr: raw mode for a view of the whole screen, and its return to normal however the process ends.
//!
//! A process of `--spawn=processes` is in a process group of its own, and so in the background. It may take the
//! terminal from its parent process, and gives it back. The parent process takes it back itself if the child is killed.

use std::env;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;

use rustix::process::{
    Pid, Signal, getpgid, getpgrp, getpid, getppid, kill_process, parent_process_death_signal,
};
use rustix::stdio::stderr;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};
use signal_hook::consts::SIGTTOU;
use signal_hook::flag::register_conditional_shutdown;
use signal_hook::low_level::register;

use super::limits::explain;
use super::process::mask;
use crate::error::escaped;

/// The terminal's settings before the screen was entered; set once.
static ORIGINAL: OnceLock<Termios> = OnceLock::new();

/// Whether the screen is entered.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Whether a thread writes to the screen now.
static DRAWS: AtomicBool = AtomicBool::new(false);

/// How often the thread that leaves the screen lets the one that writes to it run. A handler may have interrupted that thread,
/// which then never ends its write.
const MOST_YIELDS: usize = 1000;

/// The process group that the terminal was taken from; 0 if it was not taken.
static TAKEN_FROM: AtomicI32 = AtomicI32::new(0);

/// Leaves the alternate screen, shows the cursor, ends colours.
const LEAVE: &[u8] = b"\x1b[?1049l\x1b[?25h\x1b[m";
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";

/// Returns why the screen cannot be used; `None` if it can.
#[doc(hidden)]
pub fn screen_problem() -> Option<&'static str> {
    if !io::stderr().is_terminal() {
        return Some("stderr is not a terminal");
    }
    if env::var_os("TERM").is_some_and(|term| term == "dumb") {
        return Some("the terminal is a dumb one (TERM=dumb)");
    }
    // Without job control, nobody takes the terminal from another.
    let Ok(owner) = tcgetpgrp(stderr()) else { return None };
    let may_use = owner == getpgrp() || Some(owner) == parent_group();
    (!may_use).then_some("this process runs in the background")
}

/// Returns the process group of the process that has started this one with
/// [`tie_to_this_process`](super::process::tie_to_this_process). `None` in another process: its parent, such as a shell,
/// lends it no terminal.
fn parent_group() -> Option<Pid> {
    let is_tied = parent_process_death_signal().is_ok_and(|signal| signal == Some(Signal::KILL));
    getpgid(getppid()).ok().filter(|_| is_tied)
}

/// Takes the terminal, sets raw mode and switches to the alternate screen, until [`restore`].
///
/// # Errors
/// If the system refuses.
#[doc(hidden)]
pub fn enter_screen() -> io::Result<()> {
    // The user may have sent the process to the background since the screen was asked for.
    if let Some(problem) = screen_problem() {
        return Err(io::Error::other(problem));
    }
    without_stopping(|| {
        let owner = tcgetpgrp(stderr()).ok().filter(|owner| *owner != getpgrp());
        if let Some(owner) = owner {
            tcsetpgrp(stderr(), getpgrp())?;
            TAKEN_FROM.store(owner.as_raw_nonzero().get(), Ordering::SeqCst);
        }
        SHOWN.store(true, Ordering::SeqCst);
        let mut settings = tcgetattr(stderr())?;
        let _ = ORIGINAL.set(settings.clone());
        settings.make_raw();
        tcsetattr(stderr(), OptionalActions::Now, &settings)?;
        io::stderr().write_all(ENTER)
    })
}

/// Returns whether this process is in the foreground of the terminal. True without job control, where nobody takes it.
#[doc(hidden)]
pub fn is_ours() -> bool {
    tcgetpgrp(stderr()).map_or(true, |owner| owner == getpgrp())
}

/// The entered screen, to write to. Once it was left, or the terminal is another's, what is written is dropped: a view may
/// still draw while a signal ends the process.
#[doc(hidden)]
#[derive(Debug)]
pub struct EnteredScreen;

impl Write for EnteredScreen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        DRAWS.store(true, Ordering::SeqCst);
        let is_there = SHOWN.load(Ordering::SeqCst) && is_ours();
        let written = if is_there { io::stderr().write(bytes) } else { Ok(bytes.len()) };
        DRAWS.store(false, Ordering::SeqCst);
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Brings the terminal back to normal, if the screen is entered and the terminal is still this process's. May be called in a
/// signal handler.
#[doc(hidden)]
pub fn restore() {
    if !SHOWN.swap(false, Ordering::SeqCst) {
        return;
    }
    let mut yields = 0;
    while DRAWS.load(Ordering::SeqCst) && yields < MOST_YIELDS {
        thread::yield_now();
        yields += 1;
    }
    if is_ours() {
        leave(TAKEN_FROM.swap(0, Ordering::SeqCst));
    }
}

fn leave(owner: i32) {
    let _ = without_stopping(|| {
        // The rest is tried if a call fails: nobody could be told.
        let _ = rustix::io::write(stderr(), LEAVE);
        if let Some(original) = ORIGINAL.get() {
            let _ = tcsetattr(stderr(), OptionalActions::Now, original);
        }
        if let Some(owner) = Pid::from_raw(owner) {
            let _ = tcsetpgrp(stderr(), owner);
        }
        Ok(())
    });
}

/// Returns a message of the program as stderr shows it. If a system limit caused an error in it, the limit is explained.
#[doc(hidden)]
pub fn message(text: &str) -> String {
    format!("ddp-mp: {}\n", explain(text))
}

/// Writes a message of the program to stderr. It is escaped: names of hosts, files and variables are untrusted text.
pub(crate) fn write_to_stderr(text: &str) {
    // One write: stderr has no buffer, and the lines of several processes must not mix. An error is ignored: without stderr
    // it cannot be reported.
    let _ = io::stderr().lock().write_all(escaped(&message(text)).as_bytes());
}

/// The terminal of a process whose child processes draw on it.
#[derive(Debug)]
pub(crate) struct LentTerminal(());

impl LentTerminal {
    /// Remembers the terminal's settings. `None` without a terminal.
    pub(crate) fn new() -> Option<Self> {
        if screen_problem().is_some() {
            return None;
        }
        let _ = ORIGINAL.set(tcgetattr(stderr()).ok()?);
        Some(Self(()))
    }

    /// Notes that the child process `child`, which is the leader of a process group, may take the terminal.
    pub(crate) fn lend_to(&self, child: u32) {
        LENT_TO.store(child as i32, Ordering::SeqCst);
    }

    /// Takes the terminal back from a child process that has ended without giving it back, if it was lent. May be called in
    /// a signal handler.
    pub(crate) fn take_back() {
        let Some(child) = Pid::from_raw(LENT_TO.load(Ordering::SeqCst)) else { return };
        if tcgetpgrp(stderr()).is_ok_and(|owner| owner == child) {
            // First of all: a child that still draws sees that the terminal is another's.
            let _ = without_stopping(|| Ok(tcsetpgrp(stderr(), getpgrp())?));
            leave(0);
        }
    }
}

impl Drop for LentTerminal {
    fn drop(&mut self) {
        Self::take_back();
        LENT_TO.store(0, Ordering::SeqCst);
    }
}

/// The process group that a [`LentTerminal`] is lent to; 0 for none.
static LENT_TO: AtomicI32 = AtomicI32::new(0);

/// Runs `f` with SIGTTOU blocked: it would stop a process in the background that changes the terminal.
fn without_stopping<T>(f: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    mask(libc::SIG_BLOCK, &[SIGTTOU])?;
    let result = f();
    mask(libc::SIG_UNBLOCK, &[SIGTTOU])?;
    result
}

/// Makes `signal` end the process from now on while `ends` is true, with the exit code that shells show. Brings the
/// terminal back to normal first.
///
/// # Errors
/// If the system refuses.
pub(crate) fn end_at(signal: i32, ends: &Arc<AtomicBool>) -> io::Result<()> {
    let is_end = ends.clone();
    let handler = move || {
        if is_end.load(Ordering::SeqCst) {
            restore();
            LentTerminal::take_back();
        }
    };
    // SAFETY: the handler reads atomics and settings that never change, and makes system calls that a handler may make.
    unsafe { register(signal, handler) }?;
    register_conditional_shutdown(signal, 128 + signal, ends.clone()).map(drop)
}

/// Sends SIGINT as Ctrl-C does, which raw mode turns off: to this process, or to the parent process whose terminal it
/// has taken, which passes it on.
#[doc(hidden)]
pub fn interrupt() {
    let parent = getppid().filter(|_| TAKEN_FROM.load(Ordering::SeqCst) != 0);
    let _ = kill_process(parent.unwrap_or_else(getpid), Signal::INT);
}
