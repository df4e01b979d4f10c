//! The command `diff`: the first step, rank and tensor in which two recorded runs differ; and the values of two files of
//! tensors.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use crate::comparison::Comparison;
use crate::read::Record;
use crate::record::StepOfRank;
use crate::tensors::{compare_tensors, holds_tensors};
use crate::text::Shown;

/// The distance from which on tensors may be far, if nothing else is said: relative to the norm, a thousand times the rounding
/// of float32 and less than what a changed option makes of a few steps.
pub(crate) const RTOL: f64 = 1e-4;

/// What cannot be compared, in one sentence: where the problem is, what it is, and what to do.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Refused(String);

impl Refused {
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        Self(problem.into())
    }
}

/// A part of the names of A that B's names have otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rename {
    pub(crate) from: String,
    pub(crate) to: String,
}

impl FromStr for Rename {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((from, to)) if !from.is_empty() => {
                Ok(Self { from: from.to_owned(), to: to.to_owned() })
            }
            _ => Err("write OLD=NEW: a part of A's names, and what B has in its place".into()),
        }
    }
}

/// The flags of `diff`.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "command-line", derive(clap::Args))]
pub struct DiffFlags {
    /// Compare this record, or file of tensors
    ///
    /// A record of --record or of ddp_mp.record in Python, a safetensors file such as one of --keep, or a checkpoint; and B is
    /// of the same kind. The exit code is 0 if they are equal, 1 if they differ, and 2 after an error
    #[cfg_attr(feature = "command-line", arg(value_name = "A"))]
    pub a: PathBuf,
    /// Compare it with this one
    #[cfg_attr(feature = "command-line", arg(value_name = "B"))]
    pub b: PathBuf,
    /// Allow rounding: find the first jump
    ///
    /// The exit code is 0, too, for runs that differ by rounding only. If a distance is over R, relative to the norm, the first
    /// jump is named: a tensor that is much farther than what goes into it. Without R: 1e-4
    #[cfg_attr(
        feature = "command-line",
        arg(long, value_name = "R", num_args = 0..=1, require_equals = true, value_parser = rtol, default_missing_value = "1e-4")
    )]
    pub rtol: Option<f64>,
    /// Read OLD as NEW in the names of A
    ///
    /// In the names of tensors and modules: wherever OLD stands in them, as part of a name, too. May be given several times, and
    /// each is applied to what the one before has made
    #[cfg_attr(feature = "command-line", arg(long, value_name = "OLD=NEW"))]
    pub rename: Vec<Rename>,
}

#[cfg(feature = "command-line")]
fn rtol(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rtol) if (0.0..1.0).contains(&rtol) => Ok(rtol),
        _ => Err("write a number from 0 to 1, such as 1e-4".into()),
    }
}

/// What a comparison has found.
#[derive(Debug)]
pub struct Diff {
    /// What to print.
    pub lines: Vec<String>,
    /// Whether both are equal; with `rtol`, whether they are close.
    pub is_equal: bool,
    /// The step and the rank of the first difference of two records; `None` if they are equal.
    pub first: Option<StepOfRank>,
}

/// Compares two records, or two files of tensors.
///
/// # Errors
/// If one is neither, or the two cannot be compared.
pub fn diff(flags: &DiffFlags) -> Result<Diff, Refused> {
    let [a, b] = [&*flags.a, &*flags.b];
    for (record, tensors) in [(a, b), (b, a)] {
        if holds_tensors(tensors) && !holds_tensors(record) && Record::read(record).is_ok() {
            return Err(Refused::new(format!(
                "{} is a record, and {} holds tensors; compare two of a kind",
                record.shown(),
                tensors.shown()
            )));
        }
    }
    if !holds_tensors(a) && !holds_tensors(b) {
        return diff_records(a, b, flags.rtol, &flags.rename);
    }
    let (of_tensors, is_equal) = compare_tensors(a, b, ["A", "B"])?;
    let mut lines = vec![format!("A: {}", a.shown()), format!("B: {}", b.shown())];
    lines.extend(of_tensors);
    Ok(Diff { lines, is_equal, first: None })
}

/// Compares the records `a` and `b`.
///
/// # Errors
/// If one is no record, or the two cannot be compared.
pub fn compare_records(a: &Path, b: &Path) -> Result<Diff, Refused> {
    diff_records(a, b, None, &[])
}

fn diff_records(
    a: &Path,
    b: &Path,
    rtol: Option<f64>,
    renames: &[Rename],
) -> Result<Diff, Refused> {
    let (mut a, b) = (Record::read(a)?, Record::read(b)?);
    a.rename(renames);
    let comparison = Comparison::of([&a, &b], rtol.unwrap_or(RTOL))?;
    let first = comparison.first();
    let is_close = comparison.parting.is_some()
        && [&a, &b].iter().all(|record| record.failure().is_none())
        && comparison.far.is_none()
        && !comparison.verdict.has_grown_apart();
    let is_equal = first.is_none() || (rtol.is_some() && is_close);
    Ok(Diff { lines: comparison.lines(rtol), is_equal, first })
}
