//! How far the clocks of the processes of a run are apart, asked over the store.
//!
//! As NTP does it: a process asks the first one what its clock shows. The answer was given between the question and its
//! arrival here, so half of that time is what it may be wrong by. The quickest of a few answers counts.

use std::time::{Duration, Instant};

use super::messages::unreadable;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::runtime::Clock;

/// How often each process asks.
const QUESTIONS: usize = 16;

/// What the clock of process 0 shows, for process `mine` of `count`; process 0 answers all others. Each waits for at most
/// `timeout` at a time.
///
/// # Errors
/// [`Error::Store`]; [`Error::Input`] when another process does not answer.
pub(super) fn estimate_offset(
    store: &TcpStore,
    mine: usize,
    count: usize,
    timeout: Duration,
) -> Result<Clock> {
    let began = Instant::now();
    let asked = |process, number| format!("clock/{process}/{number}/asked");
    let told = |process, number| format!("clock/{process}/{number}/told");
    if mine == 0 {
        for process in 1..count {
            for number in 0..QUESTIONS {
                wait(store, asked(process, number), process, timeout)?;
                let nanos = began.elapsed().as_nanos() as u64;
                store.set(&told(process, number), &nanos.to_le_bytes())?;
            }
        }
        return Ok(Clock { at: began, there: Duration::ZERO, error: Duration::ZERO });
    }
    let mut best: Option<Clock> = None;
    for number in 0..QUESTIONS {
        // It answers one process after the other: the first question may wait for its turn.
        let before = Instant::now();
        store.set(&asked(mine, number), b"")?;
        let key = told(mine, number);
        wait(store, key.clone(), 0, timeout)?;
        let error = before.elapsed() / 2;
        let answer = store.get(&key, timeout)?.unwrap_or_default();
        let nanos = answer.try_into().map_err(|_| unreadable(&key, "it is not a time"))?;
        let there = Duration::from_nanos(u64::from_le_bytes(nanos));
        if best.is_none_or(|best| error < best.error) {
            best = Some(Clock { at: before + error, there, error });
        }
    }
    best.ok_or_else(|| Error::Input("no process was asked for the time".into()))
}

fn wait(store: &TcpStore, key: String, process: usize, timeout: Duration) -> Result<()> {
    if store.wait(&[key], timeout)? {
        return Ok(());
    }
    Err(Error::Input(format!(
        "process {process} did not compare its clock within {timeout:?}; find out what delays it, or raise --timeout"
    )))
}
