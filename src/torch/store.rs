//! Where ranks of several processes meet: `torch.distributed.TCPStore`, with an end to every wait.

use std::convert::Infallible;
use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{
    Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, select_biased, unbounded,
};

use super::c10d::Connection;
use crate::error::{Error, Result};

/// A connection to a key-value store on the network; to keys under one prefix.
///
/// libtorch's client blocks until the server answers, whatever happens, so it has a thread of its own here, and
/// who asks waits for that thread until it answers, the run is cancelled, or time is up. A request that nobody
/// waits for any more is left to that thread; if the server hangs, it stays there until the process ends.
///
/// Any number of threads can use one store, but one request follows another: a `wait` holds up a `set` from
/// another thread. [`TcpStore::another_connection`] does not.
#[derive(Debug, Clone)]
pub(crate) struct TcpStore {
    client: Arc<Client>,
    prefix: String,
    /// For how long an answer is waited for.
    timeout: Duration,
    cancelled: Receiver<Infallible>,
}

/// The thread of a connection, seen from outside.
struct Client {
    /// None while it is dropped.
    requests: Option<Sender<Request>>,
    /// Closes when the thread has ended.
    ended: Receiver<Infallible>,
    /// As the user gave it, for errors.
    name: String,
    server: SocketAddr,
    local: IpAddr,
}

type Request = Box<dyn FnOnce(&mut Connection) + Send>;

/// What the thread of a connection finds out when it opens it.
struct Opened {
    connection: Connection,
    server: SocketAddr,
    /// This machine's address on the way to the server.
    local: IpAddr,
}

/// Closed when nobody waits for the answer any more.
type GivenUp = Receiver<Infallible>;

/// For how long a wait goes on after nobody is interested any more, at most.
const SLICE: Duration = Duration::from_secs(1);

/// How long one address is tried before the next.
const ATTEMPT: Duration = Duration::from_secs(5);

/// What libtorch's server accepts; beyond that it closes the connection without a word.
const MAX_KEY: usize = 8 << 10;
const MAX_VALUE: usize = 8 << 20;

const GIVEN_UP: &str = "given up, because the run ends";

impl TcpStore {
    /// Serves a store at `host`, and nowhere else: an address of this machine, or a name of one. Port 0 takes a
    /// free one, see [`TcpStore::port`]. The server lives as long as this and what was cloned from it.
    ///
    /// A request waits for the server for `timeout`, and no longer than until `cancelled` closes.
    ///
    /// # Errors
    /// If it cannot listen there.
    pub(crate) fn serve(
        host: &str,
        port: u16,
        timeout: Duration,
        cancelled: Receiver<Infallible>,
    ) -> Result<Self> {
        let host = host.to_owned();
        let name = name(&host, port);
        Self::open(name, "listening", timeout, cancelled, move |_| listen(&host, port, timeout))
    }

    /// Connects to a store, which may not be there yet: tries every address of `host` again and again for
    /// `timeout`, or until `cancelled` closes. Requests wait as those of [`TcpStore::serve`] do.
    ///
    /// # Errors
    /// If there is no store in time.
    pub(crate) fn connect(
        host: &str,
        port: u16,
        timeout: Duration,
        cancelled: Receiver<Infallible>,
    ) -> Result<Self> {
        let host = host.to_owned();
        let name = name(&host, port);
        Self::open(name, "connecting", timeout, cancelled, move |given_up| {
            reach(&host, port, timeout, given_up)
        })
    }

    fn open(
        name: String,
        doing: &str,
        timeout: Duration,
        cancelled: Receiver<Infallible>,
        open: impl FnOnce(&GivenUp) -> Result<Opened, String> + Send + 'static,
    ) -> Result<Self> {
        let fail = |reason| Error::Store { address: name.clone(), doing: doing.into(), reason };
        let (requests, to_do) = unbounded::<Request>();
        let (opening, opened) = bounded(1);
        let (waiting, given_up) = bounded::<Infallible>(0);
        let (running, ended) = bounded::<Infallible>(0);
        let work = move || {
            let _running = running; // closed last
            let Opened { mut connection, server, local } = match open(&given_up) {
                Ok(opened) => opened,
                Err(reason) => return drop(opening.send(Err(reason))),
            };
            if opening.send(Ok((server, local))).is_ok() {
                to_do.into_iter().for_each(|request| request(&mut connection));
            }
        };
        let thread = thread::Builder::new().name("ddp-mp store".into());
        thread.spawn(work).map_err(|error| fail(format!("cannot start a thread: {error}")))?;
        // It keeps to the timeout itself, unless what it has reached hangs.
        let answer = answer(&opened, &cancelled, timeout + SLICE);
        drop(waiting);
        let (server, local) = answer.map_err(fail)?;
        let requests = Some(requests);
        let client = Client { requests, ended, name, server, local };
        Ok(Self { client: Arc::new(client), prefix: String::new(), timeout, cancelled })
    }

    /// A second connection to the same store, with the same prefix: it can wait while this one does other things.
    pub(crate) fn another_connection(&self) -> Result<Self> {
        self.reconnect(self.cancelled.clone())
    }

    /// A connection of its own to the same store, with the same prefix, whose requests end when `cancelled` closes.
    pub(crate) fn reconnect(&self, cancelled: Receiver<Infallible>) -> Result<Self> {
        let server = self.client.server;
        let host = server.ip().to_string();
        let other = Self::connect(&host, server.port(), self.timeout, cancelled)?;
        Ok(Self { prefix: self.prefix.clone(), ..other })
    }

    /// The same connection, for requests that wait for the server for `timeout`, and no longer than until `cancelled`
    /// closes.
    pub(crate) fn patient(&self, timeout: Duration, cancelled: Receiver<Infallible>) -> Self {
        Self { timeout, cancelled, ..self.clone() }
    }

    /// The same store, but with `prefix` and a slash before all keys. Follows `PrefixStore`.
    pub(crate) fn under(&self, prefix: &str) -> Self {
        Self { prefix: self.key(prefix) + "/", ..self.clone() }
    }

    /// Where the server listens.
    pub(crate) fn port(&self) -> u16 {
        self.client.server.port()
    }

    /// This machine's address on the way to the server.
    pub(crate) fn local_address(&self) -> IpAddr {
        self.client.local
    }

    /// Sets `key`. The server does not confirm it; an error shows at the next request.
    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (full, value) = (self.key(key), value.to_vec());
        self.check_size(&full, &[&value])?;
        self.ask(("set", key), Duration::ZERO, move |store, _| store.set(&full, &value))
    }

    /// The value of `key`, waiting up to `timeout` until it is set; `None` if it is not.
    pub(crate) fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let full = self.key(key);
        self.check_size(&full, &[])?;
        self.ask(("get", key), timeout, move |store, given_up| {
            let keys = [full];
            let is_there = wait(store, &keys, timeout, given_up)?;
            is_there.then(|| store.get(&keys[0])).transpose()
        })
    }

    /// Waits up to `timeout` until all `keys` are set; false if they are not.
    pub(crate) fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        let full = self.keys(keys)?;
        self.ask(("wait", &told(keys)), timeout, move |store, given_up| {
            wait(store, &full, timeout, given_up)
        })
    }

    /// Whether all `keys` are set.
    pub(crate) fn check(&self, keys: &[String]) -> Result<bool> {
        let full = self.keys(keys)?;
        self.ask(("check", &told(keys)), Duration::ZERO, move |store, _| store.check(&full))
    }

    /// Adds to a counter, which is 0 before the first time; returns the sum.
    pub(crate) fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let full = self.key(key);
        self.check_size(&full, &[])?;
        self.ask(("add", key), Duration::ZERO, move |store, _| store.add(&full, amount))
    }

    /// Sets `key` to `desired` if it is `expected`, or if that is empty and it is not set; returns what it is then.
    pub(crate) fn compare_set(
        &self,
        key: &str,
        expected: &[u8],
        desired: &[u8],
    ) -> Result<Vec<u8>> {
        let full = self.key(key);
        self.check_size(&full, &[expected, desired])?;
        let (expected, desired) = (expected.to_vec(), desired.to_vec());
        self.ask(("compare_set", key), Duration::ZERO, move |store, _| {
            store.compare_set(&full, &expected, &desired)
        })
    }

    /// The key as the server knows it.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn keys(&self, keys: &[String]) -> Result<Vec<String>> {
        let full: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        full.iter().try_for_each(|key| self.check_size(key, &[]))?;
        Ok(full)
    }

    fn check_size(&self, key: &str, values: &[&[u8]]) -> Result<()> {
        let fail = |what, len, max| {
            Error::Input(format!("the store takes {what} of up to {max} bytes, not of {len}"))
        };
        if key.len() >= MAX_KEY {
            return Err(fail("keys", key.len(), MAX_KEY - 1)); // the client adds a slash
        }
        let longest = values.iter().map(|value| value.len()).max().unwrap_or(0);
        if longest > MAX_VALUE { Err(fail("values", longest, MAX_VALUE)) } else { Ok(()) }
    }

    /// Has the connection's thread do `request`, which takes up to `waits` beside the server's answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        (doing, key): (&str, &str),
        waits: Duration,
        request: impl FnOnce(&mut Connection, &GivenUp) -> Result<T, String> + Send + 'static,
    ) -> Result<T> {
        let client = &*self.client;
        let (replying, reply) = bounded(1);
        let (waiting, given_up) = bounded::<Infallible>(0);
        let request: Request = Box::new(move |store| {
            if !is_closed(&given_up) {
                // Fails if nobody is interested any more.
                let _ = replying.send(request(store, &given_up));
            }
        });
        if let Some(requests) = &client.requests {
            // If the thread has ended, so has `reply`.
            let _ = requests.send(request);
        }
        let answer = answer(&reply, &self.cancelled, self.timeout.saturating_add(waits));
        drop(waiting);
        answer.map_err(|reason| Error::Store {
            address: client.name.clone(),
            doing: format!("{doing} {key:?}"),
            reason,
        })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.requests.take());
        // So that the port is free again; not for long, if the server hangs.
        let _ = self.ended.recv_timeout(SLICE);
    }
}

/// Waits for the thread of a connection.
fn answer<T>(
    reply: &Receiver<Result<T, String>>,
    cancelled: &Receiver<Infallible>,
    timeout: Duration,
) -> Result<T, String> {
    select_biased! {
        recv(reply) -> reply => reply.unwrap_or_else(|_| Err("its connection is gone".into())),
        recv(cancelled) -> _ => Err(GIVEN_UP.into()),
        default(timeout) => Err(format!(
            "no answer for {timeout:?}: the process there hangs, it is no store, or the network is down"
        )),
    }
}

/// Waits in short pieces, so that the thread is soon free again when nobody waits for it any more.
fn wait(
    store: &mut Connection,
    keys: &[String],
    timeout: Duration,
    given_up: &GivenUp,
) -> Result<bool, String> {
    let began = Instant::now();
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        if store.wait(keys, left.min(SLICE))? {
            return Ok(true);
        }
        if left <= SLICE {
            return Ok(false);
        }
        if is_closed(given_up) {
            return Err(GIVEN_UP.into());
        }
    }
}

/// libtorch would listen on every interface, and say less if it cannot: so it gets a socket that listens.
fn listen(host: &str, port: u16, timeout: Duration) -> Result<Opened, String> {
    let listener = TcpListener::bind((host, port)).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            "the port is in use, by another run perhaps; choose another --master-port".into()
        }
        ErrorKind::AddrNotAvailable => {
            "that is no address of this machine; start this node where --master-addr is".into()
        }
        _ => error.to_string(),
    })?;
    let server = listener.local_addr().map_err(|error| error.to_string())?;
    if server.ip().is_unspecified() {
        return Err("that is every interface of this machine; name one by its address".into());
    }
    let host = server.ip().to_string();
    let socket = listener.into_raw_fd();
    let connection = Connection::new(&host, server.port(), Some(socket), whole_seconds(timeout))?;
    Ok(Opened { connection, server, local: server.ip() })
}

/// libtorch's client is good at connecting, but cannot be stopped, nor say what it has found: so it is told an
/// address that answers.
fn reach(host: &str, port: u16, timeout: Duration, given_up: &GivenUp) -> Result<Opened, String> {
    let began = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        let left = || timeout.saturating_sub(began.elapsed());
        let reason = match find(host, port, left) {
            Ok((server, local)) => {
                let host = server.ip().to_string();
                let connection = Connection::new(&host, port, None, whole_seconds(left()))?;
                return Ok(Opened { connection, server, local });
            }
            Err(reason) => reason,
        };
        if left().is_zero() {
            return Err(format!(
                "{reason}, for {timeout:?}; is rank 0 there, and is this its address?"
            ));
        }
        match given_up.recv_timeout(pause.min(left())) {
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(SLICE),
            Err(RecvTimeoutError::Disconnected) => return Err(GIVEN_UP.into()),
            Ok(never) => match never {},
        }
    }
}

/// An address of `host` where somebody answers, and this machine's on the way there.
fn find(
    host: &str,
    port: u16,
    left: impl Fn() -> Duration,
) -> Result<(SocketAddr, IpAddr), String> {
    let servers = (host, port).to_socket_addrs().map_err(|error| format!("{host}: {error}"))?;
    let mut reason = format!("{host} has no address");
    for server in servers {
        let limit = left().clamp(Duration::from_millis(1), ATTEMPT);
        let stream = TcpStream::connect_timeout(&server, limit);
        match stream.and_then(|stream| stream.local_addr()) {
            // A socket that looks for a port of its own machine can find itself.
            Ok(local) if local == server => reason = format!("{server}: nobody there"),
            Ok(local) => return Ok((server, local.ip())),
            Err(error) => reason = format!("{server}: {error}"),
        }
    }
    Err(reason)
}

/// libtorch's client counts in these while it connects.
fn whole_seconds(timeout: Duration) -> Duration {
    Duration::from_secs(timeout.as_secs().saturating_add(1))
}

fn is_closed(channel: &Receiver<Infallible>) -> bool {
    channel.try_recv() == Err(TryRecvError::Disconnected)
}

/// Keys on one line, of which there may be one for each of many processes.
fn told(keys: &[String]) -> String {
    match keys {
        [first, .., last] if keys.len() > 4 => format!("{first}, ... {last}"),
        _ => keys.join(", "),
    }
}

fn name(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
