//! Saving beside training: a copy now, the files on a thread of their own.

use std::collections::BTreeMap;
use std::thread::{self, JoinHandle};

use tch::Tensor;

use super::tensors::Copied;
use super::{CheckpointDir, TrainerState};
use crate::ddp::SavedCommHook;
use crate::error::{Error, Result};
use crate::ffi::limits::not_started;
use crate::optim::ParameterState;

/// A copy of all that a checkpoint holds.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) state: TrainerState,
    pub(super) model: BTreeMap<String, Copied>,
    pub(super) optimizer: BTreeMap<String, Copied>,
    pub(super) comm_hook: Option<BTreeMap<String, Copied>>,
}

impl Snapshot {
    /// Copies `model`, which is a [`state_dict`](crate::DistributedDataParallel::state_dict), and `optimizer`, which is
    /// [`Optimizer::state`](crate::Optimizer::state). The device must be through with them.
    ///
    /// # Errors
    /// [`Error::Torch`], and [`Error::Unsupported`] for kinds of numbers that cannot be saved.
    pub fn take(
        state: TrainerState,
        model: &[(String, Tensor)],
        optimizer: &[ParameterState],
    ) -> Result<Self> {
        let slots = optimizer.iter().flat_map(|parameter| {
            let of = &parameter.name;
            parameter.tensors.iter().map(move |(slot, tensor)| (format!("{of}/{slot}"), tensor))
        });
        Ok(Self {
            state,
            model: model.iter().map(|(name, it)| copy(name.clone(), it)).collect::<Result<_>>()?,
            optimizer: slots.map(|(name, it)| copy(name, it)).collect::<Result<_>>()?,
            comm_hook: None,
        })
    }

    /// Copies `saved` as well, which is
    /// [`comm_hook_state`](crate::DistributedDataParallel::comm_hook_state).
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn with_comm_hook(mut self, saved: Option<&SavedCommHook>) -> Result<Self> {
        self.state.comm_hook = saved.map(|saved| saved.record.clone());
        let copied = saved.map(|saved| {
            saved.tensors.iter().map(|(name, it)| copy(name.clone(), it)).collect::<Result<_>>()
        });
        self.comm_hook = copied.transpose()?;
        Ok(self)
    }
}

fn copy(name: String, tensor: &Tensor) -> Result<(String, Copied)> {
    let copied = Copied::of(&name, tensor)?;
    Ok((name, copied))
}

/// Writes checkpoints one after the other, each while training goes on. For rank 0.
#[derive(Debug)]
pub struct Writer {
    dir: CheckpointDir,
    /// At most one: who saves again before it is through waits.
    writing: Option<JoinHandle<Result<()>>>,
}

impl Writer {
    /// A writer into `dir`.
    pub fn new(dir: CheckpointDir) -> Self {
        Self { dir, writing: None }
    }

    /// Where to.
    pub(crate) fn dir(&self) -> &CheckpointDir {
        &self.dir
    }

    /// Begins to write `snapshot`, when the one before is written.
    ///
    /// # Errors
    /// [`Error::Save`] when the one before could not be written, or no thread can be started.
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

    /// Says so as soon as what is being written is found not to be.
    ///
    /// # Errors
    /// [`Error::Save`], as [`finish`](Self::finish).
    pub fn check(&mut self) -> Result<()> {
        if self.writing.as_ref().is_some_and(JoinHandle::is_finished) {
            self.finish()
        } else {
            Ok(())
        }
    }

    /// Waits until all is written.
    ///
    /// # Errors
    /// [`Error::Save`] when it could not be.
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
        // A run that fails keeps what it was about to save. Its error is the one to tell.
        let _ = self.finish();
    }
}
