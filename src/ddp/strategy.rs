//! What a training loop asks of a model on all ranks, whichever way it is kept one: `--strategy`.

use std::rc::Rc;
use std::time::Duration;

use tch::Tensor;
use tch::nn::ModuleT;

use super::{DataParallel, DdpStatistics, DistributedDataParallel, NoSync, SavedCommHook};
use crate::error::{Error, Result};
use crate::optim::FlatBuffer;
use crate::process_group::ProcessGroup;
use crate::telemetry::report::Parameter;

/// A model on all ranks, trained one way or the other.
#[derive(Debug)]
pub enum Strategy<M> {
    /// All ranks average their gradients, and each makes the same step.
    Ddp(DistributedDataParallel<M>),
    /// The old way: rank 0 gathers the gradients, makes the step, and sends the parameters to all.
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

/// Where both have a method of the same name.
macro_rules! either {
    ($strategy:expr, $method:ident($($argument:expr),*)) => {
        match $strategy {
            Strategy::Ddp(ddp) => ddp.$method($($argument),*),
            Strategy::Dp(dp) => dp.$method($($argument),*),
        }
    };
}

impl<M> Strategy<M> {
    /// Gets ready for a step: zeroes the gradients, and with [`DataParallel`] fetches the parameters from rank
    /// 0. A collective.
    ///
    /// # Errors
    /// Those of [`DistributedDataParallel::zero_grad`] and [`DataParallel::replicate`].
    pub fn begin_step(&mut self) -> Result<()> {
        self.replicate()?;
        either!(self, zero_grad())
    }

    /// Has rank 0's parameters on all ranks, if they are not there already: before the model is looked at outside
    /// of a step. A collective.
    ///
    /// # Errors
    /// Those of [`DataParallel::replicate`].
    pub fn replicate(&self) -> Result<()> {
        match self {
            Strategy::Ddp(_) => Ok(()),
            Strategy::Dp(dp) => dp.replicate(),
        }
    }

    /// Parameters and gradients for this rank's optimizer; none where rank 0 makes the step for all.
    pub fn flat_buffers(&self) -> Option<Vec<FlatBuffer>> {
        match self {
            Strategy::Ddp(ddp) => Some(ddp.flat_buffers()),
            Strategy::Dp(dp) => dp.flat_buffers(),
        }
    }

    /// [`DistributedDataParallel::no_sync`].
    pub fn no_sync(&self) -> NoSync {
        either!(self, no_sync())
    }

    /// [`DistributedDataParallel::backward`]: the gradients of `loss`, and their mean over the ranks wherever a
    /// step is made.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        either!(self, backward(loss))
    }

    /// [`DistributedDataParallel::backward_part`].
    ///
    /// # Errors
    /// As there; [`Error::Unsupported`] with [`DataParallel`].
    #[track_caller]
    pub(crate) fn backward_part(&mut self, loss: &Tensor, samples: f64) -> Result<()> {
        match self {
            Strategy::Ddp(ddp) => ddp.backward_part(loss, samples),
            Strategy::Dp(_) => Err(Error::Unsupported(
                "weights need DistributedDataParallel: with DataParallel rank 0 gives every rank a batch \
                 of the same size"
                    .into(),
            )),
        }
    }

    /// [`DistributedDataParallel::clip_grad_norm`], for ranks that make a step.
    ///
    /// # Errors
    /// As there.
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        either!(self, clip_grad_norm(max_norm))
    }

    /// [`DistributedDataParallel::comm_hook_state`]; none of [`DataParallel`].
    ///
    /// # Errors
    /// As there.
    pub fn comm_hook_state(&self) -> Result<Option<SavedCommHook>> {
        match self {
            Strategy::Ddp(ddp) => ddp.comm_hook_state(),
            Strategy::Dp(_) => Ok(None),
        }
    }

    /// [`DistributedDataParallel::load_comm_hook_state`]; nothing happens with [`DataParallel`], which has no hooks.
    ///
    /// # Errors
    /// As there.
    pub fn load_comm_hook_state(&mut self, saved: Option<&SavedCommHook>) -> Result<()> {
        match self {
            Strategy::Ddp(ddp) => ddp.load_comm_hook_state(saved),
            Strategy::Dp(_) => Ok(()),
        }
    }

    /// The ranks that the model is trained on.
    pub fn group(&self) -> &Rc<ProcessGroup> {
        either!(self, group())
    }

    /// How many numbers are trained.
    pub fn num_parameters(&self) -> usize {
        either!(self, num_parameters())
    }

    /// What every [`backward`](Self::backward) that averaged came to so far, on average.
    pub fn statistics(&self) -> DdpStatistics {
        either!(self, statistics())
    }

    /// [`DistributedDataParallel::bucket_times`]; none of [`DataParallel`].
    pub(crate) fn bucket_times(&self) -> Vec<Option<Duration>> {
        match self {
            Strategy::Ddp(ddp) => ddp.bucket_times(),
            Strategy::Dp(_) => Vec::new(),
        }
    }

    /// Where the parameters and their gradients are, in the order in which hooks number them.
    pub(crate) fn parameter_places(&self) -> Vec<Parameter> {
        either!(self, parameter_places())
    }

    pub(crate) fn communication_time(&self) -> Duration {
        either!(self, communication_time())
    }

    /// Parameters and buffers by name, as they are: views, and no copies. Follows `state_dict`, of the module inside.
    pub fn state_dict(&self) -> Vec<(String, Tensor)> {
        either!(self, state_dict())
    }

    /// [`DistributedDataParallel::parameters_hash`]; what was trained is on rank 0 either way.
    ///
    /// # Errors
    /// As there.
    pub fn parameters_hash(&self) -> Result<u64> {
        either!(self, parameters_hash())
    }
}

impl<M: ModuleT> Strategy<M> {
    /// The model's own forward pass, in training.
    #[track_caller]
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        either!(self, forward(inputs))
    }

    /// The model's own forward pass, in training or in evaluation.
    #[track_caller]
    pub fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        either!(self, forward_t(inputs, train))
    }
}
