//! Options of training that a command which makes a few steps by itself has no use for.

use crate::error::{Error, Result};

/// What is of a whole run. In a file it may be there for training.
const TRAIN_ONLY: [&str; 22] = [
    "max_epochs",
    "val_fraction",
    "val_every",
    "checkpoint_dir",
    "save_every",
    "save_every_epochs",
    "keep_last",
    "resume",
    "init_from",
    "max_steps",
    "max_seconds",
    "max_restarts",
    "patience",
    "skip_nonfinite",
    "check_replicas_every",
    "tensorboard",
    "metrics",
    "trace",
    "report",
    "log_every",
    "explain",
    "language",
];

/// Refuses the first of these, or of `others`, among the flags `keys` that were typed, because of what the command does.
///
/// # Errors
/// [`Error::Input`] that names it.
pub(super) fn reject_flags<'a>(
    keys: impl IntoIterator<Item = &'a String>,
    others: &[&str],
    what_it_does: &str,
) -> Result<()> {
    let no_use = |key: &&String| TRAIN_ONLY.iter().chain(others).any(|it| *it == key.as_str());
    match keys.into_iter().find(no_use) {
        Some(key) => Err(Error::Input(format!(
            "--{}: {what_it_does}; leave this out",
            key.replace('_', "-")
        ))),
        None => Ok(()),
    }
}
