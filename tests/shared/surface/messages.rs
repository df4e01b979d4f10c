//! Messages: round the ring, and from any rank. Objects: of another shape and size on each rank.

use std::collections::BTreeMap;

use ddp_mp::P2POp;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{Surface, numbers};

pub(super) fn send(it: &Surface) {
    let mut received = it.tensor(&[0.0; 4], Kind::Float);
    let mine = it.mine(4, Kind::Float);
    if it.me() == 0 {
        it.group.send(&mine, it.next(), 3).unwrap();
        it.group.recv(&mut received, Some(it.last()), 3).unwrap();
    } else {
        it.group.recv(&mut received, Some(it.last()), 3).unwrap();
        it.group.send(&mine, it.next(), 3).unwrap();
    }
    it.is(&received, &numbers(it.last(), 4));
}

pub(super) fn recv(it: &Surface) {
    if it.me() > 0 {
        return it.group.send(&it.mine(4, Kind::Int64), 0, 8).unwrap();
    }
    if it.group.backend() == "nccl" {
        let refused = it.group.recv(&mut it.tensor(&[0.0], Kind::Float), None, 8).unwrap_err();
        assert!(refused.to_string().contains("from a named rank only"), "{refused}");
    }
    let mut seen = BTreeMap::new();
    for from in 1..it.size() {
        let mut received = it.tensor(&[0.0; 4], Kind::Int64);
        let from = it.is_nccl().then_some(from);
        let source = it.group.recv(&mut received, from, 8).unwrap();
        assert!(seen.insert(source, received).is_none(), "one from each");
    }
    let sources: Vec<usize> = seen.keys().copied().collect();
    it.equals(sources, (1..it.size()).collect());
    seen.iter().for_each(|(source, received)| it.is(received, &numbers(*source, 4)));
}

/// Whether this rank takes the second turn: with nccl a message waits for its other side.
fn is_second(it: &Surface) -> bool {
    it.is_nccl() && !it.me().is_multiple_of(2)
}

pub(super) fn isend(it: &Surface) {
    let mut received = it.tensor(&[0.0; 5], Kind::Float);
    let mut receive = || it.group.recv(&mut received, Some(it.last()), 1).map(drop).unwrap();
    let send = || it.group.isend(&it.mine(5, Kind::Float), it.next(), 1).unwrap();
    if is_second(it) {
        receive();
        send().wait().unwrap();
    } else {
        let work = send();
        receive();
        work.wait().unwrap();
    }
    it.is(&received, &numbers(it.last(), 5));
}

pub(super) fn irecv(it: &Surface) {
    let mut received = it.tensor(&[0.0; 5], Kind::Int);
    let mut receive = || it.group.irecv(&mut received, Some(it.last()), 2).unwrap();
    let send = || it.group.send(&it.mine(5, Kind::Int), it.next(), 2).unwrap();
    if is_second(it) {
        send();
        receive().wait().unwrap();
    } else {
        let work = receive();
        send();
        work.wait().unwrap();
    }
    it.is(&received, &numbers(it.last(), 5));
}

pub(super) fn batch_isend_irecv(it: &Surface) {
    let others = || (0..it.size()).filter(|rank| *rank != it.me());
    let mut received: Vec<Tensor> =
        (0..it.size()).map(|_| it.tensor(&[0.0; 2], Kind::Float)).collect();
    let sends = others().map(|to| P2POp::isend(&(it.mine(2, Kind::Float) * to as f64), to, 5));
    let ops: Vec<P2POp> = sends
        .chain(others().map(|from| P2POp::irecv(&mut received[from], Some(from), 5)))
        .collect();
    for work in it.group.batch_isend_irecv(&ops).unwrap() {
        work.wait().unwrap();
    }
    for from in others() {
        let sent = numbers(from, 2).iter().map(|value| value * it.me() as f64).collect::<Vec<_>>();
        it.is(&received[from], &sent);
    }
}

// Objects: of another shape and size on each rank.

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Object {
    Nothing,
    Named { name: String, values: Vec<f64> },
    Many(BTreeMap<i64, Option<Object>>),
}

fn object(rank: usize) -> Object {
    let named = || {
        let values = vec![f64::INFINITY, -0.0, 1e-300];
        Object::Named { name: "é".repeat(rank + 1), values }
    };
    match rank % 3 {
        0 => named(),
        1 => Object::Many((-25..25).map(|key| (key, (key % 2 == 0).then(named))).collect()),
        _ => Object::Nothing,
    }
}

pub(super) fn broadcast_object_list(it: &Surface) {
    let list = |rank: usize, len: usize| (rank..rank + len).map(object).collect::<Vec<_>>();
    for root in 0..it.size() {
        // The lists of other ranks have other lengths.
        for len in [0, 3] {
            let mut mine = list(it.me(), if it.me() == root { len } else { it.me() });
            it.group.broadcast_object_list(&mut mine, root).unwrap();
            it.equals(mine, list(root, len));
        }
    }
}

pub(super) fn all_gather_object(it: &Surface) {
    let all = it.group.all_gather_object(&object(it.me())).unwrap();
    it.equals(all, (0..it.size()).map(object).collect());
}

pub(super) fn gather_object(it: &Surface) {
    for root in 0..it.size() {
        let all = it.group.gather_object(&object(it.me()), root).unwrap();
        it.equals(all, (it.me() == root).then(|| (0..it.size()).map(object).collect()));
    }
}

pub(super) fn scatter_object_list(it: &Surface) {
    for root in 0..it.size() {
        let list: Option<Vec<_>> =
            (it.me() == root).then(|| (0..it.size()).map(|rank| object(rank + root)).collect());
        let mine = it.group.scatter_object_list(list.as_deref(), root).unwrap();
        it.equals(mine, object(it.me() + root));
    }
}

pub(super) fn send_object_list(it: &Surface) {
    let list = [object(it.me()), object(7)];
    if it.me() + 1 == it.size() {
        it.group.send_object_list(&list, 0).unwrap();
    } else if it.me() == 0 {
        let received: Vec<Object> = it.group.recv_object_list(it.size() - 1).unwrap();
        it.equals(received, vec![object(it.size() - 1), object(7)]);
    }
}

pub(super) fn recv_object_list(it: &Surface) {
    if it.me() == 0 {
        (1..it.size()).for_each(|to| it.group.send_object_list(&[to as u8], to).unwrap());
    } else {
        let received: Vec<u8> = it.group.recv_object_list(0).unwrap();
        it.equals(received, vec![it.me() as u8]);
    }
}
