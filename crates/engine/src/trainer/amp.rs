//! Mixed precision: `--amp`.

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};

use crate::ddp::DistributedDataParallel;
use crate::error::Result;
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
    /// Returns the scaler for the gradients of `ddp`. Enabled for float16 only: bfloat16 has the range of float32.
    pub(super) fn grad_scaler<M>(self, ddp: &DistributedDataParallel<M>) -> Result<GradScaler> {
        let options =
            GradScalerOptions { enabled: self == Amp::Fp16, ..GradScalerOptions::default() };
        GradScaler::new(ddp.flat_buffers(), ddp.group().clone(), options)
    }
}
