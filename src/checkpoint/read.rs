//! Reads checkpoints. Their files may have been damaged or changed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use tch::Tensor;
use tch::nn::VarStore;

use super::layout::{
    BEST, MODEL, OPTIMIZER, TRAINER, followed, is_pointer_name, name_of, newest_in, pointed,
    step_of, steps_in,
};
use super::state::{COPY_AGAIN, FileMark, Manifest, PART};
use super::{TensorFile, TrainerState};
use crate::error::{Error, Result, Shown};
use crate::files::{RECOGNIZED_BY, SAFETENSORS, kind_of, mistaken, name_of_kind, open_regular};
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
            let instead = match older(path) {
                Some(older) => {
                    format!("the one before it is intact: use {}", older.shown())
                }
                None => "there is no older one to use instead: start over in another folder".into(),
            };
            Error::data(format!("checkpoint {}: {problem}; {instead}", path.shown()))
        })
    }

    fn read_one(path: &Path) -> Result<Self, String> {
        let Manifest { state, files, .. } = Manifest::read(path)?;
        let tensors = |name: &str| {
            let file = path.join(name);
            let known = files.get(name).ok_or_else(|| format!("{TRAINER} does not list {name}"))?;
            let bytes = read_known(&file, known)?;
            TensorFile::new(file, bytes).map_err(|error| error.to_string())
        };
        let (model, optimizer) = (tensors(MODEL)?, tensors(OPTIMIZER)?);
        Ok(Self { path: path.into(), state, model, optimizer })
    }

    /// Broadcasts rank 0's checkpoint to all ranks of `group`. The other ranks need no file. Returns `None` if rank 0
    /// has none. A collective.
    pub(crate) fn broadcast(mine: Option<&Self>, group: &ProcessGroup) -> Result<Option<Self>> {
        let mut header = Vec::new();
        if let Some(Self { path, state, model, optimizer }) = mine.filter(|_| group.rank() == 0) {
            let state = serde_json::to_string(state).map_err(|e| Error::data(e.to_string()))?;
            let size = |file: &TensorFile| file.bytes().len();
            let sizes = (size(model), size(optimizer));
            header.push((path.clone(), state, sizes));
        }
        group.broadcast_object_list(&mut header, 0)?;
        let Some((path, state, sizes)) = header.pop() else { return Ok(None) };
        let file = |mine: Option<&TensorFile>, name: &str, size: usize| {
            let bytes = group.broadcast_bytes(mine.map_or(&[], TensorFile::bytes), size, 0)?;
            TensorFile::new(path.join(name), bytes)
        };
        let model = file(mine.map(|mine| &mine.model), MODEL, sizes.0)?;
        let optimizer = file(mine.map(|mine| &mine.optimizer), OPTIMIZER, sizes.1)?;
        let state = serde_json::from_str(&state).map_err(|error| {
            Error::mismatch(format!(
                "rank 0 sent a {TRAINER} that cannot be read: {error}; start the same ddp-mp in every process"
            ))
        })?;
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
        let names = optimizer.parameter_names().into_iter();
        let state: Vec<ParameterState> = names
            .map(|name| {
                let tensors = saved.remove(&name).unwrap_or_default();
                ParameterState { name, tensors }
            })
            .collect();
        if let Some(name) = saved.keys().next() {
            let path = self.path.join(OPTIMIZER);
            return Err(Error::mismatch(format!(
                "{} has `{name}`, which is not a parameter of this model; use the model of the run that was saved",
                path.shown()
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
    let path = &*followed(path);
    let wrong = |problem: &str| Err(Error::data(format!("checkpoint {}: {problem}", path.shown())));
    let is_pointer = is_pointer_name(&name_of(path));
    // `Path::new("best").parent()` is empty.
    let beside = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    if path.is_dir() {
        if let Err(error) = fs::read_dir(path) {
            return wrong(&error.to_string());
        }
        let is_checkpoint = path.join(TRAINER).exists() || step_of(path).is_some();
        return match newest_in(path)? {
            _ if is_checkpoint => Ok(path.into()),
            Some(newest) => Ok(newest),
            None => wrong(
                "this folder has no checkpoint; name the folder of a checkpoint or of its run",
            ),
        };
    }
    match pointed(path) {
        Some(folder) if folder.is_dir() => Ok(folder),
        Some(folder) => wrong(&format!(
            "the file names {}, which does not exist{}",
            name_of(&folder),
            instead(beside)
        )),
        None if path.is_file() && is_pointer => {
            wrong(&format!("the file names none{}", instead(beside)))
        }
        None if path.is_file() && beside.join(TRAINER).exists() => {
            wrong(&format!("this is a file of a checkpoint; name its folder, {}", beside.shown()))
        }
        None => match fs::metadata(path) {
            Ok(found) => wrong(&format!(
                "this is {}, but a checkpoint is a folder; name the folder of a checkpoint",
                name_of_kind(found.file_type())
            )),
            Err(error) if error.kind() != io::ErrorKind::NotFound => wrong(&error.to_string()),
            Err(_) if name_of(path) == BEST && beside.is_dir() => wrong(&format!(
                "this file does not exist: only a run that validates writes it, as with --val-fraction{}",
                instead(beside)
            )),
            Err(_) => match &*instead(beside) {
                "" => {
                    wrong("this path does not exist; name the folder of a checkpoint or of its run")
                }
                newest => wrong(&format!("this path does not exist{newest}")),
            },
        },
    }
}

/// Describes the checkpoints in the folder of a run, for a message.
fn instead(run: &Path) -> String {
    match newest_in(run) {
        Ok(Some(newest)) => {
            format!("; the newest checkpoint in {} is {}", run.shown(), newest.shown())
        }
        _ => String::new(),
    }
}

/// Returns the newest readable checkpoint in the same folder that is older than `path`.
fn older(path: &Path) -> Option<PathBuf> {
    let step = step_of(path)?;
    let steps = steps_in(path.parent()?).ok()?;
    let mut older = steps.into_iter().rev().filter(|(older, _)| *older < step);
    older.find(|(_, path)| Checkpoint::read_one(path).is_ok()).map(|(_, path)| path)
}

/// Reads a file and verifies that it is unchanged. A file of another length is not read at all.
fn read_known(file: &Path, known: &FileMark) -> Result<Vec<u8>, String> {
    let name = name_of(file);
    let wrong = |error: io::Error| format!("{name} cannot be read: {error}");
    let opened = open_regular(file).map_err(wrong)?;
    let found = opened.metadata().map_err(wrong)?.len();
    let mut bytes = Vec::new();
    if found != known.bytes {
        opened.take(RECOGNIZED_BY as u64).read_to_end(&mut bytes).map_err(wrong)?;
        // A damaged .safetensors file still begins like one.
        let is_other = |_: &String| kind_of(&bytes).is_none_or(|(what, _)| what != SAFETENSORS);
        return Err(match mistaken(&bytes, PART, COPY_AGAIN).filter(is_other) {
            Some(problem) => format!("{name}: {problem}"),
            None => format!("{name} is damaged: it has {found} bytes instead of {}", known.bytes),
        });
    }
    bytes.try_reserve_exact(found as usize).map_err(|error| wrong(io::Error::other(error)))?;
    opened.take(found).read_to_end(&mut bytes).map_err(wrong)?;
    let found = FileMark::of(&bytes);
    if found != *known {
        let (found, known) = (found.xxh3, &known.xxh3);
        return Err(format!("{name} is damaged: its xxh3 is {found} instead of {known}"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::layout::LATEST;
    use super::*;
    use crate::checkpoint::{CheckpointDir, Snapshot};

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
