//! Groups that PyTorch processes can join: libtorch's own `TCPStore` and `ProcessGroupGloo`.
//!
//! [`ProcessGroup`](super::ProcessGroup) compares what ranks call, allows several ranks per process, and ends all
//! ranks when one fails. For that, its processes exchange more than PyTorch's do. The groups here use PyTorch's
//! protocol only, so each member can be a Python or a Rust process.

use std::env;
use std::fmt::Display;
use std::time::Duration;

use tch::{Device, Tensor};

use super::call::{refuse, undefined};
use super::{ReduceOp, device_name};
use crate::error::{Error, Result};
pub use crate::ffi::store::TcpStore;
use crate::ffi::{GlooCall, GlooGroup, TorchResult};
use crate::operation::Operation;

/// One member of a group of CPU ranks, in this process or another, in Rust or in Python.
///
/// Follows `torch.distributed.ProcessGroupGloo`, which PyTorch uses for the backend `gloo`. The methods have the
/// names and the argument order of `torch.distributed`. Each blocks until this rank's part of the operation is
/// done. It fails if the group's timeout expires or a rank that it needs is gone. Tensors must be contiguous and on
/// the CPU.
///
/// **All ranks must make the same calls in the same order, with the same dtypes and shapes.** As in PyTorch,
/// nothing checks this, and Gloo ends the process if a message has an unexpected length. [`ProcessGroup`] does
/// check it; use that where all ranks are in Rust.
///
/// A rank that exits closes its connections, and the rank that serves the store closes the store, too: end with a
/// [`ProcessGroupGloo::barrier`]. After an error the group is unusable, and dropping it makes the other ranks fail.
///
/// In Python, the other rank of the example is
///
/// ```python
/// store = dist.PrefixStore("world", dist.TCPStore("127.0.0.1", port, is_master=False))
/// group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))
/// group.allreduce([tensor]).wait()
/// group.broadcast(tensor, 1).wait()
/// group.barrier().wait()
/// ```
///
/// In the Rust example, a thread takes the place of the Python rank:
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
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
pub struct ProcessGroupGloo(GlooGroup);

impl ProcessGroupGloo {
    /// Joins a group of `size` ranks as rank `rank`. Returns when this rank is connected to all others. The ranks
    /// find each other under `prefix`, which no earlier group may have used in this store.
    ///
    /// Follows `ProcessGroupGloo(PrefixStore(prefix, store), rank, size, timeout)`, of the same PyTorch version
    /// ([`ffi::version`](crate::ffi::version)). As there, connections use the network interfaces in
    /// `GLOO_SOCKET_IFNAME`. Without that variable, they use the interface that reaches the store.
    ///
    /// # Errors
    /// [`Error::Input`] if there is no such rank; [`Error::Store`] if other ranks do not join within `timeout`
    /// or cannot be reached.
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
        let interfaces: Option<String> =
            env::var_os("GLOO_SOCKET_IFNAME").map(|names| names.to_string_lossy().into());
        GlooGroup::new_plain(store, prefix, rank, size, timeout, interfaces.as_deref()).map(Self)
    }

    /// Returns this rank's number in the group, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Combines `tensor` over all ranks and leaves the result in every rank's `tensor`.
    ///
    /// Follows `torch.distributed.all_reduce`. Every rank gets the same bits. Gloo determines the order in which
    /// three or more floats are added.
    ///
    /// # Errors
    /// [`Error::Gloo`] if the operation fails, here or on the network; [`Error::Input`] and
    /// [`Error::Input`] for tensors and ops that cannot be used: Gloo has no [`ReduceOp::Avg`] and no
    /// [`ReduceOp::PremulSum`].
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let reduce = reduction(Operation::AllReduce, op, tensor)?;
        let call = GlooCall { reduce, outputs: &[tensor], ..GlooCall::default() };
        self.run(Operation::AllReduce, call)
    }

    /// Combines `tensor` over all ranks and leaves the result in rank `dst`'s `tensor`. The content of the other
    /// ranks' `tensor` is unspecified afterwards.
    ///
    /// Follows `torch.distributed.reduce`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn reduce(&self, tensor: &mut Tensor, dst: usize, op: ReduceOp) -> Result<()> {
        let reduce = reduction(Operation::Reduce, op, tensor)?;
        let call = GlooCall { reduce, peer: dst, outputs: &[tensor], ..GlooCall::default() };
        self.run(Operation::Reduce, call)
    }

    /// Copies `tensor` of rank `src` into every other rank's `tensor`.
    ///
    /// Follows `torch.distributed.broadcast`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn broadcast(&self, tensor: &mut Tensor, src: usize) -> Result<()> {
        let call = GlooCall { peer: src, outputs: &[tensor], ..GlooCall::default() };
        self.run(Operation::Broadcast, call)
    }

    /// Copies every rank's `tensor` into `tensor_list[rank]` of every rank.
    ///
    /// Follows `torch.distributed.all_gather`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn all_gather(&self, tensor_list: &mut [Tensor], tensor: &Tensor) -> Result<()> {
        let outputs = tensor_list.iter().collect::<Vec<_>>();
        let call = GlooCall { inputs: &[tensor], outputs: &outputs, ..GlooCall::default() };
        self.run(Operation::AllGather, call)
    }

    /// Copies every rank's `tensor` into `gather_list[rank]` of rank `dst`; the other ranks pass no list.
    ///
    /// Follows `torch.distributed.gather`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn gather(
        &self,
        tensor: &Tensor,
        gather_list: Option<&mut [Tensor]>,
        dst: usize,
    ) -> Result<()> {
        let outputs = self.list(Operation::Gather, gather_list.as_deref(), dst)?;
        let inputs = &[tensor];
        let call = GlooCall { peer: dst, inputs, outputs: &outputs, ..GlooCall::default() };
        self.run(Operation::Gather, call)
    }

    /// Copies `scatter_list[rank]` of rank `src` into every rank's `tensor`; the other ranks pass no list.
    ///
    /// Follows `torch.distributed.scatter`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn scatter(
        &self,
        tensor: &mut Tensor,
        scatter_list: Option<&[Tensor]>,
        src: usize,
    ) -> Result<()> {
        let inputs = self.list(Operation::Scatter, scatter_list, src)?;
        let outputs = &[&*tensor];
        let call = GlooCall { peer: src, inputs: &inputs, outputs, ..GlooCall::default() };
        self.run(Operation::Scatter, call)
    }

    /// Combines `input` over all ranks and leaves part `rank` of the result in `output`. `input` has
    /// [`size`](Self::size) times the rows of `output`.
    ///
    /// Follows `torch.distributed.reduce_scatter_single`, which was `reduce_scatter_tensor` before PyTorch 2.13.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    #[doc(alias = "reduce_scatter_tensor")]
    pub fn reduce_scatter_single(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        let operation = Operation::ReduceScatter;
        check(operation, [&*output, input])?; // their shapes are asked for here
        let reduce = reduction(operation, op, input)?;
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
        let outputs = &[&*output];
        let call = GlooCall { reduce, inputs: &[input], outputs, ..GlooCall::default() };
        self.run(Operation::ReduceScatter, call)
    }

    /// Sends `input_split_sizes[rank]` rows of `input` to each rank, and fills `output_split_sizes[rank]` rows of
    /// `output` from each. Pass both sizes or neither; without them, the parts are equal.
    ///
    /// Follows `torch.distributed.all_to_all_single`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn all_to_all_single(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        output_split_sizes: Option<&[i64]>,
        input_split_sizes: Option<&[i64]>,
    ) -> Result<()> {
        let call = GlooCall {
            inputs: &[input],
            outputs: &[output],
            input_splits: input_split_sizes.unwrap_or_default(),
            output_splits: output_split_sizes.unwrap_or_default(),
            ..GlooCall::default()
        };
        let mut splits = call.input_splits.iter().chain(call.output_splits);
        if let Some(split) = splits.find(|&&split| split < 0) {
            return refuse(Operation::AllToAll, format!("{split} rows cannot be sent"));
        }
        self.run(Operation::AllToAll, call)
    }

    /// Waits until all ranks have called this. Follows `torch.distributed.barrier`.
    ///
    /// # Errors
    /// [`Error::Gloo`] if other ranks do not call it in time, or are gone.
    pub fn barrier(&self) -> Result<()> {
        self.run(Operation::Barrier, GlooCall::default())
    }

    /// Sends `tensor` to rank `dst`. Messages with the same tag arrive in order.
    ///
    /// Follows `torch.distributed.send`. Returns when the operating system has the data; the receiver may not have
    /// it yet.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn send(&self, tensor: &Tensor, dst: usize, tag: u16) -> Result<()> {
        let call = GlooCall { peer: dst, tag, inputs: &[tensor], ..GlooCall::default() };
        self.run(Operation::Send, call)
    }

    /// Receives into `tensor` the message that rank `src` sends with this tag.
    ///
    /// Follows `torch.distributed.recv`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroupGloo::all_reduce`].
    pub fn recv(&self, tensor: &mut Tensor, src: usize, tag: u16) -> Result<()> {
        let call = GlooCall { peer: src, tag, outputs: &[tensor], ..GlooCall::default() };
        self.run(Operation::Recv, call)
    }

    /// Checks what libtorch would not report as an error, then runs an operation, and waits for its end.
    fn run(&self, operation: Operation, call: GlooCall<'_>) -> Result<()> {
        check(operation, call.inputs.iter().chain(call.outputs).copied())?;
        let is_message = matches!(operation, Operation::Send | Operation::Recv);
        if is_message && call.peer == self.rank() {
            let rank = self.rank();
            return refuse(operation, format!("this is rank {rank} itself; copy the tensor"));
        }
        let gone = |_| Err(Error::Gloo { doing: operation.into(), reason: "it is gone".into() });
        self.0.start(operation, call)?.recv().unwrap_or_else(gone)
    }

    /// Returns the list that only rank `root` passes; empty on other ranks.
    fn list<'a>(
        &self,
        operation: Operation,
        list: Option<&'a [Tensor]>,
        root: usize,
    ) -> Result<Vec<&'a Tensor>> {
        let rank = self.rank();
        if list.is_some() != (root == rank) {
            let why = "must pass the list, and no other rank may; this is rank";
            return refuse(operation, format!("rank {root} {why} {rank}"));
        }
        Ok(list.unwrap_or_default().iter().collect())
    }
}

/// Returns Gloo's number of a reduction, a `c10d::ReduceOp::RedOpType`.
fn reduction(operation: Operation, op: ReduceOp, tensor: &Tensor) -> Result<u8> {
    check(operation, [tensor])?;
    op.check_kind(operation, tensor.f_kind().doing("kind")?)?;
    match op {
        ReduceOp::Sum => Ok(0),
        ReduceOp::Product => Ok(2),
        ReduceOp::Min => Ok(3),
        ReduceOp::Max => Ok(4),
        ReduceOp::Band => Ok(5),
        ReduceOp::Bor => Ok(6),
        ReduceOp::Bxor => Ok(7),
        ReduceOp::Avg | ReduceOp::PremulSum(_) => Err(Error::unsupported(format!(
            "{operation}({op}): Gloo has none; multiply the tensor first, and use sum"
        ))),
    }
}

/// Checks the tensors for problems that libtorch would not report as errors.
fn check<'a>(
    operation: impl Display + Copy,
    tensors: impl IntoIterator<Item = &'a Tensor>,
) -> Result<()> {
    for tensor in tensors {
        if !tensor.defined() {
            return undefined(operation);
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
