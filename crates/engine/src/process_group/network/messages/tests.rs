//! Connections with processes that follow the protocol, and with programs that do not.

#![allow(clippy::disallowed_methods)] // threads that wait for one rank are no ranks

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{RecvTimeoutError, bounded};
use rustix::net::{self, AddressFamily, SocketType};
use tch::{Device, Kind, Tensor};

use super::super::lost;
use super::super::process_map::ProcessMap;
use super::frame::{Frame, Offer};
use super::open::{MessageListener, address_of, key};
use super::thread::MAX_STRANGERS;
use super::{Messages, Side};
use crate::error::Error;
use crate::ffi::TcpStore;
use crate::operation::{OpId, Operation};
use crate::process_group::local::{Completion, MessageEnd, MessageTensor, P2pRequest, Shared};
use crate::runtime::RunContext;

const TIMEOUT: Duration = Duration::from_secs(60);

const SEND: OpId = OpId { operation: Operation::Send, sequence: 0 };

/// One of several processes with one rank each.
struct Process {
    run: Arc<RunContext>,
    shared: Shared,
    messages: Messages,
    store: TcpStore,
}

fn store() -> TcpStore {
    TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap()
}

/// Creates one of `count` processes with one rank each.
fn one_of(count: usize, store: &TcpStore, mine: usize, timeout: Duration) -> Process {
    let process_map =
        ProcessMap { processes: (0..count).map(|rank| rank..rank + 1).collect(), mine };
    let (run, members) = (Arc::new(RunContext::new(count, timeout, None)), (0..count).collect());
    let members: Arc<[usize]> = members;
    let shared = Shared::new(run.clone(), Arc::clone(&members), process_map.here());
    let listener = MessageListener::open(store, mine, None).unwrap();
    let messages =
        Messages::new(run.clone(), store.clone(), members, process_map, listener, &shared.mail);
    Process { run, shared, messages, store: store.clone() }
}

/// What a process left in the store, and the address in it.
fn endpoint(store: &TcpStore, process: usize) -> (String, SocketAddr) {
    let left = store.get(&key(process), TIMEOUT).unwrap().unwrap();
    let left = String::from_utf8(left).unwrap();
    let address = left.split_once(' ').unwrap().0.parse().unwrap();
    (left, address)
}

/// A process that this test plays.
struct Played {
    listener: MessageListener,
    number: usize,
}

impl Played {
    fn new(store: &TcpStore, number: usize) -> Self {
        let listener = MessageListener::open(store, number, None).unwrap();
        listener.listener.set_nonblocking(false).unwrap();
        Self { listener, number }
    }

    /// Connects to `process`.
    fn connect(&self, process: &Process) -> TcpStream {
        let (to, address) = endpoint(&process.store, process.mine());
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&Frame::Hello { to, process: self.number }.to_bytes()).unwrap();
        stream
    }

    /// Accepts a connection, which begins with a greeting.
    fn accept(&self) -> TcpStream {
        let mut reader = self.listener.listener.accept().unwrap().0;
        let Frame::Hello { to, .. } = Frame::read(&mut reader).unwrap() else {
            panic!("no greeting")
        };
        assert_eq!(to, self.listener.endpoint);
        reader
    }
}

/// Waits for the end of one side of a message that this thread has posted.
fn outcome(posted: &Completion) -> MessageEnd {
    loop {
        match posted.outcome() {
            Some(outcome) => return outcome.clone(),
            None => std::thread::park(), // completion unparks this thread
        }
    }
}

impl Process {
    fn mine(&self) -> usize {
        self.messages.0.processes.mine
    }

    /// Posts a receive of this process's rank.
    fn receive(&self, into: &Tensor, source: Option<usize>, tag: u64) -> Arc<Completion> {
        let (kind, shape) = (into.kind(), into.size());
        let contents = MessageTensor::Here(into.shallow_clone());
        let request =
            P2pRequest { is_send: false, contents, source, tag, kind, shape, device: Device::Cpu };
        self.shared.mail.post(request, self.shared.here.start)
    }

    /// Sends a number from this process to the other one, which receives it.
    fn send_to(&self, other: &Process, number: i64) {
        let (source, destination) = (self.mine(), other.mine());
        let (tensor, into) = (Tensor::from_slice(&[number]), Tensor::from_slice(&[-1i64]));
        let received = other.receive(&into, None, 3);
        other.messages.expect(None).unwrap();
        let sent = self.messages.send(&tensor, source, destination, 3, SEND).unwrap();
        for posted in [&sent, &received] {
            let outcome = outcome(posted);
            assert!(
                matches!(outcome, MessageEnd::From(rank) if rank == source),
                "{outcome:?} {:?} {:?}",
                self.run.failures(),
                other.run.failures()
            );
        }
        assert_eq!(into.int64_value(&[0]), number);
    }
}

fn large() -> Tensor {
    Tensor::zeros([100_000], (Kind::Float, Device::Cpu))
}

/// The receiver never asks for the bytes: the rank that sent them ends all the same, and so does the thread.
#[test]
fn rank_with_an_unsent_message_ends() {
    let fail = |process: &Process, _: Played| process.run.report(1, None, "the cause".into());
    let nothing = |_: &Process, played: Played| std::mem::forget(played);
    let leave = |_: &Process, played: Played| drop(played);
    type Cause = fn(&Process, Played);
    let causes: [(_, _, Cause); 3] = [
        (TIMEOUT, "the cause", fail),
        (Duration::from_millis(10), "rank 1 waited 10ms in send #0", nothing),
        (TIMEOUT, "the connection to rank 0", leave),
    ];
    for (timeout, expected, cause) in causes {
        let store = store();
        let (played, mine) = (Played::new(&store, 0), one_of(2, &store, 1, timeout));
        let sent = mine.messages.send(&large(), 1, 0, 0, SEND).unwrap();
        let mut reader = played.accept();
        assert!(matches!(Frame::read(&mut reader).unwrap(), Frame::Offer(_)));
        cause(&mine, played);
        if expected.contains("connection") {
            drop(reader);
        }
        let connections = Arc::downgrade(&mine.messages.0);
        let Process { run, shared, messages, .. } = mine;
        drop((messages, shared, sent));
        let (run, (has_ended, ended)) = (run.clone(), bounded(1));
        std::thread::spawn(move || {
            run.start(1);
            run.wait_until_idle(1);
            let failures = run.failures();
            has_ended.send(failures[0].error.clone()).unwrap();
        });
        let told = ended.recv_timeout(TIMEOUT).expect("the rank cannot end");
        assert!(told.contains(expected), "{told:?}");
        while connections.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn panic_of_a_thread_fails_the_run() {
    let mine = one_of(2, &store(), 1, TIMEOUT);
    mine.messages.0.thread(|_| panic!("as expected")).unwrap();
    let tripped = mine.run.cancel.tripped().recv_timeout(TIMEOUT);
    assert!(!matches!(tripped, Err(RecvTimeoutError::Timeout)));
    let failures = mine.run.failures();
    assert!(failures[0].rank == 1 && failures[0].error.contains("as expected"), "{failures:?}");
}

/// What it has said before arrives, but no answer can reach it.
#[test]
fn sender_that_cannot_be_reached_is_lost() {
    let store = store();
    // What has connected may still send something, until then.
    let grace = Duration::from_secs(3);
    let (played, mine) = (Played::new(&store, 0), one_of(2, &store, 1, grace));
    // The port is taken, and nothing listens there.
    let taken = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    net::bind(&taken, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddr::try_from(net::getsockname(&taken).unwrap()).unwrap();
    store.set(&key(0), format!("{address} 0").as_bytes()).unwrap();
    let posted = mine.receive(&large(), Some(0), 5);
    let mut stream = played.connect(&mine);
    mine.messages.expect(Some(0)).unwrap();
    let (kind, shape) = ("float32".into(), vec![100_000]);
    let offer = Offer { id: 0, source: 0, destination: 1, tag: 5, kind, shape };
    stream.write_all(&Frame::Offer(offer).to_bytes()).unwrap();
    let outcome = outcome(&posted);
    let MessageEnd::Lost { reason, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason, format!("{address}: Connection refused (os error 111)"));
}

/// Whatever a side of a message is lost by, its rank stops waiting.
#[test]
fn dropped_side_ends_as_lost() {
    let completion = Completion::new();
    let (it, others) = (completion.clone(), vec![7]);
    drop(Side { tensor: None, source: 0, rank: 0, pending: None, completion: it, others });
    assert!(matches!(completion.outcome(), Some(MessageEnd::Lost { .. })));
}

/// Many that connect and say nothing do not keep a process of the run out.
#[test]
fn strangers_that_say_nothing_are_few() {
    let store = store();
    let [one, other] = [0, 1].map(|mine| one_of(2, &store, mine, TIMEOUT));
    let (_, address) = endpoint(&store, 1);
    other.messages.expect(None).unwrap();
    let silent: Vec<_> =
        (0..3 * MAX_STRANGERS).map(|_| TcpStream::connect(address).unwrap()).collect();
    let (oldest, newest) = silent.split_at(2 * MAX_STRANGERS);
    for mut stranger in oldest {
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
    }
    one.send_to(&other, 5);
    newest[1].set_nonblocking(true).unwrap();
    let waits = (&newest[1]).read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(waits, Err(std::io::ErrorKind::WouldBlock));
}

/// Nobody waits for a connection to a process that does not answer.
#[test]
fn process_that_does_not_answer_holds_up_no_other() {
    let store = store();
    let [one, other] = [0, 1].map(|mine| one_of(3, &store, mine, TIMEOUT));
    store.set(&key(2), b"192.0.2.1:9 0").unwrap(); // an address that no machine has
    one.messages.expect(Some(2)).unwrap();
    one.send_to(&other, 5);
    other.send_to(&one, 6);
    assert!(one.run.failures().is_empty());
}

#[test]
fn process_whose_messages_have_ended_is_not_read() {
    let store = store();
    let (played, mine) = (Played::new(&store, 0), one_of(2, &store, 1, TIMEOUT));
    mine.messages.expect(None).unwrap();
    mine.messages.0.end("over");
    assert!(matches!(played.connect(&mine).read(&mut [0]), Ok(0) | Err(_)));
}

/// The error names the rank of the process that began to send, and not a rank that is busy elsewhere.
#[test]
fn lost_receive_from_any_source_blames_the_sender() {
    let store = store();
    let (played, mine) = (Played::new(&store, 2), one_of(3, &store, 1, TIMEOUT));
    mine.run.activity[2].enter(Operation::Send, 0);
    mine.messages.expect(None).unwrap();
    let posted = mine.receive(&large(), None, 5);
    let mut stream = played.connect(&mine);
    let (kind, shape) = ("float32".into(), vec![100_000]);
    let offer = Offer { id: 0, source: 2, destination: 1, tag: 5, kind, shape };
    stream.write_all(&Frame::Offer(offer).to_bytes()).unwrap();
    assert_eq!(Frame::read(&mut played.accept()).unwrap(), Frame::Ready(0));
    // In the middle of the tensor.
    stream.write_all(&[&Frame::Data(0).to_bytes()[..], &[0; 1000]].concat()).unwrap();
    drop(stream);
    let outcome = outcome(&posted);
    let MessageEnd::Lost { ranks, reason } = outcome else { panic!("{outcome:?}") };
    let at = OpId { operation: Operation::Recv, sequence: 0 };
    let error = lost::connection_lost(&mine.run, at, 1, ranks, reason);
    let Error::ConnectionLost { lost, .. } = &error else { panic!("{error}") };
    assert_eq!(lost.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [2], "{error}");
}

/// A peer without a valid greeting is disconnected, whatever it sends.
#[test]
fn connections_without_a_valid_greeting_are_closed() {
    let store = store();
    let [one, other] = [0, 1].map(|mine| one_of(2, &store, mine, TIMEOUT));
    let (to, address) = endpoint(&store, 1);
    let hello = |to: &str, process| Frame::Hello { to: to.into(), process }.to_bytes();
    other.messages.expect(None).unwrap();
    for said in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        vec![0; 64],
        hello(&format!("{address} 1"), 0),
        hello(&to, 1),
        hello(&to, usize::MAX),
        Frame::Taken(0).to_bytes(),
    ] {
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&said).unwrap();
        // The connection ends, with a reset if not all was read.
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)), "{said:?}");
    }
    one.send_to(&other, 5);
    other.send_to(&one, 6);
    assert!(one.run.failures().is_empty() && other.run.failures().is_empty());
}

/// A peer that has the token but breaks the protocol ends the connection, and every wait for it.
#[test]
fn protocol_violation_ends_pending_operations() {
    let offer = |source, destination, shape: &[i64]| {
        let (kind, shape) = ("int64".into(), shape.into());
        Frame::Offer(Offer { id: 0, source, destination, tag: 0, kind, shape })
    };
    for said in [
        Frame::Data(7),
        Frame::Ready(7),
        Frame::Taken(7),
        Frame::Taken(0), // whose bytes are not written
        Frame::Hello { to: String::new(), process: 0 },
        offer(0, 0, &[1]),
        offer(1, 1, &[1]),
        offer(0, 1, &[i64::MAX, 2]),
    ] {
        let store = store();
        let (played, mine) = (Played::new(&store, 0), one_of(2, &store, 1, TIMEOUT));
        let posted = mine.receive(&Tensor::from_slice(&[0i64]), Some(0), 0);
        mine.messages.expect(Some(0)).unwrap();
        let sent = mine.messages.send(&large(), 1, 0, 0, SEND).unwrap();
        played.connect(&mine).write_all(&said.to_bytes()).unwrap();
        for posted in [posted, sent] {
            let outcome = outcome(&posted);
            let MessageEnd::Lost { reason, .. } = outcome else { panic!("{said:?}: {outcome:?}") };
            assert!(reason.contains("another program uses the connection"), "{said:?}: {reason}");
        }
    }
}

#[test]
fn address_is_that_of_the_given_interface() {
    assert!(address_of("lo,eth0").unwrap().is_loopback());
    let error = address_of("none-such").unwrap_err().to_string();
    assert!(error.contains("none-such (GLOO_SOCKET_IFNAME)"), "{error}");
}
