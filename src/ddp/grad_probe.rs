//! A probe of one parameter's gradient before and after averaging.

use tch::Tensor;

use super::parameters;
use super::wrapper::DistributedDataParallel;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;

/// A probe of the first parameter of a model.
#[derive(Debug)]
pub(crate) struct GradProbe {
    pub name: String,
    /// The parameter, with its current gradient.
    pub parameter: Tensor,
    /// This rank's own gradient before the last averaging.
    pub local: Tensor,
}

impl<M> DistributedDataParallel<M> {
    /// Starts to copy this rank's own gradient of the first parameter before each averaging, until
    /// [`stop_probe`](Self::stop_probe). Training results do not change.
    ///
    /// # Errors
    /// [`Error::Torch`] when the device has no room.
    pub(crate) fn start_probe(&self) -> Result<GradProbe> {
        let first = parameters::trained(&self.tensors).next();
        let first =
            first.ok_or_else(|| Error::InvalidInput("the model has no parameters".into()))?;
        let local = first.tensor.f_detach().and_then(|tensor| tensor.f_zeros_like());
        let local = local.doing("zeros_like")?;
        self.reducer.state().layout.probe = Some(local.shallow_clone());
        let (name, parameter) = (first.name.clone(), first.tensor.shallow_clone());
        Ok(GradProbe { name, parameter, local })
    }

    /// Stops copying.
    pub(crate) fn stop_probe(&self) {
        self.reducer.state().layout.probe = None;
    }
}
