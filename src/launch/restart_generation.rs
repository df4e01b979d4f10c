//! Which start of a run this is, where the store outlives it.
//!
//! torchrun's agents serve one store for as long as they run, and start the processes anew after a failure, or when a
//! machine has come or gone. How often is no common knowledge: an agent counts failures of its own processes only, and
//! what looks like one to the first may look like a machine that comes to the second. So process 0 takes the next
//! number, and tells it to whoever asks.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::messages::unreadable;
use crate::error::Result;
use crate::ffi::TcpStore;

/// How many starts there were, and how many questions.
const GENERATION_KEY: &str = "starts";
const QUESTIONS: &str = "questions";

/// How long what is there may take to come.
const SLICE: Duration = Duration::from_secs(1);

/// The number of this start, the same for all `count` processes; `mine` is that of this one, as process 0 counts. `None`
/// if process 0 has not come within `timeout`. If others have not, process 0 knows the number all the same.
///
/// # Errors
/// [`Error::Store`] when the store cannot be reached, [`Error::Input`] for what no process 0 answers.
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

/// What a process asks with is new each time, so that it takes no older answer for its own.
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
    let answer = store.get(&key, SLICE)?.unwrap_or_default();
    let start = String::from_utf8_lossy(&answer);
    let start = start.parse().map_err(|_| unreadable(&key, "it is not the number of a start"))?;
    store.add(&heard(start), 1)?;
    Ok(Some(start))
}

/// Questions of an earlier start may be left: an answer to them does no harm, because nobody waits for it.
fn answer(store: &TcpStore, count: usize, timeout: Duration) -> Result<i64> {
    let began = Instant::now();
    let start = store.add(GENERATION_KEY, 1)?;
    let mut answered = vec![Vec::new(); count];
    let mut known = -1;
    while store.add(&heard(start), 0)? < count as i64 - 1 && began.elapsed() < timeout {
        let questions = store.add(QUESTIONS, 0)?;
        if questions == known {
            thread::park_timeout(SLICE / 100); // the store has no event for it
            continue;
        }
        known = questions;
        for (process, last) in answered.iter_mut().enumerate().skip(1) {
            let key = question_of(process);
            if !store.check(std::slice::from_ref(&key))? {
                continue;
            }
            let question = store.get(&key, SLICE)?.unwrap_or_default();
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
    fn all_processes_agree_on_a_new_number_at_each_start() {
        let (_open, never) = bounded(0);
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT, never).unwrap();
        let mut starts = Vec::new();
        // What is left of one start must not mislead the next, whoever comes first, and however many.
        for (count, first) in [(3, 0), (3, 1), (2, 0), (4, 2)] {
            let told = thread::scope(|scope| {
                let start = |process: usize| {
                    let store = store.another_connection().unwrap();
                    scope.spawn(move || number(&store, process, count, TIMEOUT).unwrap())
                };
                let order = (0..count).map(|place| (place + first) % count);
                let all: Vec<_> = order.map(start).collect();
                all.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
            });
            assert!(told.iter().all(|it| it.is_some() && *it == told[0]), "{told:?}");
            assert!(!starts.contains(&told[0]), "{told:?} after {starts:?}");
            starts.push(told[0]);
        }
        // Of those who never come, process 0 makes out the rest.
        let soon = Duration::from_millis(50);
        assert_eq!(number(&store, 1, 2, soon).unwrap(), None);
        assert!(!starts.contains(&number(&store, 0, 2, soon).unwrap()));
    }
}
