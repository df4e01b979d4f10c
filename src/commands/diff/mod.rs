//! `ddp-mp diff`: the first step, rank and tensor in which two recorded runs differ; and the values of two files of
//! tensors.

mod compare;
mod read;
mod tensors;
mod texts;

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;

use crate::session::AlreadyReported;
use compare::Comparison;
use engine::error::{Error, Shown};
use engine::events::StepOfRank;
use read::Record;
pub(super) use tensors::compare_tensors;
use tensors::holds_tensors;
use views::Printer;

/// The flags of `diff`.
#[derive(Debug, Clone, Args)]
pub struct DiffFlags {
    /// Compare this record, or file of tensors
    ///
    /// A record of --record, a safetensors file such as one of --keep, or a checkpoint; and B is of the same kind. The exit
    /// code is 0 if they are equal, 1 if they differ, and 2 after an error
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Compare it with this one
    #[arg(value_name = "B")]
    pub b: PathBuf,
}

/// Prints where two records part, and what that means; or the first tensors in which two files differ.
///
/// # Errors
/// [`Error::Input`] if one is no record, or the two cannot be compared;
/// [`AlreadyReported`] if they differ; and an error when stdout can't be written.
pub fn diff(flags: &DiffFlags, printer: &Printer) -> anyhow::Result<()> {
    let [a, b] = [&*flags.a, &*flags.b];
    for (record, tensors) in [(a, b), (b, a)] {
        if holds_tensors(tensors) && !holds_tensors(record) && Record::read(record).is_ok() {
            bail!(Error::usage(format!(
                "{} is a record, and {} holds tensors; compare two of a kind",
                record.shown(),
                tensors.shown()
            )));
        }
    }
    let is_equal = if holds_tensors(a) || holds_tensors(b) {
        let (lines, is_equal) = compare_tensors(a, b, ["A", "B"])?;
        printer.line(&format!("A: {}\nB: {}\n{}", a.shown(), b.shown(), lines.join("\n")))?;
        is_equal
    } else {
        compare_files(a, b, printer)?.is_none()
    };
    if is_equal { Ok(()) } else { Err(anyhow::Error::msg(AlreadyReported)) }
}

/// Prints where the records `a` and `b` part, and what that means. Returns the place; `None` if they are equal.
///
/// # Errors
/// [`Error::Input`] if one is no record, or the two cannot be compared; and an error
/// when stdout can't be written.
pub(super) fn compare_files(
    a: &Path,
    b: &Path,
    printer: &Printer,
) -> anyhow::Result<Option<StepOfRank>> {
    let (a, b) = (Record::read(a)?, Record::read(b)?);
    let comparison = Comparison::of([&a, &b])?;
    printer.line(&comparison.lines().join("\n"))?;
    Ok(comparison.first())
}
