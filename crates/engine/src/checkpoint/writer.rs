//! Snapshots of what a checkpoint has, and the thread that writes them while training continues.

use std::collections::BTreeMap;
use std::thread::{self, JoinHandle};

use tch::Tensor;

use super::tensors::{Copied, copies};
use super::{CheckpointDir, TrainerState};
use crate::error::{Error, Result};
use crate::optim::ParameterState;
use crate::os::limits::not_started;

/// Writes checkpoints one after the other, while training continues. For rank 0.
#[derive(Debug)]
pub struct Writer {
    /// The folder that checkpoints are written to.
    pub(crate) dir: CheckpointDir,
    /// The write in progress, at most one. The next save waits for it.
    writing: Option<JoinHandle<Result<()>>>,
}

impl Writer {
    /// Creates a writer into `dir`.
    pub fn new(dir: CheckpointDir) -> Self {
        Self { dir, writing: None }
    }

    /// Waits until the previous checkpoint is written, then starts writing `snapshot`.
    ///
    /// # Errors
    /// [`Error::Save`] if the previous checkpoint could not be written, or if no thread can be started.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.finish()?;
        let dir = self.dir.clone();
        let thread = thread::Builder::new().name("checkpoint".into());
        let write = move || dir.write(&snapshot).map(drop);
        self.writing = Some(thread.spawn(write).map_err(|error| Error::Save {
            doing: "saving".into(),
            reason: not_started("the thread that writes", &error),
        })?);
        Ok(())
    }

    /// Returns the error of the write in progress, if it has failed. Does not wait.
    ///
    /// # Errors
    /// [`Error::Save`], as [`finish`](Self::finish).
    pub fn check(&mut self) -> Result<()> {
        let is_done = self.writing.as_ref().is_some_and(JoinHandle::is_finished);
        if is_done { self.finish() } else { Ok(()) }
    }

    /// Waits until the checkpoint is written.
    ///
    /// # Errors
    /// [`Error::Save`] if it could not be written.
    pub fn finish(&mut self) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        writing.join().unwrap_or_else(|_| {
            let reason = "the thread that writes panicked".into();
            Err(Error::Save { doing: "saving".into(), reason })
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A run that fails still completes its checkpoint. The run's own error is the one to report.
        let _ = self.finish();
    }
}

/// A copy of the contents of a checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) state: TrainerState,
    pub(super) model: BTreeMap<String, Copied>,
    pub(super) optimizer: BTreeMap<String, Copied>,
}

impl Snapshot {
    /// Copies `model`, a [`state_dict`](crate::DistributedDataParallel::state_dict), and `optimizer`, the result of
    /// [`Optimizer::state`](crate::Optimizer::state). The device must have finished computing them.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch), and [`Error::Input`](crate::Error::Input) for dtypes that
    /// cannot be saved.
    pub fn take(
        state: TrainerState,
        model: &[(String, Tensor)],
        optimizer: Vec<ParameterState>,
    ) -> Result<Self> {
        let model = model.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        let optimizer = optimizer.into_iter().flat_map(|ParameterState { name, tensors }| {
            tensors.into_iter().map(move |(key, tensor)| (format!("{name}/{key}"), tensor))
        });
        Ok(Self { state, model: copies(model)?, optimizer: copies(optimizer)? })
    }
}
