//! The folder of a run's checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::layout::{
    ASIDE, BEST, LATEST, LOCK, MODEL, OPTIMIZER, TRAINER, UNFINISHED, check, check_all_in,
    files_of, folder_of, name_of, pointed, remove_checkpoint, step_of, steps_in, unusable,
};
use super::state::{FileMark, Manifest};
use super::{Checkpoint, Snapshot, tensors};
use crate::error::{Error, Result, Shown};
use crate::files::Place;
use crate::os::limits::explain;

/// The folder of a run's checkpoints. It keeps the newest few and the best. While it is open, no other run can open it,
/// neither in this process nor in another.
#[derive(Debug, Clone)]
pub struct CheckpointDir {
    path: PathBuf,
    keep_last: usize,
    /// Unlocked when the last clone is dropped, and when the process ends for any reason.
    _lock: Arc<Lock>,
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
        // An existing lock file was found to be empty. Links are not followed.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let lock = options.open(path.join(LOCK)).map_err(unusable(path))?;
        // On a file system without locks, other runs are not detected.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::usage(format!(
                "another run is saving checkpoints in {}; wait for its end, or use another --checkpoint-dir",
                path.shown()
            )));
        }
        let lock = Arc::new(Lock(lock));
        check()?; // another run may have ended just then
        // Removes what a killed run left behind. Without such a folder, this shows that one can be created.
        let unfinished = path.join(UNFINISHED);
        let created = fs::create_dir_all(&unfinished);
        created.and_then(|()| remove_checkpoint(&unfinished)).map_err(unusable(path))?;
        Ok(Self { path: path.into(), keep_last: keep_last.max(1), _lock: lock })
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
        let written = self.write_as(&folder, snapshot).and_then(|()| self.remove_old());
        if written.is_err() {
            // Frees space on a full disk. If this fails, the next run does it.
            let _ = remove_checkpoint(&self.path.join(UNFINISHED));
        }
        written.map(|()| folder).map_err(|error| self.explain(error))
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

    fn write_as(&self, folder: &Path, snapshot: &Snapshot) -> Result<()> {
        let unfinished = &self.path.join(UNFINISHED);
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
        sync_folder(unfinished)
            .and_then(|()| fs::rename(unfinished, folder))
            .and_then(|()| sync_folder(&self.path))
            .map_err(failed("saving", folder))?;
        if snapshot.state.best.as_ref().is_some_and(|best| best.step == snapshot.state.step) {
            self.point(BEST, folder)?;
        }
        self.point(LATEST, folder)
    }

    /// Makes the file `pointer` name `folder`.
    fn point(&self, pointer: &str, folder: &Path) -> Result<()> {
        let (unfinished, path) = (self.path.join(UNFINISHED), self.path.join(pointer));
        let new = unfinished.join(pointer);
        let write = || {
            check(&path)?;
            fs::create_dir(&unfinished)?;
            write_file(&new, format!("{}\n", name_of(folder)).as_bytes())?;
            fs::rename(&new, &path)?;
            fs::remove_dir(&unfinished)?;
            sync_folder(&self.path)
        };
        write().map_err(failed("saving", &path))
    }

    fn remove_old(&self) -> Result<()> {
        let (steps, unfinished) = (steps_in(&self.path)?, self.path.join(UNFINISHED));
        let old = steps.len().saturating_sub(self.keep_last);
        let best = pointed(&self.path.join(BEST)).ok().flatten();
        // A folder with additional files is kept.
        let goes = |folder: &&PathBuf| Some(*folder) != best.as_ref() && files_of(folder).is_ok();
        for folder in steps.values().take(old).filter(goes) {
            // Renamed first: a partly removed folder must not look like a checkpoint.
            fs::rename(folder, &unfinished)
                .and_then(|()| remove_checkpoint(&unfinished))
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
        if let Some(folder) = steps.get(&state.step) {
            self.point(LATEST, folder)?;
        }
        // `best` names the best checkpoint up to here. Later ones belong to another run.
        let best = self.path.join(BEST);
        match state.best.as_ref().and_then(|best| steps.get(&best.step)) {
            Some(folder) => self.point(BEST, folder)?,
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
