//! Mixed precision: operations that choose the kind they compute in.

use std::marker::PhantomData;

use tch::{Device, Kind};

use super::shim::{self, AutocastState};
use crate::error::{Error, Result};

/// While this lives, what this thread computes on devices of one kind is computed in `kind` where that is
/// precise enough, as products of matrices are, and in float32 where it is not, as losses are. The inputs are
/// converted under autograd, so parameters and their gradients stay float32.
///
/// Follows `torch.autocast(device_type, dtype)`. For forward passes and losses; go backward when it has been
/// dropped. Several at once are dropped in the reverse order.
///
/// Converted weights are not kept for the next use (`cache_enabled=False` in PyTorch): libtorch has one cache
/// for all threads, which each clears when it is through, so that how a rank rounds would depend on when the
/// others are. A weight that is used twice is converted twice.
///
/// ```
/// use ddp_mp::ffi::Autocast;
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let matrix = Tensor::eye(2, (Kind::Float, Device::Cpu));
/// let product = {
///     let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16)?;
///     matrix.matmul(&matrix)
/// };
/// assert_eq!(product.kind(), Kind::BFloat16);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct Autocast {
    on_cuda: bool,
    before: AutocastState,
    /// Of this thread, which must be the one that puts it back.
    of_thread: PhantomData<*const ()>,
}

impl Autocast {
    /// From now on, on the CPU or on all GPUs, whichever `device` is. `kind` is [`Kind::BFloat16`] or
    /// [`Kind::Half`].
    ///
    /// # Errors
    /// [`Error::Input`] for another kind or device.
    pub fn new(device: Device, kind: Kind) -> Result<Self> {
        // The numbers of c10::ScalarType.
        let dtype = match kind {
            Kind::Half => 5,
            Kind::BFloat16 => 15,
            _ => {
                return Err(Error::Input(format!(
                    "autocast to {kind:?}: use BFloat16 or Half (float16)"
                )));
            }
        };
        let on_cuda = match device {
            Device::Cpu => false,
            Device::Cuda(_) => true,
            _ => return Err(Error::Input(format!("autocast on {device:?}: use the CPU or a GPU"))),
        };
        let state = AutocastState { enabled: true, dtype, cache_enabled: false };
        let before = shim::autocast_swap(on_cuda, state)?;
        Ok(Self { on_cuda, before, of_thread: PhantomData })
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // What was set before can be set again.
        let _ = shim::autocast_swap(self.on_cuda, self.before);
    }
}
