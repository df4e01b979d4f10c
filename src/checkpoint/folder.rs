//! The folder of a run's checkpoints.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::contents::{
    Contents, FILES, LONGEST_POINTER, NEW, folder_of, is_checkpoint, may_point, paths_in,
    remove_checkpoint,
};
use super::state::{FileMark, Manifest};
use super::{BEST, COMM_HOOK, Checkpoint, LATEST, MODEL, OPTIMIZER, Snapshot, TRAINER, tensors};
use crate::error::{Error, Result};
use crate::ffi::limits::explain;
use crate::files::{Place, read_regular};

/// How the name of a folder begins that is not, or no longer, a checkpoint.
pub(super) const UNFINISHED: &str = ".unfinished-";

/// The rest of the name of a folder that is made only to see whether one can be.
pub(super) const PROBE: &str = "probe";

/// The file that a run holds locked while it saves here.
pub(super) const LOCK: &str = ".lock";

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
    /// [`Error::Input`] if there are checkpoints already, another run saves there, the folder is not writable,
    /// or something that this program did not write has one of its names. Nothing in the folder has changed then.
    pub fn create(path: &Path, keep_last: usize) -> Result<Self> {
        Self::lock(path, keep_last, refuse_any_in)
    }

    /// As [`create`](Self::create), for a run that goes on from a checkpoint that is in there, if one is.
    ///
    /// # Errors
    /// As [`create`](Self::create), but there may be checkpoints.
    pub fn open(path: &Path, keep_last: usize) -> Result<Self> {
        Self::lock(path, keep_last, |_, _| Ok(()))
    }

    /// Locks the folder at `path`, whose contents must please `check`.
    fn lock(
        path: &Path,
        keep_last: usize,
        check: fn(&Path, &Contents) -> Result<()>,
    ) -> Result<Self> {
        let wrong = |error: io::Error| {
            Error::Input(format!(
                "checkpoints cannot be written to {}: {}; use another --checkpoint-dir",
                path.display(),
                explain(&error)
            ))
        };
        check(path, &Contents::of(path)?)?; // before anything is written there
        fs::create_dir_all(path).map_err(wrong)?;
        // What is there has been found empty, and no link is followed.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let lock = options.open(path.join(LOCK)).map_err(wrong)?;
        // Where a file system has no locks, nobody is kept out.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Error::Input(format!(
                "another run is saving checkpoints in {}; wait for its end, or use another --checkpoint-dir",
                path.display()
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

    /// Refuses a folder in which something that this program did not write has the name of a checkpoint, or another name
    /// that a run uses there.
    ///
    /// # Errors
    /// [`Error::Input`] that names it.
    pub(crate) fn check(path: &Path) -> Result<()> {
        Contents::of(path).map(drop)
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
        let name = folder_of(snapshot.state.step);
        let (folder, unfinished) = (self.path.join(&name), self.unfinished(&name));
        let written = self.write_as(&unfinished, &folder, snapshot);
        if written.is_err() {
            // Makes room on a disk that is full. Nobody takes it for a checkpoint if it stays.
            let _ = remove_checkpoint(&unfinished);
        }
        written.and_then(|()| self.remove_old()).map(|()| folder)
    }

    fn write_as(&self, unfinished: &Path, folder: &Path, snapshot: &Snapshot) -> Result<()> {
        if fs::symlink_metadata(folder).is_ok() {
            let reason = "this folder exists already; move it away".into();
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
        let (new, pointer) = (self.path.join(format!("{pointer}{NEW}")), self.path.join(pointer));
        if !may_point(&pointer) {
            let doing = format!("saving {}", pointer.display());
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
        // One that somebody has put something into stays.
        let goes = |folder: &&PathBuf| Some(*folder) != best.as_ref() && is_checkpoint(folder);
        for folder in steps.values().take(old).filter(goes) {
            // Renamed first: half of it must not look like a checkpoint.
            let unfinished = self.unfinished(&name_of(folder));
            fs::rename(folder, &unfinished).and_then(|()| remove_checkpoint(&unfinished)).map_err(
                |error| Error::Save {
                    doing: format!("removing the old checkpoint {}", folder.display()),
                    reason: explain(&error),
                },
            )?;
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
                .find(|aside| fs::symlink_metadata(aside).is_err())
                .unwrap_or_default();
            fs::rename(&folder, &aside).map_err(saving(&aside))?;
            Ok(aside)
        };
        newer.map(set_aside).collect()
    }

    /// The folder of the run around `path`, if that is by its name a checkpoint or a pointer to one.
    pub(crate) fn around(path: &Path) -> Option<PathBuf> {
        let path = Place::of(path).into_path();
        let is_pointer = [LATEST, BEST].contains(&&*name_of(&path));
        path.parent().filter(|_| is_pointer || step_of(&path).is_some()).map(PathBuf::from)
    }

    /// Whether a run uses `name` where it saves, or in a checkpoint.
    pub(crate) fn uses(name: &OsStr) -> bool {
        let name = &*name.to_string_lossy();
        let pointer = name.strip_suffix(NEW).unwrap_or(name);
        name == LOCK
            || FILES.iter().any(|(file, _, _)| *file == name)
            || [LATEST, BEST].contains(&pointer)
            || [UNFINISHED, "aside-"].iter().any(|begins| name.starts_with(begins))
            || step_of(Path::new(name)).is_some()
    }

    fn unfinished(&self, name: &str) -> PathBuf {
        self.path.join(format!("{UNFINISHED}{name}"))
    }
}

/// The newest checkpoint in the folder `path`, if that is there.
pub(super) fn newest_in(path: &Path) -> Result<Option<PathBuf>> {
    Ok(steps_in(path)?.pop_last().map(|(_, folder)| folder))
}

fn refuse_any_in(path: &Path, contents: &Contents) -> Result<()> {
    contents.checkpoints.values().next_back().map_or(Ok(()), |newest| {
        Err(Error::Input(format!(
            "{} holds checkpoints already, the newest is {}; continue from it with --resume auto, or use another \
             --checkpoint-dir",
            path.display(),
            name_of(newest)
        )))
    })
}

/// The checkpoints in the folder `path` by step: none where there is no folder.
pub(super) fn steps_in(path: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let step = |path: PathBuf| step_of(&path).map(|step| (step, path));
    Ok(paths_in(path)?.into_iter().filter_map(step).collect())
}

/// Returns `path`, or where it leads if it is a link: what it names lies beside that.
pub(super) fn followed(path: &Path) -> Cow<'_, Path> {
    if path.is_symlink() { Place::of(path).into_path().into() } else { path.into() }
}

/// The checkpoint that the file `latest` or `best` at `pointer` names, if it is such a file.
pub(super) fn pointed(pointer: &Path) -> Option<PathBuf> {
    let name = String::from_utf8(read_regular(pointer, LONGEST_POINTER).ok()?).ok()?;
    let folder = followed(pointer).with_file_name(name.trim_end());
    step_of(&folder).map(|_| folder)
}

/// After how many steps the checkpoint in the folder `path` was written, by its name.
pub(super) fn step_of(path: &Path) -> Option<u64> {
    let name = name_of(path);
    let step = name.strip_prefix("step-")?;
    // A number may begin with a plus sign for `parse`.
    step.parse().ok().filter(|_| step.bytes().all(|it| it.is_ascii_digit()))
}

pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Writes a new file that is on the disk then.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create_new(path)?;
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
        reason: explain(&error),
    }
}
