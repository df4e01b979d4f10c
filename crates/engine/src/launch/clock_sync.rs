//! The clock offsets between the processes of a run, measured through the store.
//!
//! Follows NTP: a process asks process 0 for its time. Process 0 answers at some moment between the question and
//! the arrival of the answer. So half of that interval bounds the error. The quickest of several answers counts.

use std::time::{Duration, Instant};

use super::messages::unreadable;
use crate::error::{Error, Result};
use crate::events::Clock;
use crate::ffi::TcpStore;
use crate::process_group::ProcessMap;

/// How many times each process asks.
const CLOCK_SAMPLES: usize = 16;

/// Returns the offset of the clock of this process of `map` from that of process 0, which answers all others. Each request
/// waits for at most `timeout`.
///
/// # Errors
/// [`Error::Store`] when the store cannot be reached, [`Error::Input`] when another process does not answer.
pub(super) fn estimate_offset(
    store: &TcpStore,
    map: &ProcessMap,
    timeout: Duration,
) -> Result<Clock> {
    let began = Instant::now();
    let question_key = |process, sample| format!("clock/{process}/{sample}/question");
    let answer_key = |process, sample| format!("clock/{process}/{sample}/answer");
    if map.mine == 0 {
        for process in 1..map.len() {
            for sample in 0..CLOCK_SAMPLES {
                get(store, &question_key(process, sample), process, timeout)?;
                let nanos = began.elapsed().as_nanos() as u64;
                store.set(&answer_key(process, sample), &nanos.to_le_bytes())?;
            }
        }
        return Ok(Clock { at: began, on_rank_0: Duration::ZERO, error: Duration::ZERO });
    }
    let mut best: Option<Clock> = None;
    for sample in 0..CLOCK_SAMPLES {
        // Process 0 answers one process after another, so the first question may wait for its turn.
        let before = Instant::now();
        store.set(&question_key(map.mine, sample), b"")?;
        let key = answer_key(map.mine, sample);
        let answer = get(store, &key, 0, timeout)?;
        let error = before.elapsed() / 2;
        let nanos = answer.try_into().map_err(|_| unreadable(&key, "it is not a time"))?;
        let on_rank_0 = Duration::from_nanos(u64::from_le_bytes(nanos));
        if best.is_none_or(|best| error < best.error) {
            best = Some(Clock { at: before + error, on_rank_0, error });
        }
    }
    best.ok_or_else(|| Error::Internal("no process was asked for the time".into()))
}

fn get(store: &TcpStore, key: &str, process: usize, timeout: Duration) -> Result<Vec<u8>> {
    store.get(key, timeout)?.ok_or_else(|| {
        Error::mismatch(format!(
            "process {process} did not compare its clock within {timeout:?}; find out what delays it, or raise --timeout"
        ))
    })
}
