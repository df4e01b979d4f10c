//! Operations that go on beside the rank.

use std::time::Duration;

use ddp_mp::{ReduceOp, Work};
use tch::{Kind, Tensor};

use super::{Surface, numbers, reduced};
use crate::harness::TIMEOUT;

pub(super) fn async_op(it: &Surface) {
    let sum = it.mine(6, Kind::Float);
    let mut same = sum.shallow_clone();
    let work = it.group.async_op(move |group| {
        group.all_reduce(&mut same, ReduceOp::Sum)?;
        group.all_reduce(&mut same, ReduceOp::Max) // the second in its order
    });
    work.unwrap().wait().unwrap();
    it.is(&sum, &reduced(ReduceOp::Sum, &it.of_all(6)));
}

pub(super) fn wait(it: &Surface) {
    it.all_have_come("wait", || {
        it.group.async_op(|group| group.barrier()).unwrap().wait().unwrap();
    });
}

/// Starts a sum, of which every rank can see that it ends. With nccl a receive waits for its sender at once, so that no
/// rank could start one before a barrier.
fn started(it: &Surface) -> (Tensor, Work) {
    let sum = it.mine(2, Kind::Float);
    let mut same = sum.shallow_clone();
    let work = it.group.async_op(move |group| group.all_reduce(&mut same, ReduceOp::Sum));
    (sum, work.unwrap())
}

pub(super) fn wait_timeout(it: &Surface) {
    if it.is_nccl() {
        let (sum, mut work) = started(it);
        it.equals(work.wait_timeout(TIMEOUT).unwrap(), true);
        work.wait().unwrap();
        return it.is(&sum, &reduced(ReduceOp::Sum, &it.of_all(2)));
    }
    let mut received = it.tensor(&[0.0; 2], Kind::Float);
    let mut work = it.group.irecv(&mut received, Some(it.last()), 7).unwrap();
    // Every rank is before the barrier, and sends after it.
    it.equals(work.wait_timeout(Duration::ZERO).unwrap(), false);
    it.group.barrier().unwrap();
    it.group.send(&it.mine(2, Kind::Float), it.next(), 7).unwrap();
    it.equals(work.wait_timeout(TIMEOUT).unwrap(), true);
    work.wait().unwrap();
    it.is(&received, &numbers(it.last(), 2));
}

pub(super) fn is_completed(it: &Surface) {
    if it.is_nccl() {
        let (sum, work) = started(it);
        while !work.is_completed() {
            std::thread::yield_now();
        }
        work.wait().unwrap();
        return it.is(&sum, &reduced(ReduceOp::Sum, &it.of_all(2)));
    }
    let mut received = it.tensor(&[0.0; 2], Kind::Float);
    let work = it.group.irecv(&mut received, Some(it.last()), 6).unwrap();
    it.equals(work.is_completed(), false); // nobody sends before the barrier
    it.group.barrier().unwrap();
    it.group.send(&it.mine(2, Kind::Float), it.next(), 6).unwrap();
    while !work.is_completed() {
        std::thread::yield_now();
    }
    work.wait().unwrap();
    it.is(&received, &numbers(it.last(), 2));
}
