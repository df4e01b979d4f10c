//! `ddp-mp diff`: the first step, rank and tensor in which two recorded runs differ.

mod compare;
mod read;
mod texts;

use std::path::{Path, PathBuf};

use clap::Args;

use crate::session::AlreadyReported;
use crate::telemetry::Printer;
use compare::{Outcome, Stage, compare};
use read::Record;
use texts::lines;

/// The flags of `diff`.
#[derive(Debug, Clone, Args)]
pub struct DiffFlags {
    /// Compare this record, written by --record
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Compare it with this one
    #[arg(value_name = "B")]
    pub b: PathBuf,
}

/// Returns the number of ranks whose parameters differ in the first step that differs between the records `a` and `b`.
///
/// # Errors
/// As [`diff`].
pub(super) fn ranks_with_other_parameters(a: &Path, b: &Path) -> crate::error::Result<usize> {
    let comparison = compare(&Record::read(a)?, &Record::read(b)?)?;
    let stages = comparison.parting.map(|parting| parting.stages).unwrap_or_default();
    Ok(match stages.get(&Stage::Parameters) {
        Some(Outcome::Differs(ranks)) => ranks.len(),
        _ => 0,
    })
}

/// Prints where two records part, and what that means.
///
/// # Errors
/// [`Error::InvalidInput`](crate::Error::InvalidInput) if one is no record, or the two cannot be compared;
/// [`AlreadyReported`] if they differ; and an error when stdout can't be written.
pub fn diff(flags: &DiffFlags, printer: &Printer) -> anyhow::Result<()> {
    match compare_files(&flags.a, &flags.b, printer)? {
        None => Ok(()),
        Some(_) => Err(anyhow::Error::msg(AlreadyReported)),
    }
}

/// The step and the rank that two records differ in first.
#[derive(Debug, Clone, Copy)]
pub(super) struct FirstDifference {
    pub step: u64,
    pub rank: usize,
}

/// Prints where the records `a` and `b` part, and what that means. Returns the place; `None` if they are equal.
///
/// # Errors
/// [`Error::InvalidInput`](crate::Error::InvalidInput) if one is no record, or the two cannot be compared; and an error
/// when stdout can't be written.
pub(super) fn compare_files(
    a: &Path,
    b: &Path,
    printer: &Printer,
) -> anyhow::Result<Option<FirstDifference>> {
    let (a, b) = (Record::read(a)?, Record::read(b)?);
    let comparison = compare(&a, &b)?;
    let lines = lines(&a, &b, &comparison);
    printer.lines(|out| lines.iter().try_for_each(|line| writeln!(out, "{line}")))?;
    Ok(comparison.parting.map(|parting| {
        let rank = parting.first().and_then(|(_, ranks)| ranks.first()).map_or(0, |it| it.rank);
        FirstDifference { step: parting.step, rank }
    }))
}
