//! Tests of a process that loses its connection to the store, or whose store exits.

#![allow(clippy::disallowed_methods)] // threads that forward bytes are not ranks, and may hang

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;

use super::*;
use crate::runtime::RankStatus;

/// Longer than any test takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A timeout that no test reaches.
const LONG: Duration = Duration::from_secs(24 * 60 * 60);

/// Process 2 of three, with its connection to the store, which process 0 serves.
struct Scene {
    server: TcpStore,
    cut: Arc<AtomicBool>,
    monitor: HeartbeatMonitor,
    run: Arc<RunContext>,
}

fn scene() -> Scene {
    let server = TcpStore::serve("127.0.0.1", 0, LIMIT).unwrap();
    let (port, cut) = cable(server.port());
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    let serves = Server { rank: Some(0), name: "the server".into() };
    let map = ProcessMap { processes: vec![0..2, 2..3, 3..4], mine: 2 };
    let monitor = HeartbeatMonitor::new(&store, serves, &map).unwrap();
    let doing = || RankStatus { at: all_reduce(), seen: Vec::new() };
    let beat = Heartbeat {
        sent: Duration::ZERO,
        suspended: Duration::ZERO,
        ranks: vec![doing(), doing()],
    };
    server.set("alive/0", &to_json("alive/0", &beat).unwrap()).unwrap();
    Scene { server, cut, monitor, run: Arc::new(RunContext::new(4, LONG, None)) }
}

fn all_reduce() -> OpId {
    OpId { operation: Operation::AllReduce, sequence: 7 }
}

/// Forwards a local port to `port`, for the four connections that a scene opens. Each direction checks the flag
/// before it forwards bytes. Once the flag is set, bytes are dropped without an error.
fn cable(port: u16) -> (u16, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let listening_port = listener.local_addr().unwrap().port();
    let cut = Arc::new(AtomicBool::new(false));
    let is_cut = cut.clone();
    thread::spawn(move || {
        for from in listener.incoming().take(4) {
            let (from, to) = (from.unwrap(), TcpStream::connect(("127.0.0.1", port)).unwrap());
            let ends = (from.try_clone().unwrap(), to.try_clone().unwrap());
            for (mut from, mut to) in [(from, to), (ends.1, ends.0)] {
                let is_cut = is_cut.clone();
                thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if !is_cut.load(Ordering::SeqCst) && to.write_all(&bytes[..count]).is_err()
                        {
                            return;
                        }
                    }
                    if !is_cut.load(Ordering::SeqCst) {
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    }
                });
            }
        }
    });
    (listening_port, cut)
}

/// Returns the result of `work`; fails if it hangs.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (result_tx, result_rx) = bounded(1);
    thread::spawn(move || result_tx.send(work()));
    result_rx.recv_timeout(LIMIT).expect("it ends")
}

#[test]
fn refresh_without_the_store_names_the_ranks_of_its_process() {
    let Scene { server: _server, cut, monitor, run } = scene();
    let store = monitor.heartbeats.store.clone();
    monitor.heartbeats.read_store(&store, &run, 0).unwrap();
    cut.store(true, Ordering::SeqCst);
    let silent = in_time(move || monitor.peer_status().refresh(&run));
    let named: Vec<_> =
        silent.iter().map(|rank| (rank.rank, rank.last_seen, rank.silent)).collect();
    assert_eq!(named, [(0, all_reduce(), true), (1, all_reduce(), true)]);
}

#[test]
fn poll_updates_the_status_even_after_a_failure() {
    let Scene { server: _server, cut, monitor, run } = scene();
    run.report(3, None, "something".into());
    monitor.peer_status().poll(&run);
    assert_eq!(
        (run.activity[1].now(), run.activity[2].now().operation),
        (all_reduce(), Operation::UserCode)
    );
    cut.store(true, Ordering::SeqCst);
    in_time(move || monitor.peer_status().poll(&run));
}

#[test]
fn refresh_of_a_cancelled_run_names_no_rank() {
    let Scene { server: _server, cut, monitor, run } = scene();
    cut.store(true, Ordering::SeqCst);
    run.report(3, None, "something else".into());
    assert!(in_time(move || monitor.peer_status().refresh(&run)).is_empty());
}

#[test]
fn monitor_ends_without_the_store() {
    let Scene { server, cut, monitor, run } = scene();
    monitor.start(&run).unwrap();
    assert!(server.wait(&[alive(2)], LIMIT).unwrap());
    cut.store(true, Ordering::SeqCst);
    let stay = || Stay { patience: LONG, failed: false, asked_to_end: &|| false };
    in_time(move || monitor.leave(Some(stay())));
    assert!(run.failures().is_empty());
}

#[test]
fn lost_store_is_a_failure_of_the_rank_that_served_it() {
    let Scene { server, monitor, run, .. } = scene();
    monitor.start(&run).unwrap();
    let began = Instant::now();
    while run.activity[1].now() != all_reduce() {
        assert!(began.elapsed() < LIMIT, "it does not hear what rank 1 does");
        thread::yield_now();
    }
    drop(server);
    run.cancel.tripped().recv_timeout(LIMIT).unwrap_err();
    let failures = run.failures();
    assert_eq!((failures[0].rank, failures[0].at), (0, all_reduce()));
    assert!(failures[0].error.starts_with("the server is gone: "), "{}", failures[0].error);
    drop(failures);
    monitor.leave(None);
}

/// The other process has timed out first. Its rank shuts down because of that, and must not be taken for a
/// straggler.
#[test]
fn refresh_reports_the_failure_of_another_process() {
    let Scene { server, monitor, run, .. } = scene();
    let failure = Failure::new(1, all_reduce(), "rank 0 waited for rank 1".into());
    publish_failure(&server, &failure).unwrap();
    assert!(monitor.peer_status().refresh(&run).is_empty());
    let failures = run.failures();
    assert_eq!(run.cancel.cancelled_by(), Some(1));
    assert_eq!((failures[0].rank, failures[0].at), (1, all_reduce()));
    assert_eq!(failures[0].error, "rank 0 waited for rank 1");
}

/// Processes that share a host's memory know of a killed one at once, and end before their next heartbeat.
#[test]
fn processes_that_have_ended_are_not_waited_for() {
    let store = TcpStore::serve("127.0.0.1", 0, LIMIT).unwrap();
    let mut waits = OpEntry::new(all_reduce(), Duration::ZERO);
    waits.group = Some(0);
    let ranks = vec![RankStatus { at: all_reduce(), seen: vec![waits] }];
    let beat = Heartbeat { sent: Duration::ZERO, suspended: Duration::ZERO, ranks };
    store.set("alive/0", &to_json("alive/0", &beat).unwrap()).unwrap();
    let mut asked = 0;
    let (text, _) = waited_for(&store, &[0], |_| {
        asked += 1;
        false
    })
    .unwrap()
    .unwrap();
    assert_eq!((&text[..], asked), ("rank 0 waits for it in all_reduce #7", 1));
}
