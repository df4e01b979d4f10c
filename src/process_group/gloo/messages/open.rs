//! Setup of the one connection between two processes for messages: each listens, and writes its address and a token to
//! the store.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::RecvTimeoutError;
use rustix::io::Errno;

use super::Post;
use super::frame::Frame;
use super::link::Link;
use super::reader::{self, Patient, TICK};
use crate::error::{Error, Result};
use crate::torch::TcpStore;
use crate::torch::limits::require_files;

/// How long a new connection may take to send its greeting.
const GREETING: Duration = Duration::from_secs(10);

/// Where the other processes connect to this one.
#[derive(Debug)]
pub(in super::super) struct Door {
    pub listener: TcpListener,
    pub address: SocketAddr,
    /// The token that they present. Not a secret, because anyone who reaches the store can read it; it only prevents
    /// accidental connections.
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
            Err(error) if is_limit(&error) => make_room(post)?,
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
        let stream = match stream {
            Ok(stream) => Arc::new(stream),
            Err(error) if is_limit(&error) => match make_room(post) {
                Ok(()) => continue,
                Err(_) => return,
            },
            // The other process has given up.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
            Err(_) => {
                // The network or the memory may be back later, and nothing tells when.
                match post.run.cancel.tripped().recv_timeout(TICK) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    _ => continue,
                }
            }
        };
        let links = links.to_vec();
        let admitted = post.clone();
        let begun = post.thread(move |serving| {
            // A stranger is let go without a word.
            if let Ok(Some(link)) = admit(&admitted, &links, &stream) {
                reader::run(&link, &stream, serving);
            }
        });
        if let Err(error) = begun {
            return post.run.report(post.first_rank(), Some(&error), error.to_string());
        }
    }
}

/// Whether `error` says that no more files can be open.
fn is_limit(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Makes sure that another connection can be opened.
///
/// # Errors
/// If the limit on open files cannot be raised, which is reported as a failure of this process.
fn make_room(post: &Post) -> Result<(), String> {
    require_files(1, "a connection for messages").map_err(|error| {
        post.run.report(post.first_rank(), Some(&error), error.to_string());
        error.to_string()
    })
}

fn admit(
    post: &Post,
    links: &[Arc<Link>],
    stream: &Arc<TcpStream>,
) -> io::Result<Option<Arc<Link>>> {
    stream.set_read_timeout(Some(GREETING))?;
    let Some(Frame::Hello { token, process }) = Frame::read(&mut &**stream)? else {
        return Ok(None);
    };
    let link = links.get(process).filter(|_| token == post.token && process != post.layout.mine);
    let Some(link) = link else { return Ok(None) };
    let chosen = link.adopt(stream, false);
    if chosen { Frame::Welcome } else { Frame::Busy }.write(&mut &**stream)?;
    Ok(chosen.then(|| link.clone()))
}

/// Wakes the thread that lets others in, so that it sees that it is to end.
pub(super) fn knock(address: SocketAddr) {
    let _ = TcpStream::connect_timeout(&address, TICK); // if nobody listens, nobody need be woken
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use crossbeam::channel::never;
    use tch::Tensor;

    use super::super::super::super::threaded::{Contents, Outcome, Parcel, Shared, Side};
    use super::super::super::Layout;
    use super::super::frame::Offer;
    use super::super::{Letter, Messages};
    use super::*;
    use crate::operation::{At, Operation};
    use crate::sync::Run;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// One of two processes of a rank each.
    struct Process {
        run: Arc<Run>,
        shared: Shared,
        messages: Messages,
    }

    fn process(store: &TcpStore, mine: usize) -> Process {
        let layout = Layout { processes: vec![0..1, 1..2], mine };
        let (run, members) = (Arc::new(Run::new(2, TIMEOUT, None)), Arc::from([0, 1]));
        let shared = Shared::new(run.clone(), Arc::clone(&members), layout.here());
        let door = Door::open(store, mine, None).unwrap();
        let of_run = (run.clone(), store.clone());
        let messages = Messages::new(of_run, members, layout, door, shared.mail());
        Process { run, shared, messages }
    }

    fn address(store: &TcpStore, process: usize) -> (SocketAddr, u64) {
        let left = store.get(&key(process), TIMEOUT).unwrap().unwrap();
        let left = String::from_utf8(left).unwrap();
        let (address, token) = left.split_once(' ').unwrap();
        (address.parse().unwrap(), token.parse().unwrap())
    }

    impl Process {
        /// Sends a number from this process to the other one, which receives it.
        fn send_to(&self, other: &Process, number: i64) {
            let (source, destination) = (self.shared.here().start, other.shared.here().start);
            let (tensor, into) = (Tensor::from_slice(&[number]), Tensor::from_slice(&[-1i64]));
            let parcel = Parcel {
                side: Side::Receive,
                contents: Contents::Here(into.shallow_clone()),
                source: None,
                tag: 3,
                kind: tensor.kind(),
                shape: tensor.size(),
                stream: 0,
            };
            let received = other.shared.mail().post(parcel, destination);
            other.messages.expect(None).unwrap();
            let at = At { operation: Operation::Send, sequence: 0 };
            let letter = Letter { tensor: &tensor, source, destination, tag: 3, at };
            let sent = self.messages.send(&letter).unwrap();
            for posted in [&sent, &received] {
                while !posted.is_completed() {
                    std::thread::park(); // whoever completes it unparks this thread
                }
                assert!(matches!(posted.outcome(), Some(Outcome::From(rank)) if *rank == source));
            }
            assert_eq!(into.int64_value(&[0]), number);
        }
    }

    /// Whoever does not show the token is let go, whatever comes.
    #[test]
    fn strangers_are_let_go() {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT, never()).unwrap();
        let [one, other] = [0, 1].map(|mine| process(&store, mine));
        let (address, token) = address(&store, 1);
        other.messages.expect(None).unwrap();
        let bytes = |frame: Frame| {
            let mut bytes = Vec::new();
            frame.write(&mut bytes).unwrap();
            bytes
        };
        for said in [
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            vec![0xff; 4096],
            vec![0; 64],
            bytes(Frame::Hello { token: token ^ 1, process: 0 }),
            bytes(Frame::Hello { token, process: 1 }),
            bytes(Frame::Hello { token, process: usize::MAX }),
            bytes(Frame::Welcome),
        ] {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(&said).unwrap();
            // It ends, with a reset if not all was read.
            assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)), "{said:?}");
        }
        one.send_to(&other, 5);
        other.send_to(&one, 6);
        assert!(one.run.failures().is_empty() && other.run.failures().is_empty());
    }

    /// One that has the token, and then says what no process says, ends the connection, and with it what waits.
    #[test]
    fn what_no_process_says_ends_the_wait_for_it() {
        let offer = |source, destination, shape: &[i64]| {
            let (kind, shape) = ("int64".into(), shape.into());
            Frame::Offer(Offer { id: 0, source, destination, tag: 0, kind, shape })
        };
        for said in [
            Frame::Data { id: 7 },
            Frame::Ready { id: 7 },
            Frame::Taken { id: 7 },
            Frame::Refused { id: 7, expected: "\x1b[2J".into() },
            Frame::Welcome,
            offer(0, 0, &[1]),
            offer(1, 1, &[1]),
            offer(0, 1, &[i64::MAX, 2]),
        ] {
            let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT, never()).unwrap();
            let mine = process(&store, 1);
            let (address, token) = address(&store, 1);
            mine.messages.expect(None).unwrap();
            let mut other = TcpStream::connect(address).unwrap();
            Frame::Hello { token, process: 0 }.write(&mut other).unwrap();
            assert_eq!(Frame::read(&mut other).unwrap(), Some(Frame::Welcome));
            let tensor = Tensor::from_slice(&[0i64]);
            let parcel = Parcel {
                side: Side::Receive,
                contents: Contents::Here(tensor.shallow_clone()),
                source: Some(0),
                tag: 0,
                kind: tensor.kind(),
                shape: tensor.size(),
                stream: 0,
            };
            let posted = mine.shared.mail().post(parcel, 1);
            mine.messages.expect(Some(0)).unwrap();
            said.write(&mut other).unwrap();
            while !posted.is_completed() {
                std::thread::park();
            }
            let outcome = posted.outcome();
            let Some(Outcome::Lost(reason)) = outcome else { panic!("{said:?}: {outcome:?}") };
            assert!(reason.contains("something else than ddp-mp"), "{said:?}: {reason}");
        }
    }

    #[test]
    fn the_address_is_that_of_the_interface() {
        assert!(address_of("lo,eth0").unwrap().is_loopback());
        let error = address_of("none-such").unwrap_err().to_string();
        assert!(error.contains("none-such (GLOO_SOCKET_IFNAME)"), "{error}");
    }
}
