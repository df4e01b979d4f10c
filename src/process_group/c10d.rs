//! Groups of which PyTorch's own processes can be members: libtorch's `TCPStore` and `ProcessGroupGloo` as they are.
//!
//! [`ProcessGroup`](super::ProcessGroup) compares what ranks call, has several ranks in a process and lets a failure
//! end all of them; for that its processes exchange more than PyTorch's do. The groups here speak PyTorch's language
//! and no other: any member can be a process in Python, and any one in Rust.

use std::env;
use std::time::Duration;

use crossbeam::channel::never;
use tch::{Device, Tensor};

use super::arguments::refuse;
use super::{ReduceOp, device_name};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::{Gloo, GlooWork, Reduce};
use crate::operation::Operation;

/// A key-value store in which processes meet: one serves it, the others connect to it.
///
/// Follows `torch.distributed.TCPStore`, which can connect to this one, and this to it. Clones are the same
/// connection.
#[derive(Debug, Clone)]
pub struct TcpStore(ffi::TcpStore);

impl TcpStore {
    /// Serves a store at `host`, an address or a name of this machine, as long as this, a clone, or a group made with
    /// it is there. Port 0 takes a free one, see [`TcpStore::port`]. A request waits for `timeout` at most.
    ///
    /// Follows `TCPStore(host, port, is_master=True, wait_for_workers=False)`.
    ///
    /// # Errors
    /// [`Error::Store`] if it cannot listen there.
    pub fn serve(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        ffi::TcpStore::serve(host, port, timeout, never()).map(Self)
    }

    /// Connects to the store at `host`, which need not be there yet, for `timeout` at most.
    ///
    /// Follows `TCPStore(host, port, is_master=False)`.
    ///
    /// # Errors
    /// [`Error::Store`] if there is none in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        ffi::TcpStore::connect(host, port, timeout, never()).map(Self)
    }

    /// Where the server listens.
    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// Sets `key` to up to 8 MiB. Follows `TCPStore.set`.
    ///
    /// # Errors
    /// [`Error::Store`] if the connection is gone, which the next request may be the first to find;
    /// [`Error::Input`] for what is too long.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }

    /// The value of `key`, waiting up to `timeout` until somebody sets it; `None` if nobody does. Follows
    /// `TCPStore.get`. Other threads can use the store meanwhile.
    ///
    /// # Errors
    /// As [`TcpStore::set`].
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        self.0.get(key, timeout)
    }
}

/// One member of a group of CPU ranks, in this process or another, in Rust or in Python.
///
/// Follows `torch.distributed.ProcessGroupGloo`, which `torch.distributed` calls for the backend `gloo`; the methods
/// are those of `torch.distributed` by name and order of arguments. Each blocks until the operation is done here, and
/// fails when the group's timeout is over or a rank that it needs is gone. Tensors must be contiguous and on the CPU.
///
/// **All ranks must make the same calls in the same order, with the same kinds and shapes.** As in PyTorch nobody
/// compares that, and Gloo ends the process at a message of another length than expected. [`ProcessGroup`] does
/// compare; use it where all ranks are in Rust.
///
/// A rank that leaves takes its connections with it, and the one that serves the store that as well: end with a
/// [`ProcessGroupGloo::barrier`]. After an error the group is of no use, and dropping it makes the others fail.
///
/// In Python the other half of the example is
///
/// ```python
/// store = dist.PrefixStore("world", dist.TCPStore("127.0.0.1", port, is_master=False))
/// group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))
/// group.allreduce([tensor]).wait()
/// group.broadcast(tensor, 1).wait()
/// group.barrier().wait()
/// ```
///
/// and here the other rank is a thread:
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// use std::thread;
/// use std::time::Duration;
///
/// use ddp_mp::ReduceOp;
/// use ddp_mp::process_group::c10d::{ProcessGroupGloo, TcpStore};
/// use tch::Tensor;
///
/// const TIMEOUT: Duration = Duration::from_secs(60);
///
/// fn rank(store: &TcpStore, rank: usize) -> ddp_mp::Result<()> {
///     let group = ProcessGroupGloo::new(store, "world", rank, 2, TIMEOUT)?;
///     let mut tensor = Tensor::from_slice(&[rank as f32 + 1.0, 1.0]);
///     group.all_reduce(&mut tensor, ReduceOp::Sum)?;
///     assert_eq!(tensor, Tensor::from_slice(&[3f32, 2.0]));
///     let mut tensor = Tensor::from_slice(&[rank as i64]);
///     group.broadcast(&mut tensor, 1)?;
///     assert_eq!(tensor, Tensor::from_slice(&[1i64]));
///     group.barrier()
/// }
///
/// let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT)?;
/// let port = store.port();
/// let other = thread::spawn(move || rank(&TcpStore::connect("127.0.0.1", port, TIMEOUT)?, 1));
/// rank(&store, 0)?;
/// other.join().expect("it does not panic")?;
/// # Ok(())
/// # }
/// ```
///
/// [`ProcessGroup`]: super::ProcessGroup
#[derive(Debug)]
pub struct ProcessGroupGloo(Gloo);

impl ProcessGroupGloo {
    /// Joins a group of `size` ranks as its rank `rank`, and returns when this one is connected to all others. They
    /// meet under `prefix`, which no group before has used in this store.
    ///
    /// Follows `ProcessGroupGloo(PrefixStore(prefix, store), rank, size, timeout)`, of the same version of PyTorch
    /// ([`ffi::version`]). As there, the connections go over the network interfaces in
    /// `GLOO_SOCKET_IFNAME`; without it over the one on the way to the store.
    ///
    /// # Errors
    /// [`Error::Input`] when there is no such rank; [`Error::Store`] when others do not come within `timeout` or
    /// cannot be reached.
    pub fn new(
        store: &TcpStore,
        prefix: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        if rank >= size || i32::try_from(size).is_err() {
            return refuse(
                Operation::Init,
                format!("there is no rank {rank} in a group of {size}; ranks count from 0"),
            );
        }
        let interfaces = env::var_os("GLOO_SOCKET_IFNAME").map(|it| it.to_string_lossy().into());
        let interfaces: Option<String> = interfaces;
        Gloo::new_plain(&store.0, prefix, rank, size, timeout, interfaces.as_deref()).map(Self)
    }

    /// This rank's number in the group, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.0.size()
    }

    /// Combines `tensor` over all ranks and leaves the result in every rank's `tensor`.
    ///
    /// Follows `torch.distributed.all_reduce`. Every rank gets the same bits; the order in which three or more floats
    /// are added is Gloo's.
    ///
    /// # Errors
    /// [`Error::Gloo`] when it fails, here or on the way; [`Error::Input`] and [`Error::Unsupported`] for tensors and
    /// ops that cannot be: Gloo has no [`ReduceOp::Avg`] and no [`ReduceOp::PremulSum`].
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let reduce = self.reduction(Operation::AllReduce, op, tensor)?;
        done(self.0.all_reduce(tensor, reduce))
    }

    /// Combines `tensor` over all ranks and leaves the result in rank `dst`'s `tensor`; what the others have then is
    /// unspecified.
    ///
    /// Follows `torch.distributed.reduce`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn reduce(&self, tensor: &mut Tensor, dst: usize, op: ReduceOp) -> Result<()> {
        let reduce = self.reduction(Operation::Reduce, op, tensor)?;
        done(self.0.reduce(tensor, dst, reduce))
    }

    /// Copies `tensor` of rank `src` into every other rank's `tensor`.
    ///
    /// Follows `torch.distributed.broadcast`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn broadcast(&self, tensor: &mut Tensor, src: usize) -> Result<()> {
        check(Operation::Broadcast, &[tensor])?;
        done(self.0.broadcast(tensor, src))
    }

    /// Copies every rank's `tensor` into `tensor_list[rank]` of every rank.
    ///
    /// Follows `torch.distributed.all_gather`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn all_gather(&self, tensor_list: &mut [Tensor], tensor: &Tensor) -> Result<()> {
        let outputs = self.list(Operation::AllGather, Some(tensor_list), self.rank(), tensor)?;
        done(self.0.all_gather(&outputs, tensor))
    }

    /// Copies every rank's `tensor` into `gather_list[rank]` of rank `dst`; the others pass no list.
    ///
    /// Follows `torch.distributed.gather`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn gather(
        &self,
        tensor: &Tensor,
        gather_list: Option<&mut [Tensor]>,
        dst: usize,
    ) -> Result<()> {
        let outputs = self.list(Operation::Gather, gather_list.as_deref(), dst, tensor)?;
        done(self.0.gather(&outputs, tensor, dst))
    }

    /// Copies `scatter_list[rank]` of rank `src` into every rank's `tensor`; the others pass no list.
    ///
    /// Follows `torch.distributed.scatter`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn scatter(
        &self,
        tensor: &mut Tensor,
        scatter_list: Option<&[Tensor]>,
        src: usize,
    ) -> Result<()> {
        let inputs = self.list(Operation::Scatter, scatter_list, src, tensor)?;
        done(self.0.scatter(tensor, &inputs, src))
    }

    /// Combines `input` over all ranks and leaves part `rank` of the result in `output`: `input` has as many times the
    /// rows of `output` as there are ranks.
    ///
    /// Follows `torch.distributed.reduce_scatter_tensor`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn reduce_scatter_tensor(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        let operation = Operation::ReduceScatter;
        let reduce = self.reduction(operation, op, input)?;
        check(operation, &[output, input])?;
        let (part, whole, size) = (output.size(), input.size(), self.size());
        let fits = match (&part[..], &whole[..]) {
            ([part, columns @ ..], [whole, all @ ..]) => {
                part.checked_mul(size as i64) == Some(*whole) && columns == all
            }
            _ => false,
        };
        if !fits {
            return refuse(
                operation,
                format!("the input of shape {whole:?} is not {size} times the output, {part:?}"),
            );
        }
        done(self.0.reduce_scatter(output, input, reduce))
    }

    /// Sends `input_split_sizes[rank]` rows of `input` to each rank, and fills `output_split_sizes[rank]` rows of
    /// `output` from each; equal parts without the sizes, which are both there or both not.
    ///
    /// Follows `torch.distributed.all_to_all_single`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn all_to_all_single(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        output_split_sizes: Option<&[i64]>,
        input_split_sizes: Option<&[i64]>,
    ) -> Result<()> {
        check(Operation::AllToAll, &[output, input])?;
        let (to, from) =
            (input_split_sizes.unwrap_or_default(), output_split_sizes.unwrap_or_default());
        if let Some(split) = to.iter().chain(from).find(|&&split| split < 0) {
            return refuse(Operation::AllToAll, format!("{split} rows cannot be sent"));
        }
        done(self.0.all_to_all(output, input, from, to))
    }

    /// Returns when all ranks have called it. Follows `torch.distributed.barrier`.
    ///
    /// # Errors
    /// [`Error::Gloo`] when others do not come in time, or are gone.
    pub fn barrier(&self) -> Result<()> {
        done(self.0.barrier())
    }

    /// Sends `tensor` to rank `dst`. What has one tag arrives in order.
    ///
    /// Follows `torch.distributed.send`. Returns when the system has taken it over, the other may not have it yet.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn send(&self, tensor: &Tensor, dst: usize, tag: u16) -> Result<()> {
        self.check_message(Operation::Send, tensor, dst)?;
        done(self.0.send(tensor, dst, tag))
    }

    /// Receives into `tensor` what rank `src` sends with this tag.
    ///
    /// Follows `torch.distributed.recv`.
    ///
    /// # Errors
    /// As [`ProcessGroupGloo::all_reduce`].
    pub fn recv(&self, tensor: &mut Tensor, src: usize, tag: u16) -> Result<()> {
        self.check_message(Operation::Recv, tensor, src)?;
        done(self.0.recv(tensor, src, tag))
    }

    fn reduction(&self, operation: Operation, op: ReduceOp, tensor: &Tensor) -> Result<Reduce> {
        check(operation, &[tensor])?;
        op.check_kind(operation, tensor.f_kind().map_err(Error::torch("kind"))?)?;
        match op {
            ReduceOp::Sum => Ok(Reduce::Sum),
            ReduceOp::Product => Ok(Reduce::Product),
            ReduceOp::Min => Ok(Reduce::Min),
            ReduceOp::Max => Ok(Reduce::Max),
            ReduceOp::Band => Ok(Reduce::Band),
            ReduceOp::Bor => Ok(Reduce::Bor),
            ReduceOp::Bxor => Ok(Reduce::Bxor),
            ReduceOp::Avg | ReduceOp::PremulSum(_) => Err(Error::Unsupported(format!(
                "{operation}({op}): Gloo has none; multiply the tensor first, and use sum"
            ))),
        }
    }

    fn check_message(&self, operation: Operation, tensor: &Tensor, peer: usize) -> Result<()> {
        check(operation, &[tensor])?;
        if peer == self.rank() {
            return refuse(operation, format!("this is rank {peer} itself; copy the tensor"));
        }
        Ok(())
    }

    /// The list that rank `root` alone passes, with a tensor like `tensor` for each rank; nothing on others.
    fn list<'a>(
        &self,
        operation: Operation,
        list: Option<&'a [Tensor]>,
        root: usize,
        tensor: &Tensor,
    ) -> Result<Vec<&'a Tensor>> {
        check(operation, &[tensor])?;
        if list.is_some() != (root == self.rank()) {
            let rank = self.rank();
            return refuse(
                operation,
                format!(
                    "rank {root} must pass the list, and no other rank may; this is rank {rank}"
                ),
            );
        }
        let list: Vec<&Tensor> = list.unwrap_or_default().iter().collect();
        check(operation, &list)?;
        Ok(list)
    }
}

/// What libtorch would not say in an error.
fn check(operation: Operation, tensors: &[&Tensor]) -> Result<()> {
    for tensor in tensors {
        if !tensor.defined() {
            return refuse(operation, "the tensor is undefined; make one first".into());
        }
        if tensor.device() != Device::Cpu {
            let device = device_name(tensor.device());
            return refuse(operation, format!("the tensor is on {device}; move it to the CPU"));
        }
        if tensor.is_sparse() || !tensor.is_contiguous() {
            return refuse(operation, "the tensor is not contiguous; pass a copy that is".into());
        }
    }
    Ok(())
}

fn done(work: Result<GlooWork>) -> Result<()> {
    work?.wait(&never())
}
