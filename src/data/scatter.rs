//! Scatters batches that rank 0 loads for all ranks, for `DataParallel`.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::loader::num_batches;
use super::{Batch, DataLoader, DistributedSampler};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::process_group::{ProcessGroup, dtype_name, parse_dtype};

/// Scatters each rank's batches from rank 0, the only rank with the data.
///
/// Each rank gets the batches that it would load for itself, in the same order. Training is therefore comparable.
#[derive(Debug)]
pub struct ScatterLoader {
    group: Rc<ProcessGroup>,
    /// On rank 0 one loader for each rank. Empty on the other ranks.
    pub(super) loaders: Vec<DataLoader>,
    plan: ScatterPlan,
    waited: Rc<Cell<Duration>>,
}

/// The shapes and counts that a rank needs to receive its batches. Rank 0 broadcasts them once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ScatterPlan {
    /// Rank 0's sampler. All ranks get equal shares.
    sampler: DistributedSampler,
    drop_last: bool,
    batch_size: usize,
    inputs: Sample,
    targets: Sample,
}

/// The shape of one sample, and the name of its dtype.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Sample {
    shape: Vec<i64>,
    dtype: String,
}

impl ScatterLoader {
    /// Creates a loader that scatters the batches of `loaders` over the ranks of `group`. Rank 0 passes one loader for
    /// each rank, the others none. A collective.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a wrong number of loaders, or if their batches differ in more than the samples;
    /// [`Error::Unsupported`] if samples have [more inputs](super::Dataset::more_inputs) than one tensor; the
    /// errors of [`ProcessGroup::broadcast_object_list`].
    pub fn new(loaders: Vec<DataLoader>, group: Rc<ProcessGroup>) -> Result<Self> {
        let expected = if group.rank() == 0 { group.world_size() } else { 0 };
        if loaders.len() != expected {
            return Err(Error::InvalidInput(format!(
                "rank 0 scatters the batches of all {} ranks: it needs a loader for each, and the others \
                 need none; rank {} has {}",
                group.world_size(),
                group.rank(),
                loaders.len()
            )));
        }
        let mut plans = loaders.iter().map(ScatterPlan::new).collect::<Result<Vec<_>>>()?;
        plans.dedup();
        if plans.len() > 1 {
            return Err(Error::InvalidInput(
                "the ranks' loaders differ: all need the same number of batches, of the same size and dtype"
                    .into(),
            ));
        }
        group.broadcast_object_list(&mut plans, 0)?;
        let plan =
            plans.pop().ok_or_else(|| Error::InvalidInput("there is nothing to scatter".into()))?;
        Ok(Self { group, loaders, plan, waited: Rc::default() })
    }

    /// Returns the number of samples per batch. An epoch's last batch may have fewer.
    pub fn batch_size(&self) -> usize {
        self.plan.batch_size
    }

    /// Returns the number of samples in the data set, for all ranks together.
    pub fn dataset_len(&self) -> usize {
        self.plan.sampler.len()
    }

    /// Returns the number of batches in an epoch, the same on every rank.
    pub fn num_batches(&self) -> usize {
        self.num_batches_from(0)
    }

    /// Returns the number of batches left after all ranks together have had the first `start` samples.
    pub fn num_batches_from(&self, start: usize) -> usize {
        let ScatterPlan { sampler, batch_size, drop_last, .. } = &self.plan;
        num_batches(sampler.num_samples_from(start), *batch_size, *drop_last)
    }

    /// Returns the total time this rank has waited for data: on rank 0 for loading, on the others for rank 0.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Returns this rank's batches of `epoch`. Each batch takes two collectives, so all ranks must request it.
    ///
    /// # Errors
    /// [`Error::Torch`] if rank 0's device has no room for the samples of all ranks. A batch's errors are those of
    /// loading it and of [`ProcessGroup::scatter`].
    pub fn epoch(&self, epoch: u64) -> Result<impl Iterator<Item = Result<Batch>> + use<>> {
        self.epoch_from(epoch, 0)
    }

    /// Returns this rank's batches of `epoch` left after all ranks together have had the first `start` samples.
    ///
    /// # Errors
    /// As [`epoch`](Self::epoch).
    pub fn epoch_from(
        &self,
        epoch: u64,
        start: usize,
    ) -> Result<impl Iterator<Item = Result<Batch>> + use<>> {
        let epochs = self.loaders.iter().map(|loader| loader.epoch_from(epoch, start));
        let mut epochs = epochs.collect::<Result<Vec<_>>>()?;
        let (group, plan, waited) = (self.group.clone(), self.plan.clone(), self.waited.clone());
        let num_samples = plan.sampler.num_samples_from(start);
        Ok((0..self.num_batches_from(start)).map(move |number| {
            let began = Instant::now();
            let batches = epochs.iter_mut().filter_map(Iterator::next);
            let batches = batches.map(|batch| batch.map(|batch| (batch.inputs, batch.targets)));
            let (inputs, targets): (Vec<_>, Vec<_>) = batches.collect::<Result<_>>()?;
            let len = plan.batch_size.min(num_samples - number * plan.batch_size) as i64;
            let inputs = plan.inputs.scatter(len, &inputs, &group)?;
            let targets = plan.targets.scatter(len, &targets, &group)?;
            waited.set(waited.get() + began.elapsed());
            Ok(Batch { inputs, targets, more_inputs: Vec::new(), len })
        }))
    }
}

impl ScatterPlan {
    fn new(loader: &DataLoader) -> Result<Self> {
        let Batch { inputs, targets, more_inputs, .. } = loader.sample()?;
        if !more_inputs.is_empty() {
            return Err(Error::Unsupported(format!(
                "DataParallel scatters one tensor of inputs, and the samples of this data set have {}; use \
                 DistributedDataParallel",
                1 + more_inputs.len()
            )));
        }
        Ok(Self {
            sampler: loader.sampler.for_rank(0),
            drop_last: loader.drop_last,
            batch_size: loader.batch_size(),
            inputs: Sample::like(&inputs),
            targets: Sample::like(&targets),
        })
    }
}

impl Sample {
    fn like(samples: &Tensor) -> Self {
        Self { shape: samples.size()[1..].into(), dtype: dtype_name(samples.kind()).into() }
    }

    /// Scatters samples and returns this rank's `len`. Rank 0 passes the samples of all ranks.
    fn scatter(&self, len: i64, all: &[Tensor], group: &ProcessGroup) -> Result<Tensor> {
        let shape = [&[len], &self.shape[..]].concat();
        let mut mine = Tensor::f_empty(shape, (parse_dtype(&self.dtype)?, group.device()))
            .doing("making room for a batch")?;
        group.scatter(&mut mine, (group.rank() == 0).then_some(all), 0)?;
        Ok(mine)
    }
}
