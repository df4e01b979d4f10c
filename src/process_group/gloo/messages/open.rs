//! How two processes come to one connection for messages: each listens, and leaves address and token in the store.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::Frame;
use super::link::Link;
use super::reader::{self, Patient, TICK};
use super::{Messages, Post};
use crate::error::{Error, Result};
use crate::torch::TcpStore;

/// How long whoever connects may take to greet.
const GREETING: Duration = Duration::from_secs(10);

/// Where the other processes connect to this one.
#[derive(Debug)]
pub(in super::super) struct Door {
    pub listener: TcpListener,
    pub address: SocketAddr,
    /// What they show. No secret: whoever reaches the store can read it; but nobody else comes in by mistake.
    pub token: u64,
}

impl Door {
    /// Listens for the other processes of `store`, on the first interface of `interfaces` or on the way to the store.
    ///
    /// # Errors
    /// [`Error::Input`] if that is not possible, and those of the store.
    pub(in super::super) fn open(
        store: &TcpStore,
        mine: usize,
        interfaces: Option<&str>,
    ) -> Result<Self> {
        let fail = |error: io::Error| {
            Error::Input(format!("process {mine} cannot listen for messages: {error}"))
        };
        let host = match interfaces {
            Some(names) => address_of(names).map_err(fail)?,
            None => store.local_address(),
        };
        let listener = TcpListener::bind((host, 0)).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let token = getrandom::u64().map_err(|error| fail(io::Error::other(error.to_string())))?;
        store.set(&key(mine), format!("{address} {token}").as_bytes())?;
        Ok(Self { listener, address, token })
    }
}

fn key(process: usize) -> String {
    format!("messages/{process}")
}

/// This machine's address on the first network interface of a list.
fn address_of(names: &str) -> io::Result<IpAddr> {
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

/// Connects to the process of `link`; `None` if the connection that it has opened at the same time is the one.
pub(super) fn connect(link: &Link) -> Result<Option<TcpStream>, String> {
    let post = &link.post;
    let key = key(link.process);
    let left = post.store.get(&key, post.run.timeout).map_err(|error| error.to_string())?;
    let left = String::from_utf8_lossy(&left.unwrap_or_default()).into_owned();
    let parsed = left.split_once(' ').and_then(|(address, token)| {
        Some((address.parse::<SocketAddr>().ok()?, token.parse::<u64>().ok()?))
    });
    let (address, token) = parsed.ok_or_else(|| {
        format!("the store key {key:?} holds no address: another program uses the same store")
    })?;
    let began = Instant::now();
    let stream = loop {
        match TcpStream::connect_timeout(&address, TICK) {
            Ok(stream) => break stream,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                link.look_at_deadlines();
                if post.is_closing() || began.elapsed() >= post.run.timeout {
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

/// Whether the other process takes this connection. It answers when one of its ranks sends or receives.
fn greet(link: &Link, stream: &TcpStream, token: u64) -> io::Result<bool> {
    stream.set_read_timeout(Some(TICK))?;
    Frame::Hello { token, process: link.post.layout.mine }.write(&mut &*stream)?;
    match Frame::read(&mut Patient::until_closing(stream, link))? {
        Some(Frame::Welcome) => Ok(true),
        Some(Frame::Busy) => Ok(false),
        Some(_) => Err(io::Error::other("something else than ddp-mp listens there")),
        None => Err(io::Error::other("it has left")),
    }
}

/// Lets in whoever connects, until the messages of this process end.
pub(super) fn accept(post: &Arc<Post>, links: &[Arc<Link>], listener: &TcpListener) {
    for stream in listener.incoming() {
        if post.is_closing() {
            return;
        }
        let Ok(stream) = stream else { continue };
        let links = links.to_vec();
        let admitted = post.clone();
        let begun = post.thread(move |serving| {
            // A stranger is let go without a word.
            if let Ok(Some(link)) = admit(&admitted, &links, &stream) {
                reader::run(&link, stream, serving);
            }
        });
        if let Err(error) = begun {
            return post.run.report(post.first_rank(), Some(&error), error.to_string());
        }
    }
}

fn admit(post: &Post, links: &[Arc<Link>], stream: &TcpStream) -> io::Result<Option<Arc<Link>>> {
    stream.set_read_timeout(Some(GREETING))?;
    let Some(Frame::Hello { token, process }) = Frame::read(&mut &*stream)? else {
        return Ok(None);
    };
    let link = links.get(process).filter(|_| token == post.token && process != post.layout.mine);
    let Some(link) = link else { return Ok(None) };
    let chosen = link.adopt(stream, false);
    if chosen { Frame::Welcome } else { Frame::Busy }.write(&mut &*stream)?;
    Ok(chosen.then(|| link.clone()))
}

impl Messages {
    /// Wakes the thread that lets others in, so that it sees that it is to end.
    pub(super) fn knock(address: SocketAddr) {
        let _ = TcpStream::connect_timeout(&address, TICK); // if nobody listens, nobody need be woken
    }
}
