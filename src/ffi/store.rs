//! Where ranks of several processes meet: `torch.distributed.TCPStore`, with an end to every wait.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;

use super::c10d::Connection;
use super::store_connection::{GivenUp, Opened, StoreConnection, listen, reach, wait};
use crate::error::{Error, Result};

/// A client of a key-value store on the network; of keys under one prefix.
///
/// libtorch's client blocks until the server answers, whatever happens, so each connection has a thread of its own here,
/// and the caller waits for that thread until it answers, the run is cancelled, or time is up. A request that was given
/// up is left to that thread; if the server hangs, it stays there until the process ends.
///
/// Any number of threads can use one store. Requests that the server answers at once follow each other on one connection,
/// so that each sees what those before it have set. A `get` or `wait` for a key that is not there yet takes another
/// connection, so that no other request waits behind it.
#[derive(Debug, Clone)]
pub(crate) struct TcpStore {
    client: Arc<Client>,
    prefix: String,
    /// For how long an answer is waited for.
    timeout: Duration,
    cancelled: Receiver<Infallible>,
}

/// The connections of a client.
#[derive(Debug)]
struct Client {
    connection: StoreConnection,
    /// A further one, on which nobody waits now.
    idle: Mutex<Option<StoreConnection>>,
    /// As the user gave it, for errors.
    name: String,
}

/// What libtorch's server accepts; beyond that it closes the connection without a word.
const MAX_KEY: usize = 8 << 10;
const MAX_VALUE: usize = 8 << 20;

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
        let connection = StoreConnection::open(timeout, &cancelled, open).map_err(|reason| {
            Error::Store { address: name.clone(), doing: doing.into(), reason }
        })?;
        let client = Client { connection, idle: Mutex::default(), name };
        Ok(Self { client: Arc::new(client), prefix: String::new(), timeout, cancelled })
    }

    /// A client of its own of the same store, with the same prefix.
    pub(crate) fn another_connection(&self) -> Result<Self> {
        self.reconnect(self.cancelled.clone())
    }

    /// A connection of its own to the same store, with the same prefix, whose requests end when `cancelled` closes.
    pub(crate) fn reconnect(&self, cancelled: Receiver<Infallible>) -> Result<Self> {
        let server = self.client.connection.server;
        let host = server.ip().to_string();
        let other = Self::connect(&host, server.port(), self.timeout, cancelled)?;
        Ok(Self { prefix: self.prefix.clone(), ..other })
    }

    /// The same connection, for requests that wait for the server for `timeout`, and no longer than until `cancelled`
    /// closes.
    pub(crate) fn with_timeout(&self, timeout: Duration, cancelled: Receiver<Infallible>) -> Self {
        Self { timeout, cancelled, ..self.clone() }
    }

    /// The same store, but with `prefix` and a slash before all keys. Follows `PrefixStore`.
    pub(crate) fn under(&self, prefix: &str) -> Self {
        Self { prefix: self.key(prefix) + "/", ..self.clone() }
    }

    /// Where the server listens.
    pub(crate) fn port(&self) -> u16 {
        self.client.connection.server.port()
    }

    /// This machine's address on the way to the server.
    pub(crate) fn local_address(&self) -> IpAddr {
        self.client.connection.local
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
        self.when_set(("get", key), vec![full], timeout, |store, keys| store.get(&keys[0]))
    }

    /// Waits up to `timeout` until all `keys` are set; false if they are not.
    pub(crate) fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        let full = self.keys(keys)?;
        let set = self.when_set(("wait", &told(keys)), full, timeout, |_, _| Ok(()))?;
        Ok(set.is_some())
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
        doing: (&str, &str),
        waits: Duration,
        request: impl FnOnce(&mut Connection, &GivenUp) -> Result<T, String> + Send + 'static,
    ) -> Result<T> {
        let timeout = self.timeout.saturating_add(waits);
        let answer = self.client.connection.ask(timeout, &self.cancelled, request);
        answer.map_err(|reason| self.failed(doing, reason))
    }

    /// What `read` finds once all `keys` are set; `None` if they are not within `timeout`.
    fn when_set<T: Send + 'static>(
        &self,
        doing: (&str, &str),
        keys: Vec<String>,
        timeout: Duration,
        read: impl Fn(&mut Connection, &[String]) -> Result<T, String> + Copy + Send + 'static,
    ) -> Result<Option<T>> {
        let (began, known) = (Instant::now(), keys.clone());
        let at_once = self.ask(doing, Duration::ZERO, move |store, _| {
            store.check(&known)?.then(|| read(store, &known)).transpose()
        })?;
        if at_once.is_some() || timeout.is_zero() {
            return Ok(at_once);
        }
        let waits = || -> Result<Option<T>, String> {
            let connection = self.client.another(self.timeout, &self.cancelled)?;
            let left = timeout.saturating_sub(began.elapsed());
            let patience = self.timeout.saturating_add(left);
            let answer = connection.ask(patience, &self.cancelled, move |store, given_up| {
                wait(store, &keys, left, given_up)?.then(|| read(store, &keys)).transpose()
            })?;
            self.client.keep(connection);
            Ok(answer)
        };
        waits().map_err(|reason| self.failed(doing, reason))
    }

    fn failed(&self, (doing, key): (&str, &str), reason: String) -> Error {
        let address = self.client.name.clone();
        Error::Store { address, doing: format!("{doing} {key:?}"), reason }
    }
}

impl Client {
    /// A connection on which a request may wait.
    fn another(
        &self,
        timeout: Duration,
        cancelled: &Receiver<Infallible>,
    ) -> Result<StoreConnection, String> {
        if let Some(idle) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Ok(idle);
        }
        let server = self.connection.server;
        StoreConnection::open(timeout, cancelled, move |given_up| {
            reach(&server.ip().to_string(), server.port(), timeout, given_up)
        })
    }

    /// Keeps one on which nobody waits any more for the next request that waits, unless there is one already.
    fn keep(&self, connection: StoreConnection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(connection);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.close();
    }
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
