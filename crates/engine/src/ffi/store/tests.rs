//! Tests of `store` on loopback, also with servers that are not a store.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, bounded};

use super::TcpStore;
use crate::error::{Error, Result};

/// A timeout that no test reaches.
pub(in crate::ffi) const TIMEOUT: Duration = Duration::from_secs(60);

pub(in crate::ffi) fn serve() -> TcpStore {
    TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap()
}

pub(in crate::ffi) fn connect(port: u16) -> TcpStore {
    TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap()
}

pub(in crate::ffi) fn reason<T>(result: Result<T>) -> String {
    result.err().expect("it fails").to_string()
}

#[test]
fn store_values_and_counters_are_shared_by_connections() {
    let server = serve();
    let client = connect(server.port());
    let value: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    client.set("a", &value).unwrap();
    assert_eq!(server.get("a", TIMEOUT).unwrap(), Some(value));
    client.set("empty", b"").unwrap();
    assert_eq!(client.get("empty", TIMEOUT).unwrap(), Some(vec![]));
    assert_eq!(server.add("n", 2).unwrap(), 2);
    assert_eq!(client.add("n", -5).unwrap(), -3);
    let under = client.under("run").under("0");
    assert!(!under.check("a").unwrap());
    assert_eq!(under.set_new("a", b"first").unwrap(), b"first");
    assert_eq!(under.set_new("a", b"second").unwrap(), b"first");
    assert_eq!(server.get("run/0/a", TIMEOUT).unwrap(), Some(b"first".to_vec()));
    assert!(client.wait(&["a".into(), "n".into()], Duration::ZERO).unwrap());
    assert!(!client.wait(&["a".into(), "b".into()], Duration::ZERO).unwrap());
    assert!(!client.wait(&["b".into()], Duration::from_millis(1)).unwrap());
    assert_eq!(client.get("b", Duration::ZERO).unwrap(), None);
}

#[test]
fn add_to_a_non_number_is_an_error() {
    let server = serve();
    let client = connect(server.port());
    client.set("n", b"one").unwrap();
    let failed = reason(client.add("n", 1));
    assert!(failed.contains("add \"n\""), "{failed}");
    assert_eq!(server.get("n", TIMEOUT).unwrap(), Some(b"one".to_vec()));
}

#[test]
fn wait_returns_when_the_keys_are_set() {
    let server = serve();
    let waiting = server.another_connection().unwrap();
    let waits = thread::scope(|scope| {
        let thread = scope.spawn(|| waiting.wait(&["x".into(), "y".into()], TIMEOUT));
        server.set("x", b"1").unwrap();
        server.set("y", b"2").unwrap();
        thread.join().unwrap()
    });
    assert!(waits.unwrap());
}

/// The client that waits for these keys also sets them, after all its waits have begun.
#[test]
fn requests_do_not_queue_behind_a_waiting_request() {
    let server = serve();
    let client = connect(server.port());
    thread::scope(|scope| {
        for round in 0..10 {
            let keys = [0, 1, 2].map(|number| format!("{round}/{number}"));
            let (begun_tx, begun_rx) = bounded(0);
            let get = |key: &String| {
                let (client, begun_tx, key) = (client.clone(), begun_tx.clone(), key.clone());
                scope.spawn(move || {
                    begun_tx.send(()).unwrap();
                    client.get(&key, TIMEOUT)
                })
            };
            let threads = keys.each_ref().map(get);
            keys.iter().for_each(|_| begun_rx.recv().unwrap());
            // The last one first: a wait does not delay the end of another.
            for (key, thread) in keys.iter().zip(threads).rev() {
                client.add("n", 1).unwrap();
                client.set(key, b"set").unwrap();
                assert_eq!(thread.join().unwrap().unwrap(), Some(b"set".to_vec()));
            }
        }
    });
    assert_eq!(server.add("n", 0).unwrap(), 30);
}

#[test]
fn wait_returns_when_the_run_is_cancelled() {
    let server = serve();
    let (running_tx, cancelled_rx) = bounded::<Infallible>(0);
    let client = server.reconnect(cancelled_rx).unwrap();
    let failed = thread::scope(|scope| {
        let thread = scope.spawn(|| client.get("never", TIMEOUT));
        server.set("so that it is asked for meanwhile", b"").unwrap();
        drop(running_tx);
        reason(thread.join().unwrap())
    });
    assert!(failed.contains("get \"never\" failed: cancelled"), "{failed}");
}

#[test]
fn store_listens_only_at_the_given_address() {
    let server = TcpStore::serve("127.0.0.2", 0, TIMEOUT).unwrap();
    assert!(TcpStream::connect(("127.0.0.1", server.port())).is_err());
    let failed = reason(TcpStore::serve("127.0.0.2", server.port(), TIMEOUT));
    assert!(failed.contains("the port is in use"), "{failed}");
    let failed = reason(TcpStore::serve("0.0.0.0", 0, TIMEOUT));
    assert!(failed.contains("stands for all interfaces"), "{failed}");
    let failed = reason(TcpStore::serve("192.0.2.1", 1, TIMEOUT));
    assert!(failed.contains("192.0.2.1:1: listening failed: that is not an address"), "{failed}");
}

/// `localhost` may resolve to ::1 first, where nothing listens.
#[test]
fn connect_tries_every_address_of_a_name() {
    let server = serve();
    let client = TcpStore::connect("localhost", server.port(), TIMEOUT).unwrap();
    assert_eq!(client.add("n", 1).unwrap(), 1);
    assert!(client.local_address().is_loopback());
}

#[test]
fn connect_waits_for_a_store_that_starts_later() {
    // The port is already used at another address, so no other process gets it.
    let other = serve();
    let port = other.port();
    let (client, _server) = thread::scope(|scope| {
        let connect = || TcpStore::connect("127.0.0.2", port, TIMEOUT);
        let thread = scope.spawn(connect);
        let server = TcpStore::serve("127.0.0.2", port, TIMEOUT).unwrap();
        (thread.join().unwrap().unwrap(), server)
    });
    assert_eq!(client.add("n", 1).unwrap(), 1);
}

#[test]
fn connect_without_a_store_is_an_error() {
    // The port of a store at another address.
    let other = serve();
    let port = other.port();
    let limit = Duration::from_millis(50);
    let failed = reason(TcpStore::connect("127.0.0.2", port, limit));
    assert!(failed.contains(&format!("127.0.0.2:{port}: connecting failed")), "{failed}");
    assert!(failed.contains("refused"), "{failed}");
    let (running_tx, cancelled_rx) = bounded::<Infallible>(0);
    drop(running_tx);
    let lost = connect(serve().port());
    let failed = reason(lost.reconnect(cancelled_rx));
    assert!(failed.contains("cancelled"), "{failed}");
}

#[test]
fn keys_and_values_have_a_maximum_size() {
    let server = serve();
    let long = "k".repeat(8 << 10);
    assert!(matches!(server.set(&long, b""), Err(Error::Input { .. })));
    assert!(matches!(server.set("k", &vec![0; (8 << 20) + 1]), Err(Error::Input { .. })));
    server.set(&long[1..], &vec![7; 8 << 20]).unwrap();
    assert_eq!(server.get(&long[1..], TIMEOUT).unwrap().map(|v| v.len()), Some(8 << 20));
    assert!(reason(server.set("a\0b", b"")).contains("NUL"));
}

#[test]
fn request_after_the_store_is_gone_is_an_error() {
    let server = serve();
    let client = connect(server.port());
    drop(server);
    let failed = reason(client.add("n", 1));
    assert!(failed.contains("add \"n\" failed"), "{failed}");
}

/// Starts a proxy to the real server, and returns its port. For each message in `turn_rx` it answers a request with `evil`
/// instead.
fn hostile(port: u16, evil: Vec<u8>, turn_rx: Receiver<()>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().port();
    thread::Builder::new()
        .spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
                let (mut to, mut from) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let (evil, turn_rx) = (evil.clone(), turn_rx.clone());
                let forth = move || {
                    let mut bytes = [0; 4096];
                    while let Ok(len @ 1..) = from.read(&mut bytes) {
                        if turn_rx.try_recv().is_ok() {
                            let _ = from.write_all(&evil);
                            let _ = from.shutdown(Shutdown::Both);
                            return;
                        }
                        to.write_all(&bytes[..len]).unwrap();
                    }
                    let _ = to.shutdown(Shutdown::Both);
                };
                thread::Builder::new().spawn(forth).unwrap();
                let back = move || drop(std::io::copy(&mut &server, &mut client));
                thread::Builder::new().spawn(back).unwrap();
            }
        })
        .unwrap();
    here
}

#[test]
fn invalid_answers_of_a_server_are_errors() {
    let server = serve();
    let lengths = [u64::MAX, 1 << 62, 1 << 46].map(|len| len.to_le_bytes().to_vec());
    for evil in lengths.into_iter().chain([vec![], vec![0xab; 3], vec![0xff; 4096]]) {
        let (turn_tx, turn_rx) = bounded(1);
        let client = connect(hostile(server.port(), evil.clone(), turn_rx));
        assert_eq!(client.set_new("k", b"v").unwrap(), b"v");
        turn_tx.send(()).unwrap();
        let failed = reason(client.set_new("k", b"v"));
        assert!(failed.contains("compare_set \"k\" failed"), "{failed}");
    }
}

/// Tests garbage in place of a greeting, and silence.
#[test]
fn connect_to_another_service_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let greeting = thread::Builder::new().spawn(move || {
        for (client, greets) in listener.incoming().zip([false, true, true, true, true, true]) {
            let mut client = client.unwrap();
            if greets {
                let _ = client.write_all(b"SSH-2.0-OpenSSH_9.6\r\n");
            }
        }
    });
    let limit = Duration::from_secs(2);
    let failed = reason(TcpStore::connect("127.0.0.1", port, limit));
    assert!(failed.contains("connecting failed"), "{failed}");
    drop(greeting);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let failed = reason(TcpStore::connect("127.0.0.1", port, limit));
    assert!(failed.contains("connecting failed"), "{failed}");
}
