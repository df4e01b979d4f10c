//! The interface of `--strategy` for a training loop, which is the same for DDP and DP.

use std::ops::Deref;
use std::time::Duration;

use tch::Tensor;

use super::comm_hook_state::SavedCommHook;
use super::data_parallel::DataParallel;
use super::replica::Replica;
use super::statistics::DdpStatistics;
use super::wrapper::DistributedDataParallel;
use crate::error::Result;
use crate::optim::FlatBuffer;
use crate::records::Parameter;

/// A model on all ranks, trained with one of the two strategies.
#[derive(Debug)]
pub enum Strategy<M> {
    /// All ranks average their gradients, and each makes the same optimizer step.
    Ddp(DistributedDataParallel<M>),
    /// The older form: rank 0 gathers the gradients, makes the step, and sends the parameters to all.
    Dp(DataParallel<M>),
}

impl<M> From<DistributedDataParallel<M>> for Strategy<M> {
    fn from(ddp: DistributedDataParallel<M>) -> Self {
        Strategy::Ddp(ddp)
    }
}

impl<M> From<DataParallel<M>> for Strategy<M> {
    fn from(dp: DataParallel<M>) -> Self {
        Strategy::Dp(dp)
    }
}

impl<M> Deref for Strategy<M> {
    type Target = Replica<M>;

    fn deref(&self) -> &Replica<M> {
        match self {
            Strategy::Ddp(ddp) => ddp,
            Strategy::Dp(dp) => dp,
        }
    }
}

/// Calls the method of this name on either strategy.
macro_rules! either {
    ($strategy:expr, $method:ident($($argument:expr),*)) => {
        match $strategy {
            Strategy::Ddp(ddp) => ddp.$method($($argument),*),
            Strategy::Dp(dp) => dp.$method($($argument),*),
        }
    };
}

impl<M> Strategy<M> {
    /// Returns whether this is [`DistributedDataParallel`], with which every rank has the averaged gradients.
    pub(crate) fn is_ddp(&self) -> bool {
        matches!(self, Strategy::Ddp(_))
    }

    /// Prepares a step: zeroes the gradients, and with [`DataParallel`] copies the parameters from rank 0. A
    /// collective.
    ///
    /// # Errors
    /// The errors of [`DistributedDataParallel::zero_grad`] and [`DataParallel::replicate`].
    pub fn begin_step(&mut self) -> Result<()> {
        self.replicate()?;
        either!(self, zero_grad())
    }

    /// Copies rank 0's parameters to all ranks if they may differ. Required before the model is used outside of a step.
    /// A collective.
    ///
    /// # Errors
    /// The errors of [`DataParallel::replicate`].
    pub fn replicate(&self) -> Result<()> {
        match self {
            Strategy::Ddp(_) => Ok(()),
            Strategy::Dp(dp) => dp.replicate(),
        }
    }

    /// Returns parameters and gradients for this rank's optimizer; `None` where rank 0 makes the step for all.
    pub fn flat_buffers(&self) -> Option<Vec<FlatBuffer>> {
        match self {
            Strategy::Ddp(ddp) => Some(ddp.flat_buffers()),
            Strategy::Dp(dp) => dp.flat_buffers(),
        }
    }

    /// Returns whether each rank keeps a part of the optimizer's state only: [`zero`](super::DdpOptions::zero).
    pub(crate) fn partitions_optimizer(&self) -> bool {
        match self {
            Strategy::Ddp(ddp) => ddp.reducer.state().layout.is_partitioned(),
            Strategy::Dp(_) => false,
        }
    }

    /// Makes the collectives of a step once, if they are launched on a GPU. All gradients must be zero. A collective.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
    pub(crate) fn warm_up(&self) -> Result<()> {
        match self {
            Strategy::Ddp(ddp) => ddp.reducer.warm_up(),
            Strategy::Dp(_) => Ok(()), // replicate has broadcast all parameters
        }
    }

    /// Calls [`DistributedDataParallel::backward`] or its counterpart: computes the gradients of `loss`, and their mean
    /// over the ranks on each rank that makes a step.
    ///
    /// # Errors
    /// The errors of [`DistributedDataParallel::backward`] and [`DataParallel::backward`].
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        either!(self, backward(loss))
    }

    /// Calls [`DistributedDataParallel::clip_grad_norm`] or its counterpart, on ranks that make a step.
    ///
    /// # Errors
    /// The errors of [`DistributedDataParallel::clip_grad_norm`] and [`DataParallel::clip_grad_norm`].
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        either!(self, clip_grad_norm(max_norm))
    }

    /// Calls [`DistributedDataParallel::comm_hook_state`]; returns `None` with [`DataParallel`].
    ///
    /// # Errors
    /// The errors of [`DistributedDataParallel::comm_hook_state`].
    pub fn comm_hook_state(&self) -> Result<Option<SavedCommHook>> {
        match self {
            Strategy::Ddp(ddp) => ddp.comm_hook_state(),
            Strategy::Dp(_) => Ok(None),
        }
    }

    /// Calls [`DistributedDataParallel::load_comm_hook_state`]. Does nothing with [`DataParallel`], which has no hooks.
    ///
    /// # Errors
    /// The errors of [`DistributedDataParallel::load_comm_hook_state`].
    pub fn load_comm_hook_state(&mut self, saved: Option<&SavedCommHook>) -> Result<()> {
        match self {
            Strategy::Ddp(ddp) => ddp.load_comm_hook_state(saved),
            Strategy::Dp(_) => Ok(()),
        }
    }

    /// Returns how often [`backward`](Self::backward) has averaged.
    pub(crate) fn num_averages(&self) -> u32 {
        match self {
            Strategy::Ddp(ddp) => ddp.reducer.state().times.count,
            Strategy::Dp(dp) => dp.num_averages(),
        }
    }

    /// Returns statistics over every [`backward`](Self::backward) so far that averaged.
    pub fn statistics(&self) -> DdpStatistics {
        either!(self, statistics())
    }

    /// Returns the time from the start of the last backward to the completion of each bucket, without reductions; on a
    /// GPU, the time to launch it. `None` for a bucket that lacked a gradient. Empty with [`DataParallel`].
    pub(crate) fn bucket_times(&self) -> Vec<Option<Duration>> {
        match self {
            Strategy::Ddp(ddp) => ddp.reducer.state().bucket_times.clone(),
            Strategy::Dp(_) => Vec::new(),
        }
    }

    /// Returns each parameter with its bucket, in the order in which hooks number them.
    pub(crate) fn parameter_places(&self) -> Vec<Parameter> {
        match self {
            Strategy::Ddp(ddp) => ddp.reducer.state().layout.parameter_places(),
            Strategy::Dp(dp) => dp.parameter_places(),
        }
    }
}
