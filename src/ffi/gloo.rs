//! Collectives between CPU ranks of several processes: libtorch's `ProcessGroupGloo`, with an end to every wait.

use std::convert::Infallible;
use std::fmt;
use std::mem;
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crossbeam::channel::{
    Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, select_biased,
};
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::c10d::{Call, Ended, Group, Join, Operation};
use super::limits;
use super::process::named;
use super::shim::raw;
use super::store::TcpStore;
use crate::error::{Error, Result};

/// How values of several ranks become one. Gloo has no average; on floats no bitwise one.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduce {
    // The numbers of `c10d::ReduceOp::RedOpType`.
    Sum = 0,
    Product = 2,
    Min = 3,
    Max = 4,
    Band = 5,
    Bor = 6,
    Bxor = 7,
}

/// One rank of a group of processes that are connected to each other.
///
/// Every rank must make the same calls in the same order, with the same kinds and shapes: Gloo does not check
/// that. Messages of different lengths end the process on the spot, because Gloo throws on a thread of its own;
/// so compare what is called before it is called.
pub(crate) struct Gloo {
    /// Locked, because its calls must follow each other; none of them blocks. None while it is dropped.
    group: Mutex<Option<Group>>,
    rank: usize,
    size: usize,
    /// Held by every operation that goes on, and closed when there is none. None while this is dropped.
    running: Option<Sender<Infallible>>,
    all_ended: Receiver<Infallible>,
}

/// An operation that was started.
#[derive(Debug)]
pub(crate) struct GlooWork {
    doing: &'static str,
    result: Receiver<std::result::Result<(), String>>,
}

/// How long operations take to end once they have been told to, at most, before they are left alone.
const GRACE: Duration = Duration::from_secs(10);

impl Gloo {
    /// Joins the group of `size` ranks that meet under the prefix of `store`, which must be a new one for each
    /// group. Waits until all are there, at most for `timeout`, and until the store's requests are cancelled.
    ///
    /// Operations fail after `timeout`. They go over the interfaces that `GLOO_SOCKET_IFNAME` lists, the value of
    /// which is to be passed, else over the one on the way to the store.
    ///
    /// # Errors
    /// What `absent` makes of the ranks that do not come; [`Error::Gloo`] if they cannot be reached.
    pub(crate) fn new(
        store: &TcpStore,
        rank: usize,
        size: usize,
        timeout: Duration,
        socket_ifname: Option<&str>,
        absent: impl Fn(Vec<usize>) -> Error,
    ) -> Result<Self> {
        let interfaces = socket_ifname.map_or_else(|| Ok(vec![]), interfaces)?;
        let meet = |place| match meet(store, place, rank, size, timeout)? {
            missing if missing.is_empty() => Ok(()),
            missing => Err(absent(missing)),
        };
        meet("here")?;
        let gloo = Self::connect(store, "gloo", rank, size, timeout, interfaces)?;
        // One that is ready must not leave while others connect to it: they would fail in here.
        meet("connected")?;
        Ok(gloo)
    }

    /// As [`Gloo::new`], but meets the others as PyTorch does and in no other way, under the prefix `prefix`: they may
    /// be PyTorch's. Who does not come is not named, and whoever is connected first must stay until all are.
    ///
    /// # Errors
    /// If ranks do not come or cannot be reached.
    pub(crate) fn new_plain(
        store: &TcpStore,
        prefix: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
        socket_ifname: Option<&str>,
    ) -> Result<Self> {
        let interfaces = socket_ifname.map_or_else(|| Ok(vec![]), interfaces)?;
        Self::connect(store, prefix, rank, size, timeout, interfaces)
    }

    fn connect(
        store: &TcpStore,
        prefix: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
        interfaces: Vec<String>,
    ) -> Result<Self> {
        let join = Join {
            prefix: store.key(prefix),
            rank,
            size,
            timeout,
            interfaces,
            address: store.local_address().to_string(),
        };
        // To each other rank one each way, and what it listens and waits with.
        limits::require_files(2 * size + 8, "connecting to the other processes")?;
        // While it connects, it keeps its connection to the store busy, and afterwards it holds it.
        let own = store.another_connection()?;
        // Its threads for the network get the name of the one that makes them.
        let connect =
            move |store: &mut _, _: &_| named(c"ddp-mp gloo", || Group::new(store, &join));
        let group = own.ask(("connecting to all ranks under", prefix), timeout, connect)?;
        let (running, all_ended) = bounded(0);
        Ok(Self { group: Mutex::new(Some(group)), rank, size, running: Some(running), all_ended })
    }

    /// This rank's number in the group.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// In place. Every rank gets the same bits, and in every run: each part goes round the ring of ranks in an
    /// order of its own, so the order in which three or more floats are added depends on where they are.
    pub(crate) fn all_reduce(&self, tensor: &Tensor, reduce: Reduce) -> Result<GlooWork> {
        self.start(
            "all_reduce",
            Operation::AllReduce,
            Arguments { reduce, outputs: &[tensor], ..none() },
        )
    }

    /// In place on the root; leaves something else on the others.
    pub(crate) fn reduce(&self, tensor: &Tensor, root: usize, reduce: Reduce) -> Result<GlooWork> {
        let arguments = Arguments { reduce, peer: root, outputs: &[tensor], ..none() };
        self.start("reduce", Operation::Reduce, arguments)
    }

    /// From the root to all, in place.
    pub(crate) fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<GlooWork> {
        let arguments = Arguments { peer: root, outputs: &[tensor], ..none() };
        self.start("broadcast", Operation::Broadcast, arguments)
    }

    /// Fills one of `outputs` from each rank.
    pub(crate) fn all_gather(&self, outputs: &[&Tensor], input: &Tensor) -> Result<GlooWork> {
        self.start(
            "all_gather",
            Operation::AllGather,
            Arguments { inputs: &[input], outputs, ..none() },
        )
    }

    /// Fills one of the root's `outputs` from each rank; the others have none.
    pub(crate) fn gather(
        &self,
        outputs: &[&Tensor],
        input: &Tensor,
        root: usize,
    ) -> Result<GlooWork> {
        let arguments = Arguments { peer: root, inputs: &[input], outputs, ..none() };
        self.start("gather", Operation::Gather, arguments)
    }

    /// Sends one of the root's `inputs` to each rank; the others have none.
    pub(crate) fn scatter(
        &self,
        output: &Tensor,
        inputs: &[&Tensor],
        root: usize,
    ) -> Result<GlooWork> {
        let arguments = Arguments { peer: root, inputs, outputs: &[output], ..none() };
        self.start("scatter", Operation::Scatter, arguments)
    }

    /// Reduces `input`, of as many equal parts as there are ranks, and gives each rank one.
    pub(crate) fn reduce_scatter(
        &self,
        output: &Tensor,
        input: &Tensor,
        reduce: Reduce,
    ) -> Result<GlooWork> {
        let arguments = Arguments { reduce, inputs: &[input], outputs: &[output], ..none() };
        self.start("reduce_scatter", Operation::ReduceScatter, arguments)
    }

    /// Sends as many rows of `input` to each rank as `input_splits` says, and fills as many of `output` from each
    /// as `output_splits` says; equal parts, if both are empty.
    pub(crate) fn all_to_all(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_splits: &[i64],
        input_splits: &[i64],
    ) -> Result<GlooWork> {
        if input_splits.len() != output_splits.len() {
            let reason = "splits are for all ranks, on both sides".to_string();
            return Err(Error::Gloo { doing: "all_to_all", reason });
        }
        let arguments = Arguments {
            inputs: &[input],
            outputs: &[output],
            input_splits,
            output_splits,
            ..none()
        };
        self.start("all_to_all", Operation::AllToAll, arguments)
    }

    /// Ends when all ranks have called it, and what they started before has ended.
    pub(crate) fn barrier(&self) -> Result<GlooWork> {
        self.start("barrier", Operation::Barrier, none())
    }

    /// To one rank. What has one tag arrives in order. Has ended when the system has taken it over.
    pub(crate) fn send(&self, tensor: &Tensor, destination: usize, tag: u16) -> Result<GlooWork> {
        let arguments = Arguments { peer: destination, tag, inputs: &[tensor], ..none() };
        self.start("send", Operation::Send, arguments)
    }

    /// From one rank.
    pub(crate) fn recv(&self, tensor: &Tensor, source: usize, tag: u16) -> Result<GlooWork> {
        let arguments = Arguments { peer: source, tag, outputs: &[tensor], ..none() };
        self.start("recv", Operation::Recv, arguments)
    }

    /// Has all operations fail at once, here and, as soon as they notice, on all other ranks. The group is of no
    /// use afterwards.
    pub(crate) fn abort(&self) -> Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        let aborted = group.as_mut().map_or(Ok(()), Group::abort);
        aborted.map_err(|reason| Error::Gloo { doing: "abort", reason })
    }

    fn start(
        &self,
        doing: &'static str,
        operation: Operation,
        arguments: Arguments<'_>,
    ) -> Result<GlooWork> {
        let fail = |reason| Error::Gloo { doing, reason: plain(reason) };
        let Arguments { reduce, peer, tag, inputs, outputs, input_splits, output_splits } =
            arguments;
        let mut tensors = inputs.iter().chain(outputs);
        // Gloo goes by the address and the number of elements.
        if tensors.any(|tensor| tensor.device() != Device::Cpu || !tensor.is_contiguous()) {
            return Err(fail("its tensors must be contiguous and on the CPU".into()));
        }
        if peer >= self.size {
            return Err(fail(format!("there is no rank {peer} in a group of {}", self.size)));
        }
        let handles = |tensors: &[&Tensor]| -> Vec<*mut C_tensor> {
            tensors.iter().map(|tensor| raw(tensor)).collect()
        };
        let (inputs, outputs) = (handles(inputs), handles(outputs));
        let or_null =
            |splits: &[i64]| if splits.is_empty() { ptr::null() } else { splits.as_ptr() };
        let call = Call {
            operation,
            reduce: reduce as u8,
            peer: peer as i32,
            tag: i32::from(tag),
            inputs: inputs.as_ptr(),
            inputs_len: inputs.len(),
            outputs: outputs.as_ptr(),
            outputs_len: outputs.len(),
            input_splits: or_null(input_splits),
            output_splits: or_null(output_splits),
            splits_len: input_splits.len(),
        };
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(group), Some(running)) = (group.as_mut(), self.running.clone()) else {
            return Err(fail("the group is gone".into()));
        };
        let (ending, result) = bounded(1);
        // SAFETY: pointers to live tensors and to splits, as many as is said: both lists of splits are equally long.
        unsafe { group.start(&call, Ended { result: ending, running }) }.map_err(fail)?;
        Ok(GlooWork { doing, result })
    }
}

/// What there is to say of a call; [`none`] of it, unless it says otherwise.
struct Arguments<'a> {
    reduce: Reduce,
    peer: usize,
    tag: u16,
    inputs: &'a [&'a Tensor],
    outputs: &'a [&'a Tensor],
    input_splits: &'a [i64],
    output_splits: &'a [i64],
}

fn none<'a>() -> Arguments<'a> {
    Arguments {
        reduce: Reduce::Sum,
        peer: 0,
        tag: 0,
        inputs: &[],
        outputs: &[],
        input_splits: &[],
        output_splits: &[],
    }
}

impl fmt::Debug for Gloo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, size) = (self.rank, self.size);
        f.debug_struct("Gloo").field("rank", &rank).field("size", &size).finish_non_exhaustive()
    }
}

impl Drop for Gloo {
    /// Ends what goes on, and then the connections. The destructor of `ProcessGroupGloo` joins threads that may be
    /// stuck in an operation: if one does not even end when it is told to, the group is left as it is, and goes
    /// with the process, which leaves with `_exit`.
    fn drop(&mut self) {
        self.running = None;
        if self.all_ended.try_recv() == Err(TryRecvError::Empty) {
            // What fails here shows in that it goes on.
            let _ = self.abort();
        }
        let all_ended = self.all_ended.recv_timeout(GRACE);
        let group = self.group.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match all_ended {
            Err(RecvTimeoutError::Disconnected) => drop(group),
            _ => mem::forget(group),
        }
    }
}

impl GlooWork {
    /// On which it arrives, once, how the operation has ended: for `select!`. See [`GlooWork::outcome`].
    ///
    /// Until then libtorch reads and writes the tensors, also if this is dropped; it has handles of its own, so
    /// their memory stays.
    pub(crate) fn ended(&self) -> &Receiver<std::result::Result<(), String>> {
        &self.result
    }

    /// An error of what has arrived.
    pub(crate) fn outcome(&self, result: std::result::Result<(), String>) -> Result<()> {
        result.map_err(|reason| Error::Gloo { doing: self.doing, reason: plain(reason) })
    }

    /// Waits until it has ended, which it does within the group's timeout, or `cancelled` closes: then the group
    /// must be aborted before the tensors are used again.
    pub(crate) fn wait(&self, cancelled: &Receiver<Infallible>) -> Result<()> {
        let result = select_biased! {
            recv(self.result) -> result => result.unwrap_or_else(|_| Err("waited for twice".into())),
            recv(cancelled) -> _ => Err("given up, because the run ends".into()),
        };
        self.outcome(result)
    }
}

/// Refuses what cannot be `GLOO_SOCKET_IFNAME` on this machine, before anybody relies on it.
///
/// # Errors
/// [`Error::Input`] that names what is no network interface.
pub(crate) fn check_interfaces(list: &str) -> Result<()> {
    let known = Path::new("/sys/class/net");
    let unknown = |name: &String| known.is_dir() && !known.join(name).exists();
    match interfaces(list)?.into_iter().find(unknown) {
        Some(name) => Err(Error::Input(format!(
            "GLOO_SOCKET_IFNAME={list}: {name} is not a network interface of this machine; ip link lists them"
        ))),
        None => Ok(()),
    }
}

/// The names in `GLOO_SOCKET_IFNAME`.
fn interfaces(list: &str) -> Result<Vec<String>> {
    let names: Vec<String> = list.split(',').map(|name| name.trim().to_owned()).collect();
    if names.iter().any(String::is_empty) {
        return Err(Error::Input(format!(
            "GLOO_SOCKET_IFNAME={list}: there is an empty name; list network interfaces, such as eth0,eth1"
        )));
    }
    Ok(names)
}

/// Waits until every rank has come to `place`. Returns those that have not.
fn meet(
    store: &TcpStore,
    place: &str,
    rank: usize,
    size: usize,
    timeout: Duration,
) -> Result<Vec<usize>> {
    let all: Vec<String> = (0..size).map(|rank| format!("{place}/{rank}")).collect();
    store.set(&all[rank], b"")?;
    if store.wait(&all, timeout)? {
        return Ok(Vec::new());
    }
    let mut missing = Vec::new();
    for (rank, key) in all.iter().enumerate() {
        if !store.check(std::slice::from_ref(key))? {
            missing.push(rank);
        }
    }
    Ok(missing)
}

/// Without the place in Gloo's source that its messages begin with.
fn plain(reason: String) -> String {
    match reason.split_once("] ") {
        Some((place, rest)) if place.starts_with('[') && place.contains(".cc:") => rest.into(),
        _ => reason,
    }
}
