//! Setup of the one connection between two processes for messages. Each process listens, and writes its address and a
//! token to the store.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::RecvTimeoutError;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::context::MessageContext;
use super::frame::Frame;
use super::link::{Adoption, Link};
use super::reader::{self, STOP_POLL_INTERVAL, StoppableReader};
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::os::limits::require_files;
use crate::runtime::Deadline;

/// Longest wait for the whole greeting of a new connection.
const GREETING: Duration = Duration::from_secs(10);

/// The most connections that have not greeted yet: each has a thread.
pub(super) const MAX_STRANGERS: usize = 16;

/// The listener to which other processes connect. Its address is in the store.
#[derive(Debug)]
pub(crate) struct MessageListener {
    pub listener: TcpListener,
    /// The token that they present. It is no secret, because anyone who reaches the store can read it. It only prevents
    /// accidental connections.
    pub token: u64,
}

impl MessageListener {
    /// Listens for the other processes of `store`: on the first of `interfaces`, or else on the one that leads to the
    /// store.
    ///
    /// # Errors
    /// [`Error::Input`] if it cannot listen, and the errors of the store.
    pub(crate) fn open(store: &TcpStore, mine: usize, interfaces: Option<&str>) -> Result<Self> {
        let fail = |error: io::Error| {
            Error::unsupported(format!("process {mine} cannot listen for messages: {error}"))
        };
        let host = match interfaces {
            Some(names) => address_of(names).map_err(fail)?,
            None => store.local_address(),
        };
        let listener = TcpListener::bind((host, 0)).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let token = getrandom::u64().map_err(|error| fail(io::Error::other(error.to_string())))?;
        store.set(&key(mine), format!("{address} {token}").as_bytes())?;
        Ok(Self { listener, token })
    }
}

pub(super) fn key(process: usize) -> String {
    format!("messages/{process}")
}

/// Returns this machine's address on the first network interface of a list.
pub(super) fn address_of(names: &str) -> io::Result<IpAddr> {
    let first = names.split(',').next().unwrap_or_default().trim();
    let mut addresses: Vec<IpAddr> = (if_addrs::get_if_addrs()?.into_iter())
        .filter(|interface| interface.name == first)
        .map(|interface| interface.ip())
        .collect();
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied().ok_or_else(|| {
        io::Error::other(format!("{first} (GLOO_SOCKET_IFNAME) has no address on this machine"))
    })
}

/// Starts a thread that connects to the process of `link` and serves the connection. Does nothing if this process
/// connects already, or is connected.
///
/// # Errors
/// [`Error::Input`] if no thread can be started.
pub(super) fn start(link: &Arc<Link>) -> Result<()> {
    if !link.begin_to_connect() {
        return Ok(());
    }
    let link = link.clone();
    link.context.clone().thread(move |serving| match connect(&link) {
        Ok(Some(stream)) => {
            let stream = Arc::new(stream);
            if link.adopt(&stream, true) == Adoption::Chosen {
                reader::run(&link, &stream, serving);
            }
        }
        Ok(None) => {} // both use the other one's connection
        Err(reason) => link.fail_to_connect(reason),
    })
}

/// Connects to the process of `link`. Returns `None` if both processes use the connection that the other one opened.
fn connect(link: &Link) -> std::result::Result<Option<TcpStream>, String> {
    let context = &link.context;
    let key = key(link.process);
    let left = context.store.get(&key, context.run.timeout).map_err(|error| error.to_string())?;
    let left = String::from_utf8_lossy(&left.unwrap_or_default()).into_owned();
    let parsed = left.split_once(' ').and_then(|(address, token)| {
        Some((address.parse::<SocketAddr>().ok()?, token.parse::<u64>().ok()?))
    });
    let (address, token) = parsed.ok_or_else(|| {
        format!("the store key {key:?} holds no address: another program uses the same store")
    })?;
    let deadline = Deadline::after(context.run.timeout);
    let stream = loop {
        match TcpStream::connect_timeout(&address, STOP_POLL_INTERVAL) {
            Ok(stream) => break stream,
            Err(error) if is_limit(&error) => require_connection_file(context)?,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                if context.is_closing() || link.is_closed() || deadline.is_over() {
                    return Err(format!("{address}: {error}"));
                }
            }
            Err(error) => return Err(format!("{address}: {error}")),
        }
    };
    greet(link, &stream, token)
        .map_err(|error| format!("{address}: {error}"))
        .map(|is_it| is_it.then_some(stream))
}

/// Returns whether the other process accepts this connection. It answers when one of its ranks sends or receives.
fn greet(link: &Link, stream: &TcpStream, token: u64) -> io::Result<bool> {
    stream.set_read_timeout(Some(STOP_POLL_INTERVAL))?;
    Frame::Hello { token, process: link.context.process_map.mine }.write(&mut &*stream)?;
    match Frame::read(&mut StoppableReader::until_closing(stream, link))? {
        Some(Frame::Welcome) => Ok(true),
        Some(Frame::Busy) => Ok(false),
        Some(_) => Err(io::Error::other("something else than ddp-mp listens there")),
        None => Err(io::Error::other("it has left")),
    }
}

/// Accepts connections until the messages of this process end.
pub(super) fn accept(context: &Arc<MessageContext>, links: &[Arc<Link>], listener: &TcpListener) {
    // All processes of the run may connect before this one accepts the first.
    let limit = MAX_STRANGERS.max(2 * links.len());
    let strangers = Arc::new(Strangers { limit, streams: Mutex::default() });
    for stream in listener.incoming() {
        if context.is_closing() {
            return;
        }
        let stream = match stream {
            Ok(stream) => Arc::new(stream),
            Err(error) if is_limit(&error) => match require_connection_file(context) {
                Ok(()) => continue,
                Err(_) => return,
            },
            // The other process has given up.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
            Err(_) => {
                // The network or the memory may recover later, and no event announces it.
                match context.run.cancel.tripped().recv_timeout(STOP_POLL_INTERVAL) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    _ => continue,
                }
            }
        };
        strangers.enter(&stream);
        let (links, strangers, admitted) = (links.to_vec(), strangers.clone(), context.clone());
        let begun = context.thread(move |serving| {
            let greeted = greeted(&admitted, &links, &stream);
            // A stranger is disconnected without an answer.
            if strangers.leave(&stream)
                && let Ok(Some(link)) = greeted
                && let Ok(Some(link)) = admit(link, &stream)
            {
                reader::run(&link, &stream, serving);
            }
        });
        if let Err(error) = begun {
            return context.run.report(context.first_rank(), Some(&error), error.to_string());
        }
    }
}

/// The connections that have not greeted yet, the oldest first.
struct Strangers {
    /// The most of them.
    limit: usize,
    streams: Mutex<VecDeque<Arc<TcpStream>>>,
}

impl Strangers {
    /// Adds a connection. Ends the oldest if there are too many: the processes of a run greet as soon as they connect.
    fn enter(&self, stream: &Arc<TcpStream>) {
        let mut strangers = self.streams.lock();
        strangers.push_back(stream.clone());
        if strangers.len() > self.limit
            && let Some(oldest) = strangers.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both); // fails if it has ended already
        }
    }

    /// Removes a connection. Returns `false` if it has been ended as the oldest.
    fn leave(&self, stream: &Arc<TcpStream>) -> bool {
        let mut strangers = self.streams.lock();
        let index = strangers.iter().position(|other| Arc::ptr_eq(other, stream));
        index.is_some_and(|index| strangers.remove(index).is_some())
    }
}

/// A stream that can be read until a time.
pub(super) struct UntilDeadline<'a> {
    pub stream: &'a TcpStream,
    pub deadline: Deadline,
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.deadline.left();
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {} // the time is over, or the process was suspended
                read => return read,
            }
        }
    }
}

/// Returns whether `error` means that no more files can be open.
fn is_limit(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Makes sure that another connection can be opened.
///
/// # Errors
/// If the limit on open files cannot be raised, which is reported as a failure of this process.
fn require_connection_file(context: &MessageContext) -> Result<(), String> {
    require_files(1, "a connection for messages").map_err(|error| {
        context.run.report(context.first_rank(), Some(&error), error.to_string());
        error.to_string()
    })
}

/// Returns the link of the process that greets, within [`GREETING`]. `None` if it is no process of this run.
pub(super) fn greeted<'a>(
    context: &MessageContext,
    links: &'a [Arc<Link>],
    stream: &TcpStream,
) -> io::Result<Option<&'a Arc<Link>>> {
    let mut greeting = UntilDeadline { stream, deadline: Deadline::after(GREETING) };
    let Some(Frame::Hello { token, process }) = Frame::read(&mut greeting)? else {
        return Ok(None);
    };
    let is_of_run = token == context.token && process != context.process_map.mine;
    Ok(links.get(process).filter(|_| is_of_run))
}

/// Makes `stream` the connection of `link`, which is returned. `None` if the stream is not used.
pub(super) fn admit(link: &Arc<Link>, stream: &Arc<TcpStream>) -> io::Result<Option<Arc<Link>>> {
    match link.adopt(stream, false) {
        Adoption::Chosen => {
            // From now on, only this thread serves the link.
            let welcomed = Frame::Welcome.write(&mut &**stream);
            welcomed.inspect_err(|error| link.lose(&error.to_string()))?;
            Ok(Some(link.clone()))
        }
        Adoption::Busy => Frame::Busy.write(&mut &**stream).map(|()| None),
        Adoption::Closed => Ok(None), // the other process sees that no connection will come
    }
}
