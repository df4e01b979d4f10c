//! One connection to a store, with a thread of its own, because libtorch's client blocks until the server responds.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::IntoRawFd;
use std::thread;
use std::time::Duration;

use crossbeam::channel::{
    Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, select_biased, unbounded,
};

use crate::error::opaque_debug;
use crate::ffi::c10d::Connection;
use crate::os::{affinity::CpuList, limits};
use crate::runtime::Instant;

/// A handle to the thread of a connection. After a drop, the thread ends when its current request has ended.
pub(super) struct StoreConnection {
    /// `None` once the thread must end.
    requests: Option<Sender<Request>>,
    /// Closes when the thread has ended.
    ended: Receiver<Infallible>,
    pub server: SocketAddr,
    /// This machine's address on the route to the server.
    pub local: IpAddr,
}

/// A request on the connection of the thread, which has none until it is opened.
type Request = Box<dyn FnOnce(&mut Option<Connection>) + Send>;

/// An opened connection, with the addresses of both ends.
pub(super) struct Opened {
    connection: Connection,
    server: SocketAddr,
    local: IpAddr,
}

/// A channel that closes when the caller no longer waits for the response.
pub(super) type GivenUp = Receiver<Infallible>;

/// How long a wait continues, at most, after the caller has given up.
pub(super) const WAIT_SLICE: Duration = Duration::from_secs(1);

/// How long to try one address before the next.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of files that a connection opens, and that a server opens before clients connect.
const FILES_OF_A_CLIENT: usize = 2;
const FILES_OF_A_SERVER: usize = 8;

/// The reason of a server whose port another program uses.
pub(crate) const PORT_IN_USE: &str = "the port is in use, by another run perhaps";

/// The reason of a server whose address another machine has.
pub(crate) const NOT_HERE: &str = "that is not an address of this machine; start this process on the machine that has it, or \
                                   give an address of this one";

/// The reason of a server whose address stands for several.
pub(crate) const ALL_INTERFACES: &str = "that stands for all interfaces of this machine; give the address of one that \
                                         the others can reach";

const ENDED: &str = "the thread of this connection has ended; start the run again";

pub(super) const CANCELLED: &str = "cancelled, because the run ends";

impl StoreConnection {
    /// Starts the thread, which first opens its connection with `open`. Waits for `timeout`, or until `cancelled`
    /// closes.
    pub(super) fn open(
        timeout: Duration,
        cancelled: &Receiver<Infallible>,
        open: impl FnOnce(&GivenUp) -> Result<Opened, String> + Send + 'static,
    ) -> Result<Self, String> {
        let (requests, requests_rx) = unbounded::<Request>();
        let (running_tx, ended) = bounded::<Infallible>(0);
        let work = move || {
            let _running = running_tx; // closed last
            CpuList::unbind_this_thread(); // Gloo's threads start from here
            let mut connection = None;
            requests_rx.into_iter().for_each(|request| request(&mut connection));
        };
        let thread = thread::Builder::new().name("ddp-mp store".into());
        thread.spawn(work).map_err(|error| limits::not_started("its thread", &error))?;
        let open = move |slot: &mut Option<Connection>, given_up: &GivenUp| {
            let Opened { connection, server, local } = open(given_up)?;
            *slot = Some(connection);
            Ok((server, local))
        };
        // `open` respects the timeout itself, unless the server hangs.
        let (server, local) = run(&requests, timeout, WAIT_SLICE, cancelled, open)?;
        Ok(Self { requests: Some(requests), ended, server, local })
    }

    /// Runs `request` on the thread, after earlier requests. Waits for the result for `timeout`, or until `cancelled`
    /// closes.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        timeout: Duration,
        cancelled: &Receiver<Infallible>,
        request: impl FnOnce(&mut Connection, &GivenUp) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let request = move |connection: &mut Option<Connection>, given_up: &GivenUp| {
            request(connection.as_mut().ok_or(ENDED)?, given_up)
        };
        run(self.requests.as_ref().ok_or(ENDED)?, timeout, Duration::ZERO, cancelled, request)
    }

    /// Ends the thread, and waits up to [`WAIT_SLICE`] for its end. A server's port is free again then.
    pub(super) fn close(&mut self) {
        drop(self.requests.take());
        let _ = self.ended.recv_timeout(WAIT_SLICE); // it takes longer if the server hangs
    }
}

opaque_debug!(StoreConnection);

/// Has the thread that gets `requests` run one. Waits for its result, for `timeout` and a `margin`, or until `cancelled`
/// closes.
fn run<T: Send + 'static>(
    requests: &Sender<Request>,
    timeout: Duration,
    margin: Duration,
    cancelled: &Receiver<Infallible>,
    request: impl FnOnce(&mut Option<Connection>, &GivenUp) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let began = Instant::now();
    let (reply_tx, reply_rx) = bounded(1);
    // Dropped when this returns.
    let (_waiting_tx, given_up_rx) = bounded::<Infallible>(0);
    // If the thread has ended, `reply_rx` is closed.
    let _ = requests.send(Box::new(move |connection: &mut Option<Connection>| {
        if !is_closed(&given_up_rx) {
            // The send fails if the caller no longer waits.
            let _ = reply_tx.send(request(connection, &given_up_rx));
        }
    }));
    loop {
        let left = timeout.saturating_add(margin).saturating_sub(began.elapsed());
        if left.is_zero() {
            return Err(format!(
                "no answer within {timeout:?}: the process there hangs, it does not serve a store, or the network is \
                 down; check that process, or raise --timeout"
            ));
        }
        select_biased! {
            recv(reply_rx) -> reply => return reply.unwrap_or_else(|_| Err(ENDED.into())),
            recv(cancelled) -> _ => return Err(CANCELLED.into()),
            default(left) => {} // unless the process was suspended meanwhile, the time is over
        }
    }
}

/// Waits for `keys` in short intervals, so that the thread is soon free again after the caller has given up.
pub(super) fn wait(
    store: &mut Connection,
    keys: &[String],
    timeout: Duration,
    given_up: &GivenUp,
) -> Result<bool, String> {
    let began = Instant::now();
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        if store.wait(keys, left.min(WAIT_SLICE))? {
            return Ok(true);
        }
        if left.is_zero() {
            return Ok(false);
        }
        if is_closed(given_up) {
            return Err(CANCELLED.into());
        }
    }
}

/// Starts a server on a listening socket. libtorch by itself would listen on every interface, and report less on
/// failure.
pub(super) fn listen(host: &str, port: u16, timeout: Duration) -> Result<Opened, String> {
    let purpose = "serving a store";
    limits::require_files(FILES_OF_A_SERVER, purpose).map_err(|error| error.to_string())?;
    let found = (host, port).to_socket_addrs();
    if found.is_ok_and(|mut all| all.any(|server| server.ip().is_unspecified())) {
        return Err(ALL_INTERFACES.into());
    }
    let listener = TcpListener::bind((host, port)).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => PORT_IN_USE.into(),
        ErrorKind::AddrNotAvailable => NOT_HERE.into(),
        _ => error.to_string(),
    })?;
    let server = listener.local_addr().map_err(|error| error.to_string())?;
    let host = server.ip().to_string();
    let socket = listener.into_raw_fd();
    // In whole seconds, in which libtorch's client counts while it connects.
    let limit = Duration::from_secs(timeout.as_secs().saturating_add(1));
    let connection = Connection::new(&host, server.port(), Some(socket), limit)?;
    Ok(Opened { connection, server, local: server.ip() })
}

/// Connects to a server. libtorch's client cannot be stopped while it connects, and does not report what it found. It
/// therefore gets an address that already accepts connections.
pub(super) fn reach(
    host: &str,
    port: u16,
    timeout: Duration,
    given_up: &GivenUp,
) -> Result<Opened, String> {
    let began = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        let left = || timeout.saturating_sub(began.elapsed());
        // Reaching the limit on open files would otherwise look like a network failure.
        limits::require_files(FILES_OF_A_CLIENT, "a connection to the store")
            .map_err(|error| error.to_string())?;
        let reason = match find(host, port, left) {
            Ok((server, local)) => {
                let host = server.ip().to_string();
                // Less than the time left: libtorch's client connects again and again for that long, in whole seconds, and then
                // says what it has found.
                let limit = Duration::from_secs(left().as_secs().saturating_sub(1).max(1));
                let connection = Connection::new(&host, port, None, limit);
                let connection = connection.map_err(|reason| {
                    if !reason.contains("Ping failed") {
                        return reason;
                    }
                    format!(
                        "{server}: what listens there is not the store of a run, but another program, perhaps an HTTP \
                         server; use a port of your own"
                    )
                })?;
                return Ok(Opened { connection, server, local });
            }
            Err(reason) => reason,
        };
        if left().is_zero() {
            return Err(format!(
                "{reason}, tried for {timeout:?}; check that rank 0 is running, and that this is its address"
            ));
        }
        match given_up.recv_timeout(pause.min(left())) {
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(WAIT_SLICE),
            Err(RecvTimeoutError::Disconnected) => return Err(CANCELLED.into()),
            Ok(never) => match never {},
        }
    }
}

/// Finds an address of `host` that accepts connections. Also returns this machine's address on the route to it.
fn find(
    host: &str,
    port: u16,
    left: impl Fn() -> Duration,
) -> Result<(SocketAddr, IpAddr), String> {
    let servers = (host, port).to_socket_addrs().map_err(|error| format!("{host}: {error}"))?;
    let mut reason = format!("{host} has no address");
    for server in servers {
        let limit = left().clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
        let stream = TcpStream::connect_timeout(&server, limit);
        match stream.and_then(|stream| stream.local_addr()) {
            // A socket that connects to a port of its own machine can connect to itself.
            Ok(local) if local == server => reason = format!("{server}: nothing listens there"),
            Ok(local) => return Ok((server, local.ip())),
            Err(error) => reason = format!("{server}: {error}"),
        }
    }
    Err(reason)
}

fn is_closed(channel: &Receiver<Infallible>) -> bool {
    channel.try_recv() == Err(TryRecvError::Disconnected)
}
