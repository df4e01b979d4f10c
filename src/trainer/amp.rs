//! Mixed precision: `--amp`.

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::{Device, Kind};

use crate::ddp::DistributedDataParallel;
use crate::error::Result;
use crate::ffi::Autocast;
use crate::optim::{GradScaler, GradScalerOptions};

/// The dtype of forward passes, for the operations where it is precise enough: `--amp`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum Amp {
    /// The dtype of the parameters.
    Off,
    /// bfloat16.
    Bf16,
    /// float16, whose gradients need a [`GradScaler`].
    Fp16,
}

impl Amp {
    /// Enables autocast for forward pass and loss, until the returned guard is dropped. `None` with `Off`.
    pub(crate) fn autocast(self, device: Device) -> Result<Option<Autocast>> {
        let dtype = match self {
            Amp::Off => return Ok(None),
            Amp::Bf16 => Kind::BFloat16,
            Amp::Fp16 => Kind::Half,
        };
        Autocast::new(device, dtype).map(Some)
    }

    /// Returns the scaler for the gradients of `ddp`. Enabled for float16 only: bfloat16 has the range of float32.
    pub(super) fn grad_scaler<M>(self, ddp: &DistributedDataParallel<M>) -> Result<GradScaler> {
        let options =
            GradScalerOptions { enabled: self == Amp::Fp16, ..GradScalerOptions::default() };
        GradScaler::new(ddp.flat_buffers(), ddp.group().clone(), options)
    }
}
