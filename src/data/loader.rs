//! The batches that one rank sees in one epoch.

use tch::{Device, Tensor};

use super::{Dataset, DistributedSampler};
use crate::error::{Error, Result};

/// Inputs and targets of a few samples, on the rank's device.
#[derive(Debug)]
pub struct Batch {
    /// The samples' inputs, first dimension [`Batch::len`].
    pub inputs: Tensor,
    /// Their targets.
    pub targets: Tensor,
    pub(super) len: i64,
}

impl Batch {
    /// How many samples it holds.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Never: a batch has at least one sample.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// Cuts a rank's share of the data set into batches, epoch by epoch.
///
/// Follows `torch.utils.data.DataLoader` with a [`DistributedSampler`]; the epoch goes on to the sampler
/// by itself. The last batch may be smaller.
#[derive(Debug)]
pub struct DataLoader {
    pub(super) inputs: Tensor,
    pub(super) targets: Tensor,
    pub(super) sampler: DistributedSampler,
    batch_size: i64,
}

impl DataLoader {
    /// Batches of `batch_size` of the samples that `sampler` picks from `dataset`, on `device`.
    ///
    /// # Errors
    /// [`Error::Input`] with batches of no samples, [`Error::Torch`] when the device has no room.
    pub fn new(
        dataset: &Dataset,
        sampler: DistributedSampler,
        batch_size: usize,
        device: Device,
    ) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::Input("a batch needs at least one sample".into()));
        }
        let (inputs, targets) = dataset.on(device)?;
        Ok(Self { inputs, targets, sampler, batch_size: batch_size as i64 })
    }

    /// How many samples a batch has, but for the last of an epoch.
    pub fn batch_size(&self) -> usize {
        self.batch_size as usize
    }

    /// How many batches an epoch has, the same on every rank.
    pub fn num_batches(&self) -> usize {
        self.sampler.num_samples().div_ceil(self.batch_size as usize)
    }

    /// The batches of `epoch`.
    ///
    /// The rank's share is gathered in one go, and the batches are views of it: cheaper than a gather
    /// for each batch by a libtorch call per tensor and step.
    ///
    /// # Errors
    /// [`Error::Torch`] when the device has no room for the rank's share.
    pub fn epoch(&self, epoch: u64) -> Result<impl Iterator<Item = Result<Batch>> + use<>> {
        let indices: Vec<i64> =
            self.sampler.indices(epoch)?.into_iter().map(|index| index as i64).collect();
        let total = indices.len() as i64;
        let gather = || {
            let indices = Tensor::f_from_slice(&indices)?.f_to_device(self.inputs.device())?;
            Ok((
                self.inputs.f_index_select(0, &indices)?,
                self.targets.f_index_select(0, &indices)?,
            ))
        };
        let (inputs, targets) = gather().map_err(Error::torch("gathering the epoch's samples"))?;
        let batch_size = self.batch_size;
        Ok((0..self.num_batches() as i64).map(move |number| {
            let start = number * batch_size;
            let len = batch_size.min(total - start);
            let cut = |tensor: &Tensor| {
                tensor.f_narrow(0, start, len).map_err(Error::torch("cutting a batch"))
            };
            Ok(Batch { inputs: cut(&inputs)?, targets: cut(&targets)?, len })
        }))
    }
}
