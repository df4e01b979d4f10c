//! Signals that ask the program to stop, or what it does.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, bounded};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::ffi::{self, limits};
use crate::runtime::{Stop, StopReason};

/// What asks a run to stop.
const STOP_SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGUSR1];

/// And what asks it for more: these concern the processes that train.
pub(super) const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2];

/// What it is told to have stopped because of.
const REASONS: [(i32, StopReason); 3] = [
    (SIGINT, StopReason::Interrupt),
    (SIGTERM, StopReason::Terminate),
    (SIGUSR1, StopReason::User1),
];

/// The code of a process that `signal` ends, as shells count.
const fn code_of(signal: i32) -> u8 {
    128 + signal as u8
}

/// Has SIGINT, SIGTERM and SIGUSR1 ask `stop` from now on. A second SIGINT ends the process at once, as its user
/// expects who has pressed Ctrl-C twice.
///
/// # Errors
/// When the system refuses.
pub fn stop_on_signals(stop: &Stop) -> io::Result<()> {
    end_at_second_interrupt()?;
    for (signal, reason) in REASONS {
        flag::register_usize(signal, stop.asked().clone(), reason as usize)?;
    }
    flag::register(SIGTERM, stop.terminated().clone())?;
    // Those that `--spawn=processes` has held back until there is somebody to heed them.
    ffi::release_signals(&STOP_SIGNALS)
}

/// From now on something arrives in the channel whenever the process gets a SIGUSR2: for
/// [`Spawn::dump_status_on`](super::Spawn::dump_status_on).
///
/// # Errors
/// When the system refuses.
pub fn status_signal() -> io::Result<Receiver<()>> {
    let mut signals = Signals::new([SIGUSR2])?;
    let (ask, asks) = bounded(1);
    // As long as the process.
    let listen = move || {
        for _ in signals.forever() {
            let _ = ask.try_send(()); // once is enough
        }
    };
    let thread = thread::Builder::new().name("signals".into());
    thread.spawn(listen).map_err(|error| not_started("the thread for signals", &error))?;
    ffi::release_signals(&[SIGUSR2])?;
    Ok(asks)
}

fn not_started(what: &str, error: &io::Error) -> io::Error {
    io::Error::other(limits::not_started(what, error))
}

/// Does `wait`, which has no step yet to stop after and may take long: a signal ends the process at once meanwhile, with
/// the code of a run that has stopped. `None` if one has come before. After [`stop_on_signals`].
///
/// # Errors
/// When the system refuses.
pub(crate) fn end_at_signals_in<T>(stop: &Stop, wait: impl FnOnce() -> T) -> io::Result<Option<T>> {
    let waiting = end_at_signals()?;
    // Looked for after that, so that none is missed.
    let waited = stop.asked_for().is_none().then(wait);
    waiting.store(false, Ordering::SeqCst);
    Ok(waited)
}

/// Waits up to `timeout` for this process's own SIGTERM, if it has not come, and ends with it. For a run that has
/// stopped because it came to another process: whoever ends all processes one after the other must not find that this
/// one has ended before it was asked to. After [`stop_on_signals`].
///
/// # Errors
/// When the system refuses.
pub(crate) fn await_termination(stop: &Stop, timeout: Duration) -> io::Result<()> {
    let _waiting = end_at_signals()?;
    // Looked for after that, so that it is not missed.
    if !stop.terminated().load(Ordering::SeqCst) {
        thread::sleep(timeout);
    }
    Ok(())
}

/// Has signals end the process at once, while what this returns is true, with the code of a run that has stopped.
fn end_at_signals() -> io::Result<Arc<AtomicBool>> {
    let waiting = Arc::new(AtomicBool::new(true));
    for (signal, reason) in REASONS {
        let code = exit_code(Some(reason)).into();
        flag::register_conditional_shutdown(signal, code, waiting.clone())?;
    }
    Ok(waiting)
}

pub(super) fn end_at_second_interrupt() -> io::Result<()> {
    let interrupted = Arc::new(AtomicBool::new(false));
    // In this order: the first SIGINT must not find the flag that it sets itself.
    flag::register_conditional_shutdown(SIGINT, code_of(SIGINT).into(), interrupted.clone())?;
    flag::register(SIGINT, interrupted)?;
    Ok(())
}

/// Why a process of the run has stopped that ends with `code`; `None` if it failed.
pub(super) fn reason_of(code: i32) -> Option<Option<StopReason>> {
    let reasons = [None, Some(StopReason::Interrupt), Some(StopReason::Terminate)];
    reasons.into_iter().find(|&reason| i32::from(exit_code(reason)) == code)
}

/// The program's exit code after a run that stopped because of `reason`. SIGUSR1 and limits are ends that were
/// planned: 0, like the end of training.
pub fn exit_code(reason: Option<StopReason>) -> u8 {
    match reason {
        Some(StopReason::Interrupt) => code_of(SIGINT),
        Some(StopReason::Terminate) => code_of(SIGTERM),
        Some(StopReason::User1 | StopReason::Time | StopReason::Steps | StopReason::NoProgress)
        | None => 0,
    }
}
