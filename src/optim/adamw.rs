//! Adam with decoupled weight decay.

use tch::{Kind, Tensor};

use super::flat::Flat;
use super::{FlatBuffer, Optimizer, ParameterState, Place};
use crate::error::{Error, Result};
use crate::torch::{AdamWStep, TensorList, fused_adamw};

/// The options of [`AdamW`]. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy)]
pub struct AdamWOptions {
    /// How much of the running means of the gradient and of its square is kept in a step.
    pub betas: (f64, f64),
    /// What is added to the denominator, so that it is not zero.
    pub eps: f64,
    /// By how much a parameter shrinks in a step, times the learning rate.
    pub weight_decay: f64,
    /// Which parameters weight decay is for: all, or [`Place::is_weight`].
    pub decays: fn(&Place) -> bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, decays: |_| true }
    }
}

/// Adam with decoupled weight decay.
///
/// Follows `torch.optim.AdamW` without amsgrad. One libtorch call steps all parameters that have the same
/// weight decay. On a CPU the running means are those of PyTorch's default implementation to the bit, and
/// the parameters to 1e-7 (its `fused=True` differs from its default as much).
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    flat: Flat,
    /// The number of steps, on the device, where the kernel reads it.
    step: Tensor,
    /// For each group the same `step` as often as the kernel wants it.
    steps: Vec<TensorList>,
}

impl AdamW {
    const STEP: &str = "step";

    /// Steps the parameters in `buffers`, which a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers) gives.
    ///
    /// # Errors
    /// [`Error::Input`] without a buffer; [`Error::Torch`] when the device has no room.
    pub fn new(buffers: Vec<FlatBuffer>, options: AdamWOptions) -> Result<Self> {
        let Some(first) = buffers.first() else {
            return Err(Error::Input("there are no parameters to step".into()));
        };
        let device = first.parameters.device();
        let step = Tensor::f_zeros([0i64; 0], (Kind::Float, device))
            .map_err(Error::torch("making the optimizer's state"))?;
        let decays = |place: &Place| options.weight_decay != 0.0 && (options.decays)(place);
        let flat = Flat::new(buffers, &["exp_avg", "exp_avg_sq"], decays)?;
        let list =
            |len| TensorList::new(&(0..len).map(|_| step.shallow_clone()).collect::<Vec<_>>());
        let steps = flat.groups.iter().map(|group| list(group.len)).collect::<Result<_>>()?;
        Ok(Self { options, flat, step, steps })
    }

    /// Goes on with the same parameters at other places.
    fn rebuild(&mut self, buffers: Vec<FlatBuffer>) -> Result<()> {
        let state = self.state()?;
        let mut rebuilt = Self::new(buffers, self.options)?;
        rebuilt.load_state(&state)?;
        *self = rebuilt;
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, lr: f64) -> Result<()> {
        if let Some(moved) = self.flat.moved() {
            self.rebuild(moved)?;
        }
        let AdamWOptions { betas, eps, weight_decay, .. } = self.options;
        let _ = self.step.f_add_scalar_(1).map_err(Error::torch("counting a step"))?;
        for (group, steps) in self.flat.groups.iter().zip(&self.steps) {
            let weight_decay = if group.decays { weight_decay } else { 0.0 };
            let [exp_avgs, exp_avg_sqs] = &group.slots[..] else { continue };
            let step = AdamWStep { lr, betas, weight_decay, eps };
            let (parameters, gradients) = (&group.parameters, &group.gradients);
            fused_adamw(parameters, gradients, exp_avgs, exp_avg_sqs, steps, step)?;
        }
        Ok(())
    }

    fn state(&self) -> Result<Vec<ParameterState>> {
        let mut state = self.flat.state()?;
        for ParameterState { tensors, .. } in &mut state {
            let step = self.step.f_detach_copy().map_err(Error::torch("copying the state"))?;
            tensors.insert(Self::STEP.into(), step);
        }
        Ok(state)
    }

    fn load_state(&mut self, state: &[ParameterState]) -> Result<()> {
        let mut counts = Vec::new();
        for ParameterState { name, tensors } in state {
            if let Some(step) = tensors.get(Self::STEP) {
                let count = step.f_double_value(&[]).map_err(Error::torch("reading `step`"))?;
                counts.push((name, count));
            }
        }
        let (first, count) = counts.first().map_or((None, 0.0), |(name, c)| (Some(name), *c));
        if let (Some(first), Some((other, theirs))) =
            (first, counts.iter().find(|(_, theirs)| *theirs != count))
        {
            return Err(Error::Input(format!(
                "the optimizer's state has {count} steps of parameter `{first}` and {theirs} of \
                 `{other}`; here all parameters are stepped together"
            )));
        }
        self.flat.load(state, &[Self::STEP])?;
        let _ = self.step.f_fill_(count).map_err(Error::torch("loading the optimizer's state"))?;
        Ok(())
    }
}
