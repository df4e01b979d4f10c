//! Training options that a command of a few steps does not support.

use crate::error::{Error, Result};

/// Options of a whole run. A file may have them for training.
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

/// Refuses the first of the given flags `keys` that is in `TRAIN_ONLY` or `others`. `what_it_does` is the reason in
/// the error.
///
/// # Errors
/// [`Error::Input`] that names the flag.
pub(crate) fn reject_flags<'a>(
    keys: impl IntoIterator<Item = &'a String>,
    others: &[&str],
    what_it_does: &str,
) -> Result<()> {
    let is_refused =
        |key: &&String| TRAIN_ONLY.iter().chain(others).any(|refused| *refused == key.as_str());
    match keys.into_iter().find(is_refused) {
        Some(key) => Err(Error::Input(format!(
            "--{}: {what_it_does}; leave this out",
            key.replace('_', "-")
        ))),
        None => Ok(()),
    }
}
