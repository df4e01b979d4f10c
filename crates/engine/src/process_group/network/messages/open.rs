//! Setup of the connections for messages. Each process listens, and writes its address and a token to the store.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::Connections;
use super::frame::Frame;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::os::limits::require_files;
use crate::runtime::Instant;

/// The listener to which other processes connect.
#[derive(Debug)]
pub(crate) struct MessageListener {
    pub listener: TcpListener,
    /// What the store has: the address, and a token. The token is no secret, because anyone who reaches the store can read
    /// it. It only prevents accidental connections.
    pub endpoint: String,
    /// Where a thread waits for the listener, for `wake`, and for connections to write to.
    pub epoll: OwnedFd,
    pub wake: OwnedFd,
}

/// The tokens of the events of the listener and of `wake`. Those of a connection to write to have the index of its process.
pub(super) const LISTENER: u64 = u64::MAX;
pub(super) const WAKE: u64 = LISTENER - 1;

/// The events of a connection to write to: each time it can write more, and its end.
pub(super) const WRITES: EventFlags =
    EventFlags::OUT.union(EventFlags::RDHUP).union(EventFlags::ET);

impl MessageListener {
    /// Listens for the other processes of `store`: on the first of `interfaces`, or else on the one that leads to the
    /// store.
    ///
    /// # Errors
    /// [`Error::Input`] if it cannot listen, and the errors of the store.
    pub(crate) fn open(store: &TcpStore, mine: usize, interfaces: Option<&str>) -> Result<Self> {
        let listen = || {
            let host = interfaces.map_or_else(|| Ok(store.local_address()), address_of)?;
            let listener = TcpListener::bind((host, 0))?;
            listener.set_nonblocking(true)?;
            let token = getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?;
            let endpoint = format!("{} {token}", listener.local_addr()?);
            let epoll = epoll::create(CreateFlags::CLOEXEC)?;
            epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
            let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let once = EventFlags::IN | EventFlags::ET;
            epoll::add(&epoll, &wake, EventData::new_u64(WAKE), once)?;
            Ok(Self { listener, endpoint, epoll, wake })
        };
        let listener = listen().map_err(|error: io::Error| {
            Error::unsupported(format!("process {mine} cannot listen for messages: {error}"))
        })?;
        store.set(&key(mine), listener.endpoint.as_bytes())?;
        Ok(listener)
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

impl Connections {
    /// Connects to `process`, unless that has begun. Waits for the store, but not for the connection.
    pub(super) fn open(&self, process: usize) {
        if self.peers[process].lock().has_begun() {
            return;
        }
        let left = self.store.get(&key(process), self.run.timeout); // without the lock, because it may take long
        let mut peer = self.peers[process].lock();
        if peer.has_begun() {
            return;
        }
        match left.and_then(|left| self.connect(process, left.unwrap_or_default())) {
            Ok((stream, to)) => {
                peer.writer = Some(stream);
                peer.address = to.split(' ').next().unwrap_or_default().into();
                let hello = Frame::Hello { to, process: self.processes.mine };
                self.put(process, &mut peer, &hello, None);
            }
            Err(error) => {
                if let Error::Input { .. } = error {
                    self.fail(&error);
                }
                peer.unreachable = Some((Instant::now(), error.to_string()));
            }
        }
    }

    /// Begins to connect to `process`, which left `endpoint` in the store. Returns both.
    fn connect(&self, process: usize, endpoint: Vec<u8>) -> Result<(TcpStream, String)> {
        let endpoint = String::from_utf8(endpoint).unwrap_or_default();
        let address = endpoint.split_once(' ').and_then(|(it, _)| it.parse::<SocketAddr>().ok());
        let address = address.ok_or_else(|| {
            Error::data(format!(
                "the store key {:?} holds no address: another program uses the same store",
                key(process)
            ))
        })?;
        require_files(1, "a connection for messages")?;
        let begin = || -> io::Result<TcpStream> {
            let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let stream = TcpStream::from(socket_with(family, SocketType::STREAM, flags, None)?);
            stream.set_nodelay(true)?;
            match rustix::net::connect(&stream, &address) {
                Ok(()) | Err(Errno::INPROGRESS) => {}
                Err(error) => return Err(error.into()),
            }
            let token = EventData::new_u64(process as u64);
            epoll::add(&self.listener.epoll, &stream, token, WRITES)?;
            Ok(stream)
        };
        let fail = |error: io::Error| Error::Gloo {
            doing: "connect",
            reason: format!("{address}: {error}"),
        };
        begin().map(|stream| (stream, endpoint)).map_err(fail)
    }
}
