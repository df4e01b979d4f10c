//! Every public method of `ProcessGroup` and `Work`, as a program calls it, on ranks of any device. The results are
//! compared with the definition, and are written down for a comparison with other backends.
//!
//! A new method needs a function of its name here that calls it, and a line in `CHECKS`: a test says so.

mod beside;
mod collectives;
mod functional;
mod groups;
mod messages;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use ddp_mp::{Backend, ProcessGroup, Rank, ReduceOp};
use tch::{Device, Kind, Tensor};

use self::beside::*;
use self::collectives::*;
use self::functional::*;
use self::groups::*;
use self::messages::*;
use crate::harness::{TIMEOUT, ranks};

/// A rank's group, and what its checks leave for the comparison with other ranks.
pub(crate) struct Surface {
    group: Rc<ProcessGroup>,
    /// The backend whose operations are called; the others have all that it has.
    backend: Backend,
    /// How many ranks each process has.
    of_process: usize,
    /// Where the ranks of all processes can see each other's files.
    folder: PathBuf,
    /// Whether all ranks share GPU 0.
    pub(crate) shares_gpu: bool,
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
    reduce,
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_single,
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
    functional_all_reduce,
    functional_all_gather,
    enter_step,
    synchronize,
    traffic,
];

/// Returns what a rank holds: whole numbers, so that sums are exact in every order.
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

fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_device(Device::Cpu).to_kind(Kind::Double).flatten(0, -1);
    Vec::try_from(flat).unwrap()
}

impl Surface {
    /// `group` is one of `backend`, or is compared with one.
    pub(crate) fn new(
        group: Rc<ProcessGroup>,
        backend: Backend,
        of_process: usize,
        folder: &Path,
    ) -> Self {
        let folder = folder.to_owned();
        Self {
            group,
            backend,
            of_process,
            folder,
            shares_gpu: false,
            transcript: RefCell::default(),
        }
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
        self.tensor(&numbers(self.me(), len), kind)
    }

    /// Returns these numbers on the rank's device.
    fn tensor(&self, values: &[f64], kind: Kind) -> Tensor {
        Tensor::from_slice(values).to_kind(kind).to_device(self.group.device())
    }

    fn is_nccl(&self) -> bool {
        self.backend == Backend::Nccl
    }

    /// Returns the reductions that the backend has. NCCL multiplies in an all-reduce only, and has no bits.
    fn reductions(&self, in_all_reduce: bool) -> Vec<(ReduceOp, Kind)> {
        let has = |op: ReduceOp| match op {
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => !self.is_nccl(),
            ReduceOp::PremulSum(_) => in_all_reduce || !self.is_nccl(),
            _ => true,
        };
        REDUCTIONS.into_iter().filter(|(op, _)| has(*op)).collect()
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
    let expected = match it.group.backend() {
        _ if it.shares_gpu => Device::Cuda(0),
        "nccl" => Device::Cuda(it.group.local_rank()),
        _ => Device::Cpu,
    };
    assert_eq!(it.group.device(), expected);
}

fn backend(it: &Surface) {
    let expected = match it.group.device() {
        Device::Cuda(_) => it.backend.name(),
        _ if it.of_process < it.size() => "gloo",
        _ => "threaded",
    };
    assert_eq!(it.group.backend(), expected);
}

fn barrier(it: &Surface) {
    it.all_have_come("barrier", || it.group.barrier().unwrap());
}

fn monitored_barrier(it: &Surface) {
    it.all_have_come("monitored", || it.group.monitored_barrier(TIMEOUT).unwrap());
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

/// Returns the lines that a process writes about `rank` for the process that has started it.
pub(crate) fn lines(rank: usize, seen: &[(&str, String)]) -> String {
    seen.iter().map(|(name, text)| format!("\nsurface|{rank}|{name}|{text}")).collect()
}

/// What each rank has seen in each check.
pub(crate) type Seen = BTreeMap<(usize, String), String>;

/// Returns what is in the `lines` of a process.
pub(crate) fn from_lines(output: &str) -> Seen {
    let of_line = |line: &str| {
        let words: Vec<&str> = line.splitn(3, '|').collect();
        ((words[0].parse().unwrap(), words[1].to_string()), words[2].to_string())
    };
    output.lines().filter_map(|line| line.strip_prefix("surface|")).map(of_line).collect()
}

/// Returns what the ranks of one process see, with all operations that `backend` has.
pub(crate) fn with_threads(size: usize, backend: Backend) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let run = move |_: &Rank, group| Ok(Surface::new(group, backend, size, &path).run());
    let of_rank = |(rank, seen): (usize, Vec<(&'static str, String)>)| {
        seen.into_iter().map(move |(name, text)| ((rank, name.to_string()), text))
    };
    let seen: Seen = ranks(size, run).into_iter().enumerate().flat_map(of_rank).collect();
    assert_eq!(seen.len(), size * CHECKS.len());
    seen
}

/// Returns whether there is a check of this name.
pub(crate) fn has_check(name: &str) -> bool {
    CHECKS.iter().any(|(check, _)| *check == name)
}
