//! The names that PyTorch had before 2.13.

use tch::Tensor;

use super::c10d::ProcessGroupGloo;
use super::{ProcessGroup, ReduceOp};
use crate::error::Result;

impl ProcessGroup {
    /// Does what [`all_gather_single`](Self::all_gather_single) does, under the name that PyTorch had before 2.13.
    ///
    /// # Errors
    /// The errors of [`all_gather_single`](Self::all_gather_single).
    #[track_caller]
    pub fn all_gather_into_tensor(
        &self,
        output_tensor: &mut Tensor,
        input_tensor: &Tensor,
    ) -> Result<()> {
        self.all_gather_single(output_tensor, input_tensor)
    }

    /// Does what [`reduce_scatter_single`](Self::reduce_scatter_single) does, under the name that PyTorch had before
    /// 2.13.
    ///
    /// # Errors
    /// The errors of [`reduce_scatter_single`](Self::reduce_scatter_single).
    #[track_caller]
    pub fn reduce_scatter_tensor(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        self.reduce_scatter_single(output, input, op)
    }
}

impl ProcessGroupGloo {
    /// Does what [`reduce_scatter_single`](Self::reduce_scatter_single) does, under the name that PyTorch had before
    /// 2.13.
    ///
    /// # Errors
    /// The errors of [`reduce_scatter_single`](Self::reduce_scatter_single).
    pub fn reduce_scatter_tensor(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        self.reduce_scatter_single(output, input, op)
    }
}
