//! Adam with decoupled weight decay.

use tch::Tensor;

use super::optimizer_state::OptimizerState;
use super::parts::{Count, Parts};
use super::{FlatBuffer, Optimizer, OptimizerOptions, ParamSpan, ParameterState};
use crate::error::{Error, Result};
use crate::ffi::{AdamWStep, TorchResult, fused_adamw};

/// The options of [`AdamW`]. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy)]
pub struct AdamWOptions {
    /// Decay factors of the running means of the gradient and of its square.
    pub betas: (f64, f64),
    /// Term added to the denominator, so that it is not zero.
    pub eps: f64,
    /// Weight decay: the part by which a parameter shrinks in a step, times the learning rate.
    pub weight_decay: f64,
    /// Selects the parameters with weight decay: all, or [`ParamSpan::is_weight`].
    pub decays: fn(&ParamSpan) -> bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, decays: |_| true }
    }
}

impl OptimizerOptions for AdamWOptions {
    fn states(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn build(&self, buffers: Vec<FlatBuffer>) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(AdamW::new(buffers, *self)?))
    }
}

/// Adam with decoupled weight decay.
///
/// Follows `torch.optim.AdamW` without amsgrad. One libtorch call steps all parameters that have the same
/// weight decay. On a CPU the running means are those of PyTorch's default implementation to the bit, and
/// the parameters to 1e-7 (its `fused=True` differs from its default as much).
/// In half precision on a CPU both are those of `fused=True`, which computes in float32.
#[derive(Debug)]
pub struct AdamW {
    options: AdamWOptions,
    flat: OptimizerState,
}

impl AdamW {
    const STEP: &str = "step";

    /// Returns an optimizer for the parameters in `buffers`, which come from a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers).
    ///
    /// # Errors
    /// [`Error::Torch`] when the device is out of memory.
    pub fn new(buffers: Vec<FlatBuffer>, options: AdamWOptions) -> Result<Self> {
        let decays = (options.weight_decay != 0.0).then_some(options.decays);
        // Every step must be counted, because the bias correction of the means depends on the count.
        let flat = OptimizerState::new(buffers, options.states(), decays, u64::MAX)?;
        Ok(Self { options, flat })
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, lr: f64) -> Result<()> {
        if !self.flat.begin_step()? {
            return Ok(());
        }
        for Count { steps, .. } in self.flat.groups.iter_mut().flat_map(|group| &mut group.count) {
            let _ = steps.f_add_scalar_(1).doing("counting a step")?;
        }
        let Self { options, flat } = self;
        let AdamWOptions { betas, eps, .. } = *options;
        flat.step(|group, parts| {
            let [exp_avgs, exp_avg_sqs] = &parts.state[..] else { return Ok(()) };
            let Some(Count { one, list, .. }) = &group.count else { return Ok(()) };
            let weight_decay = if group.decays { options.weight_decay } else { 0.0 };
            let step = AdamWStep { lr, betas: betas.into(), weight_decay, eps };
            let steps = if parts.len() == 1 { one } else { list };
            let Parts { parameters, gradients, .. } = parts;
            fused_adamw([parameters, gradients, exp_avgs, exp_avg_sqs, steps], step)
        })
    }

    fn state(&self) -> Result<Vec<ParameterState>> {
        let with_step = |(steps, mut state): (u64, ParameterState)| {
            if steps > 0 {
                state.tensors.insert(Self::STEP.into(), Tensor::from(steps as f32));
            }
            state
        };
        Ok(self.flat.state()?.into_iter().map(with_step).collect())
    }

    fn load_state(&mut self, state: &[ParameterState]) -> Result<()> {
        let count = |state: &ParameterState| {
            let steps = state.tensors[Self::STEP].f_double_value(&[]);
            let steps = steps.doing("reading `step`")?;
            if steps >= 1.0 && steps.fract() == 0.0 {
                return Ok(steps as u64);
            }
            Err(Error::data(format!(
                "the optimizer's state has a `step` of {steps} for parameter `{}`, which is not a number of steps",
                state.name
            )))
        };
        self.flat.load(state, &[Self::STEP], count)
    }

    fn parameter_names(&self) -> Vec<String> {
        self.flat.parameter_names()
    }
}
