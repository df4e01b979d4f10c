//! The rendezvous store of several processes: `torch.distributed.TCPStore`, with a timeout for every wait.

mod connection;
mod gather;
mod message;

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, never};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::ffi::c10d::Connection;
use crate::runtime::Instant;
pub(crate) use connection::{ALL_INTERFACES, NOT_HERE, PORT_IN_USE};
use connection::{GivenUp, Opened, StoreConnection, listen, reach, wait};
pub(crate) use gather::{Gathered, key_of};
pub(crate) use message::{from_json, to_json, unreadable};

/// A key-value store for rendezvous: one process serves it, the others connect to it.
///
/// Follows `torch.distributed.TCPStore`; either one can connect to the other. Clones share one connection. Each
/// `TcpStore` sees the keys under one prefix.
///
/// libtorch's client blocks until the server responds, so each connection has a thread of its own. The caller waits for
/// that thread until it replies, the run is cancelled, or the timeout expires. An abandoned request stays with the
/// thread. If the server hangs, the thread stays blocked until the process ends.
///
/// Any number of threads can use one store. Requests that the server answers at once run in order on one connection, so
/// that each sees the keys that earlier ones set. A `get` or `wait` for a key that does not exist yet uses another
/// connection, so that it does not delay other requests.
#[derive(Debug, Clone)]
pub struct TcpStore {
    client: Arc<Client>,
    prefix: String,
    /// How long to wait for the server's response.
    timeout: Duration,
    cancelled: Receiver<Infallible>,
}

/// The connections of a client.
#[derive(Debug)]
struct Client {
    connection: StoreConnection,
    /// A second connection that no request uses at the moment.
    idle: Mutex<Option<StoreConnection>>,
    /// The address as the user gave it, for errors.
    name: String,
}

/// The limits of libtorch's server, in bytes. Beyond them it closes the connection without an error.
const MAX_KEY: usize = 8 << 10;
const MAX_VALUE: usize = 8 << 20;

impl TcpStore {
    /// Serves a store at `host` only: an address of this machine, or a name of one. The server runs while this value, a
    /// clone, or a group made with it exists. Port 0 takes a free port; see [`TcpStore::port`]. A request waits for at most
    /// `timeout`.
    ///
    /// Follows `TCPStore(host, port, is_master=True, wait_for_workers=False)`.
    ///
    /// # Errors
    /// [`Error::Store`] if the server cannot listen there.
    pub fn serve(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let host = host.to_owned();
        let name = name(&host, port);
        Self::open(name, "listening", timeout, never(), move |_| listen(&host, port, timeout))
    }

    /// Connects to the store at `host`, any of its addresses. The server may start later: this retries for at most
    /// `timeout`.
    ///
    /// Follows `TCPStore(host, port, is_master=False)`.
    ///
    /// # Errors
    /// [`Error::Store`] if no store answers in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_until(host, port, timeout, never())
    }

    /// Connects to a store as [`TcpStore::connect`] does. Requests end when `cancelled` closes.
    fn connect_until(
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

    /// Opens another connection to the same store, with the same prefix.
    pub(crate) fn another_connection(&self) -> Result<Self> {
        self.reconnect(self.cancelled.clone())
    }

    /// Opens another connection to the same store, with the same prefix. Its requests end when `cancelled` closes.
    pub(crate) fn reconnect(&self, cancelled: Receiver<Infallible>) -> Result<Self> {
        let server = self.client.connection.server;
        let host = server.ip().to_string();
        let other = Self::connect_until(&host, server.port(), self.timeout, cancelled)?;
        Ok(Self { prefix: self.prefix.clone(), ..other })
    }

    /// Returns a client on the same connection, whose requests wait for the server for `timeout`, or until `cancelled`
    /// closes.
    pub(crate) fn with_timeout(&self, timeout: Duration, cancelled: Receiver<Infallible>) -> Self {
        Self { timeout, cancelled, ..self.clone() }
    }

    /// Returns a client of the same store that adds `prefix` and a slash before all keys. Follows `PrefixStore`.
    pub(crate) fn under(&self, prefix: &str) -> Self {
        Self { prefix: self.key(prefix) + "/", ..self.clone() }
    }

    /// Returns the port that the server listens on.
    pub fn port(&self) -> u16 {
        self.client.connection.server.port()
    }

    /// Returns this machine's address on the route to the server.
    pub(crate) fn local_address(&self) -> IpAddr {
        self.client.connection.local
    }

    /// Sets `key` to `value`, of up to 8 MiB. The server does not confirm it. Follows `TCPStore.set`.
    ///
    /// # Errors
    /// [`Error::Store`] if the connection is lost, which may show only at the next request; [`Error::Input`] if
    /// the key or the value is too long.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (full, value) = (self.key(key), value.to_vec());
        self.check_size(&full, &value)?;
        self.ask("set", key, Duration::ZERO, move |store, _| store.set(&full, &value))
    }

    /// Returns the value of `key`. Waits up to `timeout` for a client to set it; `None` if none does. Follows
    /// `TCPStore.get`. Other threads can use the store meanwhile.
    ///
    /// # Errors
    /// The errors of [`TcpStore::set`].
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let full = self.key(key);
        self.check_size(&full, &[])?;
        self.when_set("get", key, vec![full], timeout, |store, keys| store.get(&keys[0]))
    }

    /// Waits up to `timeout` until all `keys` are set. Returns `false` if they are not.
    pub(crate) fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        let full: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        full.iter().try_for_each(|key| self.check_size(key, &[]))?;
        let set = self.when_set("wait", &told(keys), full, timeout, |_, _| Ok(()))?;
        Ok(set.is_some())
    }

    /// Returns whether `key` is set.
    pub(crate) fn check(&self, key: &str) -> Result<bool> {
        self.wait(&[key.into()], Duration::ZERO)
    }

    /// Adds to a counter, which starts at 0. Returns the sum.
    pub(crate) fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let full = self.key(key);
        self.check_size(&full, &[])?;
        self.ask("add", key, Duration::ZERO, move |store, _| store.add(&full, amount))
    }

    /// Sets `key` if it is not set. Returns its value. Follows `TCPStore.compare_set` with an empty expected value.
    pub(crate) fn set_new(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let (full, value) = (self.key(key), value.to_vec());
        self.check_size(&full, &value)?;
        self.ask("compare_set", key, Duration::ZERO, move |store, _| store.set_new(&full, &value))
    }

    /// Sets `key` if it is not set. Returns its value. Wakes all that wait for it, which [`set_new`](Self::set_new) does not
    /// do on every server.
    pub(crate) fn set_once(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let now = self.set_new(key, value)?;
        if now == value {
            self.set(key, value)?;
        }
        Ok(now)
    }

    /// Returns the full key, with the prefix.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn check_size(&self, key: &str, value: &[u8]) -> Result<()> {
        let fail = |what, len, max| {
            Error::usage(format!("the store takes {what} of up to {max} bytes, not of {len}"))
        };
        if key.len() >= MAX_KEY {
            return Err(fail("keys", key.len(), MAX_KEY - 1)); // the client adds a slash
        }
        let len = value.len();
        if len > MAX_VALUE { Err(fail("values", len, MAX_VALUE)) } else { Ok(()) }
    }

    /// Runs `request` on the connection's thread. It may take up to `waits` in addition to the response timeout.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        doing: &str,
        key: &str,
        waits: Duration,
        request: impl FnOnce(&mut Connection, &GivenUp) -> Result<T, String> + Send + 'static,
    ) -> Result<T> {
        let timeout = self.timeout.saturating_add(waits);
        let answer = self.client.connection.ask(timeout, &self.cancelled, request);
        answer.map_err(|reason| self.failed(doing, key, reason))
    }

    /// Returns the result of `read` once all `keys` are set. `None` if they are not set within `timeout`.
    fn when_set<T: Send + 'static>(
        &self,
        doing: &str,
        key: &str,
        keys: Vec<String>,
        timeout: Duration,
        read: impl Fn(&mut Connection, &[String]) -> Result<T, String> + Copy + Send + 'static,
    ) -> Result<Option<T>> {
        let (began, known) = (Instant::now(), keys.clone());
        let at_once = self.ask(doing, key, Duration::ZERO, move |store, _| {
            store.wait(&known, Duration::ZERO)?.then(|| read(store, &known)).transpose()
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
        waits().map_err(|reason| self.failed(doing, key, reason))
    }

    fn failed(&self, doing: &str, key: &str, reason: String) -> Error {
        let address = self.client.name.clone();
        Error::Store { address, doing: format!("{doing} {key:?}"), reason }
    }
}

impl Client {
    /// Returns a connection for a request that may wait.
    fn another(
        &self,
        timeout: Duration,
        cancelled: &Receiver<Infallible>,
    ) -> Result<StoreConnection, String> {
        if let Some(idle) = self.idle.lock().take() {
            return Ok(idle);
        }
        let server = self.connection.server;
        StoreConnection::open(timeout, cancelled, move |given_up| {
            reach(&server.ip().to_string(), server.port(), timeout, given_up)
        })
    }

    /// Keeps an unused connection for the next request that waits, unless there already is one.
    fn keep(&self, connection: StoreConnection) {
        self.idle.lock().get_or_insert(connection);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.close();
    }
}

/// Lists keys on one line, abbreviated if there are many.
fn told(keys: &[String]) -> String {
    match keys {
        [first, .., last] if keys.len() > 4 => format!("{first}, ... {last}"),
        _ => keys.join(", "),
    }
}

fn name(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
pub(super) mod tests;
