//! The names of the files and folders of a run's checkpoints, and the checkpoints that a path names.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, Shown};
use crate::files::{Place, read_regular};

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const TRAINER: &str = "trainer.json";

/// The files of a checkpoint: name, number of leading bytes to skip, and the bytes with which this program continues.
/// The first 8 bytes of a safetensors file are the length of its header, which may be any.
pub(super) const FILES: [(&str, usize, &[u8]); 3] = [
    (MODEL, 8, br#"{"__metadata__":{"format":"pt"}"#),
    (OPTIMIZER, 8, br#"{"__metadata__":{"format":"pt"}"#),
    (TRAINER, 0, b"{\n  \"format\": "),
];

/// The file that a run locks while it saves here.
pub(super) const LOCK: &str = ".lock";

/// The pointer to the newest checkpoint.
pub(super) const LATEST: &str = "latest";
/// The pointer to the checkpoint with the smallest validation loss.
pub(super) const BEST: &str = "best";

/// The suffix of a file that is later renamed to a pointer.
pub(super) const NEW: &str = ".new";

/// The size limit for a pointer, in bytes. Every pointer is shorter.
pub(super) const MAX_POINTER_BYTES: u64 = 64;

/// The prefix of a folder's name that is not yet, or no longer, a checkpoint.
pub(super) const UNFINISHED: &str = ".unfinished-";

/// The rest of the name of a folder that is created only as a test.
pub(super) const PROBE: &str = "probe";

/// The prefix of a folder's name that holds a checkpoint of an abandoned continuation of the run.
pub(super) const ASIDE: &str = "aside-";

/// The prefix of a checkpoint's folder.
const STEP: &str = "step-";

/// Returns the last part of `path` as text.
pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the name of the folder for the checkpoint after `step` steps.
pub(super) fn folder_of(step: u64) -> String {
    format!("{STEP}{step:08}")
}

/// Returns the step in a checkpoint folder's name. `None` if it is not such a name.
pub(super) fn step_of(path: &Path) -> Option<u64> {
    let name = name_of(path);
    let step = name.strip_prefix(STEP)?;
    // `parse` also accepts a leading plus sign.
    step.parse().ok().filter(|_| is_all_digits(step))
}

/// Returns whether `text` is the beginning of a checkpoint folder's name.
pub(super) fn begins_folder_name(text: &str) -> bool {
    text.strip_prefix(STEP).map_or(STEP.starts_with(text), is_all_digits)
}

fn is_all_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether `name` is that of a file that names a checkpoint.
pub(super) fn is_pointer_name(name: &str) -> bool {
    [LATEST, BEST].contains(&name)
}

/// Returns whether a run uses `name` in its folder, or in a checkpoint.
pub(super) fn is_used(name: &str) -> bool {
    name == LOCK
        || FILES.iter().any(|(file, _, _)| *file == name)
        || is_pointer_name(name.strip_suffix(NEW).unwrap_or(name))
        || [UNFINISHED, ASIDE].iter().any(|prefix| name.starts_with(prefix))
        || step_of(Path::new(name)).is_some()
}

/// Returns the paths in the folder of a run. Empty if there is no folder.
///
/// # Errors
/// [`Error::Input`] if the folder cannot be read.
pub(super) fn paths_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.and_then(|found| found.map(|entry| Ok(entry?.path())).collect()),
    };
    entries.map_err(|error| {
        Error::usage(format!(
            "{} cannot hold checkpoints: {error}; use another folder for --checkpoint-dir",
            folder.shown()
        ))
    })
}

/// Returns the checkpoints in the folder `path` by step. Empty if there is no folder.
///
/// # Errors
/// As [`paths_in`].
pub(super) fn steps_in(path: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let step = |path: PathBuf| step_of(&path).map(|step| (step, path));
    Ok(paths_in(path)?.into_iter().filter_map(step).collect())
}

/// Returns the newest checkpoint in the folder `path`. `None` if there is none.
///
/// # Errors
/// As [`paths_in`].
pub(super) fn newest_in(path: &Path) -> Result<Option<PathBuf>> {
    Ok(steps_in(path)?.pop_last().map(|(_, folder)| folder))
}

/// Returns `path`, with links resolved if it is a link. A pointer names a folder beside the link's target.
pub(super) fn followed(path: &Path) -> Cow<'_, Path> {
    if path.is_symlink() { Place::of(path).into_path().into() } else { path.into() }
}

/// Returns the checkpoint that the file `latest` or `best` at `pointer` names. `None` if it is not such a file.
pub(super) fn pointed(pointer: &Path) -> Option<PathBuf> {
    let name = String::from_utf8(read_regular(pointer, MAX_POINTER_BYTES).ok()?).ok()?;
    let folder = followed(pointer).with_file_name(name.trim_end());
    step_of(&folder).map(|_| folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_run_uses_are_no_one_elses() {
        let files = FILES.map(|(name, _, _)| name);
        let others =
            ["latest.new", "best.new", ".unfinished-step-00000064", "aside-1-step-00000064"];
        for name in [LATEST, BEST, LOCK, "step-00000064"].into_iter().chain(files).chain(others) {
            assert!(is_used(name), "{name}");
        }
        for name in ["metrics.jsonl", "board", "steps", "step-1x", "model.safetensors.old"] {
            assert!(!is_used(name), "{name}");
        }
    }
}
