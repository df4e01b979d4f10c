//! A parameter whose gradient can be seen before it is averaged, and after.

use tch::Tensor;

use super::{DistributedDataParallel, parameters};
use crate::error::{Error, Result};

/// The first parameter of a model.
#[derive(Debug)]
pub(crate) struct GradProbe {
    pub name: String,
    /// Itself, and with it the gradient that it has by now.
    pub parameter: Tensor,
    /// The gradient that this rank had computed when the last one was averaged.
    pub local: Tensor,
}

impl<M> DistributedDataParallel<M> {
    /// Keeps a copy of what this rank computes as the gradient of the first parameter each time before it is averaged,
    /// until [`stop_probe`](Self::stop_probe). The results are the same.
    ///
    /// # Errors
    /// [`Error::Torch`] when the device has no room.
    pub(crate) fn start_probe(&self) -> Result<GradProbe> {
        let first = parameters::trained(&self.tensors).next();
        let first = first.ok_or_else(|| Error::Input("the model has no parameters".into()))?;
        let local = first.tensor.f_detach().and_then(|it| it.f_zeros_like());
        let local = local.map_err(Error::torch("zeros_like"))?;
        self.reducer.probe_first(Some(local.shallow_clone()));
        let (name, parameter) = (first.name.clone(), first.tensor.shallow_clone());
        Ok(GradProbe { name, parameter, local })
    }

    /// Keeps none any more.
    pub(crate) fn stop_probe(&self) {
        self.reducer.probe_first(None);
    }
}
