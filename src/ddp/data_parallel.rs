//! The older form of data parallelism, for comparison: everything goes through rank 0.

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;
use std::time::Instant;

use tch::Tensor;
use tch::nn::VarStore;

use super::broadcast::sync_module_states;
use super::layout::Layout;
use super::options::DdpOptions;
use super::replica::Replica;
use super::statistics::{BackwardTimings, DdpStatistics};
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, backward};
use crate::operation::Operation;
use crate::optim::{FlatBuffer, GradState, clip_grad_norm};
use crate::process_group::{ProcessGroup, num_bytes};
use crate::records::Parameter;

/// A model that rank 0 trains, while the other ranks help to compute its gradients. It exists to be compared with
/// [`DistributedDataParallel`](super::DistributedDataParallel), not to be used.
///
/// Follows `torch.nn.DataParallel`. The steps, in order:
///
/// 1. rank 0, the only rank with the data, scatters the batch: [`ScatterLoader`](crate::data::ScatterLoader);
/// 2. [`replicate`](Self::replicate) copies rank 0's parameters and buffers to all ranks;
/// 3. [`forward`](Replica::forward) runs the model's own forward pass on all ranks at once;
/// 4. [`backward`](Self::backward) runs autograd on all ranks and gathers the gradients on rank 0, which averages them;
/// 5. rank 0 makes the optimizer's step while the other ranks wait.
///
/// DDP is better because rank 0 is a bottleneck here. With N ranks, rank 0 sends and receives N - 1 times the data of
/// each other rank, so every added rank makes a step slower. Rank 0 needs memory for all ranks' gradients, the data and
/// the optimizer's state, and runs out first. The other ranks are idle while it adds up and steps. DDP's all_reduce
/// distributes sending and adding evenly, and with `nccl` it overlaps with backward. DDP never sends parameters again,
/// because all ranks make the same step. With the backend `threaded` both give the same bits in float32 and float64.
///
/// PyTorch gathers the outputs on rank 0 and computes the loss there, unless the loss is part of the model, as it is
/// here. With several batches per step it gathers for each of them.
pub struct DataParallel<M> {
    replica: Replica<M>,
    layout: Layout,
    /// On rank 0, for each flat buffer: the gradients of all ranks. The first tensor is rank 0's own gradients, in
    /// place.
    gathered: Vec<Vec<Tensor>>,
    /// Whether gradients have been gathered since they were zeroed.
    has_gathered: bool,
    /// On rank 0, for each flat buffer: gradients of earlier gathers, which the next gather adds to its mean.
    before: Vec<Tensor>,
    times: BackwardTimings,
}

impl<M> fmt::Debug for DataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallel").field("replica", &self.replica).finish_non_exhaustive()
    }
}

impl<M> Deref for DataParallel<M> {
    type Target = Replica<M>;

    fn deref(&self) -> &Replica<M> {
        &self.replica
    }
}

impl<M> DataParallel<M> {
    /// Wraps `module`, whose parameters and buffers are in `vs`, on this rank's device. A collective: every rank must
    /// call it, with the same model. Rank 0's parameter values are used.
    ///
    /// # Errors
    /// The errors of [`DistributedDataParallel::new`](super::DistributedDataParallel::new).
    pub fn new(module: M, vs: &VarStore, group: Rc<ProcessGroup>) -> Result<Self> {
        let options = DdpOptions::default();
        let replica = Replica::new(module, vs, group, &options)?;
        let group = &replica.group;
        let layout = Layout::new(&replica.trained(), &options, false, None)?;
        let gathered = if group.rank() == 0 {
            let gather_all = |buffer: &FlatBuffer| {
                let own = std::iter::once(Ok(buffer.gradients.shallow_clone()));
                own.chain((1..group.world_size()).map(|_| buffer.gradients.f_zeros_like()))
                    .collect()
            };
            let gathered = layout.buffers.iter().map(gather_all).collect::<Result<_, _>>();
            gathered.doing("making room for all ranks' gradients")?
        } else {
            Vec::new()
        };
        let (has_gathered, before, times) = Default::default();
        let dp = Self { replica, layout, gathered, has_gathered, before, times };
        dp.replicate()?;
        Ok(dp)
    }

    /// Copies rank 0's parameters and buffers to all ranks. Required before each step, because only rank 0 made the
    /// last one. A collective.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::broadcast`].
    pub fn replicate(&self) -> Result<()> {
        sync_module_states(&self.layout.buffers, &self.tensors, &self.group, 0)
    }

    /// Returns how often [`backward`](Self::backward) has gathered.
    pub(super) fn num_averages(&self) -> u32 {
        self.times.count
    }

    /// Returns each parameter with its bucket, in creation order.
    pub(crate) fn parameter_places(&self) -> Vec<Parameter> {
        self.layout.parameter_places()
    }

    /// Returns statistics over every [`backward`](Self::backward) so far that gathered. A bucket here is all parameters
    /// of one dtype, which are sent in one piece.
    pub fn statistics(&self) -> DdpStatistics {
        let bytes =
            |buffer: &FlatBuffer| num_bytes(buffer.gradients.kind(), buffer.gradients.numel());
        DdpStatistics::new(self.times, self.layout.buffers.iter().map(bytes).collect())
    }

    /// Returns parameters and averaged gradients as flat buffers for an optimizer, on rank 0. `None` on the other
    /// ranks, which make no step.
    pub fn flat_buffers(&self) -> Option<Vec<FlatBuffer>> {
        (self.group.rank() == 0).then(|| self.layout.flat_buffers())
    }

    /// Removes this rank's gradients.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.has_gathered = false;
        self.before.clear();
        self.layout.zero_grad()
    }

    /// Computes the gradients of `loss` and puts the mean of all ranks' gradients on rank 0. Every other rank keeps its
    /// own. A collective. A parameter that the loss does not depend on contributes zeros. Gradients add up until
    /// [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    /// [`Error::Torch`], [`Error::InvalidInput`] when a parameter's `grad` has been replaced, and the errors of
    /// [`ProcessGroup::gather`].
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.group.next_phase(Operation::Backward);
        let began = Instant::now();
        if self.has_gathered {
            self.set_aside()?;
        }
        backward(loss)?;
        self.layout.take_gradients(true)?;
        if self.averages() {
            let computed = Instant::now();
            tch::no_grad(|| self.gather())?;
            self.layout.set_gradients(GradState::Averaged);
            self.times.communication += computed.elapsed();
            self.times.total += began.elapsed();
            self.times.count += 1;
        }
        Ok(())
    }

    /// Zeroes the gradients before they are computed anew. Rank 0 first keeps what it has gathered, which already
    /// covers all ranks.
    fn set_aside(&mut self) -> Result<()> {
        if self.group.rank() == 0 {
            let copies = self.layout.buffers.iter().map(|buffer| buffer.gradients.f_detach_copy());
            let copies = copies.collect::<Result<_, _>>();
            self.before = copies.doing("keeping the gradients")?;
        }
        self.has_gathered = false;
        self.layout.zero_grad()
    }

    /// Gathers the gradients on rank 0, and replaces rank 0's gradients by the mean.
    fn gather(&mut self) -> Result<()> {
        let share = 1.0 / self.group.world_size() as f64;
        for (index, buffer) in self.layout.buffers.iter_mut().enumerate() {
            let mut gathered = self.gathered.get_mut(index).map(Vec::as_mut_slice);
            self.replica.group.gather(&buffer.gradients, gathered.as_deref_mut(), 0)?;
            // Divides each rank's gradients first and adds in rank order: the same bits as DDP's all_reduce.
            let mut average = || {
                let Some([mean, others @ ..]) = gathered else { return Ok(()) };
                let _ = mean.f_mul_scalar_(share)?;
                others
                    .iter_mut()
                    .try_for_each(|one| mean.f_add_(&one.f_mul_scalar_(share)?).map(drop))?;
                let before = self.before.get(index);
                before.map_or(Ok(()), |before| mean.f_add_(before).map(drop))
            };
            average().doing("averaging the gradients")?;
        }
        self.before.clear();
        self.has_gathered = true;
        Ok(())
    }

    /// Scales the averaged gradients on rank 0 so that their total 2-norm is at most `max_norm`. Returns the norm
    /// before scaling.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] on another rank, [`Error::Torch`].
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        let buffers = self.flat_buffers().ok_or_else(|| {
            Error::InvalidInput(
                "clip_grad_norm: the averaged gradients are on rank 0; call it there".into(),
            )
        })?;
        clip_grad_norm(&buffers, max_norm)
    }
}
