//! Signals that ask the program to stop or to report its status.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, bounded, never};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::os::{self, limits::not_started};
use crate::runtime::{StopReason, StopRequest};

/// The signals that ask a run to stop, and SIGUSR2, which requests a status report: those that training processes handle.
pub(crate) const SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// The reason for stopping that each signal stands for.
const REASONS: [(i32, StopReason); 4] = [
    (SIGINT, StopReason::Interrupt),
    (SIGTERM, StopReason::Terminate),
    (SIGHUP, StopReason::HangUp),
    (SIGUSR1, StopReason::User1),
];

/// Returns the reasons whose signals this process heeds. One that was ignored when the process began stays ignored: nohup
/// ignores SIGHUP, and a script that starts a program with `&` ignores SIGINT.
fn heeded_reasons() -> impl Iterator<Item = (i32, StopReason)> {
    REASONS.into_iter().filter(|(signal, _)| !os::is_ignored(*signal))
}

/// How long after SIGTERM another one counts as the same request. A launcher and its agent may both send one.
pub(super) const SAME_REQUEST: Duration = Duration::from_millis(500);

/// Returns the exit code of a process that `signal` ends, as shells count it.
pub(super) const fn code_of(signal: i32) -> u8 {
    128 + signal as u8
}

/// Makes SIGINT, SIGTERM, SIGHUP and SIGUSR1 set `stop` from now on, unless they are ignored. A second SIGINT ends the
/// process at once, as a user who presses Ctrl-C twice expects. While ranks of [`Spawn`](super::Spawn) run, so does a second
/// SIGTERM half a second after the first: launchers send it twice in a row.
///
/// # Errors
/// When the system refuses.
pub fn stop_on_signals(stop: &StopRequest) -> io::Result<()> {
    let heeded: Vec<(i32, StopReason)> = heeded_reasons().collect();
    end_at_second_interrupt()?;
    for (signal, reason) in &heeded {
        if reason.is_signal() {
            os::terminal::end_at(*signal, &stop.next_signal_ends)?;
        }
    }
    for (signal, reason) in heeded {
        flag::register_usize(signal, stop.asked.clone(), reason as usize)?;
        if reason == StopReason::Terminate {
            flag::register(signal, stop.terminated.clone())?;
        }
    }
    // `--spawn=processes` has blocked these signals until their handlers are in place.
    os::release_signals(&REASONS.map(|(signal, _)| signal))
}

/// Returns a channel that receives a message at each SIGUSR2 from now on: for
/// [`Spawn::dump_status_on`](super::Spawn::dump_status_on).
///
/// # Errors
/// When the system refuses.
pub fn status_signal() -> io::Result<Receiver<()>> {
    if os::is_ignored(SIGUSR2) {
        return Ok(never());
    }
    let mut signals = Signals::new([SIGUSR2])?;
    let (requests_tx, requests_rx) = bounded(1);
    // Runs until the process ends.
    let listen = move || {
        for _ in signals.forever() {
            let _ = requests_tx.try_send(()); // once is enough
        }
    };
    let thread = thread::Builder::new().name("signals".into());
    thread
        .spawn(listen)
        .map_err(|error| io::Error::other(not_started("the thread for signals", &error)))?;
    os::release_signals(&[SIGUSR2])?;
    Ok(requests_rx)
}

/// Runs `wait`, which may take long and has no training step to stop after. Meanwhile a signal ends the process at
/// once, with the exit code of a run that has stopped. Returns `None`, without a wait, if a signal has arrived
/// before. Call [`stop_on_signals`] first.
///
/// # Errors
/// When the system refuses.
#[doc(hidden)]
pub fn end_at_signals_in<T>(stop: &StopRequest, wait: impl FnOnce() -> T) -> io::Result<Option<T>> {
    let waiting = end_at_signals()?;
    // Checked after the handlers are in place, so that no signal is missed.
    let waited = stop.request_reason().is_none().then(wait);
    waiting.store(false, Ordering::SeqCst);
    Ok(waited)
}

/// Waits up to `timeout` for this process's own SIGTERM, if it has not arrived, and exits at its arrival. For a run
/// that has stopped because another process got SIGTERM. An agent that ends the processes one by one must not find
/// that this one has exited before its SIGTERM. Call [`stop_on_signals`] first.
///
/// # Errors
/// When the system refuses.
#[doc(hidden)]
pub fn await_termination(stop: &StopRequest, timeout: Duration) -> io::Result<()> {
    let _waiting = end_at_signals()?;
    // Checked after the handlers are in place, so that the signal is not missed.
    if !stop.terminated.load(Ordering::SeqCst) {
        thread::sleep(timeout);
    }
    Ok(())
}

/// Makes signals end the process at once, while the returned flag is true, with the exit code of a run that has
/// stopped.
fn end_at_signals() -> io::Result<Arc<AtomicBool>> {
    let waiting = Arc::new(AtomicBool::new(true));
    for (signal, reason) in heeded_reasons() {
        let code = exit_code(Some(reason)).into();
        flag::register_conditional_shutdown(signal, code, waiting.clone())?;
    }
    Ok(waiting)
}

pub(super) fn end_at_second_interrupt() -> io::Result<()> {
    if os::is_ignored(SIGINT) {
        return Ok(());
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    // The order matters: the first SIGINT must not see the flag that it sets itself.
    os::terminal::end_at(SIGINT, &interrupted)?;
    flag::register(SIGINT, interrupted)?;
    Ok(())
}

/// Maps an exit code to the reason for stopping. `None` means that the process failed; `Some(None)` that it
/// finished.
pub(crate) fn reason_of(code: i32) -> Option<Option<StopReason>> {
    let reasons = REASONS.into_iter().map(|(_, reason)| Some(reason));
    std::iter::once(None).chain(reasons).find(|&reason| i32::from(exit_code(reason)) == code)
}

/// Returns the program's exit code after a run that stopped because of `reason`. SIGUSR1, a key and limits are
/// planned ends: 0, like the end of training.
pub fn exit_code(reason: Option<StopReason>) -> u8 {
    match reason {
        Some(StopReason::Interrupt) => code_of(SIGINT),
        Some(StopReason::Terminate) => code_of(SIGTERM),
        Some(StopReason::HangUp) => code_of(SIGHUP),
        _ => 0,
    }
}
