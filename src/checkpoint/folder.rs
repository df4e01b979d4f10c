//! The folder of a run's checkpoints.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::contents::{Contents, is_checkpoint, may_point, remove_checkpoint};
use super::layout::{
    self, ASIDE, BEST, LATEST, LOCK, MODEL, NEW, OPTIMIZER, PROBE, TRAINER, UNFINISHED, folder_of,
    is_pointer_name, name_of, pointed, step_of, steps_in,
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
        Self::lock(path, keep_last, refuse_any_in)
    }

    /// Opens the folder like [`create`](Self::create), for a run that resumes from a checkpoint there, if there is one.
    ///
    /// # Errors
    /// As [`create`](Self::create), but existing checkpoints are no error.
    pub fn open(path: &Path, keep_last: usize) -> Result<Self> {
        Self::lock(path, keep_last, |_, _| Ok(()))
    }

    /// Locks the folder at `path`. `check` may reject its contents.
    fn lock(
        path: &Path,
        keep_last: usize,
        check: fn(&Path, &Contents) -> Result<()>,
    ) -> Result<Self> {
        let wrong = |error: io::Error| {
            Error::usage(format!(
                "checkpoints cannot be written to {}: {}; use another --checkpoint-dir",
                path.shown(),
                error
            ))
        };
        check(path, &Contents::of(path)?)?; // before anything is written there
        create_folder(path).map_err(wrong)?;
        // An existing lock file was found to be empty. Links are not followed.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let lock = options.open(path.join(LOCK)).map_err(wrong)?;
        // On a file system without locks, other runs are not detected.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::usage(format!(
                "another run is saving checkpoints in {}; wait for its end, or use another --checkpoint-dir",
                path.shown()
            )));
        }
        let locked =
            Self { path: path.into(), keep_last: keep_last.max(1), _lock: Arc::new(Lock(lock)) };
        let contents = Contents::of(path)?;
        check(path, &contents)?; // another run may have ended just then
        contents.remove_leftovers().map_err(wrong)?;
        let probe = locked.unfinished(PROBE);
        fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).map_err(wrong)?;
        Ok(locked)
    }

    /// Rejects a folder in which a file that this program did not write has a name that a run uses there.
    ///
    /// # Errors
    /// [`Error::Input`] that names the file.
    pub(crate) fn check(path: &Path) -> Result<()> {
        Contents::of(path).map(drop)
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether `checkpoint` was read from this folder.
    pub(crate) fn contains(&self, checkpoint: &Checkpoint) -> bool {
        let folder = checkpoint.path().canonicalize().ok();
        let mine = self.path.canonicalize().ok();
        folder.zip(mine).is_some_and(|(folder, mine)| folder.parent() == Some(&mine))
    }

    /// Returns whether the folder has checkpoints of later steps than `step`.
    pub(crate) fn has_newer_than(&self, step: u64) -> Result<bool> {
        Ok(steps_in(&self.path)?.last_key_value().is_some_and(|(newest, _)| *newest > step))
    }

    /// Returns the newest checkpoint in the folder. `None` if it has none.
    ///
    /// # Errors
    /// [`Error::Input`] if the folder cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>> {
        layout::newest_in(&self.path)
    }

    /// Returns the newest checkpoint in the folder `path`. `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Input`] if the folder cannot be read.
    pub fn newest_in(path: &Path) -> Result<Option<PathBuf>> {
        layout::newest_in(path)
    }

    /// Writes a checkpoint, then removes old ones. Returns the folder of the new checkpoint.
    ///
    /// # Errors
    /// [`Error::Save`]. The existing checkpoints stay. The error says whether there are any.
    pub fn write(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        let name = folder_of(snapshot.state.step);
        let (folder, unfinished) = (self.path.join(&name), self.unfinished(&name));
        let written = self.write_as(&unfinished, &folder, snapshot);
        if written.is_err() {
            // Frees space on a full disk. If this fails, the folder's name is not that of a checkpoint.
            let _ = remove_checkpoint(&unfinished);
        }
        written
            .and_then(|()| self.remove_old())
            .map(|()| folder)
            .map_err(|error| self.explain(error))
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
    pub(crate) fn was_opened(path: &Path) -> bool {
        path.join(LOCK).exists()
    }

    fn write_as(&self, unfinished: &Path, folder: &Path, snapshot: &Snapshot) -> Result<()> {
        if fs::symlink_metadata(folder).is_ok() {
            let reason = "this folder exists already; move it away".into();
            return Err(Error::Save { doing: format!("saving {}", folder.shown()), reason });
        }
        fs::create_dir(unfinished).map_err(saving(unfinished))?;
        let mut files = BTreeMap::new();
        for (name, tensors) in [(MODEL, &snapshot.model), (OPTIMIZER, &snapshot.optimizer)] {
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

    /// Makes the file `pointer` name `folder`.
    fn point(&self, pointer: &str, folder: &Path) -> Result<()> {
        let (new, pointer) = (self.path.join(format!("{pointer}{NEW}")), self.path.join(pointer));
        if !may_point(&pointer) {
            let doing = format!("saving {}", pointer.shown());
            let reason =
                "another program has created this file since the run began; move it away".into();
            return Err(Error::Save { doing, reason });
        }
        let written = write_file(&new, format!("{}\n", name_of(folder)).as_bytes());
        let renamed = written.and_then(|()| fs::rename(&new, &pointer).map_err(saving(&pointer)));
        if renamed.is_err() && may_point(&new) {
            let _ = fs::remove_file(&new);
        }
        renamed.and_then(|()| sync_folder(&self.path))
    }

    fn remove_old(&self) -> Result<()> {
        let steps = steps_in(&self.path)?;
        let old = steps.len().saturating_sub(self.keep_last);
        let best = pointed(&self.path.join(BEST));
        // A folder with additional files is kept.
        let goes = |folder: &&PathBuf| Some(*folder) != best.as_ref() && is_checkpoint(folder);
        for folder in steps.values().take(old).filter(goes) {
            // Renamed first: a partly removed folder must not look like a checkpoint.
            let unfinished = self.unfinished(&name_of(folder));
            fs::rename(folder, &unfinished).and_then(|()| remove_checkpoint(&unfinished)).map_err(
                |error| Error::Save {
                    doing: format!("removing the old checkpoint {}", folder.shown()),
                    reason: explain(&error),
                },
            )?;
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
            None if best.exists() => fs::remove_file(&best).map_err(saving(&best))?,
            None => {}
        }
        let newer = steps.into_iter().filter(|(newer, _)| *newer > state.step);
        let set_aside = |(_, folder): (u64, PathBuf)| {
            let aside = (1..)
                .map(|n| self.path.join(format!("{ASIDE}{n}-{}", name_of(&folder))))
                .find(|aside| fs::symlink_metadata(aside).is_err())
                .unwrap_or_default();
            fs::rename(&folder, &aside).map_err(saving(&aside))?;
            Ok(aside)
        };
        newer.map(set_aside).collect()
    }

    /// Returns the run's folder that contains `path`. `None` if the name is not that of a checkpoint or a pointer.
    pub(crate) fn around(path: &Path) -> Option<PathBuf> {
        let path = Place::of(path).into_path();
        let is_known = is_pointer_name(&name_of(&path)) || step_of(&path).is_some();
        path.parent().filter(|_| is_known).map(PathBuf::from)
    }

    /// Returns whether a run uses `name` in its folder, or in a checkpoint.
    pub(crate) fn uses(name: &OsStr) -> bool {
        layout::is_used(&name.to_string_lossy())
    }

    fn unfinished(&self, name: &str) -> PathBuf {
        self.path.join(format!("{UNFINISHED}{name}"))
    }
}

fn refuse_any_in(path: &Path, contents: &Contents) -> Result<()> {
    let Some(newest) = contents.checkpoints.values().next_back() else { return Ok(()) };
    Err(Error::usage(format!(
        "{} holds checkpoints already, the newest is {}; continue from it with --resume auto, or use another \
         --checkpoint-dir",
        path.shown(),
        name_of(newest)
    )))
}

/// Creates a folder with the missing ones above it. Syncs each folder that has a new entry, so that no name is lost.
fn create_folder(path: &Path) -> io::Result<()> {
    let missing =
        path.ancestors().take_while(|folder| *folder != Path::new("") && !folder.exists());
    let missing: Vec<&Path> = missing.collect();
    Place::create_folder(path)?;
    for folder in missing.into_iter().filter_map(Path::parent) {
        let folder = if folder == Path::new("") { Path::new(".") } else { folder };
        match File::open(folder) {
            // A folder without read permission can have new entries, too.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            opened => opened?.sync_all()?,
        }
    }
    Ok(())
}

/// Writes a new file and syncs it to the disk.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create_new(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(saving(path))
}

/// Syncs a folder to the disk. Without this, the names of new files may be lost.
fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(saving(path))
}

fn saving(path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| Error::Save { doing: format!("saving {}", path.shown()), reason: explain(&error) }
}
