//! The lesson about a bad core: two recorded runs, one of them with a wrong bit.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, ensure};

use super::Found;
use crate::commands::diff::ranks_with_other_parameters;
use crate::commands::lesson::answer::Answer;
use crate::launch::this_program;
use crate::os::{Ended, TemporaryFolder, TiedChild};

/// A wrong bit in a parameter of rank 2: on how many ranks `weight` differs after that step.
pub(in super::super) fn bad_core() -> anyhow::Result<Found> {
    let folder = TemporaryFolder::new().context("creating a folder for two records")?;
    let record = |name: &str, more: &[&str]| {
        let path = folder.path().join(name);
        run(&path, more).map(|()| path)
    };
    // A bit of the fraction: a flip of the exponent could make the loss infinite, and so end the run in this step.
    let flip = |place| format!("--inject-fault=flip=22:rank=2,at=step,step=5,in={place}");
    let good = record("good", &[])?;
    let in_gradient = record("gradient", &[&flip("gradient")])?;
    let in_parameter = record("parameter", &[&flip("parameter")])?;
    let with_gradient = ranks_with_other_parameters(&good, &in_gradient)?;
    let with_parameter = ranks_with_other_parameters(&good, &in_parameter)?;
    Ok(Found::new(
        Answer::Whole(vec![with_parameter as u64]),
        &[("with_gradient", &with_gradient), ("with_parameter", &with_parameter)],
    ))
}

/// Trains three ranks for ten steps, and writes their record to `path`.
fn run(path: &Path, more: &[&str]) -> anyhow::Result<()> {
    let mut command = this_program()?;
    command.args(["--launch=local", "--quiet", "--nproc-per-node=3", "--max-steps=10"]);
    command.arg("--record").arg(path).args(more).env("CUDA_VISIBLE_DEVICES", "");
    command.stdout(Stdio::null());
    let ended = TiedChild::spawn(&mut command).and_then(TiedChild::wait);
    let Ended { status, stderr } = ended.context("starting ddp-mp")?;
    // A run whose replicas differ at the end fails, and its record is whole.
    ensure!(matches!(status.code(), Some(0 | 1)), "{status}: {stderr}");
    Ok(())
}
