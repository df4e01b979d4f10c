//! Tests of `gloo` on loopback. Ranks are threads, or processes in tests that kill one.

use std::env;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use crossbeam::channel::Receiver;
use tch::{Device, Kind, Tensor};

use super::{GlooCall, GlooGroup};
use crate::error::{Error, Result};
use crate::ffi::store::TcpStore;
use crate::ffi::store::tests::{TIMEOUT, connect, reason, serve};
use crate::operation::Operation;

/// The numbers of `c10d::ReduceOp::RedOpType`, of which 1 is the average.
const SUM: u8 = 0;
const PRODUCT: u8 = 2;
const MIN: u8 = 3;
const MAX: u8 = 4;
const BAND: u8 = 5;
const BOR: u8 = 6;
const BXOR: u8 = 7;

/// The channel that receives the result of an operation.
type Ended = Receiver<Result<()>>;

/// Waits until a started operation has ended.
fn wait(started: Result<Ended>) -> Result<()> {
    started?.recv().expect("each operation ends once")
}

fn join(store: &TcpStore, rank: usize, size: usize) -> GlooGroup {
    GlooGroup::new(store, rank, size, TIMEOUT, None, absent).unwrap()
}

/// The operations that several tests start.
impl GlooGroup {
    fn all_reduce(&self, tensor: &Tensor, reduce: u8) -> Result<Ended> {
        let call = GlooCall { reduce, outputs: &[tensor], ..GlooCall::default() };
        self.start(Operation::AllReduce, call)
    }

    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Ended> {
        let call = GlooCall { peer: root, outputs: &[tensor], ..GlooCall::default() };
        self.start(Operation::Broadcast, call)
    }

    fn all_to_all(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_splits: &[i64],
        input_splits: &[i64],
    ) -> Result<Ended> {
        let (inputs, outputs) = (&[input], &[output]);
        let call = GlooCall { inputs, outputs, input_splits, output_splits, ..GlooCall::default() };
        self.start(Operation::AllToAll, call)
    }

    fn barrier(&self) -> Result<Ended> {
        self.start(Operation::Barrier, GlooCall::default())
    }

    fn send(&self, tensor: &Tensor, destination: usize, tag: u16) -> Result<Ended> {
        let call = GlooCall { peer: destination, tag, inputs: &[tensor], ..GlooCall::default() };
        self.start(Operation::Send, call)
    }

    fn recv(&self, tensor: &Tensor, source: usize, tag: u16) -> Result<Ended> {
        let call = GlooCall { peer: source, tag, outputs: &[tensor], ..GlooCall::default() };
        self.start(Operation::Recv, call)
    }
}

fn on_ranks<T: Send>(size: usize, f: impl Fn(GlooGroup) -> T + Sync) -> Vec<T> {
    let server = serve();
    thread::scope(|scope| {
        let rank = |rank| {
            let (f, port) = (&f, server.port());
            scope.spawn(move || {
                let store = connect(port).under("group");
                f(join(&store, rank, size))
            })
        };
        let threads: Vec<_> = (0..size).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn ints(values: &[i64]) -> Tensor {
    Tensor::from_slice(values)
}

#[track_caller]
fn same(tensor: &Tensor, values: &[i64]) {
    let found: Vec<i64> = tensor.to_kind(Kind::Int64).view(-1).try_into().unwrap();
    assert_eq!(found, values);
}

#[test]
fn collectives_return_the_defined_values() {
    for size in 1..=4 {
        on_ranks(size, |gloo| {
            let (rank, n) = (gloo.rank as i64, size as i64);
            let done = |started: Result<Ended>| wait(started).unwrap();
            let all = |f: &dyn Fn(i64) -> i64| (0..n).map(f).collect::<Vec<_>>();
            let fold = |f: fn(i64, i64) -> i64| (0..n).map(|r| r + 5).reduce(f).unwrap();
            for (reduce, expected) in [
                (SUM, fold(|a, b| a + b)),
                (PRODUCT, fold(|a, b| a * b)),
                (MIN, fold(i64::min)),
                (MAX, fold(i64::max)),
                (BAND, fold(|a, b| a & b)),
                (BOR, fold(|a, b| a | b)),
                (BXOR, fold(|a, b| a ^ b)),
            ] {
                let tensor = ints(&[rank + 5; 3]);
                done(gloo.all_reduce(&tensor, reduce));
                same(&tensor, &[expected; 3]);
            }
            for root in 0..size {
                let tensor = ints(&[rank, 1]);
                let call = GlooCall { peer: root, outputs: &[&tensor], ..GlooCall::default() };
                done(gloo.start(Operation::Reduce, call));
                if gloo.rank == root {
                    same(&tensor, &[n * (n - 1) / 2, n]);
                }
                let tensor = ints(&[rank]);
                done(gloo.broadcast(&tensor, root));
                same(&tensor, &[root as i64]);
                let parts: Vec<Tensor> = if gloo.rank == root {
                    all(&|_| 0).iter().map(|&x| ints(&[x, x])).collect()
                } else {
                    vec![]
                };
                let lists: Vec<&Tensor> = parts.iter().collect();
                let mine = ints(&[rank, -rank]);
                let call = GlooCall {
                    peer: root,
                    inputs: &[&mine],
                    outputs: &lists,
                    ..GlooCall::default()
                };
                done(gloo.start(Operation::Gather, call));
                parts.iter().zip(0..).for_each(|(part, r)| same(part, &[r, -r]));
                let mine = ints(&[9, 9]);
                let call = GlooCall {
                    peer: root,
                    inputs: &lists,
                    outputs: &[&mine],
                    ..GlooCall::default()
                };
                done(gloo.start(Operation::Scatter, call));
                same(&mine, &[rank, -rank]);
            }
            let parts: Vec<Tensor> = (0..n).map(|_| ints(&[0])).collect();
            let mine = ints(&[10 * rank]);
            let outputs: Vec<&Tensor> = parts.iter().collect();
            let call = GlooCall { inputs: &[&mine], outputs: &outputs, ..GlooCall::default() };
            done(gloo.start(Operation::AllGather, call));
            parts.iter().zip(0..).for_each(|(part, r)| same(part, &[10 * r]));
            let mine = ints(&[0, 0]);
            let input = Tensor::arange(2 * n, (Kind::Int64, Device::Cpu));
            let call = GlooCall { inputs: &[&input], outputs: &[&mine], ..GlooCall::default() };
            done(gloo.start(Operation::ReduceScatter, call));
            same(&mine, &[n * 2 * rank, n * (2 * rank + 1)]);
            let output = ints(&all(&|_| 0));
            done(gloo.all_to_all(&output, &ints(&all(&|to| 10 * rank + to)), &[], &[]));
            same(&output, &all(&|from| 10 * from + rank));
            // Rank r sends r rows to rank 0, and none to the others.
            let to_first = |r: i64| all(&|to| if to == 0 { r } else { 0 });
            let rows = if rank == 0 { n * (n - 1) / 2 } else { 0 };
            let output = Tensor::zeros([rows, 2], (Kind::Int64, Device::Cpu));
            let input = Tensor::full([rank, 2], rank, (Kind::Int64, Device::Cpu));
            let from = if rank == 0 { all(&|from| from) } else { all(&|_| 0) };
            done(gloo.all_to_all(&output, &input, &from, &to_first(rank)));
            if rank == 0 {
                let expected: Vec<i64> = (0..n).flat_map(|r| vec![r; 2 * r as usize]).collect();
                same(&output, &expected);
            }
            // Sends round the ring with two tags at once, received in the opposite order.
            if size > 1 {
                let (next, last) = ((gloo.rank + 1) % size, (gloo.rank + size - 1) % size);
                let (first, second) = (ints(&[rank]), ints(&[rank + 100]));
                let sends = [gloo.send(&first, next, 1), gloo.send(&second, next, 2)];
                let (first, second) = (ints(&[0]), ints(&[0]));
                done(gloo.recv(&second, last, 2));
                done(gloo.recv(&first, last, 1));
                sends.into_iter().for_each(done);
                same(&first, &[last as i64]);
                same(&second, &[last as i64 + 100]);
            }
            done(gloo.barrier());
        });
    }
}

#[test]
fn all_reduce_fails_after_a_rank_is_gone() {
    let failures = on_ranks(3, |gloo| {
        if gloo.rank == 1 {
            return None;
        }
        let tensor = ints(&[1; 1000]);
        Some(reason(wait(gloo.all_reduce(&tensor, SUM))))
    });
    for failed in failures.into_iter().flatten() {
        assert!(failed.contains("gloo failed in all_reduce: "), "{failed}");
    }
}

#[test]
fn abort_fails_pending_operations_on_every_rank() {
    let both = Barrier::new(2);
    on_ranks(2, |gloo| {
        let other = 1 - gloo.rank;
        let (received, reduced) = (ints(&[0]), ints(&[0]));
        // Neither rank sends, and only rank 0 reduces, so all operations wait.
        let mut pending = vec![gloo.recv(&received, other, 0).unwrap()];
        if gloo.rank == 0 {
            pending.push(gloo.all_reduce(&reduced, SUM).unwrap());
        }
        both.wait();
        if gloo.rank == 1 {
            gloo.abort().unwrap();
        }
        for ended in pending {
            assert!(reason(wait(Ok(ended))).contains("gloo failed"));
        }
        assert!(gloo.recv(&received, other, 0).is_err());
    });
}

#[test]
fn drop_ends_pending_operations() {
    let both = Barrier::new(2);
    on_ranks(2, |gloo| {
        let received = ints(&[0]);
        let ended = gloo.recv(&received, 1 - gloo.rank, 0).unwrap();
        both.wait();
        drop(gloo);
        assert!(wait(Ok(ended)).is_err());
    });
}

fn absent(missing: Vec<usize>) -> Error {
    Error::usage(format!("missing: {missing:?}"))
}

#[test]
fn connect_timeout_names_the_missing_ranks() {
    let server = serve();
    let limit = Duration::from_millis(20);
    let failed = reason(GlooGroup::new(&server.under("group"), 1, 4, limit, None, absent));
    assert_eq!(failed, "missing: [0, 2, 3]");
}

#[test]
fn interface_names_follow_pytorch() {
    let server = serve();
    let gloo = GlooGroup::new(&server.under("a"), 0, 1, TIMEOUT, Some("lo"), absent).unwrap();
    wait(gloo.barrier()).unwrap();
    let failed = reason(GlooGroup::new(&server.under("b"), 0, 1, TIMEOUT, Some("lo,"), absent));
    assert!(failed.contains("GLOO_SOCKET_IFNAME=lo,: there is an empty name"), "{failed}");
    let failed =
        reason(GlooGroup::new(&server.under("c"), 0, 1, TIMEOUT, Some("no_such0"), absent));
    assert!(failed.contains("no_such0"), "{failed}");
}

#[test]
fn invalid_arguments_are_refused() {
    on_ranks(1, |gloo| {
        let strided = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)).tr();
        assert!(reason(gloo.all_reduce(&strided, SUM)).contains("contiguous"));
        assert!(reason(gloo.broadcast(&ints(&[1]), 1)).contains("no rank 1 in a group of 1"));
        let floats = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        let band = gloo.all_reduce(&floats, BAND);
        assert!(reason(wait(band)).contains("BAND"));
        assert!(reason(gloo.all_to_all(&floats, &floats, &[2], &[])).contains("splits"));
    });
}

/// A ring does not add in the order of the ranks, but its order is the same in every run and on every rank.
#[test]
fn float_sums_have_the_same_bits_in_every_run() {
    let run = || {
        let sums = on_ranks(3, |gloo| {
            let index = Tensor::arange(100_000, (Kind::Float, Device::Cpu));
            let tensor = (index + gloo.rank as f64 * 78.233).sin();
            wait(gloo.all_reduce(&tensor, SUM)).unwrap();
            wait(gloo.barrier()).unwrap();
            Vec::<f32>::try_from(&tensor).unwrap()
        });
        let bits = |sum: Vec<f32>| sum.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        sums.into_iter().map(bits).collect::<Vec<_>>()
    };
    let sums = run();
    assert!(sums.iter().all(|sum| *sum == sums[0]));
    assert_eq!(run(), sums);
}

const PORT: &str = "DDP_MP_TEST_STORE_PORT";

/// The second process of the next two tests. Without the variable `PORT` it does nothing.
#[test]
fn peer() {
    let Ok(port) = env::var(PORT) else { return };
    let gloo = join(&connect(port.parse().unwrap()).under("group"), 1, 2);
    let tensor = ints(&[2]);
    wait(gloo.all_reduce(&tensor, SUM)).unwrap();
    same(&tensor, &[3]);
    // Waits until this process is killed, or the other process sends.
    wait(gloo.recv(&tensor, 0, 0)).unwrap();
}

fn start_peer(port: u16) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "ffi::gloo::tests::peer"])
        .env(PORT, port.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn barrier_fails_after_a_process_is_killed() {
    let server = serve();
    let mut peer = start_peer(server.port());
    let gloo = join(&server.under("group"), 0, 2);
    let tensor = ints(&[1]);
    wait(gloo.all_reduce(&tensor, SUM)).unwrap();
    let ended = gloo.barrier().unwrap();
    peer.kill().unwrap();
    let failed = reason(wait(Ok(ended)));
    assert!(failed.contains("gloo failed in barrier: "), "{failed}");
    peer.wait().unwrap();
}

/// The process runs libtorch's destructors at its end: nothing may still be using what they destroy.
#[test]
fn process_exits_cleanly_after_gloo_was_used() {
    let server = serve();
    let mut peer = start_peer(server.port());
    let gloo = join(&server.under("group"), 0, 2);
    let tensor = ints(&[1]);
    wait(gloo.all_reduce(&tensor, SUM)).unwrap();
    wait(gloo.send(&tensor, 1, 0)).unwrap();
    assert!(peer.wait().unwrap().success());
}
