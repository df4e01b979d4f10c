//! Checks of arguments that need no other rank.

use tch::{Kind, Tensor};

use super::call::{refuse, undefined};
use super::contiguous::overlaps_itself;
use super::{ProcessGroup, device_name};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::operation::Operation;

impl ProcessGroup {
    /// Returns the dtype of all tensors; `Uint8` if there are none. Checks that they are defined and on this rank's
    /// device.
    pub(super) fn common_kind(
        &self,
        operation: Operation,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<Kind> {
        let mut common = None;
        for tensor in inputs.iter().chain(outputs) {
            if !tensor.defined() {
                return undefined(operation);
            }
            if tensor.device() != self.device() {
                return Err(Error::usage(format!(
                    "{operation}: the tensor is on {}, but rank {} works on {}; move it there first",
                    device_name(tensor.device()),
                    self.rank(),
                    device_name(self.device())
                )));
            }
            let kind = tensor.f_kind().doing("kind")?;
            if common.is_some_and(|common| common != kind) {
                return Err(Error::usage(format!(
                    "{operation}: the tensors have different dtypes; convert them to one"
                )));
            }
            common = Some(kind);
        }
        Ok(common.unwrap_or(Kind::Uint8))
    }

    /// Checks that each element of an output has its own memory. Otherwise the output could not hold the results.
    pub(super) fn check_output(&self, operation: Operation, output: &Tensor) -> Result<()> {
        if output.is_contiguous() {
            return Ok(());
        }
        let (shape, strides) = (output.size(), output.stride());
        if !overlaps_itself(&shape, &strides) {
            return Ok(());
        }
        refuse(
            operation,
            format!(
                "the output of rank {} has shape {shape:?} and strides {strides:?}, so several elements may share \
                 memory and cannot hold different results; pass a tensor with memory of its own, such as \
                 `tensor.contiguous()`",
                self.global_rank()
            ),
        )
    }

    pub(super) fn check_rank(&self, operation: Operation, name: &str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        let last = self.world_size() - 1;
        // The ranks of a sub-group have its own numbers, unlike PyTorch's `src` and `dst`.
        let members = match self.ranks() {
            ranks if ranks.last() == Some(&last) => String::new(),
            ranks => format!(", which are ranks {ranks:?} of the run"),
        };
        refuse(
            operation,
            format!("{name} is rank {rank}, but the group has ranks 0 to {last}{members}"),
        )
    }

    /// Checks that a list has one tensor for each rank, of this shape if there is one.
    pub(super) fn check_list(
        &self,
        operation: Operation,
        list: &[Tensor],
        shape: Option<&[i64]>,
    ) -> Result<()> {
        if list.len() != self.world_size() {
            return Err(Error::usage(format!(
                "{operation}: the list has {} tensors, but there are {} ranks; pass one for each",
                list.len(),
                self.world_size()
            )));
        }
        let Some(shape) = shape else { return Ok(()) };
        match list.iter().map(Tensor::size).find(|size| size != shape) {
            None => Ok(()),
            Some(size) => Err(Error::mismatch(format!(
                "{operation}: the list has tensors of the shapes {size:?} and {shape:?}; all must have the same shape"
            ))),
        }
    }

    /// Returns the list that only the root passes; empty on the other ranks.
    pub(super) fn list_at<'a>(
        &self,
        operation: Operation,
        list: Option<&'a [Tensor]>,
        root: usize,
        shape: &[i64],
    ) -> Result<&'a [Tensor]> {
        self.check_rank(operation, operation.root_argument(), root)?;
        match list {
            Some(list) if self.rank() == root => {
                self.check_list(operation, list, Some(shape))?;
                Ok(list)
            }
            None if self.rank() != root => Ok(&[]),
            _ => Err(Error::usage(format!(
                "{operation}: rank {root} ({}) must pass {operation}_list, and no other rank may; this is rank {}",
                operation.root_argument(),
                self.rank()
            ))),
        }
    }

    /// Returns the number of elements to or from each rank when `tensor` is split by rows.
    pub(super) fn rows(
        &self,
        operation: Operation,
        tensor: &Tensor,
        name: &str,
        splits: Option<&[i64]>,
    ) -> Result<Vec<i64>> {
        let world_size = self.world_size() as i64;
        let shape = tensor.size();
        let total = shape.first().copied().unwrap_or(1);
        let row: i64 = shape.iter().skip(1).product();
        let refuse = |why: String| refuse(operation, format!("{name} {why}"));
        let Some(splits) = splits else {
            if total % world_size != 0 {
                return refuse(format!(
                    "has {total} rows, which are not equal parts for {world_size} ranks; pass splits"
                ));
            }
            return Ok(vec![total / world_size * row; world_size as usize]);
        };
        let fits = splits.len() as i64 == world_size
            && splits.iter().all(|&split| split >= 0)
            && splits.iter().try_fold(0i64, |sum, &split| sum.checked_add(split)) == Some(total);
        if !fits {
            return refuse(format!(
                "has {total} rows for {world_size} ranks, and the splits {splits:?}; pass one for each \
                 rank that add up"
            ));
        }
        Ok(splits.iter().map(|split| split * row).collect())
    }
}
