//! Data parallelism the old way, to compare: everything goes through rank 0.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::Instant;

use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

use super::layout::{FlatParams, Layout};
use super::parameters::{self, NamedTensor};
use super::timings::BackwardTimings;
use super::{DdpOptions, DdpStatistics, NoSync};
use crate::error::{Error, Result};
use crate::ffi::backward;
use crate::operation::Operation;
use crate::optim::{FlatBuffer, GradState, clip_grad_norm};
use crate::process_group::{ProcessGroup, num_bytes};
use crate::telemetry::report::Parameter;

/// A model that rank 0 trains, with the other ranks to compute its gradients. Made to be compared with
/// [`DistributedDataParallel`](super::DistributedDataParallel), and not to be used.
///
/// Follows `torch.nn.DataParallel`. Each step goes, in order:
///
/// 1. rank 0, which alone has the data, scatters the batch: [`ScatterLoader`](crate::data::ScatterLoader);
/// 2. [`replicate`](Self::replicate) copies rank 0's parameters and buffers to all ranks;
/// 3. [`forward`](Self::forward) is the model's own, on all ranks at once;
/// 4. [`backward`](Self::backward) runs autograd on all ranks, and gathers the gradients on rank 0, which
///    averages them;
/// 5. rank 0 makes the optimizer's step. The other ranks wait.
///
/// Why DDP is better: of N ranks, rank 0 sends and receives N - 1 times what each other one does, so a step
/// takes longer with every rank that is added; it needs room for all ranks' gradients, for the data and for
/// the optimizer's state, so it is out of memory first; and the others have nothing to do while it adds up and
/// steps. DDP's all_reduce shares out the sending and the adding evenly, parameters are never sent again,
/// because all ranks make the same step, and with `nccl` it happens while backward goes on. The numbers are
/// the same to the bit with the backend `threaded`, in float32 and float64.
///
/// (PyTorch gathers the outputs on rank 0 and computes the loss there, unless the loss is made part of the
/// model, as it is here; and with several batches a step it gathers for each of them.)
pub struct DataParallel<M> {
    module: M,
    group: Rc<ProcessGroup>,
    layout: Layout,
    /// On rank 0, of each flat buffer: the gradients of all ranks. The first are rank 0's own, in their place.
    gathered: Vec<Vec<Tensor>>,
    /// Whether gradients have been gathered since they were zeroed.
    has_gathered: bool,
    /// On rank 0, of each flat buffer: what had been gathered before gradients that are still to be.
    before: Vec<Tensor>,
    tensors: Vec<NamedTensor>,
    /// How many [`NoSync`] live.
    no_sync: Rc<Cell<u32>>,
    times: BackwardTimings,
}

impl<M> fmt::Debug for DataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallel")
            .field("group", &self.group)
            .field("parameters", &self.num_parameters())
            .finish_non_exhaustive()
    }
}

impl<M> DataParallel<M> {
    /// Wraps `module`, whose parameters and buffers are in `vs`, on this rank's device. A collective: every
    /// rank must call it, with the same model. The values that the parameters have on rank 0 count.
    ///
    /// # Errors
    /// As [`DistributedDataParallel::new`](super::DistributedDataParallel::new).
    pub fn new(module: M, vs: &VarStore, group: Rc<ProcessGroup>) -> Result<Self> {
        let options = DdpOptions::default();
        let tensors = parameters::same_on_all_ranks(vs, &options, &group)?;
        let parameters: Vec<&NamedTensor> = parameters::trained(&tensors).collect();
        let layout = Layout::new(&parameters, &options)?;
        let gathered = if group.rank() == 0 {
            let of_all = |flat: &FlatParams| {
                let own = std::iter::once(Ok(flat.gradients.shallow_clone()));
                own.chain((1..group.world_size()).map(|_| flat.gradients.f_zeros_like())).collect()
            };
            let gathered = layout.flats.iter().map(of_all).collect::<Result<_, _>>();
            gathered.map_err(Error::torch("making room for all ranks' gradients"))?
        } else {
            Vec::new()
        };
        let (has_gathered, before, no_sync, times) = Default::default();
        let dp =
            Self { module, group, layout, gathered, has_gathered, before, tensors, no_sync, times };
        dp.replicate()?;
        Ok(dp)
    }

    /// Copies rank 0's parameters and buffers to all ranks: before each step, because rank 0 alone has made
    /// the last one. A collective.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::broadcast`].
    pub fn replicate(&self) -> Result<()> {
        let rest = self.tensors.iter().filter(|t| !t.trainable).map(|t| &t.tensor);
        let all = self.layout.flats.iter().map(|flat| &flat.parameters).chain(rest);
        tch::no_grad(|| {
            all.map(Tensor::shallow_clone).try_for_each(|mut t| self.group.broadcast(&mut t, 0))
        })
    }

    /// Until what it returns is dropped, [`backward`](Self::backward) adds up gradients on each rank and gathers
    /// nothing: for steps that are made of several batches.
    pub fn no_sync(&self) -> NoSync {
        NoSync::new(&self.no_sync)
    }

    /// Where the parameters are: [`Strategy::parameter_places`](super::Strategy::parameter_places).
    pub(crate) fn parameter_places(&self) -> Vec<Parameter> {
        self.layout.parameter_places()
    }

    /// What every [`backward`](Self::backward) that gathered came to so far, on average. A bucket is what goes
    /// in one piece: all parameters of one kind.
    pub fn statistics(&self) -> DdpStatistics {
        let bytes = |flat: &FlatParams| num_bytes(flat.gradients.kind(), flat.gradients.numel());
        DdpStatistics::new(self.times, self.layout.flats.iter().map(bytes).collect())
    }

    /// The wrapped model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The ranks that it is trained on.
    pub fn group(&self) -> &Rc<ProcessGroup> {
        &self.group
    }

    /// How many numbers are trained.
    pub fn num_parameters(&self) -> usize {
        parameters::trained(&self.tensors).map(|t| t.tensor.numel()).sum()
    }

    /// On rank 0, parameters and averaged gradients as flat buffers: what an optimizer steps. On the others
    /// there is nothing to step.
    pub fn flat_buffers(&self) -> Option<Vec<FlatBuffer>> {
        (self.group.rank() == 0).then(|| self.layout.flats.iter().map(FlatParams::buffer).collect())
    }

    /// Takes this rank's gradients away.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn zero_grad(&mut self) -> Result<()> {
        self.has_gathered = false;
        self.before.clear();
        self.layout.zero_grad()
    }

    /// Computes the gradients of `loss`, and leaves the mean of all ranks' on rank 0; each other rank keeps its
    /// own. A collective. A parameter that the loss does not depend on contributes zeros. Gradients add up until
    /// [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    /// [`Error::Torch`], [`Error::Input`] when a parameter's `grad` has been replaced, and those of
    /// [`ProcessGroup::gather`].
    #[track_caller]
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.group.next_phase(Operation::Backward);
        let began = Instant::now();
        if self.has_gathered {
            self.set_aside()?;
        }
        backward(loss)?;
        self.layout.move_grads_into_buckets(true)?;
        if self.no_sync.get() == 0 {
            let computed = Instant::now();
            tch::no_grad(|| self.gather())?;
            self.layout.set_gradients(GradState::Averaged);
            self.times.communication += computed.elapsed();
            self.times.total += began.elapsed();
            self.times.count += 1;
        }
        Ok(())
    }

    /// Begins anew with gradients, but for what rank 0 has gathered: that is of all ranks already.
    fn set_aside(&mut self) -> Result<()> {
        if self.group.rank() == 0 {
            let copies = self.layout.flats.iter().map(|flat| flat.gradients.f_detach_copy());
            let copies = copies.collect::<Result<_, _>>();
            self.before = copies.map_err(Error::torch("keeping the gradients"))?;
        }
        self.has_gathered = false;
        self.layout.zero_grad()
    }

    /// Gathers the gradients on rank 0, and makes rank 0's their mean.
    fn gather(&mut self) -> Result<()> {
        let share = 1.0 / self.group.world_size() as f64;
        for (index, flat) in self.layout.flats.iter_mut().enumerate() {
            let mut gathered = self.gathered.get_mut(index).map(Vec::as_mut_slice);
            self.group.gather(&flat.gradients, gathered.as_deref_mut(), 0)?;
            // In the order of the ranks, and each divided first: to the bit what DDP's all_reduce does.
            let mut average = || {
                let Some([mean, others @ ..]) = gathered else { return Ok(()) };
                let _ = mean.f_mul_scalar_(share)?;
                others
                    .iter_mut()
                    .try_for_each(|one| mean.f_add_(&one.f_mul_scalar_(share)?).map(drop))?;
                let before = self.before.get(index);
                before.map_or(Ok(()), |before| mean.f_add_(before).map(drop))
            };
            average().map_err(Error::torch("averaging the gradients"))?;
        }
        self.before.clear();
        self.has_gathered = true;
        Ok(())
    }

    /// How long this rank has gathered gradients, or waited for others to, since the beginning.
    pub(crate) fn communication_time(&self) -> std::time::Duration {
        self.times.communication
    }

    /// On rank 0, scales the averaged gradients so that their 2-norm, all together, is `max_norm` or less, and
    /// returns the norm that they had.
    ///
    /// # Errors
    /// [`Error::Input`] on another rank, [`Error::Torch`].
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        let buffers = self.flat_buffers().ok_or_else(|| {
            Error::Input(
                "clip_grad_norm: the averaged gradients are on rank 0; call it there".into(),
            )
        })?;
        clip_grad_norm(&buffers, max_norm)
    }

    /// Parameters and buffers by name, as they are: views, and no copies. Follows `state_dict`, of the module inside.
    pub fn state_dict(&self) -> Vec<(String, Tensor)> {
        parameters::by_name(&self.tensors)
    }

    /// 64 bits over the names, shapes and values of all parameters and buffers. Those of other ranks than 0 are
    /// as old as the last [`replicate`](Self::replicate). Waits for the device.
    ///
    /// # Errors
    /// [`Error::Torch`], and those of [`ProcessGroup::synchronize`].
    pub fn parameters_hash(&self) -> Result<u64> {
        self.group.synchronize()?;
        parameters::hash(&self.tensors)
    }
}

impl<M: ModuleT> DataParallel<M> {
    /// The model's own forward pass, in training.
    #[track_caller]
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        self.forward_t(inputs, true)
    }

    /// The model's own forward pass, in training or in evaluation.
    #[track_caller]
    pub fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        if train {
            self.group.enter_forward(inputs);
        }
        self.module.forward_t(inputs, train)
    }
}
