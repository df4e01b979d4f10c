//! Connections with processes that follow the protocol, and with programs that do not.

#![allow(clippy::disallowed_methods)] // threads that wait for one rank are no ranks

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::bounded;
use tch::{Device, Kind, Tensor};

use super::super::lost;
use super::super::process_map::ProcessMap;
use super::frame::{Frame, Offer};
use super::link::{Adoption, Link};
use super::open::{MAX_STRANGERS, MessageListener, UntilDeadline, address_of, admit, greeted, key};
use super::{Connections, Messages};
use crate::error::Error;
use crate::ffi::TcpStore;
use crate::operation::{OpId, Operation};
use crate::process_group::local::{Completion, MessageEnd, MessageTensor, P2pRequest, Shared};
use crate::runtime::{Deadline, RunContext};

const TIMEOUT: Duration = Duration::from_secs(60);

/// One of two processes with one rank each.
struct Process {
    run: Arc<RunContext>,
    shared: Shared,
    messages: Messages,
}

fn process(store: &TcpStore, mine: usize) -> Process {
    one_of(2, store, mine, TIMEOUT)
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
    Process { run, shared, messages }
}

fn address(store: &TcpStore, process: usize) -> (SocketAddr, u64) {
    let left = store.get(&key(process), TIMEOUT).unwrap().unwrap();
    let left = String::from_utf8(left).unwrap();
    let (address, token) = left.split_once(' ').unwrap();
    (address.parse().unwrap(), token.parse().unwrap())
}

const SEND: OpId = OpId { operation: Operation::Send, sequence: 0 };

impl Process {
    /// Posts a receive of this process's rank.
    fn receive(&self, into: &Tensor, source: Option<usize>, tag: u64) -> Arc<Completion> {
        let (kind, shape) = (into.kind(), into.size());
        let contents = MessageTensor::Here(into.shallow_clone());
        let request =
            P2pRequest { is_send: false, contents, source, tag, kind, shape, device: Device::Cpu };
        self.shared.mail.post(request, self.shared.here.start)
    }

    /// Connects to this process as process `number` of the store.
    fn connect_as(&self, number: usize, store: &TcpStore) -> TcpStream {
        let (address, token) = address(store, self.messages.0.context.process_map.mine);
        let mut stream = TcpStream::connect(address).unwrap();
        Frame::Hello { token, process: number }.write(&mut stream).unwrap();
        stream
    }

    /// Sends from rank 1, which is this process's, to rank 0, and ends the rank. Returns the failures.
    fn end_with_a_message(self, cut: impl FnOnce(&Self)) -> Vec<String> {
        let tensor = Tensor::from_slice(&[7i64]);
        let sent = self.messages.send(&tensor, 1, 0, 0, SEND).unwrap();
        cut(&self);
        let (run, (has_ended, ended)) = (self.run.clone(), bounded(1));
        std::thread::spawn(move || {
            run.start(1);
            run.wait_until_idle(1);
            has_ended.send(()).unwrap();
        });
        ended.recv_timeout(TIMEOUT).expect("the rank cannot end");
        drop(sent);
        self.run.failures().iter().map(|failure| failure.error.clone()).collect()
    }

    /// Sends a number from this process to the other one, which receives it.
    fn send_to(&self, other: &Process, number: i64) {
        let (source, destination) = (self.shared.here.start, other.shared.here.start);
        let (tensor, into) = (Tensor::from_slice(&[number]), Tensor::from_slice(&[-1i64]));
        let received = other.receive(&into, None, 3);
        other.messages.expect(None).unwrap();
        let sent = self.messages.send(&tensor, source, destination, 3, SEND).unwrap();
        for posted in [&sent, &received] {
            while !posted.is_completed() {
                std::thread::park(); // completion unparks this thread
            }
            assert!(matches!(posted.outcome(), Some(MessageEnd::From(rank)) if *rank == source));
        }
        assert_eq!(into.int64_value(&[0]), number);
    }
}

/// The peer promises a connection and opens none, or no thread serves the connection any more.
#[test]
fn send_ends_when_no_thread_serves_its_connection() {
    let fail = |process: &Process| process.run.report(1, None, "the cause".into());
    let panic =
        |process: &Process| process.messages.0.context.thread(|_| panic!("the cause")).unwrap();
    let nothing = |_: &Process| {};
    let causes: [(_, _, fn(&Process)); 3] = [
        (TIMEOUT, "the cause", fail),
        (TIMEOUT, "the cause", panic),
        (Duration::from_millis(10), "rank 1 waited 10ms in send #0", nothing),
    ];
    for (timeout, expected, cause) in causes {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let listener = MessageListener::open(&store, 0, None).unwrap();
        let told = one_of(2, &store, 1, timeout).end_with_a_message(|mine| {
            let (mut stream, _) = listener.listener.accept().unwrap();
            let hello = Frame::read(&mut stream).unwrap();
            assert!(matches!(hello, Some(Frame::Hello { process: 1, .. })), "{hello:?}");
            Frame::Busy.write(&mut stream).unwrap();
            assert_eq!(Frame::read(&mut stream).unwrap(), None);
            cause(mine);
        });
        assert!(told[0].contains(expected), "{told:?}");

        let mine = one_of(2, &store, 1, timeout);
        let other = TcpStream::connect(listener.listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.listener.accept().unwrap();
        let adopted = mine.messages.0.links[0].adopt(&Arc::new(stream), false);
        assert_eq!(adopted, Adoption::Chosen);
        let told = mine.end_with_a_message(cause);
        assert!(told[0].contains(expected), "{told:?}");
        drop(other);
    }
}

/// Until the thread that writes has finished with a tensor, its rank must not change it: not if the connection ends, and
/// not if the peer answers too early.
#[test]
fn send_completes_only_when_its_tensor_is_not_being_written() {
    for arrives in [true, false] {
        let end =
            |link: &Link| if arrives { link.taken(0).unwrap() } else { link.close("the cause") };
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let mine = process(&store, 1);
        let link = &mine.messages.0.links[0];
        let _ = link.begin_to_connect(); // no thread serves it
        let tensor = Tensor::from_slice(&[7i64]);
        let sent = mine.messages.send(&tensor, 1, 0, 0, SEND).unwrap();
        let writing = link.begin_writing(0).unwrap();
        end(link);
        assert!(!sent.is_completed(), "its tensor is being written");
        drop(writing);
        let outcome = sent.outcome();
        if arrives {
            assert!(matches!(outcome, Some(MessageEnd::From(1))), "{outcome:?}")
        } else {
            assert!(matches!(outcome, Some(MessageEnd::Lost { .. })), "{outcome:?}")
        }
        assert!(link.begin_writing(0).is_none());
        mine.run.report(1, None, "over".into()); // nobody waits for the rest
    }
}

/// Many that connect and say nothing do not keep a process of the run out, nor get a thread each.
#[test]
fn strangers_that_say_nothing_are_few() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let [one, other] = [0, 1].map(|mine| process(&store, mine));
    let (address, _) = address(&store, 1);
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

/// A byte in time does not extend the time for a greeting.
#[test]
fn greeting_has_one_deadline_for_all_its_bytes() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    stranger.write_all(&[0]).unwrap();
    let mut greeting = UntilDeadline { stream: &stream, deadline: Deadline::after(Duration::ZERO) };
    assert_eq!(greeting.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::TimedOut);
}

#[test]
fn thread_that_accepts_ends_without_a_connection() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let mine = process(&store, 1);
    mine.messages.expect(None).unwrap();
    let listener = mine.messages.0.listener.clone();
    let Process { run: _run, shared: _shared, messages } = mine;
    drop(messages);
    // The thread and this test held the listener. Only a connection would have woken the thread otherwise.
    while Arc::strong_count(&listener) > 1 {
        std::thread::yield_now();
    }
}

#[test]
fn closed_link_accepts_no_connection() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let mine = process(&store, 1);
    let Connections { context, links, .. } = &*mine.messages.0;
    // Makes the answer fail.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (token, stream) = (context.token, Arc::new(listener.accept().unwrap().0));
    Frame::Hello { token, process: 0 }.write(&mut other).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let link = greeted(context, links, &stream).unwrap().unwrap();
    assert!(admit(link, &stream).is_err() && links[0].is_closed());
    // The link sends no answer. Otherwise the other process would wait for a connection of this one.
    mine.messages.expect(None).unwrap();
    let mut other = mine.connect_as(0, &store);
    assert_eq!(Frame::read(&mut other).unwrap(), None);
}

/// The error names the rank of the process that began to send, and not a rank that is busy elsewhere.
#[test]
fn lost_receive_from_any_source_blames_the_sender() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
    let mine = one_of(3, &store, 1, TIMEOUT);
    mine.run.activity[2].enter(Operation::Send, 0);
    mine.messages.expect(None).unwrap();
    let posted = mine.receive(&Tensor::zeros([100_000], (Kind::Float, Device::Cpu)), None, 5);
    let mut other = mine.connect_as(2, &store);
    assert_eq!(Frame::read(&mut other).unwrap(), Some(Frame::Welcome));
    let (kind, shape) = ("float32".into(), vec![100_000]);
    let offer = Offer { id: 0, source: 2, destination: 1, tag: 5, kind, shape };
    Frame::Offer(offer).write(&mut other).unwrap();
    assert_eq!(Frame::read(&mut other).unwrap(), Some(Frame::Ready { id: 0 }));
    drop(other);
    while !posted.is_completed() {
        std::thread::park();
    }
    let outcome = posted.outcome().cloned();
    let Some(MessageEnd::Lost { ranks, reason }) = outcome else { panic!("{outcome:?}") };
    let at = OpId { operation: Operation::Recv, sequence: 0 };
    let error = lost::connection_lost(&mine.run, at, 1, ranks, reason);
    let Error::ConnectionLost { lost, .. } = &error else { panic!("{error}") };
    assert_eq!(lost.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [2], "{error}");
}

/// A peer without a valid greeting is disconnected, whatever it sends.
#[test]
fn connections_without_a_valid_greeting_are_closed() {
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
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
        Frame::Data { id: 7 },
        Frame::Ready { id: 7 },
        Frame::Taken { id: 7 },
        Frame::Refused { id: 7, expected: "\x1b[2J".into() },
        Frame::Welcome,
        offer(0, 0, &[1]),
        offer(1, 1, &[1]),
        offer(0, 1, &[i64::MAX, 2]),
    ] {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let mine = process(&store, 1);
        mine.messages.expect(None).unwrap();
        let mut other = mine.connect_as(0, &store);
        assert_eq!(Frame::read(&mut other).unwrap(), Some(Frame::Welcome));
        let posted = mine.receive(&Tensor::from_slice(&[0i64]), Some(0), 0);
        mine.messages.expect(Some(0)).unwrap();
        said.write(&mut other).unwrap();
        while !posted.is_completed() {
            std::thread::park();
        }
        let outcome = posted.outcome();
        let Some(MessageEnd::Lost { reason, .. }) = outcome else {
            panic!("{said:?}: {outcome:?}")
        };
        assert!(reason.contains("another program uses the connection"), "{said:?}: {reason}");
    }
}

#[test]
fn address_is_that_of_the_given_interface() {
    assert!(address_of("lo,eth0").unwrap().is_loopback());
    let error = address_of("none-such").unwrap_err().to_string();
    assert!(error.contains("none-such (GLOO_SOCKET_IFNAME)"), "{error}");
}
