//! `ddp-mp diff`: the first step, rank and tensor in which two recorded runs differ; and the values of two files of
//! tensors.

mod compare;
mod read;
mod tensors;
mod texts;

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::{Error, Shown};
use crate::session::AlreadyReported;
use crate::telemetry::{Printer, StepOfRank};
pub(super) use compare::SidesOf;
use compare::compare;
use read::Record;
pub(super) use tensors::TensorComparison;
use tensors::holds_tensors;
use texts::lines;

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
    let DiffFlags { a, b } = flags;
    for (record, tensors) in [(a, b), (b, a)] {
        if holds_tensors(tensors) && !holds_tensors(record) && check_record(record).is_ok() {
            return Err(Error::usage(format!(
                "{} is a record, and {} holds tensors; compare two of a kind",
                record.shown(),
                tensors.shown()
            ))
            .into());
        }
    }
    let is_equal = if holds_tensors(a) || holds_tensors(b) {
        let comparison = TensorComparison::of(a, b)?;
        let mut lines = vec![format!("A: {}", a.shown()), format!("B: {}", b.shown())];
        lines.extend(comparison.lines(SidesOf { a: "A", b: "B" }));
        print_lines(&lines, printer)?;
        comparison.is_equal()
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
    let comparison = compare(&a, &b)?;
    print_lines(&lines(&a, &b, &comparison), printer)?;
    if let Some(parting) = &comparison.parting {
        let rank = parting.first().and_then(|(_, it)| it.ranks.first()).map_or(0, |it| it.rank);
        return Ok(Some(StepOfRank { step: parting.step, rank }));
    }
    let SidesOf { a, b } = comparison.failed;
    let step = |at: StepOfRank| at.step;
    if a.map(step) == b.map(step) {
        return Ok(None);
    }
    let first = a.into_iter().chain(b).min_by_key(|at| at.step);
    Ok(first)
}

/// Prints `lines` on stdout.
pub(super) fn print_lines(lines: &[String], printer: &Printer) -> io::Result<()> {
    printer.lines(|out| lines.iter().try_for_each(|line| writeln!(out, "{line}")))
}

/// Checks that the file at `path` is a record.
///
/// # Errors
/// As [`diff`].
fn check_record(path: &Path) -> crate::error::Result<()> {
    Record::read(path).map(drop)
}
