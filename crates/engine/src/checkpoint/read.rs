//! Reads checkpoints. Their files may have been damaged or changed.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tch::Tensor;
use tch::nn::VarStore;

use super::layout::{MODEL, OPTIMIZER, TRAINER, followed, name_of, pointed, step_of, steps_in};
use super::state::Manifest;
use super::{CheckpointDir, TensorFile, TrainerState};
use crate::error::{Error, Result, Shown};
use crate::files::name_of_kind;
use crate::optim::{Optimizer, ParameterState};
use crate::process_group::ProcessGroup;

/// A checkpoint in memory, verified to be unchanged. All ranks may share it.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: TrainerState,
    model: TensorFile,
    optimizer: TensorFile,
}

impl Checkpoint {
    /// Reads the checkpoint at `path`. `path` is the checkpoint's folder, or the folder of a run (reads the newest
    /// checkpoint), or a run's file `latest` or `best` (reads the checkpoint that it names).
    ///
    /// # Errors
    /// [`Error::Input`] that names the file that is missing, truncated, changed, or of another version. It also
    /// names the next older checkpoint that can be read.
    pub fn read(path: &Path) -> Result<Self> {
        let path = &find(path)?;
        Self::read_one(path).map_err(|problem| {
            let instead = older(path).map_or_else(
                || "there is no older one to use instead: start over in another folder".into(),
                |older| format!("the one before it is intact: use {}", older.shown()),
            );
            Error::data(format!("checkpoint {problem}; {instead}"))
        })
    }

    fn read_one(path: &Path) -> Result<Self> {
        let Manifest { state, files, .. } = Manifest::read(path)?;
        let tensors = |name: &str| {
            let lost =
                || Error::data(format!("{} does not list {name}", path.join(TRAINER).shown()));
            TensorFile::open(path.join(name), Some(files.get(name).ok_or_else(lost)?))
        };
        let (model, optimizer) = (tensors(MODEL)?, tensors(OPTIMIZER)?);
        Ok(Self { path: path.into(), state, model, optimizer })
    }

    /// Broadcasts rank 0's checkpoint to all ranks of `group`. The other ranks need no file. Returns `None` if rank 0
    /// has none. A collective.
    #[doc(hidden)]
    pub fn broadcast(mine: Option<&Self>, group: &ProcessGroup) -> Result<Option<Self>> {
        let mut header = Vec::new();
        if let Some(Self { path, state, model, optimizer }) = mine.filter(|_| group.rank() == 0) {
            let sizes = [model, optimizer].map(|file| file.bytes.len());
            header.push((path.clone(), state.clone(), sizes));
        }
        group.broadcast_object_list(&mut header, 0)?;
        let Some((path, state, sizes)) = header.pop() else { return Ok(None) };
        let file = |mine: Option<&TensorFile>, name: &str, size: usize| -> Result<_> {
            let bytes = mine.map_or(&[][..], |file| &file.bytes[..]);
            let bytes = group.broadcast_bytes(bytes, size, 0)?;
            Ok(TensorFile { path: path.join(name), bytes })
        };
        let model = file(mine.map(|mine| &mine.model), MODEL, sizes[0])?;
        let optimizer = file(mine.map(|mine| &mine.optimizer), OPTIMIZER, sizes[1])?;
        Ok(Some(Self { path, state, model, optimizer }))
    }

    /// Returns the folder that the checkpoint was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the progress of the run at this checkpoint.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Copies parameters and buffers into `vs`. For rank 0, before DDP broadcasts its model to the other ranks.
    ///
    /// # Errors
    /// As [`TensorFile::load_into`].
    pub fn load_model(&self, vs: &VarStore) -> Result<()> {
        self.model.load_into(vs)
    }

    /// Loads the saved state into `optimizer`. For every rank that steps.
    ///
    /// # Errors
    /// The errors of [`Optimizer::load_state`].
    pub fn load_optimizer(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let mut saved: BTreeMap<String, BTreeMap<String, Tensor>> = BTreeMap::new();
        for (key, tensor) in self.optimizer.tensors()? {
            let (parameter, state_key) = key.rsplit_once('/').unwrap_or((&key, ""));
            saved.entry(parameter.into()).or_default().insert(state_key.into(), tensor);
        }
        // A parameter that was not stepped yet has no state in the file.
        let state_of = |name: String| {
            let tensors = saved.remove(&name).unwrap_or_default();
            ParameterState { name, tensors }
        };
        let state: Vec<_> = optimizer.parameter_names().into_iter().map(state_of).collect();
        if let Some(name) = saved.keys().next() {
            return Err(Error::mismatch(format!(
                "{} has `{name}`, which is not a parameter of this model; use the model of the run that was saved",
                self.path.join(OPTIMIZER).shown()
            )));
        }
        optimizer.load_state(&state)
    }
}

/// Returns the folder of the checkpoint that `path` names. `path` is that folder, the run's folder, or a pointer.
///
/// # Errors
/// [`Error::Input`] that describes what is there instead, and suggests another path.
fn find(path: &Path) -> Result<PathBuf> {
    let path = &followed(path);
    let name = &*name_of(path);
    // `Path::new("best").parent()` is empty.
    let beside = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let named = if !path.is_dir() {
        pointed(path).ok().flatten()
    } else if path.join(TRAINER).exists() || step_of(name).is_some() {
        Some(path.clone())
    } else {
        CheckpointDir::newest_in(path)?
    };
    let problem = match (named, fs::metadata(path)) {
        (Some(folder), _) if folder.is_dir() => return Ok(folder),
        (Some(folder), _) => format!("the file names {}, which does not exist", name_of(&folder)),
        (None, Ok(found)) if found.is_dir() => "this folder has no checkpoint".into(),
        (None, Ok(found)) => {
            format!("this is {}, but a checkpoint is a folder", name_of_kind(found.file_type()))
        }
        (None, Err(error)) if error.kind() != io::ErrorKind::NotFound => error.to_string(),
        (None, Err(_)) => "this path does not exist".into(),
    };
    let instead = match CheckpointDir::newest_in(beside) {
        Ok(Some(newest)) => {
            format!("the newest checkpoint in {} is {}", beside.shown(), newest.shown())
        }
        _ => "name the folder of a checkpoint or of its run".into(),
    };
    Err(Error::data(format!("checkpoint {}: {problem}; {instead}", path.shown())))
}

/// Returns the newest readable checkpoint in the same folder that is older than `path`.
fn older(path: &Path) -> Option<PathBuf> {
    let step = step_of(&name_of(path))?;
    let steps = steps_in(path.parent()?).ok()?;
    let mut older = steps.into_iter().rev().filter(|(older, _)| *older < step);
    older.find(|(_, path)| Checkpoint::read_one(path).is_ok()).map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::layout::LATEST;
    use super::*;
    use crate::checkpoint::Snapshot;

    #[test]
    fn checkpoint_links_and_pointers_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let (run, elsewhere) = (folder.join("run"), folder.join("elsewhere"));
        fs::create_dir(&elsewhere).unwrap();
        let dir = CheckpointDir::create(&run, 3).unwrap();
        let mut saved = PathBuf::new();
        for step in [1, 2] {
            let state = TrainerState { step, ..TrainerState::default() };
            saved = dir.write(&Snapshot::take(state, &[], Vec::new()).unwrap()).unwrap();
        }
        let link = |target: &Path, name: &str| {
            symlink(target, elsewhere.join(name)).unwrap();
            elsewhere.join(name)
        };
        let absolute = link(&run.join(LATEST), "absolute");
        let relative = link(Path::new("../run/latest"), "relative");
        let to_link = link(&relative, "to-link");
        let to_folder = link(&saved, "folder");
        for link in [&absolute, &relative, &to_link, &to_folder] {
            assert_eq!(Checkpoint::read(link).unwrap().path(), saved, "{}", link.display());
            TensorFile::read(link).unwrap();
            // The run's folder is found, so that outputs do not overwrite the checkpoint.
            assert_eq!(CheckpointDir::around(link), Some(run.clone()), "{}", link.display());
        }
        // The older checkpoint is in the folder of the damaged one, not in the link's folder.
        fs::write(saved.join(MODEL), "").unwrap();
        for link in [&absolute, &to_folder] {
            let error = Checkpoint::read(link).unwrap_err().to_string();
            let older = format!("use {}", run.join("step-00000001").display());
            assert!(error.ends_with(&older), "{error}");
        }
        assert_eq!(CheckpointDir::around(&elsewhere.join("nothing")), None);
    }
}
