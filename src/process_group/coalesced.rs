//! Several tensors in one collective: the ranks synchronize once for all of them instead of once for each.
//!
//! The tensors are copied into one tensor and back, which is faster for small tensors. Every element has the same
//! bits as with one call per tensor.

use tch::Tensor;

use super::call::{Options, refuse};
use super::contiguous::zeros;
use super::in_place::join_shapes;
use super::{ProcessGroup, ReduceOp};
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::operation::Operation;

impl ProcessGroup {
    /// Reduces each of `tensors` like [`ProcessGroup::all_reduce`], in one collective.
    ///
    /// Follows `torch.distributed.all_reduce_coalesced`. All tensors have one dtype. Each has its own shape, the
    /// same on every rank.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`]; [`Error::InvalidInput`](crate::Error::InvalidInput) if there are no
    /// tensors, or dtypes differ.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mine = rank.rank() as i64;
    ///     let mut tensors = [Tensor::from_slice(&[mine, 1]), Tensor::from_slice(&[10 * mine])];
    ///     group.all_reduce_coalesced(&mut tensors, ReduceOp::Sum)?;
    ///     assert_eq!(Vec::<i64>::try_from(&tensors[0])?, [0 + 1, 2]);
    ///     assert_eq!(tensors[1].int64_value(&[0]), 0 + 10);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
        let operation = Operation::AllReduce;
        self.check_several(operation, tensors, tensors)?;
        let flat = joined(tensors, 1)?;
        let options = Options { reduce_op: Some(op), ..Options::default() };
        let one = std::slice::from_ref(&flat);
        self.collective(
            operation,
            options,
            &join_shapes(tensors.iter().map(Tensor::size)),
            one,
            one,
        )?;
        part(&flat, tensors, 1)
    }

    /// Gathers each of `input_tensors` into the tensor of `output_tensors` at the same index, like
    /// [`ProcessGroup::all_gather_single`], in one collective.
    ///
    /// Follows c10d's `allgather_into_tensor_coalesced`. All tensors have one dtype.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_gather_single`]; [`Error::InvalidInput`](crate::Error::InvalidInput) if
    /// there are no tensors, the numbers of outputs and inputs differ, or dtypes differ.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mine = rank.rank() as i64;
    ///     let inputs = [Tensor::from_slice(&[mine]), Tensor::from_slice(&[10 * mine, 7])];
    ///     let mut outputs = [Tensor::from_slice(&[0i64; 2]), Tensor::from_slice(&[0i64; 4])];
    ///     group.all_gather_into_tensor_coalesced(&mut outputs, &inputs)?;
    ///     assert_eq!(Vec::<i64>::try_from(&outputs[0])?, [0, 1]);
    ///     assert_eq!(Vec::<i64>::try_from(&outputs[1])?, [0, 7, 10, 7]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_into_tensor_coalesced(
        &self,
        output_tensors: &mut [Tensor],
        input_tensors: &[Tensor],
    ) -> Result<()> {
        let operation = Operation::AllGather;
        self.check_several(operation, input_tensors, output_tensors)?;
        self.check_sizes(operation, ["output", "input"], output_tensors, input_tensors)?;
        let input = joined(input_tensors, 1)?;
        let count = self.world_size() as i64;
        let all = zeros(&[count, input.numel() as i64], &input)?;
        let rows = all.f_unbind(0).doing("unbind")?;
        let one = std::slice::from_ref(&input);
        self.collective(
            operation,
            Options::default(),
            &join_shapes(input_tensors.iter().map(Tensor::size)),
            one,
            &rows,
        )?;
        part(&all, output_tensors, count)
    }

    /// Reduces each of `inputs` into the tensor of `outputs` at the same index, like
    /// [`ProcessGroup::reduce_scatter_single`], in one collective.
    ///
    /// Follows c10d's `reduce_scatter_tensor_coalesced`. All tensors have one dtype.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::reduce_scatter_single`]; [`Error::InvalidInput`](crate::Error::InvalidInput) if
    /// there are no tensors, the numbers of outputs and inputs differ, or dtypes differ.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let inputs = [Tensor::from_slice(&[1i64, 2]), Tensor::from_slice(&[10i64, 20, 30, 40])];
    ///     let mut outputs = [Tensor::from_slice(&[0i64]), Tensor::from_slice(&[0i64; 2])];
    ///     group.reduce_scatter_tensor_coalesced(&mut outputs, &inputs, ReduceOp::Sum)?;
    ///     assert_eq!(outputs[0].int64_value(&[0]), [2, 4][rank.rank()]);
    ///     assert_eq!(Vec::<i64>::try_from(&outputs[1])?, [[20, 40], [60, 80]][rank.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reduce_scatter_tensor_coalesced(
        &self,
        outputs: &mut [Tensor],
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<()> {
        let operation = Operation::ReduceScatter;
        self.check_several(operation, inputs, outputs)?;
        self.check_sizes(operation, ["input", "output"], inputs, outputs)?;
        let all = joined(inputs, self.world_size() as i64)?;
        let rows = all.f_unbind(0).doing("unbind")?;
        let output = zeros(&all.size()[1..], &all)?;
        let options = Options { reduce_op: Some(op), ..Options::default() };
        let one = std::slice::from_ref(&output);
        self.collective(
            operation,
            options,
            &join_shapes(outputs.iter().map(Tensor::size)),
            &rows,
            one,
        )?;
        part(&output, outputs, 1)
    }

    /// Checks what can be checked without the other ranks: equal numbers of inputs and outputs, one dtype, and
    /// outputs that can be written to.
    fn check_several(
        &self,
        operation: Operation,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<()> {
        if inputs.is_empty() || inputs.len() != outputs.len() {
            let why = "pass at least one input, and an output for each";
            let (inputs, outputs) = (inputs.len(), outputs.len());
            return refuse(
                operation,
                format!("{inputs} input and {outputs} output tensors; {why}"),
            );
        }
        self.common_kind(operation, inputs, outputs)?;
        for output in outputs {
            self.check_output(operation, output)?;
        }
        Ok(())
    }

    /// Checks that each tensor of `whole` has `world_size` times the elements of its counterpart in `parts`.
    fn check_sizes(
        &self,
        operation: Operation,
        names: [&str; 2],
        whole: &[Tensor],
        parts: &[Tensor],
    ) -> Result<()> {
        let needed = |part: &Tensor| part.numel() * self.world_size();
        let mut pairs = whole.iter().zip(parts).enumerate();
        match pairs.find(|(_, (whole, part))| whole.numel() != needed(part)) {
            None => Ok(()),
            Some((index, (whole, part))) => refuse(
                operation,
                format!(
                    "{} {index} has {} elements, but {} {index} has {}, and there are {} ranks; {} are needed",
                    names[0],
                    whole.numel(),
                    names[1],
                    part.numel(),
                    self.world_size(),
                    needed(part)
                ),
            ),
        }
    }
}

/// Joins `tensors` into one contiguous tensor of `rows` rows. Each row has its part of each tensor.
fn joined(tensors: &[Tensor], rows: i64) -> Result<Tensor> {
    let joined = || {
        let flat = |tensor: &Tensor| tensor.f_reshape([rows, tensor.numel() as i64 / rows]);
        let flat = tensors.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
        Tensor::f_cat(&flat, 1)
    };
    tch::no_grad(joined).doing("joining tensors")
}

/// Copies each tensor's part of `all` back: the inverse of [`joined`].
fn part(all: &Tensor, tensors: &mut [Tensor], rows: i64) -> Result<()> {
    let mut part = || {
        let all = all.f_reshape([rows, all.numel() as i64 / rows])?;
        let mut start = 0;
        for tensor in tensors.iter_mut() {
            let len = tensor.numel() as i64 / rows;
            tensor.f_copy_(&all.f_narrow(1, start, len)?.f_reshape(tensor.size())?)?;
            start += len;
        }
        Ok(())
    };
    tch::no_grad(&mut part).doing("parting tensors")
}
