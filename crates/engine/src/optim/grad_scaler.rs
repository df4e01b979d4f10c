//! Loss scaling, so that float16 gradients do not vanish.

use std::rc::Rc;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{FlatBuffer, GradState, Optimizer, average_gradients};
use crate::error::{Error, Result};
use crate::ffi::{TensorList, TorchResult, amp_unscale};
use crate::process_group::ProcessGroup;

/// The options of [`GradScaler`]. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradScalerOptions {
    /// The initial scale.
    pub init_scale: f64,
    /// Factor for the scale after `growth_interval` steps in a row with finite gradients.
    pub growth_factor: f64,
    /// Factor for the scale after a step with gradients that are not finite.
    pub backoff_factor: f64,
    /// The number of steps in a row with finite gradients before the scale grows.
    pub growth_interval: u64,
    /// Whether to scale, check and skip. If false, the scaler does nothing, so that one loop serves float16 and other
    /// dtypes.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
        }
    }
}

/// The state of a [`GradScaler`], with the keys of PyTorch's `state_dict`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GradScalerState {
    /// The current scale.
    pub scale: f64,
    /// See [`GradScalerOptions`].
    pub growth_factor: f64,
    /// See [`GradScalerOptions`].
    pub backoff_factor: f64,
    /// See [`GradScalerOptions`].
    pub growth_interval: u64,
    /// The number of steps in a row with finite gradients since the last change of the scale.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: u64,
}

/// Multiplies losses by a large scale, so that small gradients are not zero in float16, and divides the averaged
/// gradients by it. Skips a step whose gradients overflow, and lowers the scale.
///
/// Follows `torch.amp.GradScaler`. All ranks make the same decision because they check averaged gradients. A gradient
/// that is infinite or NaN on one rank is so in the average, in any dtype it was sent in.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::models::ModelConfig;
/// use ddp_mp::optim::{GradScaler, GradScalerOptions};
/// use ddp_mp::ffi::Autocast;
/// use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, Sgd, SgdOptions, spawn};
/// use tch::{Kind, Reduction, Tensor};
///
/// spawn(2, |rank| {
///     let group = rank.init_process_group(Backend::Threaded)?;
/// #   let config = ModelConfig { in_features: 3, ..ModelConfig::default() };
/// #   let (vs, model) = config.build(rank.device(), 0)?;
/// #   let float = (Kind::Float, rank.device());
/// #   let (inputs, targets) = (Tensor::ones([4, 3], float), Tensor::ones([4, 1], float));
///     // ... vs and model
///     let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
///     let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
///     let mut scaler = GradScaler::new(ddp.flat_buffers(), group, GradScalerOptions::default())?;
///     for _ in 0..4 {
///         ddp.zero_grad()?;
///         let loss = {
///             let _autocast = Autocast::new(rank.device(), Kind::Half)?;
///             ddp.forward(&inputs).mse_loss(&targets, Reduction::Mean)
///         };
///         ddp.backward(&scaler.scale(&loss)?)?;
///         scaler.unscale_()?; // before what looks at the gradients, such as ddp.clip_grad_norm
///         scaler.step(&mut optimizer, 0.1)?;
///         scaler.update()?;
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GradScaler {
    enabled: bool,
    group: Rc<ProcessGroup>,
    buffers: Vec<FlatBuffer>,
    /// One list per buffer, because the kernel takes one dtype.
    gradients: Vec<TensorList>,
    /// On the host, and the scale in PyTorch's precision, float32. PyTorch keeps the scale on the device, yet reads
    /// `found_inf` on the host before each step. Here that read decides whether to step, so optimizers need not handle
    /// skipped steps. Momentum and step counts stay right.
    state: GradScalerState,
    stage: Stage,
    /// The kernel's output `found_inf` and its factor `inv_scale`; on the device, allocated once.
    found_inf: Tensor,
    inv_scale: Tensor,
}

/// The stage of the step since the last update.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Scaled,
    Unscaled,
    Stepped { found_inf: bool },
}

impl GradScaler {
    /// The smallest scale: below it a gradient of 1 is zero in float16. From 65536 it takes 41 skipped steps in a row
    /// to get there, through all magnitudes that float16 has.
    const MIN_SCALE: f32 = 1.0 / 16_777_216.0;

    /// Returns a scaler for the gradients in `buffers`, which come from a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers) on the ranks of `group`.
    ///
    /// # Errors
    /// [`Error::Input`] for a growth factor that does not grow, a backoff factor that does not shrink, and
    /// float16 parameters; [`Error::Torch`] when the device is out of memory.
    pub fn new(
        buffers: Vec<FlatBuffer>,
        group: Rc<ProcessGroup>,
        options: GradScalerOptions,
    ) -> Result<Self> {
        let GradScalerOptions { growth_factor, backoff_factor, growth_interval, enabled, .. } =
            options;
        let state = GradScalerState {
            scale: options.init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            growth_tracker: 0,
        };
        if enabled {
            state.check()?;
            if let Some(half) = buffers.iter().find(|it| it.gradients.kind() == Kind::Half) {
                let name = half.layout.get().first().map_or(String::new(), |it| it.name.clone());
                return Err(Error::unsupported(format!(
                    "parameter `{name}` is float16, and so is its gradient, which cannot be unscaled; keep \
                     parameters float32 and use Autocast"
                )));
            }
        }
        let scalar = || Tensor::f_zeros([0i64; 0], (Kind::Float, group.device())).doing("zeros");
        let (found_inf, inv_scale) = (scalar()?, scalar()?);
        let list = |buffer: &FlatBuffer| TensorList::new(vec![buffer.gradients.shallow_clone()]);
        let gradients = buffers.iter().map(list).collect::<Result<_>>()?;
        let (state, stage) = (state.in_float32(), Stage::Scaled);
        Ok(Self { enabled, group, buffers, gradients, state, stage, found_inf, inv_scale })
    }

    /// Returns whether the scaler is enabled.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns `loss` times the scale, for backward.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.enabled {
            return Ok(loss.shallow_clone());
        }
        loss.f_mul_scalar(self.state.scale).doing("scaling the loss")
    }

    /// Divides the averaged gradients by the scale and checks whether they are finite. Call it after the last backward
    /// of a step and before code that reads gradients; otherwise [`step`](Self::step) calls it. Does not wait for the
    /// device. A collective where [`average_gradients`] is one.
    ///
    /// # Errors
    /// [`Error::Input`] when it has been called since the last [`update`](Self::update), or when there was no
    /// backward since gradients were zeroed; [`Error::Torch`].
    pub fn unscale_(&mut self) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        if self.stage != Stage::Scaled {
            return out_of_turn("unscale_ has been called since the last update");
        }
        if self.buffers.iter().all(|buffer| buffer.layout.gradients() == GradState::Cleared) {
            return out_of_turn("there has been no backward since gradients were zeroed");
        }
        average_gradients(&self.buffers)?;
        // Computed in float64, like PyTorch.
        let inverse = self.state.scale.recip();
        let set = |scalar: &Tensor, to: f64| scalar.shallow_clone().f_fill_(to).map(drop);
        set(&self.found_inf, 0.0).and_then(|()| set(&self.inv_scale, inverse)).doing("fill_")?;
        for gradients in &self.gradients {
            amp_unscale(gradients, &self.found_inf, &self.inv_scale)?;
        }
        self.stage = Stage::Unscaled;
        Ok(())
    }

    /// Calls `optimizer` with learning rate `lr`, unless a gradient is infinite or NaN. Then parameters and optimizer
    /// state stay unchanged. Returns whether the optimizer has stepped, the same on every rank. Waits for the device if
    /// the scaler is enabled.
    ///
    /// # Errors
    /// The errors of the optimizer, of [`unscale_`](Self::unscale_) and, with `nccl`, of [`ProcessGroup::synchronize`];
    /// [`Error::Input`] when it has been called since the last [`update`](Self::update).
    pub fn step(&mut self, optimizer: &mut dyn Optimizer, lr: f64) -> Result<bool> {
        if !self.enabled {
            return optimizer.step(lr).map(|()| true);
        }
        if let Stage::Stepped { .. } = self.stage {
            return out_of_turn("step has been called since the last update");
        }
        let found_inf = self.found_inf()?;
        if !found_inf {
            optimizer.step(lr)?;
        }
        self.stage = Stage::Stepped { found_inf };
        Ok(!found_inf)
    }

    /// Lowers the scale if the gradients were not finite. Raises it after `growth_interval` finite steps in a row. Call
    /// it at the end of each step.
    ///
    /// # Errors
    /// [`Error::LossScale`] when the scale is so small that it cannot be the cause of the overflow. (PyTorch continues
    /// to a scale of 0, and skips all steps.) [`Error::Input`] when no gradients were unscaled since the last
    /// update.
    pub fn update(&mut self) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let found_inf = match self.stage {
            Stage::Scaled => {
                return out_of_turn("update needs gradients that were unscaled before");
            }
            Stage::Unscaled => self.found_inf()?,
            Stage::Stepped { found_inf } => found_inf,
        };
        self.stage = Stage::Scaled;
        // Computed like the kernel `_amp_update_scale_`.
        let state = &mut self.state;
        if found_inf {
            let scale = (state.scale * state.backoff_factor) as f32;
            (state.scale, state.growth_tracker) = (f64::from(scale), 0);
            if scale < Self::MIN_SCALE {
                return Err(Error::LossScale { scale });
            }
        } else if state.growth_tracker + 1 == state.growth_interval {
            let grown = (state.scale * state.growth_factor) as f32;
            state.scale = if grown.is_finite() { f64::from(grown) } else { state.scale };
            state.growth_tracker = 0;
        } else {
            state.growth_tracker += 1;
        }
        Ok(())
    }

    /// Returns the scaler's state for a checkpoint; `None` if the scaler is not enabled. Follows `state_dict`.
    pub fn state(&self) -> Option<GradScalerState> {
        self.enabled.then_some(self.state)
    }

    /// Restores `state`; does nothing if the scaler is not enabled. Follows `load_state_dict`.
    ///
    /// # Errors
    /// [`Error::Input`] when `state` is invalid; the scaler is then unchanged.
    pub fn load_state(&mut self, state: &GradScalerState) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        state.check()?;
        (self.state, self.stage) = (state.in_float32(), Stage::Scaled);
        Ok(())
    }

    /// Returns whether a gradient is not finite. Waits for the device.
    fn found_inf(&mut self) -> Result<bool> {
        if self.stage == Stage::Scaled {
            self.unscale_()?;
        }
        self.group.await_launched()?; // with `nccl`, this wait ends if another rank fails
        let found = self.found_inf.f_double_value(&[]).doing("reading found_inf")?;
        Ok(found != 0.0)
    }
}

impl GradScalerState {
    /// Checks the numbers like PyTorch, and that the scale is a positive float32.
    ///
    /// # Errors
    /// [`Error::Input`] that names the wrong number.
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        let Self { scale, growth_factor, backoff_factor, growth_interval, growth_tracker } = *self;
        let in_float32 = scale as f32;
        let problem = if !(in_float32 >= GradScaler::MIN_SCALE && in_float32.is_finite()) {
            format!("gradient scaler's scale {scale} is not from 2^-24 to what float32 holds")
        } else if !(growth_factor > 1.0 && growth_factor.is_finite()) {
            format!("gradient scaler's growth_factor {growth_factor} is not above 1")
        } else if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
            format!("gradient scaler's backoff_factor {backoff_factor} is not between 0 and 1")
        } else if growth_interval == 0 {
            "gradient scaler's growth_interval is 0; use 1 or more".into()
        } else if growth_tracker >= growth_interval {
            format!(
                "scaler's state has a _growth_tracker of {growth_tracker}, which must be below its growth_interval of \
                 {growth_interval}"
            )
        } else {
            return Ok(());
        };
        Err(Error::data(format!("the {problem}")))
    }

    /// Returns the state with the scale as float32 holds it.
    fn in_float32(self) -> Self {
        Self { scale: f64::from(self.scale as f32), ..self }
    }
}

fn out_of_turn<T>(what: &str) -> Result<T> {
    Err(Error::usage(format!(
        "the gradient scaler: {what}; a step is scale, backward, unscale_ (if needed), step, update"
    )))
}
