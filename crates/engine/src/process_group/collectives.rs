//! Every collective, with PyTorch's names and argument order.

use std::time::Duration;

use tch::Tensor;

use super::call::Call;
use super::contiguous::Contiguous;
use super::{ProcessGroup, ReduceOp};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi;
use crate::operation::Operation;

impl ProcessGroup {
    /// Combines `tensor` over all ranks and leaves the result in every rank's `tensor`.
    ///
    /// Follows `torch.distributed.all_reduce`. Any shape, also empty; the same on every rank. Dtypes: float64,
    /// float32, float16, bfloat16 (the last two are reduced in float32), int64, int32, int16, int8, uint8 and bool,
    /// as far as the operation makes sense for them ([`ReduceOp`]). With `threaded` and `gloo`, the reduction runs in
    /// rank order. So the result has the same bits on every rank, in every run and in every layout of the ranks. Partial
    /// sums and products of float16 and bfloat16 stay float32 until the end, also on the network. So an average of float16
    /// is finite even if the sum is not.
    ///
    /// On a GPU, this launches the operation and returns, like every GPU operation.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if ranks differ, [`Error::Input`] for other dtypes, [`Error::OverlappingTensors`],
    /// [`Error::Input`] for a tensor that is undefined or on another device, [`Error::Timeout`],
    /// [`Error::PeerExited`] and [`Error::Cancelled`] if other ranks do not make the call, and the backend's own
    /// errors. After an error the content of `tensor` is unspecified.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(3, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut tensor = Tensor::from_slice(&[rank.rank() as f32, 1.0]);
    ///     group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ///     assert_eq!(Vec::<f32>::try_from(&tensor)?, [0.0 + 1.0 + 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let (shape, tensors) = (ffi::shape(tensor)?, std::slice::from_ref(&*tensor));
        let call = Call::of(Operation::AllReduce, &shape, tensors, tensors);
        self.collective(Call { reduce_op: Some(op), ..call })
    }

    /// Combines `tensor` over all ranks and leaves the result in rank `dst`'s `tensor`. The other ranks' tensors do
    /// not change.
    ///
    /// Follows `torch.distributed.reduce`. Shapes and dtypes as for [`ProcessGroup::all_reduce`].
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if there is no rank `dst`.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(3, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mine = rank.rank() as i64;
    ///     let mut tensor = Tensor::from_slice(&[mine]);
    ///     group.reduce(&mut tensor, 1, ReduceOp::Max)?;
    ///     assert_eq!(tensor.int64_value(&[0]), if mine == 1 { 2 } else { mine });
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reduce(&self, tensor: &mut Tensor, dst: usize, op: ReduceOp) -> Result<()> {
        let (shape, inputs) = (tensor.size(), std::slice::from_ref(&*tensor));
        let outputs = if self.rank() == dst { inputs } else { &[] };
        let call = Call::of(Operation::Reduce, &shape, inputs, outputs);
        self.collective(Call { reduce_op: Some(op), root: Some(dst), ..call })
    }

    /// Copies `tensor` of rank `src` into every other rank's `tensor`.
    ///
    /// Follows `torch.distributed.broadcast`. Any dtype and shape, the same on every rank.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if there is no rank `src`.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut tensor = Tensor::from_slice(&[rank.rank() as i64; 4]);
    ///     group.broadcast(&mut tensor, 1)?;
    ///     assert_eq!(Vec::<i64>::try_from(&tensor)?, [1, 1, 1, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn broadcast(&self, tensor: &mut Tensor, src: usize) -> Result<()> {
        let (shape, tensors) = (tensor.size(), std::slice::from_ref(&*tensor));
        let (inputs, outputs): (&[Tensor], &[Tensor]) =
            if self.rank() == src { (tensors, &[]) } else { (&[], tensors) };
        let call = Call::of(Operation::Broadcast, &shape, inputs, outputs);
        self.collective(Call { root: Some(src), ..call })
    }

    /// Copies every rank's `tensor` into `tensor_list[rank]` of every rank.
    ///
    /// Follows `torch.distributed.all_gather`. Any dtype and shape, the same on every rank and in the list. The
    /// list has one tensor for each rank.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if the list does not fit.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mine = Tensor::from_slice(&[rank.rank() as i64, 7]);
    ///     let mut all = [mine.zeros_like(), mine.zeros_like()];
    ///     group.all_gather(&mut all, &mine)?;
    ///     assert_eq!(Vec::<i64>::try_from(&all[0])?, [0, 7]);
    ///     assert_eq!(Vec::<i64>::try_from(&all[1])?, [1, 7]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather(&self, tensor_list: &mut [Tensor], tensor: &Tensor) -> Result<()> {
        let shape = tensor.size();
        self.check_list(Operation::AllGather, tensor_list, Some(&shape))?;
        let input = std::slice::from_ref(tensor);
        self.collective(Call::of(Operation::AllGather, &shape, input, tensor_list))
    }

    /// Copies every rank's `input_tensor` into its part of every rank's `output_tensor`: one part after the other,
    /// in rank order.
    ///
    /// Follows `torch.distributed.all_gather_single`, which was `all_gather_into_tensor` before PyTorch 2.13.
    /// `output_tensor` has the elements of all inputs together, in any shape.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if `output_tensor` has another size.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut all = Tensor::from_slice(&[0i64; 2]);
    ///     group.all_gather_single(&mut all, &Tensor::from_slice(&[rank.rank() as i64 + 5]))?;
    ///     assert_eq!(Vec::<i64>::try_from(&all)?, [5, 6]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    #[doc(alias = "all_gather_into_tensor")]
    pub fn all_gather_single(
        &self,
        output_tensor: &mut Tensor,
        input_tensor: &Tensor,
    ) -> Result<()> {
        let even = vec![input_tensor.numel() as i64; self.world_size()];
        let output = Contiguous::new(Operation::AllGather, output_tensor)?;
        self.check_output(Operation::AllGather, output_tensor)?;
        let parts = output.parts(Operation::AllGather, "output_tensor", &even)?;
        let input = std::slice::from_ref(input_tensor);
        let shape = input_tensor.size();
        self.collective(Call::of(Operation::AllGather, &shape, input, &parts))?;
        output.write_back(output_tensor)
    }

    /// Copies every rank's `tensor` into `gather_list[rank]` of rank `dst`. Only rank `dst` passes a list.
    ///
    /// Follows `torch.distributed.gather`. Any dtype and shape, the same on every rank and in the list.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if the list does not fit, is missing on
    /// `dst`, or is passed on another rank.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mine = Tensor::from_slice(&[rank.rank() as i64]);
    ///     if rank.rank() == 1 {
    ///         let mut all = [mine.zeros_like(), mine.zeros_like()];
    ///         group.gather(&mine, Some(&mut all), 1)?;
    ///         assert_eq!(all.map(|tensor| tensor.int64_value(&[0])), [0, 1]);
    ///     } else {
    ///         group.gather(&mine, None, 1)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn gather(
        &self,
        tensor: &Tensor,
        gather_list: Option<&mut [Tensor]>,
        dst: usize,
    ) -> Result<()> {
        let shape = tensor.size();
        let list = gather_list.as_deref();
        let outputs = self.list_at(Operation::Gather, list, dst, &shape)?;
        let call = Call::of(Operation::Gather, &shape, std::slice::from_ref(tensor), outputs);
        self.collective(Call { root: Some(dst), ..call })
    }

    /// Copies `scatter_list[rank]` of rank `src` into every rank's `tensor`. Only rank `src` passes a list.
    ///
    /// Follows `torch.distributed.scatter`. Any dtype and shape, the same on every rank and in the list.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::gather`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut mine = Tensor::from_slice(&[0i64]);
    ///     let all = [Tensor::from_slice(&[10i64]), Tensor::from_slice(&[11i64])];
    ///     group.scatter(&mut mine, (rank.rank() == 0).then_some(&all[..]), 0)?;
    ///     assert_eq!(mine.int64_value(&[0]), 10 + rank.rank() as i64);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn scatter(
        &self,
        tensor: &mut Tensor,
        scatter_list: Option<&[Tensor]>,
        src: usize,
    ) -> Result<()> {
        let shape = tensor.size();
        let inputs = self.list_at(Operation::Scatter, scatter_list, src, &shape)?;
        let call = Call::of(Operation::Scatter, &shape, inputs, std::slice::from_ref(&*tensor));
        self.collective(Call { root: Some(src), ..call })
    }

    /// Combines `input_list[rank]` of all ranks into rank `rank`'s `output`.
    ///
    /// Follows `torch.distributed.reduce_scatter`. One shape for all tensors; dtypes as for
    /// [`ProcessGroup::all_reduce`].
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if the list does not fit.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let list = [Tensor::from_slice(&[1i64]), Tensor::from_slice(&[10i64])];
    ///     let mut output = Tensor::from_slice(&[0i64]);
    ///     group.reduce_scatter(&mut output, &list, ReduceOp::Sum)?;
    ///     assert_eq!(output.int64_value(&[0]), [2, 20][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        output: &mut Tensor,
        input_list: &[Tensor],
        op: ReduceOp,
    ) -> Result<()> {
        let shape = output.size();
        self.check_list(Operation::ReduceScatter, input_list, Some(&shape))?;
        let output = std::slice::from_ref(&*output);
        let call = Call::of(Operation::ReduceScatter, &shape, input_list, output);
        self.collective(Call { reduce_op: Some(op), ..call })
    }

    /// Combines all ranks' `input` and leaves part `rank` of the result in each rank's `output`.
    ///
    /// Follows `torch.distributed.reduce_scatter_single`, which was `reduce_scatter_tensor` before PyTorch 2.13.
    /// `input` has the elements of all outputs together, in any shape; dtypes as for [`ProcessGroup::all_reduce`].
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if `input` has another size.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut output = Tensor::from_slice(&[0f32]);
    ///     group.reduce_scatter_single(&mut output, &Tensor::from_slice(&[1f32, 3.0]), ReduceOp::Avg)?;
    ///     assert_eq!(output.double_value(&[0]), [1.0, 3.0][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    #[doc(alias = "reduce_scatter_tensor")]
    pub fn reduce_scatter_single(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        let even = vec![output.numel() as i64; self.world_size()];
        let parts = Contiguous::new(Operation::ReduceScatter, input)?;
        let parts = parts.parts(Operation::ReduceScatter, "input", &even)?;
        let (shape, output) = (output.size(), std::slice::from_ref(&*output));
        let call = Call::of(Operation::ReduceScatter, &shape, &parts, output);
        self.collective(Call { reduce_op: Some(op), ..call })
    }

    /// Copies `input_tensor_list[j]` of rank `i` into `output_tensor_list[i]` of rank `j`, for all `i` and
    /// `j`.
    ///
    /// Follows `torch.distributed.all_to_all`. Any dtype; each pair of ranks can have its own size.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if a list does not have a tensor for each
    /// rank.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let from = 10 * rank.rank() as i64;
    ///     let inputs = [Tensor::from_slice(&[from]), Tensor::from_slice(&[from + 1])];
    ///     let mut outputs = [Tensor::from_slice(&[0i64]), Tensor::from_slice(&[0i64])];
    ///     group.all_to_all(&mut outputs, &inputs)?;
    ///     let mine = rank.rank() as i64;
    ///     assert_eq!(outputs.map(|tensor| tensor.int64_value(&[0])), [mine, 10 + mine]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_to_all(
        &self,
        output_tensor_list: &mut [Tensor],
        input_tensor_list: &[Tensor],
    ) -> Result<()> {
        self.check_list(Operation::AllToAll, output_tensor_list, None)?;
        self.check_list(Operation::AllToAll, input_tensor_list, None)?;
        let (inputs, outputs) = (input_tensor_list, output_tensor_list);
        self.collective(Call::of(Operation::AllToAll, &[], inputs, outputs))
    }

    /// Splits `input` along its first dimension, sends part `j` to rank `j`, and writes the parts from all ranks
    /// into `output`, in rank order.
    ///
    /// Follows `torch.distributed.all_to_all_single`. The splits count rows, one number for each rank;
    /// without them the parts are equal.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::Input`] if the splits don't add up.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     // Each rank keeps one row, and rank 0 sends two to rank 1.
    ///     if rank.rank() == 0 {
    ///         let mut output = Tensor::from_slice(&[0i64]);
    ///         group.all_to_all_single(&mut output, &Tensor::from_slice(&[1i64, 2, 3]), Some(&[1, 0]), Some(&[1, 2]))?;
    ///         assert_eq!(Vec::<i64>::try_from(&output)?, [1]);
    ///     } else {
    ///         let mut output = Tensor::from_slice(&[0i64; 3]);
    ///         group.all_to_all_single(&mut output, &Tensor::from_slice(&[9i64]), Some(&[2, 1]), Some(&[0, 1]))?;
    ///         assert_eq!(Vec::<i64>::try_from(&output)?, [2, 3, 9]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_to_all_single(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        output_split_sizes: Option<&[i64]>,
        input_split_sizes: Option<&[i64]>,
    ) -> Result<()> {
        let operation = Operation::AllToAll;
        let contiguous = Contiguous::new(operation, output)?;
        self.check_output(operation, output)?;
        let outputs = self.rows(operation, output, "output", output_split_sizes)?;
        let outputs = contiguous.parts(operation, "output", &outputs)?;
        let inputs = self.rows(operation, input, "input", input_split_sizes)?;
        let inputs = Contiguous::new(operation, input)?.parts(operation, "input", &inputs)?;
        self.collective(Call::of(operation, &[], &inputs, &outputs))?;
        contiguous.write_back(output)
    }

    /// Waits until every rank has called this.
    ///
    /// Follows `torch.distributed.barrier`.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.collective(Call::bare(Operation::Barrier))
    }

    /// Waits like [`barrier`](Self::barrier), but for at most `timeout`. The error names all ranks that have not
    /// called it.
    ///
    /// Follows `torch.distributed.monitored_barrier` with `wait_all_ranks`. (Here, every collective names the ranks
    /// that it waited for in vain.)
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.collective(Call { timeout: Some(timeout), ..Call::bare(Operation::Barrier) })
    }
}
