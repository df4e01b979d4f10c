//! The ranks that still have inputs, within `join`.

use tch::Tensor;

use crate::error::{Error, Result, counted};
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

/// The state that a rank within `join` sends to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inputs {
    /// The rank has run out of inputs.
    None,
    /// The rank has inputs and calls `backward`.
    Plain,
    /// The rank has inputs and calls `backward_weighted`.
    Weighted,
}

/// The number of ranks with inputs, and whether they are weighted by samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Active {
    pub count: usize,
    pub weighted: bool,
}

impl Active {
    /// Returns the number of ranks to divide by; `None` for all ranks, or where weights already account for it.
    pub(super) fn to_divide_by(self, join: JoinOptions) -> Option<usize> {
        (!join.divide_by_initial_world_size && !self.weighted).then_some(self.count)
    }
}

/// Sends whether this rank has inputs to all ranks. Returns how many have.
pub(super) fn count_active(
    group: &ProcessGroup,
    mine: Inputs,
    options: JoinOptions,
) -> Result<Active> {
    // Packs two counts into one number.
    const WEIGHTED: i64 = 1 << 32;
    let mine = match mine {
        Inputs::None => 0,
        Inputs::Plain => 1,
        Inputs::Weighted => WEIGHTED,
    };
    let counts = all_reduce_number(group, mine, ReduceOp::Sum)?;
    let (weighted, plain) = ((counts / WEIGHTED) as usize, (counts % WEIGHTED) as usize);
    if weighted > 0 && plain > 0 {
        return Err(Error::InvalidInput(format!(
            "join: {} called backward, and {} backward_weighted; all must call the same",
            counted(plain, "rank"),
            counted(weighted, "rank")
        )));
    }
    let active = weighted + plain;
    if options.throw_on_early_termination && (1..group.world_size()).contains(&active) {
        return Err(Error::InvalidInput(format!(
            "join: {} of {} ranks have run out of inputs; give every rank the same number of batches, or \
             allow it without throw_on_early_termination",
            group.world_size() - active,
            group.world_size()
        )));
    }
    Ok(Active { count: active, weighted: weighted > 0 })
}

/// All-reduces one number and reads the result.
pub(super) fn all_reduce_number(group: &ProcessGroup, mine: i64, op: ReduceOp) -> Result<i64> {
    let mut number = group.to_device(&Tensor::from_slice(&[mine]))?;
    group.all_reduce(&mut number, op)?;
    group.to_host(&number)?.f_int64_value(&[0]).doing("reading a number")
}
