//! The files and folders of a run's checkpoints: their names, and whether this program wrote what has such a name.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::state::Manifest;
use crate::error::{Error, Result, Shown};
use crate::files::{Place, RECOGNIZED_BY, kind_of, open_regular, read_regular};

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
/// The file with the state of training.
#[doc(hidden)]
pub const TRAINER: &str = "trainer.json";

/// The file that a run locks while it saves here.
pub(super) const LOCK: &str = ".lock";

/// The pointer to the newest checkpoint.
pub(super) const LATEST: &str = "latest";
/// The pointer to the checkpoint with the smallest validation loss.
pub(super) const BEST: &str = "best";

/// The size limit for a pointer, in bytes. Every pointer is shorter.
const MAX_POINTER_BYTES: u64 = 64;

/// The folder for what is not yet, or no longer, a checkpoint or a pointer. A killed run may leave it behind.
pub(super) const UNFINISHED: &str = ".unfinished";

/// Likewise, for a checkpoint that a rank saves after a failure.
pub(super) const UNFINISHED_AFTER_FAILURE: &str = ".unfinished-after-failure";

/// The prefix of a folder's name that holds a checkpoint of an abandoned continuation of the run.
pub(super) const ASIDE: &str = "aside-";

/// The prefix of a checkpoint's folder.
const STEP: &str = "step-";

/// The files that this program writes: name, number of leading bytes to skip, and the bytes with which it continues.
/// The first 8 bytes of a safetensors file are the length of its header, which may be any.
const FILES: [(&str, usize, &[u8]); 5] = [
    (MODEL, 8, br#"{"__metadata__":{"format":"pt"}"#),
    (OPTIMIZER, 8, br#"{"__metadata__":{"format":"pt"}"#),
    (TRAINER, 0, b"{\n  \"format\": "),
    (LATEST, 0, STEP.as_bytes()),
    (BEST, 0, STEP.as_bytes()),
];

/// Returns the last part of `path` as text.
pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the name of the folder for the checkpoint after `step` steps.
pub(super) fn folder_of(step: u64) -> String {
    format!("{STEP}{step:08}")
}

/// Returns the step of the checkpoint whose folder has this name. `None` if no checkpoint has it.
pub(super) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix(STEP)?.parse().ok()?;
    (name == folder_of(step)).then_some(step)
}

/// Returns whether a run uses `name` in its folder, or in a checkpoint.
#[doc(hidden)]
pub fn is_used(name: &str) -> bool {
    [LOCK, UNFINISHED, UNFINISHED_AFTER_FAILURE].contains(&name)
        || name.starts_with(ASIDE)
        || step_of(name).is_some()
        || FILES.iter().any(|(file, ..)| *file == name)
}

/// Returns the paths in the folder of a run. Empty if there is no folder.
///
/// # Errors
/// [`Error::Input`] if the folder cannot be read.
fn paths_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.and_then(|found| found.map(|entry| Ok(entry?.path())).collect()),
    };
    entries.map_err(unusable(folder))
}

/// Returns the error of a folder in which checkpoints cannot be saved, or of a file in it.
pub(super) fn unusable(path: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |error| {
        let path = path.shown();
        Error::usage(format!(
            "{path} cannot be used for checkpoints: {error}; move it away, or use another folder for --checkpoint-dir"
        ))
    }
}

/// Returns the checkpoints in the folder `path` by step. Empty if there is no folder.
///
/// # Errors
/// As [`paths_in`].
pub(super) fn steps_in(path: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let step = |path: PathBuf| step_of(&name_of(&path)).map(|step| (step, path));
    Ok(paths_in(path)?.into_iter().filter_map(step).collect())
}

/// Returns `path`, with links resolved if it is a link. A pointer names a folder beside the link's target.
pub(super) fn followed(path: &Path) -> PathBuf {
    if path.is_symlink() { Place::of(path).into_path() } else { path.into() }
}

/// Returns the checkpoint that the file `latest` or `best` at `pointer` names. `None` if it names none.
pub(super) fn pointed(pointer: &Path) -> io::Result<Option<PathBuf>> {
    let text = read_regular(pointer, MAX_POINTER_BYTES)?;
    let text = String::from_utf8_lossy(&text);
    let name = text.trim_end();
    Ok(step_of(name).map(|_| followed(pointer).with_file_name(name)))
}

/// Checks everything in `folder` whose name a run uses there.
///
/// # Errors
/// [`Error::Input`] that names a file that this program did not write, or cannot read.
#[doc(hidden)]
pub fn check_all_in(folder: &Path) -> Result<()> {
    paths_in(folder)?.iter().try_for_each(|path| check(path).map_err(unusable(path)))
}

/// Checks that this program wrote what is at `path`, if a run uses its name. A run that saves there may just have
/// renamed or removed it.
pub(super) fn check(path: &Path) -> io::Result<()> {
    let name = &*name_of(path);
    let this = |is_ours| written_here(is_ours, "this", &[]);
    let checked = fs::symlink_metadata(path).and_then(|found| match (name, step_of(name)) {
        (TRAINER, _) => Err(io::Error::other("this folder is itself a checkpoint")),
        // A second hard link would be another program's file.
        (LOCK, _) => this(found.is_file() && found.len() == 0 && found.nlink() == 1),
        (LATEST | BEST, _) => this(found.is_file() && pointed(path)?.is_some()),
        (UNFINISHED | UNFINISHED_AFTER_FAILURE, _) => files_of(path).map(drop),
        (_, Some(step)) => check_checkpoint(path, step),
        (_, None) => Ok(()),
    });
    match checked {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        checked => checked,
    }
}

/// Returns an error that says what the file is, if this program did not write it. It begins with `bytes`.
fn written_here(is_ours: bool, name: &str, bytes: &[u8]) -> io::Result<()> {
    let kind = kind_of(bytes).map_or("damaged, or was not written by ddp-mp", |(what, _)| what);
    if is_ours { Ok(()) } else { Err(io::Error::other(format!("{name} is {kind}"))) }
}

fn check_checkpoint(folder: &Path, step: u64) -> io::Result<()> {
    written_here(!files_of(folder)?.is_empty(), "this", &[])?;
    if let Ok(Manifest { state, .. }) = Manifest::read(folder)
        && state.step != step
    {
        let name = folder_of(state.step);
        let problem = format!("this holds step {}, so its name should be {name}", state.step);
        return Err(io::Error::other(problem));
    }
    Ok(()) // a damaged checkpoint does not contain its step
}

/// Returns the files in a checkpoint's folder, or in the unfinished one.
///
/// # Errors
/// If this program did not write one of them.
pub(super) fn files_of(folder: &Path) -> io::Result<Vec<PathBuf>> {
    written_here(fs::symlink_metadata(folder)?.is_dir(), "this", &[])?;
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = &*name_of(&path);
        let known = FILES.into_iter().find(|(known, ..)| *known == name);
        let is_file = fs::symlink_metadata(&path)?.is_file();
        written_here(is_file && known.is_some(), name, &[])?;
        let mut text = Vec::new();
        open_regular(&path)?.take(RECOGNIZED_BY as u64).read_to_end(&mut text)?;
        // Of a truncated file, compares the bytes that exist.
        let is_ours = known.is_some_and(|(_, skipped, begins)| {
            text.iter().skip(skipped).zip(begins).all(|(found, ours)| found == ours)
        });
        written_here(is_ours, name, &text)?;
        files.push(path);
    }
    Ok(files)
}

/// Removes the files of a checkpoint and their folder. Fails if the folder holds anything else.
pub(super) fn remove_checkpoint(folder: &Path) -> io::Result<()> {
    files_of(folder)?.iter().try_for_each(fs::remove_file)?;
    fs::remove_dir(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_run_uses_are_no_one_elses() {
        let files = FILES.map(|(name, ..)| name);
        let others = [LOCK, UNFINISHED, "step-00000064", "step-123456789", "aside-1-step-00000064"];
        for name in files.into_iter().chain(others) {
            assert!(is_used(name), "{name}");
        }
        for name in ["metrics.jsonl", "board", "steps", "step-1x", "step-9", "step-+0000009"] {
            assert!(!is_used(name), "{name}");
        }
    }
}
