//! The number of this start of a run, for stores that outlive a start.
//!
//! torchrun's agents serve one store for as long as they run. They restart the processes after a failure, or when a
//! machine joins or leaves. The agents share no count of the restarts: each counts only the failures of its own
//! processes. One agent may take for a failure what another takes for a machine that joins. So process 0 takes the
//! next number, and answers the processes that ask for it.
//!
//! Processes ask through a queue of messages in the store, which outlives a start, too. Each process confirms the
//! number through the same queue. So process 0 waits for one key at a time: that of the next message.

use std::collections::HashSet;
use std::time::Duration;

use super::messages::unreadable;
use crate::error::Result;
use crate::ffi::TcpStore;
use crate::runtime::Instant;

/// Key of the number of starts.
const STARTS: &str = "starts";

/// Key of the number of messages that a process 0 has read.
const READ: &str = "read";

/// Returns the generation of this start, the same for all `count` processes. `mine` is the index of this process.
/// `None` if process 0 has not arrived within `timeout`. Process 0 gets a generation even if others have not arrived.
///
/// # Errors
/// [`Error::Store`](crate::Error::Store) when the store cannot be reached,
/// [`Error::Input`](crate::Error::Input) when a value in it is not an integer.
pub(super) fn agree(
    store: &TcpStore,
    mine: usize,
    count: usize,
    timeout: Duration,
) -> Result<Option<i64>> {
    if mine == 0 { answer(store, count, timeout).map(Some) } else { ask(store, mine, timeout) }
}

/// Asks process 0 for the generation of this start.
fn ask(store: &TcpStore, mine: usize, timeout: Duration) -> Result<Option<i64>> {
    let host = gethostname::gethostname();
    let pid = std::process::id();
    let question = format!("process {mine} (on {}, process {pid}) asks", host.to_string_lossy());
    let key = answer_to(post(store, &question)?);
    let start = read_integer(store, &key, timeout)?;
    if let Some(start) = start {
        post(store, &confirmation(mine, start))?;
    }
    Ok(start)
}

/// Takes the next number, and answers the questions of the other processes until all have confirmed it. Questions of
/// an earlier start may remain; answering them does no harm, because no process waits for the answer.
fn answer(store: &TcpStore, count: usize, timeout: Duration) -> Result<i64> {
    let began = Instant::now();
    let start = store.add(STARTS, 1)?;
    let mut unconfirmed: HashSet<String> =
        (1..count).map(|process| confirmation(process, start)).collect();
    let mut next = messages_read(store)?;
    while !unconfirmed.is_empty() {
        let left = timeout.saturating_sub(began.elapsed());
        let Some(text) = store.get(&message(next), left)? else { break };
        if !unconfirmed.remove(&*String::from_utf8_lossy(&text)) {
            store.set(&answer_to(next), start.to_string().as_bytes())?;
        }
        next += 1;
        store.set(READ, next.to_string().as_bytes())?;
    }
    Ok(start)
}

/// Appends `text` to the queue. Returns its index there.
fn post(store: &TcpStore, text: &str) -> Result<i64> {
    let mut index = messages_read(store)?;
    // Other processes append, too. Their texts are different ones.
    while store.set_once(&message(index), text.as_bytes())? != text.as_bytes() {
        index += 1;
    }
    Ok(index)
}

/// Returns how many messages of the queue have been read.
fn messages_read(store: &TcpStore) -> Result<i64> {
    Ok(read_integer(store, READ, Duration::ZERO)?.unwrap_or(0))
}

/// Returns the number at `key`. Waits up to `timeout` until it is there; `None` if it is not.
fn read_integer(store: &TcpStore, key: &str, timeout: Duration) -> Result<Option<i64>> {
    let Some(text) = store.get(key, timeout)? else { return Ok(None) };
    let parsed = String::from_utf8_lossy(&text).parse();
    parsed.map(Some).map_err(|_| unreadable(key, "it is not a number"))
}

fn message(index: i64) -> String {
    format!("message/{index}")
}

fn answer_to(index: i64) -> String {
    format!("answer/{index}")
}

fn confirmation(process: usize, start: i64) -> String {
    format!("process {process} takes part in start {start}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn generation_is_new_and_equal_on_all_processes() {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let mut starts = Vec::new();
        // The keys of one start must not mislead the next, whichever process is first, and however many there are.
        for (count, first) in [(3, 0), (3, 1), (2, 0), (4, 2)] {
            let generations = std::thread::scope(|scope| {
                let start = |process: usize| {
                    let store = store.another_connection().unwrap();
                    scope.spawn(move || agree(&store, process, count, TIMEOUT).unwrap())
                };
                let order = (0..count).map(|index| (index + first) % count);
                let all: Vec<_> = order.map(start).collect();
                all.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            assert!(generations[0].is_some(), "{generations:?}");
            assert!(
                generations.iter().all(|generation| *generation == generations[0]),
                "{generations:?}"
            );
            assert!(!starts.contains(&generations[0]), "{generations:?} after {starts:?}");
            starts.push(generations[0]);
        }
        // Process 0 takes a new number even if the other process never arrives.
        let soon = Duration::from_millis(50);
        assert_eq!(agree(&store, 1, 2, soon).unwrap(), None);
        assert!(!starts.contains(&agree(&store, 0, 2, soon).unwrap()));
    }
}
