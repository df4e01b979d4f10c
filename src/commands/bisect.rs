//! `ddp-mp bisect`: the first tensor in which two commands differ, with its values.
//!
//! Commands of this program record every step, and run once more to keep the tensors of the first step that differs. Any
//! other command says where it takes a number of steps and a file; its steps are halved until one step is left.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use clap::Args;
use tch::{Kind, Tensor};

use super::diff::compare_files;
use crate::checkpoint::TensorFile;
use crate::config::whole;
use crate::ddp::bytes_of;
use crate::error::{Error, Result, Shown};
use crate::ffi::TorchResult;
use crate::session::{AlreadyReported, path_in_shell};
use crate::telemetry::Printer;

/// The flags of `bisect`.
#[derive(Debug, Clone, Args)]
pub struct BisectFlags {
    /// Run this command of the shell as the right one
    ///
    /// A command that trains with this program, and saves no checkpoints. Or one that stops after {steps} steps and
    /// writes its tensors to the safetensors file {file}
    #[arg(long, value_name = "COMMAND")]
    pub good: String,
    /// Run this command as the other one
    #[arg(long, value_name = "COMMAND")]
    pub bad: String,
    /// Search the first N steps of commands with {steps}
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..), default_value_t = 100)]
    pub steps: u64,
    /// Keep both sides' tensors of that step here
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// The place of a number of steps and of a file in a command.
const STEPS: &str = "{steps}";
const FILE: &str = "{file}";

/// One of the two commands.
#[derive(Debug, Clone, Copy)]
struct Side<'a> {
    name: &'static str,
    command: &'a str,
}

/// Runs both commands, and prints the first tensor in which they differ.
///
/// # Errors
/// [`Error::InvalidInput`] if a command fails, or their files cannot be compared; [`AlreadyReported`] if they differ; and
/// an error when stdout cannot be written.
pub fn bisect(flags: &BisectFlags, program: &str, printer: &Printer) -> anyhow::Result<()> {
    let scratch = tempfile::tempdir().context("creating a folder for the runs")?;
    let folder = flags.keep.as_deref().unwrap_or(scratch.path());
    if flags.keep.as_ref().is_some_and(|keep| keep.exists()) {
        return Err(Error::InvalidInput(format!(
            "--keep {}: this folder exists; remove it, or use another name",
            folder.shown()
        ))
        .into());
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.shown()))?;
    let sides =
        [Side { name: "good", command: &flags.good }, Side { name: "bad", command: &flags.bad }];
    let differ = if sides.iter().any(|side| side.command.contains(FILE)) {
        by_halves(sides, flags.steps, folder, printer)?
    } else {
        by_records(sides, program, folder, printer)?
    };
    if differ { Err(anyhow::Error::msg(AlreadyReported)) } else { Ok(()) }
}

/// Records both runs, and runs the first step that differs once more. Returns whether they differ.
fn by_records(
    sides: [Side<'_>; 2],
    program: &str,
    folder: &Path,
    printer: &Printer,
) -> anyhow::Result<bool> {
    let records = sides.map(|side| folder.join(format!("{}.record", side.name)));
    for (side, record) in sides.iter().zip(&records) {
        side.run(&format!("{} --record={}", side.command, path_in_shell(record)), printer)?;
        if !record.exists() && !folder.join(format!("{}.0.record", side.name)).exists() {
            return Err(side.refused(&format!(
                "it has written no record; name a command of {program} that trains, or one with {STEPS} and {FILE}"
            )));
        }
    }
    let Some(first) = compare_files(&records[0], &records[1], printer)? else { return Ok(false) };
    let step = first.step;
    let kept = sides.map(|side| folder.join(format!("{}.safetensors", side.name)));
    for (side, file) in sides.iter().zip(&kept) {
        let (command, file, rank) = (side.command, path_in_shell(file), first.rank);
        let kept = format!("--keep={file} --keep-step={step} --keep-rank={rank}");
        side.run(&format!("{command} {kept}"), printer)?;
    }
    compare_tensors(&kept[0], &kept[1], printer)?;
    Ok(true)
}

/// Halves the steps until the first one is found after which the tensors differ. Returns whether they differ.
fn by_halves(
    sides: [Side<'_>; 2],
    steps: u64,
    folder: &Path,
    printer: &Printer,
) -> anyhow::Result<bool> {
    for side in sides {
        if !side.command.contains(STEPS) || !side.command.contains(FILE) {
            return Err(side.refused(&format!("it needs both {STEPS} and {FILE}")));
        }
    }
    let files =
        |steps: u64| sides.map(|side| folder.join(format!("{}-{steps}.safetensors", side.name)));
    let differ_after = |steps: u64| -> anyhow::Result<bool> {
        let files = files(steps);
        for (side, file) in sides.iter().zip(&files) {
            let command = side.command.replace(STEPS, &steps.to_string());
            side.run(&command.replace(FILE, &path_in_shell(file)), printer)?;
            if !file.is_file() {
                return Err(side.refused(&format!("it has not written {}", file.shown())));
            }
        }
        let [good, bad] = files.each_ref().map(|file| tensors_of(file));
        let differ = first_difference(&good?, &bad?)?.is_some();
        let said = if differ { "different" } else { "equal" };
        printer.info(&format!("after {steps} steps: {said}"));
        if !differ {
            for file in &files {
                fs::remove_file(file).with_context(|| format!("removing {}", file.shown()))?;
            }
        }
        Ok(differ)
    };
    if !differ_after(steps)? {
        printer.lines(|out| writeln!(out, "Equal after {steps} steps."))?;
        return Ok(false);
    }
    let (mut equal, mut different) = (0, steps);
    while different - equal > 1 {
        let middle = equal + (different - equal) / 2;
        if differ_after(middle)? { different = middle } else { equal = middle }
    }
    printer.lines(|out| writeln!(out, "Step {} is the first that differs.", different - 1))?;
    let [good, bad] = files(different);
    compare_tensors(&good, &bad, printer)?;
    Ok(true)
}

impl Side<'_> {
    fn refused(&self, problem: &str) -> anyhow::Error {
        Error::InvalidInput(format!("--{}: {problem}", self.name)).into()
    }

    /// Runs `command` in the shell, without showing its output. Exit code 1 is right, too: a run whose replicas differ at
    /// the end has it.
    fn run(&self, command: &str, printer: &Printer) -> anyhow::Result<()> {
        printer.info(&format!("{}: {command}", self.name));
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null());
        let output = shell.stderr(Stdio::piped()).output().context("starting sh")?;
        if matches!(output.status.code(), Some(0 | 1)) {
            return Ok(());
        }
        let problem = String::from_utf8_lossy(&output.stderr);
        let last = problem.lines().last().unwrap_or("it printed nothing on stderr");
        Err(self.refused(&format!("it failed ({}): {last}", output.status)))
    }
}

/// The first tensor that differs, and how.
#[derive(Debug)]
struct Difference {
    name: String,
    /// The number of other tensors that differ.
    others: usize,
    shape: Vec<i64>,
    /// The number of values that differ.
    count: usize,
    /// Flat index of the value that differs most.
    index: usize,
    good: f64,
    bad: f64,
    /// The number of float32 values from one to the other. `None` for other dtypes.
    ulps: Option<u64>,
}

fn tensors_of(file: &Path) -> Result<BTreeMap<String, Tensor>> {
    TensorFile::read(file)?.tensors()
}

/// Prints the first difference between two files of tensors.
fn compare_tensors(good: &Path, bad: &Path, printer: &Printer) -> anyhow::Result<()> {
    let line = match first_difference(&tensors_of(good)?, &tensors_of(bad)?)? {
        None => "No tensor of that step differs in these runs: the difference is not reproducible."
            .into(),
        Some(difference) => difference.to_string(),
    };
    Ok(printer.lines(|out| writeln!(out, "{line}"))?)
}

/// The groups of tensors in the files of `--keep`, in the order of computation.
const ORDER: [&str; 7] =
    ["before.", "batch.", "loss.", "gradient.", "average.", "parameter.", "buffer."];

/// Returns the first tensor that differs, in the order of computation and then of names.
fn first_difference(
    good: &BTreeMap<String, Tensor>,
    bad: &BTreeMap<String, Tensor>,
) -> Result<Option<Difference>> {
    if !good.keys().eq(bad.keys()) {
        let only = good.keys().find(|name| !bad.contains_key(*name));
        let only = only.or_else(|| bad.keys().find(|name| !good.contains_key(*name)));
        let name = only.map_or("", |name| name);
        return Err(Error::InvalidInput(format!(
            "only one of the two commands has written a tensor `{name}`; both must write the same names"
        )));
    }
    let group = |name: &str| ORDER.iter().position(|prefix| name.starts_with(prefix));
    let mut names: Vec<&String> = good.keys().collect();
    names.sort_by_key(|name| group(name));
    let mut differ = Vec::new();
    for name in names {
        let (good, bad) = (&good[name], &bad[name]);
        if good.kind() != bad.kind() || good.size() != bad.size() {
            return Err(Error::InvalidInput(format!(
                "`{name}` has another dtype or shape in the two commands: {:?} {:?} and {:?} {:?}",
                good.kind(),
                good.size(),
                bad.kind(),
                bad.size()
            )));
        }
        if bytes_of(good)? != bytes_of(bad)? {
            differ.push(name);
        }
    }
    let Some((first, others)) = differ.split_first() else { return Ok(None) };
    largest(first, others.len(), &good[*first], &bad[*first]).map(Some)
}

/// Describes the largest difference of two tensors whose bytes differ.
fn largest(name: &str, others: usize, good: &Tensor, bad: &Tensor) -> Result<Difference> {
    let values = |tensor: &Tensor| {
        let flat = tensor.f_to_kind(Kind::Double).and_then(|tensor| tensor.f_reshape([-1]));
        flat.and_then(Vec::<f64>::try_from).doing("reading a tensor")
    };
    let (of_good, of_bad) = (values(good)?, values(bad)?);
    let pairs = || of_good.iter().zip(&of_bad).enumerate();
    let differing = || pairs().filter(|(_, (good, bad))| good.to_bits() != bad.to_bits());
    // NaN minus anything is NaN, which `total_cmp` puts last.
    let distance = |good: f64, bad: f64| (good - bad).abs();
    let most = differing()
        .max_by(|(_, (a, b)), (_, (c, d))| distance(**a, **b).total_cmp(&distance(**c, **d)));
    let (index, good_value, bad_value) = most.map_or((0, 0.0, 0.0), |(i, (a, b))| (i, *a, *b));
    let ulps = (good.kind() == Kind::Float)
        .then(|| ordered(good_value as f32).abs_diff(ordered(bad_value as f32)));
    Ok(Difference {
        name: name.to_owned(),
        others,
        shape: good.size(),
        count: differing().count(),
        index,
        good: good_value,
        bad: bad_value,
        ulps,
    })
}

/// Returns the place of a number among all of its type, so that neighbours differ by 1.
fn ordered(number: f32) -> i64 {
    let bits = i64::from(number.to_bits());
    if number.is_sign_negative() { (1 << 31) - bits } else { bits }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, others, shape, count, index, good, bad, ulps } = self;
        write!(
            f,
            "`{name}` {shape:?} is the first tensor that differs, in {count} of its values. "
        )?;
        write!(
            f,
            "The largest difference is {:.3e}, at index {}: ",
            (good - bad).abs(),
            place(*index, shape)
        )?;
        match ulps {
            // The shortest numbers that are these float32 values.
            Some(ulps) => {
                write!(f, "good {:e}, bad {:e} ({ulps} ULPs)", *good as f32, *bad as f32)?
            }
            None => write!(f, "good {good:e}, bad {bad:e}")?,
        }
        match others {
            0 => write!(f, ". No other tensor differs."),
            1 => write!(f, ". 1 other tensor differs."),
            others => write!(f, ". {others} other tensors differ."),
        }
    }
}

/// Writes a flat index into a tensor of this shape, as in [0, 3].
fn place(mut index: usize, shape: &[i64]) -> String {
    let mut places = vec![0; shape.len()];
    for (place, size) in places.iter_mut().zip(shape).rev() {
        *place = index % (*size).max(1) as usize;
        index /= (*size).max(1) as usize;
    }
    format!("{places:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_difference_is_found_with_its_place_and_ulps() {
        let good = Tensor::from_slice(&[1.0f32, 2.0, -0.0, 4.0]).reshape([2, 2]);
        let bad = Tensor::from_slice(&[1.0f32, 2.0, 0.0, f32::from_bits(4.0f32.to_bits() + 2)])
            .reshape([2, 2]);
        let difference = largest("w", 3, &good, &bad).unwrap();
        assert_eq!((difference.count, difference.index, difference.ulps), (2, 3, Some(2)));
        assert_eq!(place(3, &[2, 2]), "[1, 1]");
        assert_eq!(ordered(-0.0), ordered(0.0));
        assert_eq!(ordered(f32::MIN_POSITIVE).abs_diff(ordered(-f32::MIN_POSITIVE)), 2 << 23);
        let text = difference.to_string();
        assert!(
            text.starts_with("`w` [2, 2] is the first tensor that differs, in 2 of its values. "),
            "{text}"
        );
    }
}
