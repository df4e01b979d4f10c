//! The folder of a run's checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use crossbeam::channel::bounded;

use super::layout::{
    ASIDE, BEST, LATEST, LOCK, MODEL, OPTIMIZER, TRAINER, UNFINISHED, UNFINISHED_AFTER_FAILURE,
    check, check_all_in, files_of, folder_of, name_of, pointed, remove_checkpoint, step_of,
    steps_in, unusable,
};
use super::state::{FileMark, Manifest};
use super::{Checkpoint, Snapshot, TrainerState, tensors};
use crate::error::{Error, Result, Shown};
use crate::files::Place;
use crate::os::limits::{explain, not_started};
use crate::runtime::Deadline;

/// The folder of a run's checkpoints. It keeps the newest few and the best. While it is open, no other run can open it,
/// neither in this process nor in another.
#[derive(Debug, Clone)]
pub struct CheckpointDir {
    path: PathBuf,
    keep_last: usize,
    /// Unlocked when the last clone is dropped, and when the process ends for any reason. `None` if another process of the run
    /// has the lock.
    _lock: Option<Arc<Lock>>,
}

/// A locked file, unlocked explicitly on drop. Closing the file does not unlock it while a child process that another
/// thread is just starting still has a copy of the descriptor.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock(); // if this fails, the lock ends with the process
    }
}

impl CheckpointDir {
    /// Opens the folder at `path`, or creates it, for a run that starts from the beginning. Checkpoints other than
    /// the newest `keep_last` and the best are removed, each after a newer one is complete. One is always kept.
    ///
    /// # Errors
    /// [`Error::Input`] if there are checkpoints already, another run saves there, or the folder is not
    /// writable. Also if a file that this program did not write has one of its names. Nothing in the folder has changed
    /// then.
    pub fn create(path: &Path, keep_last: usize) -> Result<Self> {
        Self::lock(path, keep_last, true)
    }

    /// Opens the folder like [`create`](Self::create), for a run that resumes from a checkpoint there, if there is one.
    ///
    /// # Errors
    /// As [`create`](Self::create), but existing checkpoints are no error.
    pub fn open(path: &Path, keep_last: usize) -> Result<Self> {
        Self::lock(path, keep_last, false)
    }

    /// Locks the folder at `path`. A new run refuses one with checkpoints.
    fn lock(path: &Path, keep_last: usize, is_new: bool) -> Result<Self> {
        let check = || match check_all_in(path).and_then(|()| Self::newest_in(path))? {
            Some(newest) if is_new => Err(Error::usage(format!(
                "{} holds checkpoints already, the newest is {}; continue from it with --resume auto, or use another \
                 --checkpoint-dir",
                path.shown(),
                name_of(&newest)
            ))),
            _ => Ok(()),
        };
        check()?; // before anything is written there
        create_folder(path).map_err(unusable(path))?;
        let lock = open_lock(path, true).map_err(unusable(path))?;
        // On a file system without locks, other runs are not detected.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::usage(format!(
                "another run is saving checkpoints in {}; wait for its end, or use another --checkpoint-dir",
                path.shown()
            )));
        }
        let lock = Some(Arc::new(Lock(lock)));
        check()?; // another run may have ended just then
        for unfinished in [UNFINISHED, UNFINISHED_AFTER_FAILURE].map(|name| path.join(name)) {
            remove_left(&unfinished).map_err(unusable(path))?;
        }
        Ok(Self { path: path.into(), keep_last: keep_last.max(1), _lock: lock })
    }

    /// Returns the folder at `path` if another process of this run has opened it. The ranks of this process save there after
    /// a failure only. `None` if no run has opened the folder: this host has another disk.
    #[doc(hidden)]
    pub fn of_run(path: &Path, keep_last: usize) -> Option<Self> {
        let lock = open_lock(path, false).ok()?;
        let is_open = matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock));
        is_open.then(|| Self { path: path.into(), keep_last: keep_last.max(1), _lock: None })
    }

    /// Returns whether the folder has a checkpoint of this step or of a later one.
    pub(crate) fn has_step(&self, step: u64) -> bool {
        steps_in(&self.path).is_ok_and(|steps| steps.range(step..).next().is_some())
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether `checkpoint` was read from this folder.
    #[doc(hidden)]
    pub fn contains(&self, checkpoint: &Checkpoint) -> bool {
        let folder = Place::of(checkpoint.path()).into_path();
        folder.parent() == Some(&*Place::of(&self.path).into_path())
    }

    /// Returns the newest checkpoint in the folder. `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Input`] if the folder cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>> {
        Self::newest_in(&self.path)
    }

    /// Returns the newest checkpoint in the folder `path`. `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Input`] if the folder cannot be read.
    pub fn newest_in(path: &Path) -> Result<Option<PathBuf>> {
        Ok(steps_in(path)?.pop_last().map(|(_, folder)| folder))
    }

    /// Writes a checkpoint, then removes old ones. Returns the folder of the new checkpoint.
    ///
    /// # Errors
    /// [`Error::Save`]. The existing checkpoints stay. The error says whether there are any.
    pub fn write(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        let folder = self.path.join(folder_of(snapshot.state.step));
        let unfinished = self.path.join(UNFINISHED);
        let written = self
            .write_as(&folder, &unfinished, snapshot)
            .and_then(|()| self.remove_old(&unfinished));
        if written.is_err() {
            // Frees space on a full disk. If this fails, the next run does it.
            let _ = remove_checkpoint(&unfinished);
        }
        written.map(|()| folder).map_err(|error| self.explain(error))
    }

    /// Writes the checkpoint of a rank that survives a failure, unless the folder has one of this step or a later one.
    /// Returns its folder; `None` if it was not needed.
    ///
    /// The process that has opened the folder may hang, or still write another checkpoint. So this writes to a folder with a
    /// name of its own. Survivors wait for each other, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::Save`], as [`write`](Self::write).
    pub(crate) fn write_after_failure(
        &self,
        snapshot: &Snapshot,
        deadline: Deadline,
    ) -> Result<Option<PathBuf>> {
        let _lock = self.lock_itself(deadline)?;
        if self.has_step(snapshot.state.step) {
            return Ok(None);
        }
        let folder = self.path.join(folder_of(snapshot.state.step));
        let unfinished = self.path.join(UNFINISHED_AFTER_FAILURE);
        let removed = remove_left(&unfinished).map_err(failed("saving", &unfinished));
        let written = removed.and_then(|()| self.write_as(&folder, &unfinished, snapshot));
        if written.is_ok() {
            let _ = self.remove_old(&unfinished); // another process may remove them
        } else {
            let _ = remove_checkpoint(&unfinished); // frees space on a full disk
        }
        written.map(|()| Some(folder)).map_err(|error| self.explain(error))
    }

    /// Locks the folder itself against other survivors.
    fn lock_itself(&self, deadline: Deadline) -> Result<Lock> {
        let folder = File::open(&self.path).map_err(failed("saving in", &self.path))?;
        let (locked_tx, locked_rx) = bounded(1);
        let lock = move || {
            let _ = folder.lock(); // on a file system without locks, the checkpoint may be written twice
            locked_tx.send(Lock(folder))
        };
        let save = |reason| Error::Save { doing: "saving".into(), reason };
        let thread = thread::Builder::new().name("lock".into()).spawn(lock);
        thread
            .map_err(|error| save(not_started("the thread that waits for the folder", &error)))?;
        let other = "another rank saves in the folder, and is not done in time";
        deadline.recv(&locked_rx).map_err(|_| save(other.into()))
    }

    /// Adds to an error what is left of the earlier checkpoints, and what to do.
    fn explain(&self, error: Error) -> Error {
        let Error::Save { doing, reason } = error else { return error };
        let dir = self.path.shown();
        let rest = match self.newest() {
            Ok(Some(newest)) => format!(
                "earlier checkpoints are intact: remove the cause, and continue from {} with --resume auto",
                name_of(&newest)
            ),
            _ if !Self::was_opened(&self.path) => format!(
                "{dir} was removed during the run, with all checkpoints: start again, and leave the folder in its place"
            ),
            _ => format!("{dir} has no earlier checkpoint: remove the cause, and start again"),
        };
        Error::Save { doing, reason: format!("{reason}; {rest}") }
    }

    /// Returns whether a run has opened the folder at `path`, and nobody has removed it since.
    #[doc(hidden)]
    pub fn was_opened(path: &Path) -> bool {
        path.join(LOCK).exists()
    }

    /// Writes a checkpoint to `unfinished`, and makes it `folder`.
    fn write_as(&self, folder: &Path, unfinished: &Path, snapshot: &Snapshot) -> Result<()> {
        fs::create_dir(unfinished).map_err(failed("saving", unfinished))?;
        let mut files = BTreeMap::new();
        for (name, tensors) in [(MODEL, &snapshot.model), (OPTIMIZER, &snapshot.optimizer)] {
            let (path, bytes) = (unfinished.join(name), tensors::serialize(tensors)?);
            files.insert(name.into(), FileMark::of(&bytes));
            write_file(&path, &bytes).map_err(failed("saving", &path))?;
        }
        let path = unfinished.join(TRAINER);
        Manifest::new(snapshot.state.clone(), files)
            .and_then(|manifest| Ok(serde_json::to_vec_pretty(&manifest)?))
            .and_then(|text| write_file(&path, &text))
            .map_err(failed("saving", &path))?;
        sync_folder(unfinished).map_err(failed("saving", folder))?;
        // A rank may have saved this step after a failure, when its epoch was not ended.
        let older = TrainerState::read(folder).ok();
        let replaces = older.is_some_and(|older| older.after_failure.is_some());
        let replaced = self.path.join(UNFINISHED_AFTER_FAILURE);
        if replaces {
            fs::rename(folder, &replaced).map_err(failed("saving", folder))?;
        }
        fs::rename(unfinished, folder)
            .and_then(|()| sync_folder(&self.path))
            .map_err(failed("saving", folder))?;
        if replaces {
            remove_checkpoint(&replaced).map_err(failed("saving", folder))?;
        }
        if snapshot.state.best.as_ref().is_some_and(|best| best.step == snapshot.state.step) {
            self.point(BEST, folder, unfinished)?;
        }
        // A rank may have saved a later step after a failure meanwhile.
        let newest = self.newest()?;
        self.point(LATEST, newest.as_deref().unwrap_or(folder), unfinished)
    }

    /// Makes the file `pointer` name `folder`. It is written to `unfinished` first.
    fn point(&self, pointer: &str, folder: &Path, unfinished: &Path) -> Result<()> {
        let path = self.path.join(pointer);
        let new = unfinished.join(pointer);
        let write = || {
            check(&path)?;
            fs::create_dir(unfinished)?;
            write_file(&new, format!("{}\n", name_of(folder)).as_bytes())?;
            fs::rename(&new, &path)?;
            fs::remove_dir(unfinished)?;
            sync_folder(&self.path)
        };
        write().map_err(failed("saving", &path))
    }

    /// Removes old checkpoints. Each is renamed to `unfinished` first.
    fn remove_old(&self, unfinished: &Path) -> Result<()> {
        let steps = steps_in(&self.path)?;
        let old = steps.len().saturating_sub(self.keep_last);
        let best = pointed(&self.path.join(BEST)).ok().flatten();
        // A folder with additional files is kept.
        let goes = |folder: &&PathBuf| Some(*folder) != best.as_ref() && files_of(folder).is_ok();
        for folder in steps.values().take(old).filter(goes) {
            // Renamed first: a partly removed folder must not look like a checkpoint.
            fs::rename(folder, unfinished)
                .and_then(|()| remove_checkpoint(unfinished))
                .map_err(failed("removing the old checkpoint", folder))?;
        }
        Ok(())
    }

    /// Renames the checkpoints after `checkpoint`, from which a run resumes: the run will write new ones. Returns their
    /// new paths.
    ///
    /// # Errors
    /// [`Error::Save`].
    pub fn set_aside_after(&self, checkpoint: &Checkpoint) -> Result<Vec<PathBuf>> {
        let (state, steps) = (checkpoint.state(), steps_in(&self.path)?);
        let unfinished = &self.path.join(UNFINISHED);
        if let Some(folder) = steps.get(&state.step) {
            self.point(LATEST, folder, unfinished)?;
        }
        // `best` names the best checkpoint up to here. Later ones belong to another run.
        let best = self.path.join(BEST);
        match state.best.as_ref().and_then(|best| steps.get(&best.step)) {
            Some(folder) => self.point(BEST, folder, unfinished)?,
            None if best.exists() => fs::remove_file(&best).map_err(failed("saving", &best))?,
            None => {}
        }
        let newer = steps.into_iter().filter(|(newer, _)| *newer > state.step);
        let set_aside = |(_, folder): (u64, PathBuf)| {
            let aside = (1..)
                .map(|n| self.path.join(format!("{ASIDE}{n}-{}", name_of(&folder))))
                .find(|aside| fs::symlink_metadata(aside).is_err())
                .unwrap_or_default();
            fs::rename(&folder, &aside).map_err(failed("saving", &aside))?;
            Ok(aside)
        };
        newer.map(set_aside).collect()
    }

    /// Returns the run's folder that contains `path`. `None` if the name is not that of a checkpoint or a pointer.
    #[doc(hidden)]
    pub fn around(path: &Path) -> Option<PathBuf> {
        let path = Place::of(path).into_path();
        let name = &*name_of(&path);
        let is_known = [LATEST, BEST].contains(&name) || step_of(name).is_some();
        path.parent().filter(|_| is_known).map(PathBuf::from)
    }
}

/// Opens the lock file of the folder at `path`. An existing one was found to be empty. Links are not followed.
fn open_lock(path: &Path, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(create).truncate(false);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.open(path.join(LOCK))
}

/// Removes what a killed process has left in `unfinished`. Without such a folder, this shows that one can be created.
fn remove_left(unfinished: &Path) -> io::Result<()> {
    fs::create_dir_all(unfinished)?;
    remove_checkpoint(unfinished)
}

/// Creates a folder with the missing ones above it. Syncs each folder that has a new entry, so that no name is lost.
fn create_folder(path: &Path) -> io::Result<()> {
    let place = Place::of(path).into_path();
    let missing: Vec<&Path> = place.ancestors().take_while(|folder| !folder.exists()).collect();
    fs::create_dir_all(&place)?;
    for folder in missing.into_iter().filter_map(Path::parent) {
        // A folder without read permission can have new entries, too.
        if let Ok(folder) = File::open(folder) {
            folder.sync_all()?;
        }
    }
    Ok(())
}

/// Writes a new file and syncs it to the disk.
fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Syncs a folder to the disk. Without this, the names of new files may be lost.
fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn failed(doing: &str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::Save { doing: format!("{doing} {}", path.shown()), reason: explain(&error) }
}
