//! The folder of a run's checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::state::{FileMark, Manifest};
use super::{BEST, COMM_HOOK, Checkpoint, LATEST, MODEL, OPTIMIZER, Snapshot, TRAINER, tensors};
use crate::error::{Error, Result};

/// What a folder is called while it is not, or no longer, a checkpoint.
const UNFINISHED: &str = ".unfinished-";

/// The file that a run holds locked while it saves here.
const LOCK: &str = ".lock";

/// The folder of a run's checkpoints, of which it keeps the newest few and the best. No other run, of this
/// process or another, can open it meanwhile.
#[derive(Debug, Clone)]
pub struct CheckpointDir {
    path: PathBuf,
    keep_last: usize,
    /// Unlocked when the last clone is dropped, and when the process ends, however it does.
    _lock: Arc<Lock>,
}

/// A locked file. Closing it would unlock it too, but not while a process that another thread starts at this moment still
/// has a copy of it.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock(); // and if not, it goes with the process
    }
}

impl CheckpointDir {
    /// The folder at `path`, which is made if need be, for a run that starts from the beginning. Checkpoints but
    /// the newest `keep_last` and the best will be removed, each when a newer one is complete; one is always kept.
    ///
    /// # Errors
    /// [`Error::Input`] when there are checkpoints already, another run saves there, or nothing can be written.
    pub fn create(path: &Path, keep_last: usize) -> Result<Self> {
        refuse_any_in(path)?; // before anything is written there
        let opened = Self::open(path, keep_last)?;
        refuse_any_in(path)?; // another run may have ended just then
        Ok(opened)
    }

    /// As [`create`](Self::create), for a run that goes on from a checkpoint that is in there, if one is.
    ///
    /// # Errors
    /// [`Error::Input`] when another run saves there, or nothing can be written.
    pub fn open(path: &Path, keep_last: usize) -> Result<Self> {
        let wrong = |error: io::Error| {
            Error::Input(format!(
                "checkpoints cannot be written to {}: {error}; use another --save-dir",
                path.display()
            ))
        };
        fs::create_dir_all(path).map_err(wrong)?;
        let lock = File::create(path.join(LOCK)).map_err(wrong)?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::Input(format!(
                "another run is saving checkpoints in {}; wait for its end, or use another --save-dir",
                path.display()
            )));
        }
        // Left behind by a run that was killed.
        for entry in fs::read_dir(path).map_err(wrong)? {
            let entry = entry.map_err(wrong)?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                fs::remove_dir_all(entry.path()).map_err(wrong)?;
            }
        }
        let probe = path.join(format!("{UNFINISHED}probe"));
        fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).map_err(wrong)?;
        // Where a file system has no locks, nobody is kept out.
        Ok(Self { path: path.into(), keep_last: keep_last.max(1), _lock: Arc::new(Lock(lock)) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether `checkpoint` was read from here.
    pub(crate) fn contains(&self, checkpoint: &Checkpoint) -> bool {
        let folder = checkpoint.path().canonicalize().ok();
        let mine = self.path.canonicalize().ok();
        folder.zip(mine).is_some_and(|(folder, mine)| folder.parent() == Some(&mine))
    }

    /// Whether there are checkpoints of later steps than `step` in it.
    pub(crate) fn has_newer_than(&self, step: u64) -> Result<bool> {
        Ok(steps_in(&self.path)?.last_key_value().is_some_and(|(newest, _)| *newest > step))
    }

    /// The newest checkpoint in it.
    ///
    /// # Errors
    /// [`Error::Input`] when it cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>> {
        newest_in(&self.path)
    }

    /// The newest checkpoint in the folder `path`, if that is there.
    ///
    /// # Errors
    /// [`Error::Input`] when it cannot be read.
    pub fn newest_in(path: &Path) -> Result<Option<PathBuf>> {
        newest_in(path)
    }

    /// Writes a checkpoint, and removes what is too old then. The folder of the new one.
    ///
    /// # Errors
    /// [`Error::Save`]; the checkpoints that were there still are.
    pub fn write(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        let name = format!("step-{:08}", snapshot.state.step);
        let (folder, unfinished) = (self.path.join(&name), self.unfinished(&name));
        let written = self.write_as(&unfinished, &folder, snapshot);
        if written.is_err() {
            // Makes room on a disk that is full. Nobody takes it for a checkpoint if it stays.
            let _ = fs::remove_dir_all(&unfinished);
        }
        written.and_then(|()| self.remove_old()).map(|()| folder)
    }

    fn write_as(&self, unfinished: &Path, folder: &Path, snapshot: &Snapshot) -> Result<()> {
        if folder.exists() {
            let reason = "it is there already".into();
            return Err(Error::Save { doing: format!("saving {}", folder.display()), reason });
        }
        fs::create_dir(unfinished).map_err(saving(unfinished))?;
        let mut files = BTreeMap::new();
        let always = [(MODEL, &snapshot.model), (OPTIMIZER, &snapshot.optimizer)];
        let comm_hook = snapshot.comm_hook.as_ref().map(|tensors| (COMM_HOOK, tensors));
        for (name, tensors) in always.into_iter().chain(comm_hook) {
            let bytes = tensors::serialize(tensors)?;
            files.insert(name.into(), FileMark::of(&bytes));
            write_file(&unfinished.join(name), &bytes)?;
        }
        let path = unfinished.join(TRAINER);
        let manifest = Manifest::new(snapshot.state.clone(), files);
        let text = manifest.and_then(|manifest| serde_json::to_string_pretty(&manifest));
        write_file(&path, text.map_err(|e| saving(&path)(e.into()))?.as_bytes())?;
        sync_folder(unfinished)?;
        fs::rename(unfinished, folder).map_err(saving(folder))?;
        sync_folder(&self.path)?;
        if snapshot.state.best.as_ref().is_some_and(|best| best.step == snapshot.state.step) {
            self.point(BEST, folder)?;
        }
        self.point(LATEST, folder)
    }

    /// Has the file `pointer` name `folder`.
    fn point(&self, pointer: &str, folder: &Path) -> Result<()> {
        let (pointer, new) = (self.path.join(pointer), self.path.join(format!("{pointer}.new")));
        write_file(&new, format!("{}\n", name_of(folder)).as_bytes())?;
        fs::rename(&new, &pointer).map_err(saving(&pointer))?;
        sync_folder(&self.path)
    }

    fn remove_old(&self) -> Result<()> {
        let steps = steps_in(&self.path)?;
        let old = steps.len().saturating_sub(self.keep_last);
        let best = pointed(&self.path.join(BEST));
        for folder in steps.values().take(old).filter(|folder| Some(*folder) != best.as_ref()) {
            // Renamed first: half of it must not look like a checkpoint.
            let unfinished = self.unfinished(&name_of(folder));
            fs::rename(folder, &unfinished)
                .and_then(|()| fs::remove_dir_all(&unfinished))
                .map_err(|error| Error::Save {
                    doing: format!("removing the old checkpoint {}", folder.display()),
                    reason: error.to_string(),
                })?;
        }
        Ok(())
    }

    /// Renames the checkpoints after `checkpoint`, from which a run goes on: it will write its own. Where they
    /// are now.
    ///
    /// # Errors
    /// [`Error::Save`].
    pub fn set_aside_after(&self, checkpoint: &Checkpoint) -> Result<Vec<PathBuf>> {
        let (state, steps) = (checkpoint.state(), steps_in(&self.path)?);
        if let Some(folder) = steps.get(&state.step) {
            self.point(LATEST, folder)?;
        }
        // The best so far: what came later was another run's.
        let best = self.path.join(BEST);
        match state.best.as_ref().and_then(|best| steps.get(&best.step)) {
            Some(folder) => self.point(BEST, folder)?,
            None if best.exists() => fs::remove_file(&best).map_err(saving(&best))?,
            None => {}
        }
        let newer = steps.into_iter().filter(|(newer, _)| *newer > state.step);
        let set_aside = |(_, folder): (u64, PathBuf)| {
            let aside = (1..)
                .map(|n| self.path.join(format!("aside-{n}-{}", name_of(&folder))))
                .find(|aside| !aside.exists())
                .unwrap_or_default();
            fs::rename(&folder, &aside).map_err(saving(&aside))?;
            Ok(aside)
        };
        newer.map(set_aside).collect()
    }

    fn unfinished(&self, name: &str) -> PathBuf {
        self.path.join(format!("{UNFINISHED}{name}"))
    }
}

/// The newest checkpoint in the folder `path`, if that is there.
pub(super) fn newest_in(path: &Path) -> Result<Option<PathBuf>> {
    Ok(steps_in(path)?.pop_last().map(|(_, folder)| folder))
}

fn refuse_any_in(path: &Path) -> Result<()> {
    newest_in(path)?.map_or(Ok(()), |newest| {
        Err(Error::Input(format!(
            "{} holds checkpoints already, the newest being {}; go on from it with --resume auto, or use \
             another --save-dir",
            path.display(),
            name_of(&newest)
        )))
    })
}

/// The checkpoints in the folder `path` by step: none where there is no folder.
pub(super) fn steps_in(path: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let wrong = |error: io::Error| {
        Error::Input(format!(
            "there can be no checkpoints in {}: {error}; use another folder for --save-dir",
            path.display()
        ))
    };
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(wrong(error)),
    };
    let mut steps = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(wrong)?.path();
        if let Some(step) = step_of(&path) {
            steps.insert(step, path);
        }
    }
    Ok(steps)
}

/// The checkpoint that the file `latest` or `best` at `pointer` names, if it is such a file.
pub(super) fn pointed(pointer: &Path) -> Option<PathBuf> {
    let name = fs::read_to_string(pointer).ok()?;
    let folder = pointer.with_file_name(name.trim_end());
    step_of(&folder).map(|_| folder)
}

/// After how many steps the checkpoint in the folder `path` was written, by its name.
pub(super) fn step_of(path: &Path) -> Option<u64> {
    name_of(path).strip_prefix("step-")?.parse().ok()
}

pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Writes a file that is on the disk then.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(saving(path))
}

/// Names are on the disk only when their folder is.
fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(saving(path))
}

fn saving(path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| Error::Save {
        doing: format!("saving {}", path.display()),
        reason: error.to_string(),
    }
}
