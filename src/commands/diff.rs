//! `ddp-mp diff`: the first step, rank and tensor in which two recorded runs differ; and the values of two files of tensors.

pub use compare::DiffFlags;

use crate::session::AlreadyReported;
use engine::checkpoint::model_file;
use engine::error::Error;
use views::Printer;

/// Prints where two records part, and what that means; or the first tensors in which two files differ.
///
/// # Errors
/// [`Error::Input`] if one is no record, or the two cannot be compared;
/// [`AlreadyReported`] if they differ; and an error when stdout can't be written.
pub fn diff(flags: &DiffFlags, printer: &Printer) -> anyhow::Result<()> {
    let flags = DiffFlags { a: model_file(&flags.a)?, b: model_file(&flags.b)?, ..flags.clone() };
    let found = compare::diff(&flags).map_err(|refused| Error::data(refused.to_string()))?;
    printer.line(&found.lines.join("\n"))?;
    if found.is_equal { Ok(()) } else { Err(anyhow::Error::msg(AlreadyReported)) }
}
