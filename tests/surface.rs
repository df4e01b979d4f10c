//! Every public method of `ProcessGroup` and `Work`, as a program calls it: with threads, with two processes of one rank,
//! and with two processes of two ranks. The results are compared with the definition and with those of threads.
//!
//! A new method needs a function of its name here that calls it, and a line in `CHECKS`: a test says so.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use ddp_mp::process_group::functional;
use ddp_mp::{P2POp, ProcessGroup, ReduceOp, torch};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, ranks, repository};
use crate::processes::play_with;

/// What each check gets, and what it leaves for the comparison with the ranks of one process.
pub(crate) struct Surface {
    group: Rc<ProcessGroup>,
    /// How many ranks each process has.
    of_process: usize,
    /// Where the ranks of all processes can see each other's files.
    folder: PathBuf,
    transcript: RefCell<String>,
}

type Check = fn(&Surface);

macro_rules! checks {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), $name as Check)),*] };
}

/// In this order, on every rank.
const CHECKS: &[(&str, Check)] = &checks![
    rank,
    local_rank,
    world_size,
    local_world_size,
    spans_processes,
    ranks_of_group,
    device,
    backend,
    barrier,
    monitored_barrier,
    all_reduce,
    all_reduce_weighted,
    reduce,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all,
    all_to_all_single,
    send,
    recv,
    isend,
    irecv,
    batch_isend_irecv,
    broadcast_object_list,
    all_gather_object,
    gather_object,
    scatter_object_list,
    send_object_list,
    recv_object_list,
    async_op,
    wait,
    wait_timeout,
    is_completed,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    all_reduce_coalesced,
    all_gather_into_tensor_coalesced,
    reduce_scatter_tensor_coalesced,
    functional_all_reduce,
    functional_broadcast,
    functional_reduce,
    functional_gather,
    functional_scatter,
    functional_all_gather,
    functional_all_gather_into_tensor,
    functional_reduce_scatter,
    functional_all_to_all,
    functional_all_to_all_single,
    enter_step,
    synchronize,
    traffic,
];

/// What a rank holds: whole numbers, so that sums are exact in every order.
fn numbers(rank: usize, len: usize) -> Vec<f64> {
    (0..len).map(|index| ((index * 3 + rank * 5) % 7 + 1) as f64).collect()
}

/// A reduction by its definition, element by element.
fn reduced(op: ReduceOp, of_ranks: &[Vec<f64>]) -> Vec<f64> {
    let of_element = |index: usize| {
        let all = of_ranks.iter().map(|values| values[index]);
        let bits = |f: fn(i64, i64) -> i64| {
            let all = all.clone().map(|value| value as i64);
            all.reduce(f).expect("there is a rank") as f64
        };
        match op {
            ReduceOp::Sum => all.sum(),
            ReduceOp::Avg => all.sum::<f64>() / of_ranks.len() as f64,
            ReduceOp::Product => all.product(),
            ReduceOp::Min => all.fold(f64::INFINITY, f64::min),
            ReduceOp::Max => all.fold(f64::NEG_INFINITY, f64::max),
            ReduceOp::PremulSum(factor) => all.map(|value| value * factor).sum(),
            ReduceOp::Band => bits(|a, b| a & b),
            ReduceOp::Bor => bits(|a, b| a | b),
            ReduceOp::Bxor => bits(|a, b| a ^ b),
        }
    };
    (0..of_ranks[0].len()).map(of_element).collect()
}

/// Every reduction with a kind of numbers that has it.
const REDUCTIONS: [(ReduceOp, Kind); 14] = [
    (ReduceOp::Sum, Kind::Float),
    (ReduceOp::Sum, Kind::Int64),
    (ReduceOp::Sum, Kind::BFloat16),
    (ReduceOp::Avg, Kind::Float),
    (ReduceOp::Product, Kind::Double),
    (ReduceOp::Product, Kind::Int64),
    (ReduceOp::Min, Kind::Float),
    (ReduceOp::Min, Kind::Uint8),
    (ReduceOp::Max, Kind::Half),
    (ReduceOp::Max, Kind::Int64),
    (ReduceOp::PremulSum(0.5), Kind::Float),
    (ReduceOp::Band, Kind::Int64),
    (ReduceOp::Bor, Kind::Int),
    (ReduceOp::Bxor, Kind::Int64),
];

fn tensor(values: &[f64], kind: Kind) -> Tensor {
    Tensor::from_slice(values).to_kind(kind)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_device(Device::Cpu).to_kind(Kind::Double).flatten(0, -1);
    Vec::try_from(flat).unwrap()
}

impl Surface {
    pub(crate) fn new(group: Rc<ProcessGroup>, of_process: usize, folder: &Path) -> Self {
        let folder = folder.to_owned();
        Self { group, of_process, folder, transcript: RefCell::default() }
    }

    /// Runs every check, and returns what this rank has seen in each.
    pub(crate) fn run(&self) -> Vec<(&'static str, String)> {
        let all = CHECKS.iter().map(|(name, check)| {
            check(self);
            (*name, self.transcript.take())
        });
        all.collect()
    }

    fn me(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.world_size()
    }

    /// The neighbours in a ring.
    fn next(&self) -> usize {
        (self.me() + 1) % self.size()
    }

    fn last(&self) -> usize {
        (self.me() + self.size() - 1) % self.size()
    }

    fn of_all(&self, len: usize) -> Vec<Vec<f64>> {
        (0..self.size()).map(|rank| numbers(rank, len)).collect()
    }

    fn mine(&self, len: usize, kind: Kind) -> Tensor {
        tensor(&numbers(self.me(), len), kind)
    }

    fn write(&self, text: &str) {
        *self.transcript.borrow_mut() += text;
    }

    /// Compares a result with its definition, and keeps it for the comparison with threads.
    #[track_caller]
    fn is(&self, found: &Tensor, expected: &[f64]) {
        assert_eq!(values(found), expected, "rank {}", self.me());
        self.write(&format!("{:?}{:?}{expected:?}", found.kind(), found.size()));
    }

    /// The same of other values.
    #[track_caller]
    fn equals<T: std::fmt::Debug + PartialEq>(&self, found: T, expected: T) {
        assert_eq!(found, expected, "rank {}", self.me());
        self.write(&format!("{found:?}"));
    }

    /// Leaves a file, goes through `pass`, and sees the files of all.
    fn all_have_come(&self, name: &str, pass: impl FnOnce()) {
        let file = |rank: usize| self.folder.join(format!("{name}{rank}"));
        fs::write(file(self.me()), "").unwrap();
        pass();
        let all = (0..self.size()).all(|rank| file(rank).exists());
        self.equals(all, true);
    }
}

// Facts of the group. Those of a layout differ from those of threads, and are compared with the definition only.

fn rank(it: &Surface) {
    let place = it.group.ranks().iter().position(|rank| *rank == it.group.rank());
    it.equals(place, Some(it.me()));
}

fn local_rank(it: &Surface) {
    assert_eq!(it.group.local_rank(), it.me() % it.of_process, "a machine for each process");
}

fn world_size(it: &Surface) {
    it.equals(it.group.world_size(), it.group.ranks().len());
}

fn local_world_size(it: &Surface) {
    assert_eq!(it.group.local_world_size(), it.of_process);
}

fn spans_processes(it: &Surface) {
    assert_eq!(it.group.spans_processes(), it.of_process < it.size());
}

fn ranks_of_group(it: &Surface) {
    it.equals(it.group.ranks().to_vec(), (0..it.size()).collect());
}

fn device(it: &Surface) {
    it.equals(it.group.device(), Device::Cpu);
}

fn backend(it: &Surface) {
    let expected = if it.of_process < it.size() { "gloo" } else { "threaded" };
    assert_eq!(it.group.backend(), expected);
}

fn barrier(it: &Surface) {
    it.all_have_come("barrier", || it.group.barrier().unwrap());
}

fn monitored_barrier(it: &Surface) {
    it.all_have_come("monitored", || it.group.monitored_barrier(TIMEOUT).unwrap());
}

// Collectives of tensors.

fn all_reduce(it: &Surface) {
    for (op, kind) in REDUCTIONS {
        let mut tensor = it.mine(6, kind);
        it.group.all_reduce(&mut tensor, op).unwrap();
        it.is(&tensor, &reduced(op, &it.of_all(6)));
    }
}

fn all_reduce_weighted(it: &Surface) {
    // Their mean is 2, for every even number of ranks, so that all numbers are exact.
    let weight = |rank: usize| if rank.is_multiple_of(2) { 1.0 } else { 3.0 };
    let mut sum = it.mine(6, Kind::Float);
    it.group.all_reduce_weighted(&mut sum, ReduceOp::Sum, Some(weight(it.me()))).unwrap();
    let scaled = it.of_all(6).into_iter().enumerate().map(|(rank, values)| {
        values.into_iter().map(|value| value * weight(rank) / 2.0).collect::<Vec<_>>()
    });
    it.is(&sum, &reduced(ReduceOp::Sum, &scaled.collect::<Vec<_>>()));
    let mut plain = it.mine(6, Kind::Float);
    it.group.all_reduce_weighted(&mut plain, ReduceOp::Sum, None).unwrap();
    it.is(&plain, &reduced(ReduceOp::Sum, &it.of_all(6)));
}

fn reduce(it: &Surface) {
    for (root, (op, kind)) in (0..it.size()).cycle().zip(REDUCTIONS) {
        let mut tensor = it.mine(6, kind);
        it.group.reduce(&mut tensor, root, op).unwrap();
        if it.me() == root {
            it.is(&tensor, &reduced(op, &it.of_all(6)));
        } else {
            it.is(&tensor, &numbers(it.me(), 6)); // as it was
        }
    }
}

fn broadcast(it: &Surface) {
    for root in 0..it.size() {
        let mut tensor = it.mine(6, Kind::Float).view([2, 3]);
        it.group.broadcast(&mut tensor, root).unwrap();
        it.is(&tensor, &numbers(root, 6));
    }
}

fn all_gather(it: &Surface) {
    let mut list: Vec<Tensor> = it.of_all(3).iter().map(|_| tensor(&[0.0; 3], Kind::Int)).collect();
    it.group.all_gather(&mut list, &it.mine(3, Kind::Int)).unwrap();
    list.iter().zip(it.of_all(3)).for_each(|(found, expected)| it.is(found, &expected));
}

fn all_gather_into_tensor(it: &Surface) {
    let mut all = tensor(&vec![0.0; it.size() * 3], Kind::Double);
    it.group.all_gather_into_tensor(&mut all, &it.mine(3, Kind::Double)).unwrap();
    it.is(&all, &it.of_all(3).concat());
}

fn gather(it: &Surface) {
    for root in 0..it.size() {
        let mut list: Vec<Tensor> =
            it.of_all(3).iter().map(|_| tensor(&[0.0; 3], Kind::Float)).collect();
        let mine = it.mine(3, Kind::Float);
        it.group.gather(&mine, (it.me() == root).then_some(&mut list[..]), root).unwrap();
        for (found, expected) in list.iter().zip(it.of_all(3)) {
            it.is(found, if it.me() == root { &expected } else { &[0.0; 3] });
        }
    }
}

fn scatter(it: &Surface) {
    for root in 0..it.size() {
        let list: Vec<Tensor> =
            it.of_all(3).iter().map(|values| tensor(values, Kind::Int64) + root as i64).collect();
        let mut mine = tensor(&[0.0; 3], Kind::Int64);
        it.group.scatter(&mut mine, (it.me() == root).then_some(&list[..]), root).unwrap();
        let expected: Vec<f64> = numbers(it.me(), 3).iter().map(|it| it + root as f64).collect();
        it.is(&mine, &expected);
    }
}

/// What each rank has for all: 2 numbers for each rank.
fn parts(it: &Surface) -> Vec<Vec<f64>> {
    it.of_all(it.size() * 2)
}

fn reduce_scatter(it: &Surface) {
    for (op, kind) in REDUCTIONS {
        let whole = reduced(op, &parts(it));
        let list: Vec<Tensor> =
            parts(it)[it.me()].chunks(2).map(|part| tensor(part, kind)).collect();
        let mut output = tensor(&[0.0; 2], kind);
        it.group.reduce_scatter(&mut output, &list, op).unwrap();
        it.is(&output, &whole[it.me() * 2..][..2]);
    }
}

fn reduce_scatter_tensor(it: &Surface) {
    for (op, kind) in REDUCTIONS {
        let whole = reduced(op, &parts(it));
        let input = tensor(&parts(it)[it.me()], kind);
        let mut output = tensor(&[0.0; 2], kind);
        it.group.reduce_scatter_tensor(&mut output, &input, op).unwrap();
        it.is(&output, &whole[it.me() * 2..][..2]);
    }
}

fn all_to_all(it: &Surface) {
    // To rank r go r + 1 numbers.
    let input: Vec<Tensor> =
        (0..it.size()).map(|to| it.mine(to + 1, Kind::Float) + to as f64).collect();
    let mut output: Vec<Tensor> =
        (0..it.size()).map(|_| tensor(&vec![0.0; it.me() + 1], Kind::Float)).collect();
    it.group.all_to_all(&mut output, &input).unwrap();
    for (from, found) in output.iter().enumerate() {
        let sent = numbers(from, it.me() + 1);
        it.is(found, &sent.iter().map(|value| value + it.me() as f64).collect::<Vec<_>>());
    }
}

fn all_to_all_single(it: &Surface) {
    // Even parts.
    let mut output = tensor(&vec![0.0; it.size() * 2], Kind::Int64);
    let input = tensor(&parts(it)[it.me()], Kind::Int64);
    it.group.all_to_all_single(&mut output, &input, None, None).unwrap();
    let to_me = |values: &Vec<f64>| values[it.me() * 2..][..2].to_vec();
    it.is(&output, &parts(it).iter().flat_map(to_me).collect::<Vec<_>>());
    // Rank r gets r rows from each.
    let to: Vec<i64> = (0..it.size() as i64).collect();
    let from = vec![it.me() as i64; it.size()];
    let rows = to.iter().sum::<i64>() as usize;
    let mut output = tensor(&vec![0.0; it.size() * it.me()], Kind::Float);
    let input = it.mine(rows, Kind::Float);
    it.group.all_to_all_single(&mut output, &input, Some(&from), Some(&to)).unwrap();
    let before = (0..it.me()).sum::<usize>();
    let to_me = |values: &Vec<f64>| values[before..][..it.me()].to_vec();
    it.is(&output, &it.of_all(rows).iter().flat_map(to_me).collect::<Vec<_>>());
}

// Messages: round the ring, and from anybody.

fn send(it: &Surface) {
    let mut received = tensor(&[0.0; 4], Kind::Float);
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

fn recv(it: &Surface) {
    if it.me() > 0 {
        return it.group.send(&it.mine(4, Kind::Int64), 0, 8).unwrap();
    }
    let mut seen = BTreeMap::new();
    for _ in 1..it.size() {
        let mut received = tensor(&[0.0; 4], Kind::Int64);
        let source = it.group.recv(&mut received, None, 8).unwrap();
        assert!(seen.insert(source, received).is_none(), "one from each");
    }
    let sources: Vec<usize> = seen.keys().copied().collect();
    it.equals(sources, (1..it.size()).collect());
    seen.iter().for_each(|(source, received)| it.is(received, &numbers(*source, 4)));
}

fn isend(it: &Surface) {
    let work = it.group.isend(&it.mine(5, Kind::Float), it.next(), 1).unwrap();
    let mut received = tensor(&[0.0; 5], Kind::Float);
    it.group.recv(&mut received, Some(it.last()), 1).unwrap();
    work.wait().unwrap();
    it.is(&received, &numbers(it.last(), 5));
}

fn irecv(it: &Surface) {
    let mut received = tensor(&[0.0; 5], Kind::Int);
    let work = it.group.irecv(&mut received, Some(it.last()), 2).unwrap();
    it.group.send(&it.mine(5, Kind::Int), it.next(), 2).unwrap();
    work.wait().unwrap();
    it.is(&received, &numbers(it.last(), 5));
}

fn batch_isend_irecv(it: &Surface) {
    let others = || (0..it.size()).filter(|rank| *rank != it.me());
    let mut received: Vec<Tensor> =
        (0..it.size()).map(|_| tensor(&[0.0; 2], Kind::Float)).collect();
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

// Objects: of another size on each rank.

fn object(rank: usize) -> (String, Vec<Option<u64>>) {
    ("rank".repeat(rank + 1), (0..rank as u64).map(Some).chain([None]).collect())
}

fn broadcast_object_list(it: &Surface) {
    for root in 0..it.size() {
        let mut list = vec![object(it.me()), object(it.me() + 9)];
        it.group.broadcast_object_list(&mut list, root).unwrap();
        it.equals(list, vec![object(root), object(root + 9)]);
    }
}

fn all_gather_object(it: &Surface) {
    let all = it.group.all_gather_object(&object(it.me())).unwrap();
    it.equals(all, (0..it.size()).map(object).collect());
}

fn gather_object(it: &Surface) {
    for root in 0..it.size() {
        let all = it.group.gather_object(&object(it.me()), root).unwrap();
        it.equals(all, (it.me() == root).then(|| (0..it.size()).map(object).collect()));
    }
}

fn scatter_object_list(it: &Surface) {
    for root in 0..it.size() {
        let list: Option<Vec<_>> =
            (it.me() == root).then(|| (0..it.size()).map(|rank| object(rank + root)).collect());
        let mine = it.group.scatter_object_list(list.as_deref(), root).unwrap();
        it.equals(mine, object(it.me() + root));
    }
}

fn send_object_list(it: &Surface) {
    let list = [object(it.me()), object(7)];
    if it.me() + 1 == it.size() {
        it.group.send_object_list(&list, 0).unwrap();
    } else if it.me() == 0 {
        let received: Vec<(String, Vec<Option<u64>>)> =
            it.group.recv_object_list(it.size() - 1).unwrap();
        it.equals(received, vec![object(it.size() - 1), object(7)]);
    }
}

fn recv_object_list(it: &Surface) {
    if it.me() == 0 {
        (1..it.size()).for_each(|to| it.group.send_object_list(&[to as u8], to).unwrap());
    } else {
        let received: Vec<u8> = it.group.recv_object_list(0).unwrap();
        it.equals(received, vec![it.me() as u8]);
    }
}

// What goes on beside the rank.

fn async_op(it: &Surface) {
    let sum = it.mine(6, Kind::Float);
    let mut same = sum.shallow_clone();
    let work = it.group.async_op(move |group| {
        group.all_reduce(&mut same, ReduceOp::Sum)?;
        group.all_reduce(&mut same, ReduceOp::Max) // the second in its order
    });
    work.unwrap().wait().unwrap();
    it.is(&sum, &reduced(ReduceOp::Sum, &it.of_all(6)));
}

fn wait(it: &Surface) {
    it.all_have_come("wait", || {
        it.group.async_op(|group| group.barrier()).unwrap().wait().unwrap();
    });
}

fn wait_timeout(it: &Surface) {
    let mut received = tensor(&[0.0; 2], Kind::Float);
    let mut work = it.group.irecv(&mut received, Some(it.last()), 7).unwrap();
    // Every rank is before the barrier, and sends after it.
    it.equals(work.wait_timeout(Duration::ZERO).unwrap(), false);
    it.group.barrier().unwrap();
    it.group.send(&it.mine(2, Kind::Float), it.next(), 7).unwrap();
    it.equals(work.wait_timeout(TIMEOUT).unwrap(), true);
    work.wait().unwrap();
    it.is(&received, &numbers(it.last(), 2));
}

fn new_subgroups(it: &Surface) {
    let size = it.size() / 2;
    let half = it.group.new_subgroups(size).unwrap();
    let members: Vec<usize> = (0..it.size()).filter(|rank| rank / size == it.me() / size).collect();
    it.equals(half.ranks().to_vec(), members.clone());
    let mut tensor = it.mine(4, Kind::Float);
    half.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
    let of_members: Vec<_> = members.iter().map(|rank| numbers(*rank, 4)).collect();
    it.is(&tensor, &reduced(ReduceOp::Sum, &of_members));
}

fn new_subgroups_by_enumeration(it: &Surface) {
    // The first with the last, across the processes; the others, if there are any, are in none.
    let members = [0, it.size() - 1];
    let group = it.group.new_subgroups_by_enumeration(&[&members]).unwrap();
    it.equals(group.is_some(), members.contains(&it.me()));
    let Some(group) = group else { return };
    let mut tensor = it.mine(4, Kind::Float);
    group.all_reduce(&mut tensor, ReduceOp::Max).unwrap();
    it.is(&tensor, &reduced(ReduceOp::Max, &members.map(|rank| numbers(rank, 4))));
}

// Several tensors in one collective.

fn all_reduce_coalesced(it: &Surface) {
    for (op, kind) in REDUCTIONS {
        let mut tensors = [it.mine(6, kind).view([2, 3]), it.mine(5, kind), it.mine(1, kind)];
        it.group.all_reduce_coalesced(&mut tensors, op).unwrap();
        for (found, len) in tensors.iter().zip([6, 5, 1]) {
            it.is(found, &reduced(op, &it.of_all(len)));
        }
    }
}

fn all_gather_into_tensor_coalesced(it: &Surface) {
    let inputs = [it.mine(3, Kind::Int64), it.mine(4, Kind::Int64)];
    let mut outputs = [3, 4].map(|len| tensor(&vec![0.0; len * it.size()], Kind::Int64));
    it.group.all_gather_into_tensor_coalesced(&mut outputs, &inputs).unwrap();
    for (found, len) in outputs.iter().zip([3, 4]) {
        it.is(found, &it.of_all(len).concat());
    }
}

fn reduce_scatter_tensor_coalesced(it: &Surface) {
    for (op, kind) in REDUCTIONS {
        let inputs = [2, 3].map(|len| it.mine(len * it.size(), kind));
        let mut outputs = [2, 3].map(|len| tensor(&vec![0.0; len], kind));
        it.group.reduce_scatter_tensor_coalesced(&mut outputs, &inputs, op).unwrap();
        for (found, len) in outputs.iter().zip([2, 3]) {
            let whole = reduced(op, &it.of_all(len * it.size()));
            it.is(found, &whole[it.me() * len..][..len]);
        }
    }
}

fn is_completed(it: &Surface) {
    let mut received = tensor(&[0.0; 2], Kind::Float);
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

fn new_group(it: &Surface) {
    // Across the processes, within one, and of one rank.
    let (size, here) = (it.size(), it.of_process);
    for members in [vec![size - 1, 0], (0..here.min(size - 1)).collect(), vec![size - 1]] {
        let group = it.group.new_group(&members).unwrap();
        let mut sorted = members.clone();
        sorted.sort_unstable();
        assert_eq!(group.is_some(), sorted.contains(&it.me()));
        let Some(group) = group else { continue };
        assert_eq!((group.ranks(), sorted[group.rank()]), (&sorted[..], it.me()));
        let mut tensor = it.mine(4, Kind::Float);
        group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
        let of_members: Vec<_> = sorted.iter().map(|rank| numbers(*rank, 4)).collect();
        assert_eq!(values(&tensor), reduced(ReduceOp::Sum, &of_members));
    }
}

fn functional_all_reduce(it: &Surface) {
    let mine = it.mine(3, Kind::Float).set_requires_grad(true);
    let sum = functional::all_reduce(&mine, &it.group).unwrap();
    let expected = reduced(ReduceOp::Sum, &it.of_all(3));
    it.is(&sum.detach(), &expected);
    // Each rank's loss is sum^2, and each depends on `mine` with the gradient 2 * sum.
    torch::backward(&sum.square().sum(Kind::Float)).unwrap();
    let factor = 2.0 * it.size() as f64;
    it.is(&mine.grad(), &expected.iter().map(|sum| factor * sum).collect::<Vec<_>>());
}

// The other collectives that gradients flow through. Rank `r` multiplies its result number `j` with `weights(r, j)`, and its
// loss is the sum of that; so these are the gradients of the results, and each operation is linear.

const LEN: usize = 3;

fn weights(rank: usize, result: usize) -> Vec<f64> {
    numbers(rank + 3, LEN).iter().map(|it| it + 10.0 * result as f64).collect()
}

/// The sum of lists, element by element.
fn sum(lists: impl Iterator<Item = Vec<f64>>) -> Vec<f64> {
    reduced(ReduceOp::Sum, &lists.collect::<Vec<_>>())
}

impl Surface {
    fn trained(&self, len: usize) -> Tensor {
        self.mine(len, Kind::Float).set_requires_grad(true)
    }

    /// A list with a tensor for each rank, of one tensor that is trained: number `i` is `numbers(me) + i`.
    fn trained_list(&self) -> (Tensor, Vec<Tensor>) {
        let rows: Vec<f64> = (0..self.size()).flat_map(|index| row(self.me(), index)).collect();
        let whole = tensor(&rows, Kind::Float).set_requires_grad(true);
        let list = whole.split(LEN as i64, 0);
        (whole, list)
    }

    /// Goes backward from this rank's loss, and compares the gradient of `mine` with its definition.
    #[track_caller]
    fn goes_back(&self, results: &[Tensor], mine: &Tensor, expected: &[f64]) {
        let parts = results.iter().enumerate();
        let parts = parts.map(|(index, it)| {
            (it * tensor(&weights(self.me(), index), Kind::Float)).sum(Kind::Float)
        });
        torch::backward(&parts.sum::<Tensor>()).unwrap();
        self.is(&mine.grad(), expected);
    }

    fn everyone(&self) -> std::ops::Range<usize> {
        0..self.size()
    }
}

fn row(rank: usize, index: usize) -> Vec<f64> {
    numbers(rank, LEN).iter().map(|it| it + index as f64).collect()
}

fn functional_broadcast(it: &Surface) {
    for root in it.everyone() {
        let mine = it.trained(LEN);
        let result = functional::broadcast(&mine, root, &it.group).unwrap();
        it.is(&result.detach(), &numbers(root, LEN));
        let all = sum(it.everyone().map(|rank| weights(rank, 0)));
        it.goes_back(&[result], &mine, if it.me() == root { &all } else { &[0.0; LEN] });
    }
}

fn functional_reduce(it: &Surface) {
    for root in it.everyone() {
        let mine = it.trained(LEN);
        let result = functional::reduce(&mine, root, &it.group).unwrap();
        let expected = match it.me() == root {
            true => reduced(ReduceOp::Sum, &it.of_all(LEN)),
            false => numbers(it.me(), LEN),
        };
        it.is(&result.detach(), &expected);
        it.goes_back(&[result], &mine, &weights(root, 0));
    }
}

fn functional_gather(it: &Surface) {
    for root in it.everyone() {
        let mine = it.trained(LEN);
        let results = functional::gather(&mine, root, &it.group).unwrap();
        for (rank, result) in results.iter().enumerate() {
            let sent = numbers(rank, LEN);
            it.is(&result.detach(), if it.me() == root { &sent } else { &[0.0; LEN] });
        }
        it.goes_back(&results, &mine, &weights(root, it.me()));
    }
}

fn functional_scatter(it: &Surface) {
    for root in it.everyone() {
        let (whole, list) = it.trained_list();
        let result = functional::scatter(&list, root, &it.group).unwrap();
        it.is(&result.detach(), &row(root, it.me()));
        let of_root: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, 0)).collect();
        let zeros = vec![0.0; of_root.len()];
        it.goes_back(&[result], &whole, if it.me() == root { &of_root } else { &zeros });
    }
}

fn functional_all_gather(it: &Surface) {
    let mine = it.trained(LEN);
    let results = functional::all_gather(&mine, &it.group).unwrap();
    for (rank, result) in results.iter().enumerate() {
        it.is(&result.detach(), &numbers(rank, LEN));
    }
    it.goes_back(&results, &mine, &sum(it.everyone().map(|rank| weights(rank, it.me()))));
}

fn functional_all_gather_into_tensor(it: &Surface) {
    let mine = it.trained(LEN);
    let result = functional::all_gather_into_tensor(&mine, &it.group).unwrap();
    it.is(&result.detach(), &it.of_all(LEN).concat());
    let results = result.split(LEN as i64, 0);
    it.goes_back(&results, &mine, &sum(it.everyone().map(|rank| weights(rank, it.me()))));
}

fn functional_reduce_scatter(it: &Surface) {
    let (whole, list) = it.trained_list();
    let result = functional::reduce_scatter(&list, &it.group).unwrap();
    it.is(&result.detach(), &sum(it.everyone().map(|rank| row(rank, it.me()))));
    let expected: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, 0)).collect();
    it.goes_back(&[result], &whole, &expected);
}

fn functional_all_to_all(it: &Surface) {
    let (whole, list) = it.trained_list();
    let shapes = vec![&[LEN as i64][..]; it.size()];
    let results = functional::all_to_all(&shapes, &list, &it.group).unwrap();
    for (rank, result) in results.iter().enumerate() {
        it.is(&result.detach(), &row(rank, it.me()));
    }
    let expected: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, it.me())).collect();
    it.goes_back(&results, &whole, &expected);
}

fn functional_all_to_all_single(it: &Surface) {
    let (whole, _) = it.trained_list();
    let result = functional::all_to_all_single(&whole, None, None, &it.group).unwrap();
    let sent: Vec<f64> = it.everyone().flat_map(|rank| row(rank, it.me())).collect();
    it.is(&result.detach(), &sent);
    let results = result.split(LEN as i64, 0);
    let expected: Vec<f64> = it.everyone().flat_map(|rank| weights(rank, it.me())).collect();
    it.goes_back(&results, &whole, &expected);
}

fn enter_step(it: &Surface) {
    it.group.enter_step(4).unwrap();
    it.group.barrier().unwrap();
}

fn synchronize(it: &Surface) {
    it.group.synchronize().unwrap();
}

fn traffic(it: &Surface) {
    let before = it.group.traffic();
    let mut tensor = it.mine(100, Kind::Float);
    if it.me() == 0 {
        it.group.send(&tensor, it.size() - 1, 4).unwrap();
    } else if it.me() == it.size() - 1 {
        it.group.recv(&mut tensor, Some(0), 4).unwrap();
    }
    let after = it.group.traffic();
    let moved = (after.sent - before.sent, after.received - before.received);
    let expected = match it.me() {
        0 => (400, 0),
        last if last == it.size() - 1 => (0, 400),
        _ => (0, 0),
    };
    it.equals(moved, expected);
    // Whatever a rank has sent another one has received.
    let all = it.group.all_gather_object(&(after.sent, after.received)).unwrap();
    let (sent, received): (Vec<u64>, Vec<u64>) = all.into_iter().unzip();
    assert_eq!(sent.iter().sum::<u64>(), received.iter().sum::<u64>());
}

/// What each rank has seen in each check.
type Seen = BTreeMap<(usize, String), String>;

fn with_threads(size: usize) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let of_ranks = ranks(size, move |_, group| Ok(Surface::new(group, size, &path).run()));
    let of_rank = |(rank, seen): (usize, Vec<(&'static str, String)>)| {
        seen.into_iter().map(move |(name, text)| ((rank, name.to_string()), text))
    };
    of_ranks.into_iter().enumerate().flat_map(of_rank).collect()
}

/// What `child` writes of each rank for the process that has started it.
pub(crate) fn lines(rank: usize, seen: &[(&str, String)]) -> String {
    seen.iter().map(|(name, text)| format!("\nsurface|{rank}|{name}|{text}")).collect()
}

fn with_processes(of_process: [usize; 2]) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let variables = [("DDP_MP_FOLDER", folder.path())];
    let mut seen = Seen::new();
    for (code, output) in play_with("surface", &of_process, &variables) {
        assert_eq!(code, Some(0), "{of_process:?}: {output}");
        for line in output.lines().filter_map(|line| line.strip_prefix("surface|")) {
            let words: Vec<&str> = line.splitn(3, '|').collect();
            let rank = words[0].parse().unwrap();
            seen.insert((rank, words[1].into()), words[2].into());
        }
    }
    seen
}

#[test]
fn every_method_does_the_same_with_threads_and_with_processes() {
    for of_process in [[1, 1], [2, 2]] {
        let size = of_process.iter().sum();
        let (threads, processes) = (with_threads(size), with_processes(of_process));
        assert_eq!(threads.len(), size * CHECKS.len());
        assert_eq!(processes, threads, "{of_process:?}");
    }
}

/// The code between the braces that follow each line that `starts` takes, with that line.
fn blocks(code: &str, starts: impl Fn(&str) -> bool) -> Vec<Vec<&str>> {
    let mut found: Vec<Vec<&str>> = Vec::new();
    let mut inside = false;
    for line in code.lines() {
        if !inside && starts(line) {
            inside = true;
            found.push(Vec::new());
        }
        if inside {
            found.last_mut().unwrap().push(line);
            inside = line != "}";
        }
    }
    found
}

/// The public methods of `ProcessGroup` and `Work` that a file of `src/process_group` has, and its functions that take a
/// group.
fn public_methods(code: &str, module: &str) -> Vec<String> {
    let name = |line: &str| {
        let after = line.trim_start().strip_prefix("pub fn ")?;
        Some(after.split(['(', '<']).next().unwrap().to_string())
    };
    let is_impl = |line: &str| ["impl ProcessGroup {", "impl Work {"].contains(&line);
    let methods = blocks(code, is_impl).into_iter().flatten().filter_map(name);
    let of_group = |block: &Vec<&str>| block.join(" ").contains("ProcessGroup>");
    let functions = blocks(code, |line| line.starts_with("pub fn ")).into_iter().filter(of_group);
    let functions = functions.filter_map(|block| Some(format!("{module}_{}", name(block[0])?)));
    methods.chain(functions).collect()
}

#[test]
fn every_public_method_has_a_check_that_calls_it() {
    let mut methods = BTreeSet::new();
    for entry in fs::read_dir(repository("src/process_group")).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "rs") {
            let code = fs::read_to_string(&file).unwrap();
            methods.extend(public_methods(&code, file.file_stem().unwrap().to_str().unwrap()));
        }
    }
    // So that this test notices when it finds none any more.
    for known in ["all_reduce", "recv_object_list", "wait", "functional_all_reduce"] {
        assert!(methods.contains(known), "{known} is not found: {methods:?}");
    }
    let this = fs::read_to_string(repository("tests/surface.rs")).unwrap();
    for method in &methods {
        // `ranks` would hide the function of the harness.
        let (check, call) = match method.strip_prefix("functional_") {
            Some(function) => (method.as_str(), format!("functional::{function}(")),
            None if method == "ranks" => ("ranks_of_group", ".ranks()".into()),
            None => (method.as_str(), format!(".{method}(")),
        };
        let in_list = CHECKS.iter().any(|(name, _)| *name == check);
        let function = blocks(&this, |line| line.starts_with(&format!("fn {check}(")));
        let calls = function.iter().flatten().any(|line| line.contains(&call));
        assert!(
            in_list && calls,
            "{method} is public: add a function {check} that calls it and compares its result with the \
             definition to tests/surface.rs, and to CHECKS there"
        );
    }
}

#[test]
fn a_method_that_is_added_is_found() {
    let code = "impl ProcessGroup {\n    /// Adds.\n    pub fn one<T: Debug>(&self) {}\n    pub(crate) fn two(&self) {}\n}\n\
                impl Side {\n    pub fn three(&self) {}\n}\nimpl Work {\n    pub fn four(self) {\n    }\n}\n\
                pub fn five(\n    group: &Rc<ProcessGroup>,\n) {\n}\npub fn six() {\n}\n";
    assert_eq!(public_methods(code, "it"), ["one", "four", "it_five"]);
}
