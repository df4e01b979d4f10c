//! Stochastic gradient descent.

use super::flat::OptimizerState;
use super::{FlatBuffer, Optimizer, ParamSpan, ParameterState};
use crate::error::{Error, Result};
use crate::ffi::{SgdStep, TensorList, add_scaled, fused_sgd};

/// The options of [`Sgd`]. The defaults are PyTorch's: nothing but the learning rate.
#[derive(Debug, Clone, Copy)]
pub struct SgdOptions {
    /// How much of the last step goes into the next.
    pub momentum: f64,
    /// How much less of the gradient goes into the momentum.
    pub dampening: f64,
    /// Step as if the momentum had been applied before; needs momentum and no dampening.
    pub nesterov: bool,
    /// How much of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// Which parameters weight decay is for: all, or [`ParamSpan::is_weight`].
    pub decays: fn(&ParamSpan) -> bool,
}

impl Default for SgdOptions {
    fn default() -> Self {
        let decays = |_: &ParamSpan| true;
        Self { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, decays }
    }
}

/// Stochastic gradient descent: `parameter -= lr * gradient`, with momentum and weight decay if wanted.
///
/// Follows `torch.optim.SGD`. One libtorch call steps all parameters that have the same weight decay. On
/// a CPU the parameters are those of PyTorch's default implementation to the bit.
#[derive(Debug)]
pub struct Sgd {
    options: SgdOptions,
    flat: OptimizerState,
    /// What stands for the momentum buffers where there are none.
    none: TensorList,
}

impl Sgd {
    /// Steps the parameters in `buffers`, which a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers) gives.
    ///
    /// # Errors
    /// [`Error::Input`] for Nesterov's momentum without momentum or with dampening; [`Error::Torch`] when
    /// the device has no room.
    pub fn new(buffers: Vec<FlatBuffer>, options: SgdOptions) -> Result<Self> {
        if options.nesterov && (options.momentum <= 0.0 || options.dampening != 0.0) {
            return Err(Error::Input(
                "Nesterov momentum needs a momentum above 0 and no dampening".into(),
            ));
        }
        let slots: &[_] = if options.momentum == 0.0 { &[] } else { &["momentum_buffer"] };
        let decays = (options.weight_decay != 0.0).then_some(options.decays);
        // Only a parameter's first step is another: with it the momentum begins.
        let flat = OptimizerState::new(buffers, slots, decays, 1)?;
        Ok(Self { options, flat, none: TensorList::new(&[])? })
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, lr: f64) -> Result<()> {
        if !self.flat.have_gradients()? {
            return Ok(());
        }
        self.flat.refresh()?;
        let SgdOptions { momentum, dampening, nesterov, weight_decay, .. } = self.options;
        if momentum == 0.0 && weight_decay == 0.0 {
            // The same bits as the fused kernel's. One call a bucket, whatever libtorch's threads: with 2.1 M
            // parameters on one thread 1.8 ms, the fused kernel 2.1 ms. Who has no gradient has zeros there.
            for FlatBuffer { parameters, gradients, .. } in &self.flat.buffers {
                add_scaled(parameters, gradients, -lr)?;
            }
            return self.flat.bump_versions();
        }
        for group in &self.flat.groups {
            let weight_decay = if group.decays { weight_decay } else { 0.0 };
            let is_first_step = momentum != 0.0 && group.steps == 0;
            let step = SgdStep { lr, weight_decay, momentum, dampening, nesterov, is_first_step };
            let buffers = group.slots.first().unwrap_or(&self.none);
            fused_sgd(&group.parameters, &group.gradients, buffers, step)?;
        }
        self.flat.count_step();
        self.flat.bump_versions()
    }

    fn state(&self) -> Result<Vec<ParameterState>> {
        Ok(self.flat.state()?.into_iter().map(|(_, state)| state).collect())
    }

    fn load_state(&mut self, state: &[ParameterState]) -> Result<()> {
        self.flat.load(state, &[], |_| Ok(1))
    }
}
