//! The ranks that still have inputs, within `join`.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::process_group::{ProcessGroup, ReduceOp};

/// Options for ranks that have run out of inputs. Follows the arguments of `DistributedDataParallel.join`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinOptions {
    /// Divide by the number of all ranks, so that every sample has the same weight; otherwise by the number of ranks
    /// with inputs.
    pub divide_by_initial_world_size: bool,
    /// Return an error on every rank when one has run out.
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    /// Returns PyTorch's defaults.
    fn default() -> Self {
        Self { divide_by_initial_world_size: true, throw_on_early_termination: false }
    }
}

/// Sends whether this rank has inputs to all ranks. Returns how many have.
pub(super) fn count_active(
    group: &ProcessGroup,
    has_inputs: bool,
    options: JoinOptions,
) -> Result<usize> {
    let active = all_reduce_number(group, i64::from(has_inputs), ReduceOp::Sum)? as usize;
    if options.throw_on_early_termination && (1..group.world_size()).contains(&active) {
        return Err(Error::usage(format!(
            "join: {} of {} ranks have run out of inputs; give every rank the same number of batches, or \
             allow it without throw_on_early_termination",
            group.world_size() - active,
            group.world_size()
        )));
    }
    Ok(active)
}

/// All-reduces one number and reads the result.
pub(super) fn all_reduce_number(group: &ProcessGroup, mine: i64, op: ReduceOp) -> Result<i64> {
    let mut number = group.to_device(&Tensor::from_slice(&[mine]))?;
    group.all_reduce(&mut number, op)?;
    group.to_host(&number)?.f_int64_value(&[0]).doing("reading a number")
}
