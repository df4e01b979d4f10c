//! Collectives between CPU ranks of several processes: libtorch's `ProcessGroupGloo`, with a timeout for every wait.

use std::convert::Infallible;
use std::mem;
use std::path::Path;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};
use parking_lot::Mutex;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use crate::error::{Error, Result, opaque_debug};
use crate::ffi::c10d::{GlooArguments, GlooEnd, GlooHandle, plain};
use crate::ffi::shim::raw;
use crate::ffi::store::{Gathered, TcpStore};
use crate::operation::Operation;
use crate::os::limits;
use crate::runtime::MAX_WAIT;

/// One rank of a group of connected processes.
///
/// Every rank must make the same calls in the same order, with the same dtypes and shapes. Gloo does not check this.
/// Messages of different lengths abort the process, because Gloo throws on a thread of its own. Compare the calls of
/// the ranks before making them.
pub(crate) struct GlooGroup {
    /// Locked, because only one thread may call it at a time. The calls do not block. `None` while `self` is dropped.
    group: Mutex<Option<GlooHandle>>,
    /// This rank's number in the group.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) size: usize,
    /// Every running operation holds a clone. The channel closes when none is left. `None` while `self` is dropped.
    running: Option<Sender<Infallible>>,
    all_ended: Receiver<Infallible>,
}

/// How long to wait for aborted operations to end. After that, the group is leaked.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

impl GlooGroup {
    /// Joins a group of `size` ranks. Its rendezvous is under the prefix of `store`, which must be new for each group.
    /// Waits until all ranks are connected, at most for `timeout`, or until the store's requests are cancelled.
    ///
    /// Connecting fails after `timeout`; operations do not end by themselves. They use the network interfaces in
    /// `interfaces`, the value of `GLOO_SOCKET_IFNAME`. Without it, they use the interface on the route to the store.
    ///
    /// # Errors
    /// The error that `absent` returns for the missing ranks; [`Error::Gloo`] if ranks cannot be reached.
    pub(crate) fn new(
        store: &TcpStore,
        rank: usize,
        size: usize,
        timeout: Duration,
        socket_ifname: Option<&str>,
        absent: impl Fn(Vec<usize>) -> Error,
    ) -> Result<Self> {
        socket_ifname.map(interfaces).transpose()?; // an error before the ranks wait for each other
        let meet =
            |point| Gathered::of(store, point, [rank, size], &(), timeout, &absent, Gathered::All);
        meet("here")?;
        let mut gloo = Self::new_plain(store, "gloo", rank, size, timeout, socket_ifname)?;
        // From here on the caller ends operations that take too long: Gloo's clock runs on while the process is suspended.
        if let Some(group) = gloo.group.get_mut() {
            let never = group.set_timeout(MAX_WAIT);
            never.map_err(|reason| Error::Gloo { doing: "set the timeout", reason })?;
        }
        // A rank that is ready must not exit while others connect to it: their connection would fail.
        meet("connected")?;
        Ok(gloo)
    }

    /// Joins a group like [`GlooGroup::new`], but with only PyTorch's own rendezvous, under `prefix`. The other ranks
    /// may be PyTorch processes. Missing ranks are not named. A rank that is connected must stay until all ranks are.
    ///
    /// # Errors
    /// If ranks are missing or cannot be reached.
    pub(crate) fn new_plain(
        store: &TcpStore,
        prefix: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
        socket_ifname: Option<&str>,
    ) -> Result<Self> {
        let interfaces = socket_ifname.map_or_else(|| Ok(vec![]), interfaces)?;
        let (key, address) = (store.key(prefix), store.local_address().to_string());
        // Two connections per other rank, and the descriptors to listen and poll with.
        limits::require_files(2 * size + 8, "connecting to the other processes")?;
        // Gloo uses this connection to the store while it connects, and keeps it afterwards.
        let own = store.another_connection()?;
        let connect = move |store: &mut _, _: &_| {
            GlooHandle::new(store, &key, rank, size, timeout, &interfaces, &address)
        };
        let group = own.ask("connecting to all ranks under", prefix, timeout, connect)?;
        let (running_tx, ended_rx) = bounded(0);
        Ok(Self {
            group: Mutex::new(Some(group)),
            rank,
            size,
            running: Some(running_tx),
            all_ended: ended_rx,
        })
    }

    /// Makes all operations fail, here at once, and on other ranks as soon as they notice. The group cannot be used
    /// afterwards.
    pub(crate) fn abort(&self) -> Result<()> {
        let mut group = self.group.lock();
        let Some(group) = &mut *group else { return Ok(()) };
        group.abort().map_err(|reason| Error::Gloo { doing: "abort", reason })
    }

    /// Starts a collective, a send or a recv. Returns the channel that receives its result, once.
    ///
    /// A reduction has the same bits in every run. Each part goes round the ring from another rank, so the order in which
    /// three or more floats are added depends on their position. After `Reduce`, the result is undefined on all ranks but
    /// the root. A send ends when the operating system has taken the data. Tensors with the same tag arrive in order.
    ///
    /// Until then libtorch reads and writes the tensors, even if the channel is dropped. It has handles of its own, so
    /// their memory stays valid.
    pub(crate) fn start(
        &self,
        operation: Operation,
        call: GlooCall<'_>,
    ) -> Result<Receiver<Result<()>>> {
        let doing = operation.into();
        let fail = |reason| Error::Gloo { doing, reason: plain(reason) };
        let GlooCall { reduce, peer, tag, inputs, outputs, input_splits, output_splits } = call;
        let mut tensors = inputs.iter().chain(outputs);
        // Gloo uses only the address and the number of elements.
        if tensors.any(|tensor| tensor.device() != Device::Cpu || !tensor.is_contiguous()) {
            return Err(fail("its tensors must be contiguous and on the CPU".into()));
        }
        if peer >= self.size {
            return Err(fail(format!("there is no rank {peer} in a group of {}", self.size)));
        }
        if input_splits.len() != output_splits.len() {
            return Err(fail("splits are for all ranks, on both sides".into()));
        }
        let handles = |tensors: &[&Tensor]| -> Vec<*mut C_tensor> {
            tensors.iter().map(|tensor| raw(tensor)).collect()
        };
        let inputs = handles(inputs);
        let outputs = handles(outputs);
        let call = GlooArguments {
            operation,
            reduce,
            peer: peer as i32,
            tag: i32::from(tag),
            inputs: inputs.as_ptr(),
            inputs_len: inputs.len(),
            outputs: outputs.as_ptr(),
            outputs_len: outputs.len(),
            input_splits: input_splits.as_ptr(),
            output_splits: output_splits.as_ptr(),
            splits_len: input_splits.len(),
        };
        let mut group = self.group.lock();
        let (Some(group), Some(running)) = (group.as_mut(), self.running.clone()) else {
            return Err(fail("the group is gone".into()));
        };
        let (result_tx, result_rx) = bounded(1);
        // SAFETY: pointers to live tensors and splits, with their lengths; both lists of splits are equally long.
        unsafe { group.start(&call, GlooEnd { doing, result: result_tx, running }) }
            .map_err(fail)?;
        Ok(result_rx)
    }
}

/// The arguments of an operation, which uses some of them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GlooCall<'a> {
    /// The reduction, a `c10d::ReduceOp::RedOpType`. Gloo has no average, and no bitwise reduction of floats.
    pub reduce: u8,
    /// The root, the destination or the source.
    pub peer: usize,
    pub tag: u16,
    pub inputs: &'a [&'a Tensor],
    pub outputs: &'a [&'a Tensor],
    /// The rows of the input for each rank.
    pub input_splits: &'a [i64],
    /// The rows of the output from each rank.
    pub output_splits: &'a [i64],
}

opaque_debug!(GlooGroup);

impl Drop for GlooGroup {
    /// Aborts running operations, then closes the connections. The destructor of `ProcessGroupGloo` joins threads that
    /// may be stuck in an operation. If one does not end after the abort, the group is leaked until the process exits
    /// with `_exit`.
    fn drop(&mut self) {
        self.running = None;
        if self.all_ended.try_recv() == Err(TryRecvError::Empty) {
            // If the abort fails, the operations do not end, which is checked below.
            let _ = self.abort();
        }
        let all_ended = self.all_ended.recv_timeout(ABORT_TIMEOUT);
        let group = self.group.get_mut().take();
        match all_ended {
            Err(RecvTimeoutError::Disconnected) => drop(group),
            _ => mem::forget(group),
        }
    }
}

/// Checks that `list`, the value of `GLOO_SOCKET_IFNAME`, is valid on this machine.
///
/// # Errors
/// [`Error::Input`] that names the first unknown network interface.
pub(crate) fn check_interfaces(list: &str) -> Result<()> {
    let known = Path::new("/sys/class/net");
    let unknown = |name: &String| known.is_dir() && !known.join(name).exists();
    match interfaces(list)?.into_iter().find(unknown) {
        Some(name) => Err(Error::usage(format!(
            "GLOO_SOCKET_IFNAME={list}: {name} is not a network interface of this machine; ip link lists them"
        ))),
        None => Ok(()),
    }
}

/// Returns the names in `GLOO_SOCKET_IFNAME`.
fn interfaces(list: &str) -> Result<Vec<String>> {
    let names: Vec<String> = list.split(',').map(|name| name.trim().to_owned()).collect();
    if names.iter().any(String::is_empty) {
        return Err(Error::usage(format!(
            "GLOO_SOCKET_IFNAME={list}: there is an empty name; list network interfaces, such as eth0,eth1"
        )));
    }
    Ok(names)
}

#[cfg(test)]
mod tests;
