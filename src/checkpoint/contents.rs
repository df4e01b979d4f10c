//! The contents of a checkpoint folder: files that this program wrote, and files that it must not touch.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::layout::{
    FILES, LOCK, MAX_POINTER_BYTES, NEW, PROBE, TRAINER, UNFINISHED, begins_folder_name, folder_of,
    is_pointer_name, name_of, paths_in, step_of,
};
use super::state::Manifest;
use crate::error::{Error, Result, Shown};
use crate::files::{RECOGNIZED_BY, kind_of, open_regular};

/// The parts of a run's folder that this program wrote.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The folders of checkpoints by step, whole or damaged.
    pub checkpoints: BTreeMap<u64, PathBuf>,
    /// Files and folders that a killed run left behind.
    leftovers: Vec<PathBuf>,
}

impl Contents {
    /// Checks everything in `folder` whose name a run uses there. Empty if there is no folder.
    ///
    /// # Errors
    /// [`Error::Input`] that names a file that this program did not write, or cannot read. Nothing has changed
    /// then.
    pub(super) fn of(folder: &Path) -> Result<Self> {
        let mut contents = Self::default();
        for path in paths_in(folder)? {
            match contents.take(&path) {
                // A run that saves here has just renamed or removed the file.
                Err(Foreign::Unreadable(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(Foreign::Unreadable(error)) => {
                    return Err(Error::usage(format!(
                        "{} cannot be read: {error}; use another folder for --checkpoint-dir",
                        path.shown()
                    )));
                }
                Err(Foreign::Is(path, what)) => {
                    return Err(Error::usage(format!(
                        "{} {what}, and a run that saves here needs this name; move it away, or use another --checkpoint-dir",
                        path.shown()
                    )));
                }
                Ok(()) => {}
            }
        }
        Ok(contents)
    }

    fn take(&mut self, path: &Path) -> Result<(), Foreign> {
        let name = &*name_of(path);
        let pointer = name.strip_suffix(NEW).unwrap_or(name);
        if name == LOCK {
            is_lock(path)?;
        } else if name == TRAINER {
            return Err(Foreign::is(
                path,
                "is a file of a checkpoint, so this folder is that checkpoint",
            ));
        } else if is_pointer_name(pointer) {
            is_pointer(path)?;
            if name != pointer {
                self.leftovers.push(path.into());
            }
        } else if let Some(step) = step_of(path) {
            if name != folder_of(step) {
                return Err(Foreign::is(path, format!("should be called {}", folder_of(step))));
            }
            if files_of_checkpoint(path)?.is_empty() {
                return Err(Foreign::is(path, NOT_OURS));
            }
            // A damaged checkpoint does not contain its step.
            match Manifest::read(path) {
                Ok(found) if found.state.step != step => {
                    let holds = found.state.step;
                    let name = folder_of(holds);
                    return Err(Foreign::is(
                        path,
                        format!("holds step {holds}, so its name should be {name}"),
                    ));
                }
                _ => self.checkpoints.insert(step, path.into()),
            };
        } else if let Some(rest) = name.strip_prefix(UNFINISHED) {
            let is_known = rest == PROBE
                || step_of(Path::new(rest)).is_some_and(|step| rest == folder_of(step));
            let files = files_of_checkpoint(path)?;
            if !is_known || (rest == PROBE && !files.is_empty()) {
                return Err(Foreign::is(path, NOT_OURS));
            }
            self.leftovers.push(path.into());
        }
        Ok(())
    }

    /// Removes the files and folders that a killed run left behind.
    ///
    /// # Errors
    /// The operating system's error, with the path.
    pub(super) fn remove_leftovers(&self) -> io::Result<()> {
        let remove = |path: &PathBuf| {
            let result =
                if path.is_dir() { remove_checkpoint(path) } else { fs::remove_file(path) };
            result.map_err(|error| io::Error::other(format!("{}: {error}", path.shown())))
        };
        for file in &self.leftovers {
            remove(file)?;
        }
        Ok(())
    }
}

/// The reason why a name cannot be used.
enum Foreign {
    /// The path that has the name, and the problem, for the message.
    Is(PathBuf, String),
    Unreadable(io::Error),
}

impl Foreign {
    fn is(path: &Path, what: impl Into<String>) -> Self {
        Self::Is(path.into(), what.into())
    }
}

impl From<io::Error> for Foreign {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

const NOT_OURS: &str = "is damaged, or was not written by ddp-mp";

/// Removes the files of a checkpoint and their folder. Fails if the folder holds anything else.
pub(super) fn remove_checkpoint(folder: &Path) -> io::Result<()> {
    let found = files_of_checkpoint(folder);
    let files = found.map_err(|foreign| match foreign {
        Foreign::Is(path, what) => io::Error::other(format!("{} {what}", path.shown())),
        Foreign::Unreadable(error) => error,
    })?;
    for file in &files {
        fs::remove_file(file)?;
    }
    fs::remove_dir(folder)
}

/// Returns whether the folder holds only files that this program wrote.
pub(super) fn is_checkpoint(folder: &Path) -> bool {
    files_of_checkpoint(folder).is_ok()
}

/// Returns whether a pointer can be written to `path`: there is no file, or a pointer that this program wrote.
pub(super) fn may_point(path: &Path) -> bool {
    match is_pointer(path) {
        Err(Foreign::Unreadable(error)) => error.kind() == io::ErrorKind::NotFound,
        found => found.is_ok(),
    }
}

/// Checks that `path` is a lock file of this program: empty, and without a second hard link.
fn is_lock(path: &Path) -> Result<(), Foreign> {
    let found = fs::symlink_metadata(path)?;
    let is_ours = found.is_file() && found.len() == 0 && found.nlink() == 1;
    if is_ours { Ok(()) } else { Err(Foreign::is(path, NOT_OURS)) }
}

/// Checks that `path` is a pointer of this program. A pointer holds the name of a checkpoint's folder. While it is
/// being written (suffix `.new`), it may hold only the beginning of such a name.
fn is_pointer(path: &Path) -> Result<(), Foreign> {
    let found = fs::symlink_metadata(path)?;
    let foreign = || Err(Foreign::is(path, NOT_OURS));
    if !found.is_file() {
        return foreign();
    }
    let text = beginning(path, MAX_POINTER_BYTES)?;
    let text = str::from_utf8(&text).unwrap_or_default();
    let line = text.strip_suffix('\n').unwrap_or(text);
    let is_whole = step_of(Path::new(line)).is_some_and(|step| line == folder_of(step));
    let is_begun = name_of(path).ends_with(NEW) && line == text && begins_folder_name(line);
    if found.len() < MAX_POINTER_BYTES && (is_whole || is_begun) { Ok(()) } else { foreign() }
}

/// Returns the files in the folder of a checkpoint. An error if this program did not write one of them.
fn files_of_checkpoint(folder: &Path) -> Result<Vec<PathBuf>, Foreign> {
    let foreign = |path: &Path| Foreign::is(path, NOT_OURS);
    if !fs::symlink_metadata(folder)?.is_dir() {
        return Err(foreign(folder));
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = name_of(&path);
        let known = FILES.into_iter().find(|(known, _, _)| *known == name);
        let Some((_, skipped, begins)) = known else { return Err(foreign(&path)) };
        if !fs::symlink_metadata(&path)?.is_file() {
            return Err(foreign(&path));
        }
        let text = beginning(&path, RECOGNIZED_BY as u64)?;
        // Of a truncated file, compares the bytes that exist.
        if text.iter().skip(skipped).zip(begins).any(|(found, ours)| found != ours) {
            let known = kind_of(&text).map(|(what, _)| Foreign::is(&path, format!("is {what}")));
            return Err(known.unwrap_or_else(|| foreign(&path)));
        }
        files.push(path);
    }
    Ok(files)
}

/// Returns the first bytes of a regular file, at most `most`.
fn beginning(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
