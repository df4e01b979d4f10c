//! Stochastic gradient descent.

use tch::{Device, Kind, Tensor};

use super::optimizer_state::OptimizerState;
use super::{FlatBuffer, Optimizer, OptimizerOptions, ParamSpan, ParameterState};
use crate::error::{Error, Result};
use crate::ffi::{SgdStep, TensorList, TorchResult, add_scaled, fused_sgd};

/// The options of [`Sgd`]. The defaults are PyTorch's: all zero or off.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions {
    /// Momentum: the part of the last step that goes into the next.
    pub momentum: f64,
    /// Dampening: the part of the gradient that is left out of the momentum.
    pub dampening: f64,
    /// Step as if the momentum had been applied before; requires momentum and no dampening.
    pub nesterov: bool,
    /// Weight decay: the part of the parameter that is added to its gradient.
    pub weight_decay: f64,
    /// Selects the parameters with weight decay: all, or [`ParamSpan::is_weight`].
    pub decays: fn(&ParamSpan) -> bool,
}

impl Default for SgdOptions {
    fn default() -> Self {
        let decays = |_: &ParamSpan| true;
        Self { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, decays }
    }
}

impl OptimizerOptions for SgdOptions {
    fn states(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn is_plain(&self) -> bool {
        self.momentum == 0.0 && self.weight_decay == 0.0
    }

    fn build(&self, buffers: Vec<FlatBuffer>) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Sgd::new(buffers, *self)?))
    }
}

/// Stochastic gradient descent: `parameter -= lr * gradient`, with optional momentum and weight decay.
///
/// Follows `torch.optim.SGD`. One libtorch call steps all parameters that have the same weight decay. On
/// a CPU the parameters are those of PyTorch's default implementation to the bit, also in half precision. There it does
/// not use libtorch's fused kernel, which does not update all parameters.
#[derive(Debug)]
pub struct Sgd {
    options: SgdOptions,
    flat: OptimizerState,
    /// An empty list, for kernels without momentum buffers.
    none: TensorList,
}

impl Sgd {
    /// Returns an optimizer for the parameters in `buffers`, which come from a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers).
    ///
    /// # Errors
    /// [`Error::Input`] for Nesterov momentum without momentum or with dampening; [`Error::Torch`] when the
    /// device is out of memory.
    pub fn new(buffers: Vec<FlatBuffer>, options: SgdOptions) -> Result<Self> {
        if options.nesterov && (options.momentum <= 0.0 || options.dampening != 0.0) {
            return Err(Error::usage(
                "Nesterov momentum needs a momentum above 0 and no dampening".into(),
            ));
        }
        let decays = (options.weight_decay != 0.0).then_some(options.decays);
        // Counts to 1 only: a parameter's first step differs, because it initializes the momentum.
        let count_to = u64::from(options.momentum != 0.0);
        let flat = OptimizerState::new(buffers, options.states(), decays, count_to)?;
        Ok(Self { options, flat, none: TensorList::new(Vec::new())? })
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, lr: f64) -> Result<()> {
        if !self.flat.begin_step()? {
            return Ok(());
        }
        let Self { options, flat, none } = self;
        let SgdOptions { momentum, dampening, nesterov, .. } = *options;
        flat.step(|group, parts| {
            let weight_decay = if group.decays { options.weight_decay } else { 0.0 };
            let is_first_step = momentum != 0.0 && group.steps == 0;
            let step = SgdStep { lr, weight_decay, momentum, dampening, nesterov, is_first_step };
            // A plain step gives the same bits without the fused kernel, and then takes one call per range whatever
            // libtorch's thread count. With 2.1 M parameters on one thread this takes 1.8 ms, the fused kernel 2.1 ms.
            if options.is_plain() || parts.parameters.first().is_some_and(has_no_fused_kernel) {
                for index in 0..parts.len() {
                    let buffer = parts.state.first().map(|buffers| &buffers[index]);
                    single_sgd(&parts.parameters[index], &parts.gradients[index], buffer, step)?;
                }
                return Ok(());
            }
            let buffers = parts.state.first().unwrap_or(none);
            fused_sgd([&parts.parameters, &parts.gradients, buffers], step)
        })
    }

    fn state(&self) -> Result<Vec<ParameterState>> {
        Ok(self.flat.state()?.into_iter().map(|(_, state)| state).collect())
    }

    fn load_state(&mut self, state: &[ParameterState]) -> Result<()> {
        self.flat.load(state, &[], |_| Ok(1))
    }

    fn parameter_names(&self) -> Vec<String> {
        self.flat.parameter_names()
    }
}

/// Returns whether libtorch's `_fused_sgd_` is wrong for `parameter`. In half precision, its CPU kernel reads the
/// momentum as float32. It also does not write back the parameters that it computes in whole vectors.
fn has_no_fused_kernel(parameter: &Tensor) -> bool {
    parameter.device() == Device::Cpu && matches!(parameter.kind(), Kind::Half | Kind::BFloat16)
}

/// Steps one tensor. Follows `_single_tensor_sgd`, PyTorch's default on CPUs. `buffer` is the momentum.
fn single_sgd(
    parameter: &Tensor,
    gradient: &Tensor,
    buffer: Option<&Tensor>,
    step: SgdStep,
) -> Result<()> {
    let SgdStep { lr, weight_decay, momentum, dampening, nesterov, is_first_step } = step;
    let sum = |term: &Tensor, other: &Tensor, factor| {
        let sum = term.f_detach_copy().doing("SGD")?;
        add_scaled(&sum, other, factor)?;
        Ok(sum)
    };
    let (decayed, ahead);
    let mut update = gradient;
    if weight_decay != 0.0 {
        decayed = sum(gradient, parameter, weight_decay)?;
        update = &decayed;
    }
    if let Some(buffer) = buffer {
        if is_first_step {
            tch::no_grad(|| buffer.shallow_clone().f_copy_(update)).doing("SGD")?;
        } else {
            // As a tensor, because libtorch rounds a scalar to the dtype of the buffer.
            let _ = buffer.shallow_clone().f_mul_(&Tensor::from(momentum)).doing("SGD")?;
            add_scaled(buffer, update, 1.0 - dampening)?;
        }
        update = if nesterov {
            ahead = sum(update, buffer, momentum)?;
            &ahead
        } else {
            buffer
        };
    }
    add_scaled(parameter, update, -lr)
}
