//! The threads of a group's messages: one accepts connections and writes what could not be written at once, and for each
//! connection that another process has opened, one reads.

use std::io::{self, BufReader, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, Event, EventFlags};
use rustix::io::Errno;
use tch::{Device, Kind, Tensor};

use super::super::lost;
use super::frame::{EAGER_MAX_BYTES, Frame, foreign, read_tensor};
use super::open::{LISTENER, WAKE};
use super::peer::{LEFT, Peer};
use super::{CANCELLED, Connections, Stranger};
use crate::error::{Error, Result};
use crate::os::affinity::CpuList;
use crate::os::limits::{not_started, require_files};
use crate::process_group::contiguous::is_plain_contiguous;
use crate::process_group::local::MessageEnd;
use crate::runtime::{Instant, panics};

/// Interval at which a thread looks for messages that are overdue and for processes that have left.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Each connection that has not greeted yet has a thread. So many may wait at once, or two for each process, and each for
/// so long.
pub(super) const MAX_STRANGERS: usize = 16;
pub(super) const GREETING_TIME: Duration = Duration::from_secs(10);

/// How long to wait for the connection of a process that has closed this one: what it sent before it left may still arrive.
/// Once its connection is there, the end of that decides, unless nothing arrives for longer.
const GRACE: Duration = Duration::from_secs(1);
const SILENT_GRACE: Duration = Duration::from_secs(60);

impl Connections {
    /// Starts the thread that accepts and writes, unless it has started. It ends when the group is dropped and all of its
    /// messages have gone, or when the run fails. With it all messages end.
    ///
    /// # Errors
    /// [`Error::Input`] if the system refuses a thread.
    pub(super) fn start(self: &Arc<Self>) -> Result<()> {
        if self.has_started.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.thread(Self::serve).inspect_err(|error| self.end(&error.to_string()))
    }

    /// Starts a thread, which `top -H` shows by name. If it panics, the run fails.
    ///
    /// # Errors
    /// [`Error::Input`] if the system refuses it.
    pub(super) fn thread(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> Result<()> {
        let me = self.clone();
        let work = move || {
            CpuList::unbind_this_thread();
            panics::watch_this_thread();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&me))) {
                me.run.report(me.first_rank(), None, panics::describe(&*panic));
                me.end(CANCELLED);
            }
        };
        let thread = thread::Builder::new().name("ddp-mp message".into()).spawn(work);
        thread
            .map(drop)
            .map_err(|error| Error::unsupported(not_started("a thread for messages", &error)))
    }

    fn serve(self: &Arc<Self>) {
        let mut looked = Instant::now();
        while self.run.cancel.cancelled_by().is_none() && !self.has_ended() {
            for event in self.wait() {
                match event.data.u64() {
                    LISTENER => self.accept().unwrap_or_else(|error| self.fail(&error)),
                    WAKE => {}
                    process => self.write(process as usize, event.flags),
                }
            }
            if looked.elapsed() >= POLL_INTERVAL {
                looked = Instant::now();
                (0..self.peers.len()).for_each(|process| self.look_at(process));
                let silent = |(since, _): &mut Stranger| since.elapsed() >= GREETING_TIME;
                for (_, stranger) in self.strangers.lock().extract_if(.., silent) {
                    let _ = stranger.shutdown(Shutdown::Both); // it may have ended
                }
            }
        }
        self.end(CANCELLED);
    }

    /// Returns whether the group is dropped and all of its messages have gone.
    fn has_ended(&self) -> bool {
        let is_written = |peer: &Mutex<Peer>| peer.lock().unwritten().next().is_none();
        self.is_leaving.load(Ordering::Acquire) && self.peers.iter().all(is_written)
    }

    /// Waits for events, for at most [`POLL_INTERVAL`]. A signal may interrupt it.
    fn wait(&self) -> Vec<Event> {
        let (mut events, timeout) = (Vec::with_capacity(64), POLL_INTERVAL.try_into().ok());
        let _ = epoll::wait(&self.listener.epoll, spare_capacity(&mut events), timeout.as_ref());
        events
    }

    /// Accepts a connection, which gets a thread. Any program may connect: if too many have not greeted, the oldest is
    /// closed.
    ///
    /// # Errors
    /// [`Error::Input`] if the system refuses a file or a thread.
    fn accept(self: &Arc<Self>) -> Result<()> {
        require_files(1, "a connection for messages")?;
        let stream = match self.listener.listener.accept() {
            Ok((stream, _)) => Arc::new(stream),
            Err(error) if is_lasting(&error) => {
                let text = format!("a connection for messages cannot be accepted: {error}");
                return Err(Error::unsupported(text));
            }
            Err(_) => return Ok(()), // it has ended meanwhile
        };
        let mut strangers = self.strangers.lock();
        strangers.push((Instant::now(), stream.clone()));
        // All processes of the run may connect at once.
        if strangers.len() > MAX_STRANGERS.max(2 * self.peers.len()) {
            let _ = strangers.remove(0).1.shutdown(Shutdown::Both); // it may have ended
        }
        drop(strangers);
        self.thread(move |me| me.serve_connection(&stream))
    }

    /// Reads from a connection that a process has opened. What greets otherwise is closed without an answer.
    fn serve_connection(self: &Arc<Self>, stream: &Arc<TcpStream>) {
        let mut from = BufReader::new(&**stream);
        let greeting = Frame::read(&mut from);
        let is_it = |(_, it): &mut Stranger| Arc::ptr_eq(it, stream);
        if self.strangers.lock().extract_if(.., is_it).next().is_none() {
            return; // closed meanwhile
        }
        let Ok(Frame::Hello { to, process }) = greeting else { return };
        let is_other = process < self.peers.len() && process != self.processes.mine;
        if to != self.listener.endpoint || !is_other {
            return;
        }
        self.open(process); // for the answers
        let mut peer = self.peers[process].lock();
        if peer.reader.is_some() || peer.lost.is_some() {
            return;
        }
        peer.reader = Some(stream.clone());
        drop(peer);
        if let Err(error) = self.read(process, &mut from) {
            self.lose(process, &reason(&error), true);
        }
    }

    /// Writes to a process. If that has closed the connection, what it sent before can still be read.
    fn write(&self, process: usize, flags: EventFlags) {
        let mut peer = self.peers[process].lock();
        if flags.intersects(EventFlags::HUP | EventFlags::RDHUP | EventFlags::ERR) {
            let error = peer.writer.as_ref().and_then(|stream| stream.take_error().ok()?);
            peer.give_up(error.as_ref());
        } else {
            self.flush(process, &mut peer);
        }
    }

    /// Reads the frames of `process`, and acts on them.
    fn read(self: &Arc<Self>, process: usize, from: &mut impl Read) -> io::Result<()> {
        let unknown = |id| foreign(&format!("there is no message {id}"));
        loop {
            let frame = Frame::read(from)?;
            let mut peer = self.peers[process].lock();
            if let Some((since, _)) = &mut peer.unreachable {
                *since = Instant::now();
            }
            match frame {
                Frame::Offer(offer) => {
                    drop(peer);
                    let (kind, size) = offer.check(&self.processes, process)?;
                    let mut inline = None;
                    if size <= EAGER_MAX_BYTES {
                        read_tensor(from, inline.insert(room(&offer.shape, kind)?))?;
                    }
                    self.post(process, offer, kind, inline);
                }
                Frame::Ready(id) => {
                    let asked = peer.sends.get_mut(&id).and_then(|sent| sent.tensor.take());
                    let tensor = asked.ok_or_else(|| unknown(id))?;
                    self.put(process, &mut peer, &Frame::Data(id), Some((id, tensor)));
                }
                Frame::Data(id) => {
                    // From here on only this thread ends it.
                    let side = peer.receives.remove(&id).ok_or_else(|| unknown(id))?;
                    drop(peer);
                    let read = receive(from, side.tensor.as_ref());
                    let tensor = read.inspect_err(|error| side.lose(&reason(error)))?;
                    self.deliver(process, id, &tensor, side);
                }
                Frame::Taken(id) => {
                    // Until its bytes are written, the rank must not change the tensor.
                    let is_sent = peer.sends.get(&id).is_some_and(|sent| sent.pending.is_none());
                    let sent = is_sent.then(|| peer.sends.remove(&id)).flatten();
                    let side = sent.ok_or_else(|| unknown(id))?;
                    side.completion.complete(MessageEnd::From(side.source));
                }
                Frame::Hello { .. } => return Err(foreign("a greeting came between messages")),
            }
        }
    }

    /// Fails the run if a rank has waited at its end for longer than the timeout, because a message is not written. Ends
    /// the messages with a process that has left.
    fn look_at(&self, process: usize) {
        let (run, peer) = (&self.run, self.peers[process].lock());
        let overdue = peer.unwritten().find(|it| run.is_overdue(it.rank));
        let overdue = overdue.map(|it| (it.rank, it.at));
        let grace = if peer.reader.is_some() { SILENT_GRACE.min(run.timeout) } else { GRACE };
        let left = peer.unreachable.clone().filter(|(since, _)| since.elapsed() >= grace);
        drop(peer);
        if let Some((rank, at)) = overdue {
            let error = lost::timed_out(run, at, rank, self.ranks(process), run.timeout);
            run.report_at(rank, Some(at), Some(&error), error.to_string());
        }
        if let Some((_, reason)) = left {
            self.lose(process, &reason, true);
        }
    }
}

/// Reads the bytes of a message for `into`. Returns `into`, or a tensor like it if its elements are not in sequence.
fn receive(from: &mut impl Read, into: Option<&Tensor>) -> io::Result<Tensor> {
    let into = into.ok_or_else(|| io::Error::other("a receive has no tensor"))?;
    let tensor = if is_plain_contiguous(into).map_err(io::Error::other)? {
        into.shallow_clone()
    } else {
        room(&into.size(), into.kind())?
    };
    read_tensor(from, &tensor)?;
    Ok(tensor)
}

/// Returns a new tensor for a message.
fn room(shape: &[i64], kind: Kind) -> io::Result<Tensor> {
    Tensor::f_empty(shape, (kind, Device::Cpu)).map_err(io::Error::other)
}

/// Returns whether the next accept would fail in the same way: the system lacks files or memory.
fn is_lasting(error: &io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|it| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&it))
}

/// Returns why a connection has ended.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => LEFT.into(),
        _ => error.to_string(),
    }
}
