//! Signals that ask the program to stop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::sync::{Stop, StopReason};
use crate::torch;

/// What asks a run to stop.
pub(super) const STOP_SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGUSR1];

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
    for (signal, reason) in [
        (SIGINT, StopReason::Interrupt),
        (SIGTERM, StopReason::Terminate),
        (SIGUSR1, StopReason::User1),
    ] {
        flag::register_usize(signal, stop.asked().clone(), reason as usize)?;
    }
    // Those that `--spawn=processes` has held back until there is somebody to heed them.
    torch::release_signals(&STOP_SIGNALS)
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
