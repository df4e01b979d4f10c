//! Autocast: mixed precision, where each operation chooses its dtype.

use std::ffi::c_char;
use std::marker::PhantomData;

use tch::{Device, Kind};

use super::shim::check;
use crate::error::{Error, Result};

/// The state that `torch.autocast` sets for a thread.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct AutocastState {
    enabled: bool,
    /// A `c10::ScalarType`.
    dtype: i8,
    cache_enabled: bool,
}

unsafe extern "C" {
    fn ddp_autocast_swap(on_cuda: bool, state: *mut AutocastState) -> *mut c_char;
}

/// Enables autocast for this thread, on the CPU or on all GPUs, until it is dropped. Operations for which `kind` is
/// precise enough, such as matrix products, compute in `kind`. Others, such as losses, compute in float32. Inputs are
/// converted under autograd, so parameters and their gradients stay float32.
///
/// Follows `torch.autocast(device_type, dtype)`. Use it for forward passes and losses, and drop it before backward.
/// Drop nested ones in reverse order.
///
/// Converted weights are not cached (`cache_enabled=False` in PyTorch), so a weight that is used twice is converted
/// twice. libtorch has one cache for all threads, which each thread clears at its end. With the cache, a rank's
/// rounding would depend on the timing of other ranks.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
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
    /// Makes the type `!Send`: the thread that set the state must restore it.
    _not_send: PhantomData<*const ()>,
}

impl Autocast {
    /// Enables autocast on the CPU, or on all GPUs if `device` is a GPU. `kind` is [`Kind::BFloat16`] or
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
                return Err(Error::unsupported(format!(
                    "autocast to {kind:?}: use BFloat16 or Half (float16)"
                )));
            }
        };
        let on_cuda = match device {
            Device::Cpu => false,
            Device::Cuda(_) => true,
            _ => {
                return Err(Error::unsupported(format!(
                    "autocast on {device:?}: use the CPU or a GPU"
                )));
            }
        };
        let state = AutocastState { enabled: true, dtype, cache_enabled: false };
        let before = swap(on_cuda, state)?;
        Ok(Self { on_cuda, before, _not_send: PhantomData })
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // Cannot fail: this state was set before.
        let _ = swap(self.on_cuda, self.before);
    }
}

/// Sets the autocast state of the calling thread, for CUDA devices or for the CPU. Returns the previous state.
fn swap(on_cuda: bool, mut state: AutocastState) -> Result<AutocastState> {
    // SAFETY: reads and writes one plain struct, whose `dtype` is a kind that libtorch knows: one that `Autocast`
    // names, or the one that was set before.
    check("autocast", unsafe { ddp_autocast_swap(on_cuda, &mut state) })?;
    Ok(state)
}
