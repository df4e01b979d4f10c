//! Exchanges messages with the other processes of the host: a thread waits for their messages and for their end.
//!
//! A process sends its first failure, and each rank that has ended its function, before it ends itself. So a connection
//! that ends without either is that of a process that was killed.

use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use serde::{Deserialize, Serialize};

use super::{HostLinks, Peer};
use crate::error::{Error, Result, list_ranks, opaque_debug};
use crate::launch::heartbeat_monitor::record_failure;
use crate::launch::messages::{check_failure, from_json, to_json};
use crate::os::limits::not_started;
use crate::runtime::{Failure, Notify, RunContext};

/// What a process sends the others of its host. A line of JSON each.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// A rank has ended its function.
    Done(usize),
    /// The first failure of the process.
    Failed(Failure),
}

/// The time in which torchrun's agent sees that a process has ended: it looks every 0.1 s.
const AGENT_POLLS: Duration = Duration::from_secs(1);

/// The longest message in bytes; no process of the run sends a longer one.
const MAX_MESSAGE: usize = 1 << 20;

/// The thread that watches, and what this process sends.
pub(super) struct HostWatch {
    sender: Arc<Sender>,
    /// Its end ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

opaque_debug!(HostWatch);

impl Drop for HostWatch {
    fn drop(&mut self) {
        self.sender.notify(); // what has happened since the last event
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl HostLinks {
    /// Starts to watch the other processes for `run`.
    ///
    /// # Errors
    /// [`Error::Input`] if the system refuses a thread.
    pub(in crate::launch) fn watch(&self, run: &Arc<RunContext>) -> Result<()> {
        let refuse = |error: std::io::Error| {
            Error::unsupported(not_started("the thread that watches the other processes", &error))
        };
        let (stop, stopped) = UnixStream::pair().map_err(refuse)?;
        let sender = Arc::new(Sender {
            peers: self.peers.clone(),
            run: Arc::downgrade(run),
            done: run.local_ranks.clone().map(|rank| (rank, AtomicBool::new(false))).collect(),
            knows_failure: AtomicBool::new(false),
            lock: Mutex::new(()),
        });
        let events: Arc<dyn Notify> = sender.clone();
        run.cancel.register_events(Arc::downgrade(&events));
        let watch = Watch {
            run: run.clone(),
            has_agent: self.has_agent,
            sender: sender.clone(),
            ends: self.peers.iter().map(|peer| Some(End::new(peer.clone()))).collect(),
        };
        let thread = thread::Builder::new().name("host".into());
        let thread = thread.spawn(move || watch.run(&stopped)).map_err(refuse)?;
        *self.watch.lock() = Some(HostWatch { sender, stop: Some(stop), thread: Some(thread) });
        Ok(())
    }

    /// Ends the watch. The other processes then know how this one's ranks have ended.
    pub(in crate::launch) fn leave(&self) {
        drop(self.watch.lock().take());
    }
}

/// Sends the other processes what happens in this one.
#[derive(Debug)]
struct Sender {
    peers: Vec<Arc<Peer>>,
    run: Weak<RunContext>,
    /// For each rank of this process whether its end has been sent.
    done: Vec<(usize, AtomicBool)>,
    /// Whether the other processes know of the failure.
    knows_failure: AtomicBool,
    lock: Mutex<()>,
}

impl Notify for Sender {
    fn notify(&self) {
        let Some(run) = self.run.upgrade() else { return };
        if run.cancel.cancelled_by().is_some() && !self.knows_failure.swap(true, Ordering::SeqCst) {
            let first = run.failures().first().cloned();
            first.map(Message::Failed).iter().for_each(|message| self.send(message));
        }
        for (rank, is_sent) in &self.done {
            if run.is_done(*rank) && !is_sent.swap(true, Ordering::SeqCst) {
                self.send(&Message::Done(*rank));
            }
        }
    }
}

impl Sender {
    fn send(&self, message: &Message) {
        let Ok(mut line) = to_json("host", message) else { return };
        line.push(b'\n');
        let _whole = self.lock.lock();
        for peer in &self.peers {
            if peer.is_cut_off.load(Ordering::Relaxed) {
                continue;
            }
            let sent = send(&peer.socket, &line, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            // A process that does not take all of it has ended, or hangs and finds out by the heartbeats. What followed would
            // be taken for the rest of this line.
            peer.is_cut_off.store(sent != Ok(line.len()), Ordering::Relaxed);
        }
    }
}

/// The state of the thread.
struct Watch {
    run: Arc<RunContext>,
    has_agent: bool,
    sender: Arc<Sender>,
    /// The other processes that have not ended.
    ends: Vec<Option<End>>,
}

/// Another process, and what it has sent of a line.
struct End {
    peer: Arc<Peer>,
    received: Vec<u8>,
}

impl Watch {
    /// Waits for the other processes until `stopped` ends.
    fn run(mut self, stopped: &UnixStream) {
        loop {
            let ends: Vec<&End> = self.ends.iter().flatten().collect();
            let files = ends.iter().flat_map(|end| end.files());
            let files = std::iter::once(stopped.as_fd()).chain(files);
            let mut polled: Vec<PollFd<'_>> =
                files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)).collect();
            match poll(&mut polled, None) {
                Err(Errno::INTR) => continue,
                Err(_) => return, // the heartbeats go on
                Ok(_) if !polled[0].revents().is_empty() => return,
                Ok(_) => {}
            }
            for index in 0..self.ends.len() {
                self.look(index);
            }
        }
    }

    /// Reads what another process has sent, and notices its end.
    fn look(&mut self, index: usize) {
        let Some(end) = &mut self.ends[index] else { return };
        // In this order: what it has sent before its end is read after that is noticed.
        let has_ended = end.process_has_ended();
        let is_closed = end.read();
        let peer = end.peer.clone();
        let lines = end.lines();
        for line in lines {
            self.receive(&peer, &line);
        }
        if !has_ended && !is_closed {
            return;
        }
        self.ends[index] = None;
        let ranks: Vec<usize> =
            peer.ranks.clone().filter(|rank| !self.run.is_done(*rank)).collect();
        if ranks.is_empty() || self.run.cancel.cancelled_by().is_some() {
            return;
        }
        // The first rank of this process reports.
        let (run, waiting) = (&self.run, self.run.local_ranks.start);
        if self.has_agent {
            // The agent blames the process that it sees end first: it must see that one before this one fails.
            let _ = run.cancel.tripped().recv_timeout(AGENT_POLLS);
        }
        // What the ranks did last. A process that fails before its ranks begin says so in the store only.
        run.poll_peers();
        if run.cancel.cancelled_by().is_some() {
            return;
        }
        let error = Error::ConnectionLost {
            at: run.activity[waiting].now(),
            step: run.flight_recorder.step_of(waiting),
            lost: run.last_seen(ranks),
            reason: "its process has ended".into(),
        };
        run.report(waiting, Some(&error), error.to_string());
    }

    fn receive(&self, peer: &Peer, line: &[u8]) {
        let run = &self.run;
        match from_json("host", line) {
            Ok(Message::Done(rank)) if peer.ranks.contains(&rank) => run.finish(rank),
            Ok(Message::Failed(failure)) => {
                self.sender.knows_failure.store(true, Ordering::SeqCst);
                match check_failure("host", failure, run.activity.len()) {
                    Ok(failure) => record_failure(run, failure),
                    Err(error) => run.report(run.local_ranks.start, None, error.to_string()),
                }
            }
            _ => {
                let from = list_ranks(&peer.ranks.clone().collect::<Vec<_>>());
                let text = format!(
                    "the process of {from} has sent a message that no process of a run sends; start the same program in \
                     all processes"
                );
                run.report(run.local_ranks.start, None, text);
            }
        }
    }
}

impl End {
    fn new(peer: Arc<Peer>) -> Self {
        let _ = peer.socket.set_nonblocking(true);
        Self { peer, received: Vec::new() }
    }

    /// Returns what becomes readable when the process sends something or ends.
    fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let process = self.peer.process.as_ref().map(AsFd::as_fd);
        std::iter::once(self.peer.socket.as_fd()).chain(process)
    }

    fn process_has_ended(&self) -> bool {
        let Some(process) = &self.peer.process else { return false };
        let mut polled = [PollFd::new(process, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Reads all that has arrived. Returns whether the other end is closed.
    fn read(&mut self) -> bool {
        let room = MAX_MESSAGE.saturating_sub(self.received.len());
        let read = (&self.peer.socket).take(room as u64).read_to_end(&mut self.received);
        !read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    /// Takes the complete lines.
    fn lines(&mut self) -> Vec<Vec<u8>> {
        let end = self.received.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let complete: Vec<u8> = self.received.drain(..end).collect();
        complete.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::{OpId, Operation};

    #[test]
    fn torn_line_is_not_continued_by_the_next() {
        let (here, there) = UnixStream::pair().unwrap();
        let peer = |ranks, socket| {
            Arc::new(Peer { ranks, socket, process: None, is_cut_off: AtomicBool::default() })
        };
        let sender = Sender {
            peers: vec![peer(1..2, here)],
            run: Weak::new(),
            done: Vec::new(),
            knows_failure: AtomicBool::default(),
            lock: Mutex::default(),
        };
        let mut end = End::new(peer(0..1, there));
        sender.send(&Message::Done(0));
        // More than the system takes at once.
        let at = OpId { operation: Operation::Step, sequence: 0 };
        sender.send(&Message::Failed(Failure::new(0, at, "x".repeat(MAX_MESSAGE / 2))));
        assert!(!end.read());
        assert_eq!(end.lines().len(), 1);
        assert!(!end.received.is_empty(), "a part of the line");
        sender.send(&Message::Done(1)); // there is room again
        assert!(!end.read());
        assert_eq!(end.lines(), Vec::<Vec<u8>>::new());
    }
}
