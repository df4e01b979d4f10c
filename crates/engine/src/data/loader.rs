//! [`DataLoader`]: makes the batches of one rank, epoch by epoch, with threads if asked.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use tch::{Device, Kind, Tensor};

use super::gathered_batches::GatheredBatches;
use super::staging::Staging;
use super::{Dataset, DistributedSampler};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::os::limits::not_started;
use crate::process_group::ProcessGroup;
use crate::runtime::panics;

/// Inputs and targets of a few samples, on the rank's device.
#[derive(Debug)]
pub struct Batch {
    /// The samples' inputs, first dimension [`Batch::len`].
    pub inputs: Tensor,
    /// The samples' targets.
    pub targets: Tensor,
    /// The samples' further inputs, for a model of several: [`Dataset::more_inputs`]. Empty for all others.
    pub more_inputs: Vec<Tensor>,
    pub(super) len: i64,
}

impl Batch {
    /// Reads the samples `indices` of `dataset`, which are on the CPU.
    fn read(dataset: &dyn Dataset, indices: &[usize]) -> anyhow::Result<Self> {
        let (inputs, targets) = dataset.batch(indices)?;
        let more_inputs = dataset.more_inputs(indices)?;
        let rows = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
        let len = rows(&inputs);
        if let Some(wrong) = more_inputs.iter().map(rows).find(|&rows| rows != len) {
            anyhow::bail!(
                "the first input has {len} samples, and a further one has {wrong}; return a row for each sample from \
                 more_inputs"
            );
        }
        Ok(Self { inputs, targets, more_inputs, len })
    }

    /// Returns all tensors: the inputs, the targets and the further inputs.
    #[doc(hidden)]
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.inputs, &self.targets].into_iter().chain(&self.more_inputs)
    }

    /// Returns the results of `f` for each tensor, as a batch of `len` samples.
    #[doc(hidden)]
    pub fn map<E>(
        &self,
        len: i64,
        mut f: impl FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        let (inputs, targets) = (f(&self.inputs)?, f(&self.targets)?);
        let more_inputs = self.more_inputs.iter().map(f).collect::<Result<_, _>>()?;
        Ok(Self { inputs, targets, more_inputs, len })
    }

    /// Returns the number of samples in the batch.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns the number of tokens in a sample. `None` unless samples are sequences: targets of more than one int64
    /// each.
    pub fn tokens_per_sample(&self) -> Option<usize> {
        let is_sequence = self.targets.kind() == Kind::Int64 && self.targets.dim() > 1;
        is_sequence.then(|| self.targets.size()[1..].iter().product::<i64>() as usize)
    }

    /// Returns whether the batch has no samples. This occurs with [`DataLoader::in_step`], if other ranks have more.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Returns the number of batches in `samples`. With `drop_last` an incomplete last batch is not counted.
fn num_batches(samples: usize, batch_size: usize, drop_last: bool) -> usize {
    if drop_last { samples / batch_size } else { samples.div_ceil(batch_size) }
}

/// Returns the number of batches left in an epoch for all ranks, after they together have had the first `start`
/// samples. With unequal shares the longest share counts. With `drop_last` the shortest counts, because a batch that
/// is incomplete on one rank is left out on all. `sampler` may be any rank's.
#[doc(hidden)]
pub fn batches_of_all(
    sampler: &DistributedSampler,
    start: usize,
    batch_size: usize,
    drop_last: bool,
) -> usize {
    // Samples are dealt in turn: rank 0 has the most, and the last rank the fewest.
    let rank = if drop_last { sampler.num_replicas() - 1 } else { 0 };
    num_batches(sampler.for_rank(rank).num_samples_from(start), batch_size, drop_last)
}

/// Splits a rank's share of the data set into batches, epoch by epoch.
///
/// Follows `torch.utils.data.DataLoader` with a [`DistributedSampler`]. The loader passes the epoch to the sampler.
/// The last batch may be smaller.
#[derive(Debug)]
pub struct DataLoader {
    dataset: Arc<dyn Dataset>,
    /// All inputs and targets on the device, if the data set keeps them there.
    resident: Option<(Tensor, Tensor)>,
    sampler: DistributedSampler,
    batch_size: usize,
    device: Device,
    drop_last: bool,
    in_step: bool,
    workers: Option<Workers>,
    /// The group whose failure ends the rank's waits, if one was given.
    group: Option<Rc<ProcessGroup>>,
    staging: Option<Rc<Staging>>,
    waited: Rc<Cell<Duration>>,
    /// The epoch and the order of the last call of [`samples`](Self::samples): each step may ask for its own.
    last_order: RefCell<Option<(u64, Option<Vec<usize>>)>>,
}

impl DataLoader {
    /// Creates a loader of batches of `batch_size` samples, which `sampler` picks from `dataset`, on `device`.
    ///
    /// # Errors
    /// [`Error::Input`] if `batch_size` is 0, or if `sampler` is for another number of samples;
    /// [`Error::Torch`] if the device has no room.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: DistributedSampler,
        batch_size: usize,
        device: Device,
    ) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::usage("a batch size of 0 is too small; use 1 or more".into()));
        }
        let (len, expected) = (dataset.len(), sampler.len());
        if len != expected {
            return Err(Error::mismatch(format!(
                "the data set has {len} samples, and the sampler deals {expected}"
            )));
        }
        // The gathered batches of what is on the device have one tensor of inputs.
        let has_more = !dataset.more_inputs(&[0]).map_err(Error::of_samples(&[0]))?.is_empty();
        let resident = if has_more { None } else { dataset.resident(device)? };
        Ok(Self {
            dataset,
            resident,
            sampler,
            batch_size,
            device,
            drop_last: false,
            in_step: false,
            workers: None,
            group: None,
            staging: None,
            waited: Rc::default(),
            last_order: RefCell::default(),
        })
    }

    /// Leaves out an epoch's last batch, if it has fewer samples than the others. Follows `drop_last`. (The sampler's
    /// [`drop_last`](DistributedSampler::drop_last) leaves out samples that cannot be divided evenly between ranks.)
    #[must_use]
    pub fn drop_last(self, drop_last: bool) -> Self {
        Self { drop_last, ..self }
    }

    /// Gives every rank the same number of batches, even if the sampler
    /// [does not pad](DistributedSampler::without_padding). A rank that has run out of samples gets an empty batch.
    /// All ranks then make the same steps, in which each rank counts by its samples. With
    /// [`drop_last`](Self::drop_last) all ranks leave out an epoch's last batch if it is incomplete on any rank.
    #[must_use]
    pub fn in_step(self, in_step: bool) -> Self {
        Self { in_step, ..self }
    }

    /// Returns the number of samples that all ranks together have in the next `batches` batches, after the first
    /// `start` samples. `None` if the loader is not [in step](Self::in_step).
    #[doc(hidden)]
    pub fn dealt_in(&self, start: usize, batches: usize) -> Option<usize> {
        let left = self.sampler.dealt_from(start);
        let full = batches.saturating_mul(self.batch_size * self.sampler.num_replicas());
        self.in_step.then_some(left.min(full))
    }

    /// Loads batches ahead of time on `num_workers` threads, each of which is `prefetch_factor` (at least one) batches
    /// ahead. A failure in `group` ends the rank's wait for a batch, and for its copy to a GPU. With 0 workers, the
    /// default, the rank loads each batch itself. The order is the same either way. Follows `num_workers` and
    /// `prefetch_factor`.
    #[must_use]
    pub fn num_workers(
        self,
        num_workers: usize,
        prefetch_factor: usize,
        group: &Rc<ProcessGroup>,
    ) -> Self {
        let workers = Workers { count: num_workers, prefetch: prefetch_factor.max(1) };
        let workers = Some(workers).filter(|workers| workers.count > 0);
        Self { workers, group: Some(group.clone()), ..self }
    }

    /// Copies batches to a GPU through pinned memory, which is allocated here. Copies overlap the previous steps on the
    /// GPU. The rank is ahead by one batch, or with workers by `prefetch_factor`. A failure in `group` ends the rank's
    /// wait for a free buffer. Call this after [`num_workers`](Self::num_workers). It does nothing on the CPU, nor for
    /// a data set that is already on the device (without workers).
    ///
    /// Follows `pin_memory=True` together with `batch.to(device, non_blocking=True)`.
    ///
    /// # Errors
    /// [`Error::Torch`] if there is no memory; [`Error::Data`] if the sample that determines the size cannot be loaded.
    pub fn pin_memory(self, group: &Rc<ProcessGroup>) -> Result<Self> {
        let Device::Cuda(gpu) = self.device else { return Ok(self) };
        if self.workers.is_none() && self.resident.is_some() {
            return Ok(self);
        }
        let ahead = self.workers.map_or(1, |workers| workers.prefetch);
        // No batch is larger than an epoch.
        let most = self.batch_size.min(self.sampler.num_samples()).max(1);
        let staging = Staging::new(&self.sample()?, most, 1 + ahead, gpu, group)?;
        Ok(Self { staging: Some(Rc::new(staging)), ..self })
    }

    /// Returns the number of samples per batch. An epoch's last batch may have fewer.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Returns the number of samples in the data set, for all ranks together.
    pub fn dataset_len(&self) -> usize {
        self.sampler.len()
    }

    /// Returns the number of batches in an epoch. The same on every rank, unless the sampler deals unequal shares.
    pub fn num_batches(&self) -> usize {
        self.num_batches_from(0)
    }

    /// Returns the number of batches left after all ranks together have had the first `start` samples.
    pub fn num_batches_from(&self, start: usize) -> usize {
        if self.in_step {
            return batches_of_all(&self.sampler, start, self.batch_size, self.drop_last);
        }
        num_batches(self.sampler.num_samples_from(start), self.batch_size, self.drop_last)
    }

    /// Returns the samples of `count` batches, from batch `first` on, by their numbers in the data. Batches are counted
    /// after the first `start` samples that all ranks together have had in `epoch`.
    #[doc(hidden)]
    pub fn samples(
        &self,
        epoch: u64,
        start: usize,
        first: usize,
        count: usize,
    ) -> Result<Vec<usize>> {
        let mut order = self.last_order.borrow_mut();
        if order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            *order = Some((epoch, self.sampler.order(epoch)?));
        }
        let order = order.as_ref().and_then(|(_, order)| order.as_deref());
        let all = self.sampler.num_samples_from(start);
        let place = |batch: usize| batch.saturating_mul(self.batch_size).min(all);
        let indices = self.sampler.deal_some(
            order,
            start,
            place(first)..place(first.saturating_add(count)),
        )?;
        Ok(indices.into_iter().map(|index| self.dataset.source_index(index)).collect())
    }

    /// Returns the total time this rank has spent on data: waiting for workers, or gathering samples itself.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Returns the first sample as a batch of one, for its shapes and dtypes.
    fn sample(&self) -> Result<Batch> {
        Batch::read(&*self.dataset, &[0]).map_err(Error::of_samples(&[0]))
    }

    /// Returns the batches of `epoch`.
    ///
    /// # Errors
    /// [`Error::Torch`] if there is no room. A batch's errors are [`Error::Data`], and the error of a wait that ends
    /// because another rank failed.
    pub fn epoch(&self, epoch: u64) -> Result<Batches> {
        self.epoch_from(epoch, 0)
    }

    /// Returns the batches of `epoch` left after all ranks together have had the first `start` samples. See
    /// [`DistributedSampler::indices_from`].
    ///
    /// # Errors
    /// As [`epoch`](Self::epoch).
    pub fn epoch_from(&self, epoch: u64, start: usize) -> Result<Batches> {
        let began = Instant::now();
        let indices = self.sampler.indices_from(epoch, start)?;
        let batch_size = self.batch_size;
        let (num_batches, waited) = (self.num_batches_from(start), self.waited.clone());
        let source = match (self.workers.zip(self.group.as_ref()), &self.resident) {
            (Some((workers, group)), _) => {
                let batches = indices.chunks(batch_size).take(num_batches).map(<[_]>::to_vec);
                let loading = workers.start(&self.dataset, batches.collect(), group)?;
                Source::Workers(loading)
            }
            (None, Some((inputs, targets))) => {
                let (inputs, targets) = (inputs.shallow_clone(), targets.shallow_clone());
                Source::Gathered(GatheredBatches::new(inputs, targets, &indices, batch_size)?)
            }
            (None, None) => Source::Each { dataset: self.dataset.clone(), indices },
        };
        let own = self.sampler.num_samples_from(start).div_ceil(batch_size);
        let empty = (own < num_batches).then(|| self.empty()).transpose()?;
        waited.set(waited.get() + began.elapsed());
        Ok(Batches {
            source,
            next: 0,
            num_batches,
            own,
            empty,
            batch_size,
            device: self.device,
            staging: self.staging.clone(),
            group: self.group.clone(),
            waited,
        })
    }

    /// Returns a batch of 0 samples.
    fn empty(&self) -> Result<Batch> {
        let none = |tensor: &Tensor| tensor.f_narrow(0, 0, 0)?.f_to_device(self.device);
        self.sample()?.map(0, none).doing("a batch without samples")
    }
}

/// The batches of an epoch, in the sampler's order. Returned by [`DataLoader::epoch`].
#[derive(Debug)]
pub struct Batches {
    source: Source,
    next: usize,
    num_batches: usize,
    /// The number of batches that have samples.
    own: usize,
    empty: Option<Batch>,
    batch_size: usize,
    device: Device,
    staging: Option<Rc<Staging>>,
    /// The group whose failure ends the wait for a copy, if the loader knows one.
    group: Option<Rc<ProcessGroup>>,
    waited: Rc<Cell<Duration>>,
}

#[derive(Debug)]
enum Source {
    /// From samples that are already on the device.
    Gathered(GatheredBatches),
    /// Loaded by the rank, each batch on request.
    Each { dataset: Arc<dyn Dataset>, indices: Vec<usize> },
    /// Loaded ahead of time by worker threads.
    Workers(Loading),
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next;
        if index == self.num_batches {
            return None;
        }
        self.next += 1;
        let began = Instant::now();
        let batch = self.load(index);
        self.waited.set(self.waited.get() + began.elapsed());
        Some(batch)
    }
}

impl Batches {
    fn load(&mut self, index: usize) -> Result<Batch> {
        if let Some(empty) = self.empty.as_ref().filter(|_| index >= self.own) {
            return empty.map(0, |tensor| Ok(tensor.shallow_clone()));
        }
        let batch = match &mut self.source {
            Source::Gathered(batches) => return batches.batch(index),
            Source::Each { dataset, indices } => {
                let indices = indices.chunks(self.batch_size).nth(index).unwrap_or_default();
                Batch::read(&**dataset, indices).map_err(Error::of_samples(indices))?
            }
            Source::Workers(loading) => loading.next()?,
        };
        match (&self.staging, &self.group) {
            (Some(staging), _) => staging.send(&batch),
            (None, Some(group)) => batch.map(batch.len, |tensor| group.to_device(tensor)),
            (None, None) => {
                let copy = |tensor: &Tensor| tensor.f_to_device(self.device);
                batch.map(batch.len, copy).doing("copying a batch to the device")
            }
        }
    }
}

/// The number of worker threads, and the number of batches that each loads ahead.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workers {
    pub count: usize,
    pub prefetch: usize,
}

type Loaded = Result<Batch>;

/// The worker threads of one epoch. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Loading {
    group: Rc<ProcessGroup>,
    /// One channel per thread. Batch `n` comes from thread `n % count`, so the order is the same as without workers.
    arrive: Vec<Receiver<Loaded>>,
    threads: Vec<JoinHandle<()>>,
    next: usize,
}

impl Workers {
    /// Starts threads that load `batches` of `dataset`.
    pub(super) fn start(
        self,
        dataset: &Arc<dyn Dataset>,
        batches: Vec<Vec<usize>>,
        group: &Rc<ProcessGroup>,
    ) -> Result<Loading> {
        let batches = Arc::new(batches);
        let mut loading =
            Loading { group: group.clone(), arrive: Vec::new(), threads: Vec::new(), next: 0 };
        for worker in 0..self.count.min(batches.len()) {
            let (loaded_tx, loaded_rx) = bounded(self.prefetch);
            let dataset = dataset.clone();
            let batches = batches.clone();
            let step = self.count;
            let name = format!("loader{}.{worker}", group.rank());
            let work =
                move || load(&*dataset, batches.iter().skip(worker).step_by(step), &loaded_tx);
            let thread = Builder::new().name(name).spawn(work).map_err(|error| Error::Data {
                samples: "with workers".into(),
                reason: not_started(&format!("worker {worker} of {}", self.count), &error),
            })?;
            loading.arrive.push(loaded_rx);
            loading.threads.push(thread);
        }
        Ok(loading)
    }
}

fn load<'a>(
    dataset: &dyn Dataset,
    batches: impl Iterator<Item = &'a Vec<usize>>,
    loaded_tx: &Sender<Loaded>,
) {
    // The cores are for the ranks' own kernels.
    tch::set_num_threads(1);
    panics::watch_this_thread();
    for indices in batches {
        let batch = catch_unwind(AssertUnwindSafe(|| Batch::read(dataset, indices)));
        let batch = batch.unwrap_or_else(|panic| Err(panics::error(panic)));
        let failed = batch.is_err();
        // The send fails if the epoch ended early.
        if loaded_tx.send(batch.map_err(Error::of_samples(indices))).is_err() || failed {
            return;
        }
    }
}

impl Loading {
    /// Waits for the next batch and returns it.
    pub(super) fn next(&mut self) -> Loaded {
        let worker = self.next % self.arrive.len();
        self.next += 1;
        let ended = || Error::Data {
            samples: "with workers".into(),
            reason: format!("worker {worker} has ended after an error"),
        };
        self.group.receive(&self.arrive[worker])?.unwrap_or_else(|| Err(ended()))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.arrive.clear(); // a thread that sends a batch then fails and ends
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // its panics have been caught
        }
    }
}
