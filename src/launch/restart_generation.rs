//! The number of this start of a run, for stores that outlive a start.
//!
//! torchrun's agents serve one store for as long as they run. They restart the processes after a failure, or when a
//! machine joins or leaves. The agents share no count of the restarts: each counts only the failures of its own
//! processes. One agent may take for a failure what another takes for a machine that joins. So process 0 takes the
//! next number, and answers the processes that ask for it.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::messages::unreadable;
use crate::error::Result;
use crate::ffi::TcpStore;

/// Keys: the number of starts, and the number of questions.
const GENERATION_KEY: &str = "starts";
const QUESTIONS: &str = "questions";

/// The timeout for reading a key that is known to exist.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the number of this start, the same for all `count` processes. `mine` is the number of this process.
/// `None` if process 0 has not arrived within `timeout`. Process 0 gets a number even if others have not arrived.
///
/// # Errors
/// [`Error::Store`] when the store cannot be reached, [`Error::InvalidInput`] when the answer is not one that process 0
/// gives.
pub(super) fn number(
    store: &TcpStore,
    mine: usize,
    count: usize,
    timeout: Duration,
) -> Result<Option<i64>> {
    if mine == 0 { answer(store, count, timeout).map(Some) } else { ask(store, mine, timeout) }
}

fn question_of(process: usize) -> String {
    format!("question/{process}")
}

fn answer_to(question: &[u8]) -> String {
    format!("answer/{}", String::from_utf8_lossy(question))
}

fn heard(start: i64) -> String {
    format!("heard/{start}")
}

/// Asks process 0 for the number of this start. The question is new each time, so that no older answer fits it.
fn ask(store: &TcpStore, mine: usize, timeout: Duration) -> Result<Option<i64>> {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    let host = gethostname::gethostname();
    let question = format!("{}/{}/{now}", host.to_string_lossy(), std::process::id());
    store.set(&question_of(mine), question.as_bytes())?;
    store.add(QUESTIONS, 1)?;
    let key = answer_to(question.as_bytes());
    if !store.wait(std::slice::from_ref(&key), timeout)? {
        return Ok(None);
    }
    let answer = store.get(&key, READ_TIMEOUT)?.unwrap_or_default();
    let start = String::from_utf8_lossy(&answer);
    let start = start.parse().map_err(|_| unreadable(&key, "it is not the number of a start"))?;
    store.add(&heard(start), 1)?;
    Ok(Some(start))
}

/// Takes the next number, and answers the questions of the other processes. Questions of an earlier start may
/// remain; answering them does no harm, because no process waits for the answer.
fn answer(store: &TcpStore, count: usize, timeout: Duration) -> Result<i64> {
    let began = Instant::now();
    let start = store.add(GENERATION_KEY, 1)?;
    let mut answered = vec![Vec::new(); count];
    let mut known = -1;
    while store.add(&heard(start), 0)? < count as i64 - 1 && began.elapsed() < timeout {
        let questions = store.add(QUESTIONS, 0)?;
        if questions == known {
            thread::park_timeout(READ_TIMEOUT / 100); // the store has no event for it
            continue;
        }
        known = questions;
        for (process, last) in answered.iter_mut().enumerate().skip(1) {
            let key = question_of(process);
            if !store.check(std::slice::from_ref(&key))? {
                continue;
            }
            let question = store.get(&key, READ_TIMEOUT)?.unwrap_or_default();
            if question != *last {
                store.set(&answer_to(&question), start.to_string().as_bytes())?;
                *last = question;
            }
        }
    }
    Ok(start)
}

#[cfg(test)]
mod tests {
    use crossbeam::channel::bounded;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn generation_is_new_and_equal_on_all_processes() {
        let (_open, never) = bounded(0);
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT, never).unwrap();
        let mut starts = Vec::new();
        // The keys of one start must not mislead the next, whichever process is first, and however many there are.
        for (count, first) in [(3, 0), (3, 1), (2, 0), (4, 2)] {
            let told = thread::scope(|scope| {
                let start = |process: usize| {
                    let store = store.another_connection().unwrap();
                    scope.spawn(move || number(&store, process, count, TIMEOUT).unwrap())
                };
                let order = (0..count).map(|place| (place + first) % count);
                let all: Vec<_> = order.map(start).collect();
                all.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            assert!(told.iter().all(|number| number.is_some() && *number == told[0]), "{told:?}");
            assert!(!starts.contains(&told[0]), "{told:?} after {starts:?}");
            starts.push(told[0]);
        }
        // Process 0 takes a new number even if the other process never arrives.
        let soon = Duration::from_millis(50);
        assert_eq!(number(&store, 1, 2, soon).unwrap(), None);
        assert!(!starts.contains(&number(&store, 0, 2, soon).unwrap()));
    }
}
