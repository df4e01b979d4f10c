//! `ddp-mp rerun`: a step of an earlier run once more, from the newest checkpoint before it, with all tensors kept.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Args;

use super::diff::{check_record, compare_files};
use super::train::train;
use crate::checkpoint::{Checkpoint, TRAINER, steps_in};
use crate::config::{Config, Program, whole};
use crate::data::hashed;
use crate::error::{Error, Result, Shown};
use crate::ffi::cuda::Cuda;
use crate::launch::{LaunchChoice, Nproc, StopReason, exit_code};
use crate::records::DataFile;
use crate::session::AlreadyReported;
use crate::telemetry::{Printer, steps_text};

/// The epochs of a run that ends because of its steps.
const MANY_EPOCHS: u64 = 1 << 32;

/// The flags of `rerun`.
#[derive(Debug, Clone, Args)]
pub struct RerunFlags {
    /// Start from the newest checkpoint before the step
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: PathBuf,
    /// Run step N again; the first is 0
    #[arg(long, value_name = "N", value_parser = whole::<u64>(..))]
    pub step: u64,
    /// Keep the tensors of rank R
    #[arg(long, value_name = "R", default_value_t = 0, value_parser = whole::<usize>(..))]
    pub rank: usize,
    /// Write the tensors to this safetensors file
    #[arg(long, value_name = "FILE")]
    pub keep: PathBuf,
    /// Compare the steps with this record of the run
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

/// Trains from the newest checkpoint up to the step, with the options that the checkpoint has saved. Returns the reason if
/// a signal has stopped it.
///
/// # Errors
/// [`Error::InvalidInput`] if there is no checkpoint, or the file exists; [`AlreadyReported`] if the steps differ from
/// the record, or if something else than a signal for its end has stopped it; and the errors of [`train`].
pub(crate) fn rerun(
    flags: &RerunFlags,
    program: &Arc<Program>,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<Option<StopReason>> {
    if let Some(record) = flags.record.as_deref() {
        check_record(record)?;
    }
    let mut config = config_of(flags, program)?;
    let folder = flags.record.as_ref().map(|_| tempfile::tempdir()).transpose();
    let folder = folder.context("creating a folder for a record")?;
    let recorded = folder.as_ref().map(|folder| folder.path().join("rerun.record"));
    config.output.record.clone_from(&recorded);
    let start = match (&config.checkpoints.resume, &config.checkpoints.init_from) {
        (Some(checkpoint), _) => checkpoint.clone(),
        (None, Some(file)) => file.shown().into_owned(),
        (None, None) => "the beginning".into(),
    };
    let stopped = train(config, cuda, &Arc::new(Printer::new(printer.format()).quiet(true)))?;
    if !flags.keep.is_file()
        && let Some(reason) = stopped.filter(|reason| *reason != StopReason::Steps)
    {
        printer.report(&format!("{}: stopped before step {}", reason.name(), flags.step));
        return match exit_code(stopped) {
            0 => Err(anyhow::Error::msg(AlreadyReported)),
            _ => Ok(stopped),
        };
    }
    if !flags.keep.is_file() {
        return Err(Error::InvalidInput(format!(
            "--step {}: the run ended before or started after that step; name a step of this run",
            flags.step
        ))
        .into());
    }
    printer.info(&format!(
        "ran again from {start} to step {}; the tensors of rank {} are in {}",
        flags.step,
        flags.rank,
        flags.keep.shown()
    ));
    let (Some(record), Some(recorded)) = (&flags.record, &recorded) else {
        if steps_in(&flags.checkpoint_dir)?.range(flags.step + 1..).next().is_none() {
            printer.info("no later checkpoint shows that the run came to this step; a record of the run can (--record)");
        }
        return Ok(None);
    };
    match compare_files(record, recorded, printer)? {
        None => Ok(None),
        Some(_) => Err(anyhow::Error::msg(AlreadyReported)),
    }
}

/// Returns the configuration of the run up to the step.
fn config_of(flags: &RerunFlags, program: &Arc<Program>) -> Result<Config> {
    let dir = flags.checkpoint_dir.shown();
    let refused =
        |problem: String| Error::InvalidInput(format!("--checkpoint-dir {dir}: {problem}"));
    let checkpoints = steps_in(&flags.checkpoint_dir)?;
    let (_, oldest) = checkpoints.first_key_value().ok_or_else(|| {
        refused("it has no checkpoint; name the folder of a run with --checkpoint-dir".into())
    })?;
    let before = checkpoints.range(..=flags.step).next_back().map(|(_, path)| path);
    let checkpoint = Checkpoint::read(before.unwrap_or(oldest))?;
    let state = checkpoint.state();
    let mut options = state.options.clone();
    // Saved is the number of samples to train on; the same others are held back of the same data set again.
    if let (Some(num_samples), 1..) = (options.get_mut("num_samples"), state.dataset_len) {
        *num_samples = state.dataset_len.into();
    }
    let mut config =
        Config::of_saved(program, &options).map_err(|error| refused(error.to_string()))?;
    if config.data.val_fraction.is_some_and(|fraction| fraction > 0.0) && state.dataset_len == 0 {
        return Err(refused(
            "it does not say how many samples the run had before --val-fraction held some back; train again with \
             --keep and --keep-step"
                .into(),
        ));
    }
    let later = checkpoints.range(flags.step + 1..).next();
    if later.is_none() && (1..=flags.step).contains(&state.total_steps) {
        return Err(Error::InvalidInput(format!(
            "--step {}: the run ends after {}; name a step from 0 to {}",
            flags.step,
            steps_text(state.total_steps),
            state.total_steps - 1
        )));
    }
    if flags.rank >= state.world_size {
        return Err(Error::InvalidInput(format!(
            "--rank {}: the run has ranks 0 to {}",
            flags.rank,
            state.world_size.saturating_sub(1)
        )));
    }
    config.launch.launcher = LaunchChoice::Local;
    config.launch.nproc_per_node = Nproc::Count(state.world_size);
    match (before, &state.started_from) {
        (Some(path), _) => config.checkpoints.resume = Some(path.to_string_lossy().into_owned()),
        (None, Some(file)) => {
            start_from(&mut config, file).map_err(|error| refused(error.to_string()))?
        }
        (None, None) => (), // as the run did, from the beginning
    }
    if !state.options.contains_key("max_epochs") {
        config.training.max_epochs = MANY_EPOCHS; // a run that must have as many as before saves them
    }
    config.training.max_steps = Some(flags.step + 1);
    config.output.keep = Some(flags.keep.clone());
    config.output.keep_step = flags.step;
    config.output.keep_rank = flags.rank;
    Ok(config)
}

/// Has the run start from `file`, as the run did that saved the checkpoints.
fn start_from(config: &mut Config, file: &DataFile) -> Result<()> {
    let DataFile { path, xxh3 } = file;
    let problem = match hashed(path.as_ref()) {
        Ok(found) if found.xxh3 == *xxh3 => {
            match path.strip_suffix(TRAINER) {
                Some(folder) => config.checkpoints.resume = Some(folder.to_owned()),
                None => config.checkpoints.init_from = Some(path.into()),
            }
            return Ok(());
        }
        Ok(_) => format!("{path} has changed since"),
        Err(error) => error.to_string(),
    };
    Err(Error::InvalidInput(format!(
        "before its first checkpoint the run started from a file ({problem}); rerun a later step"
    )))
}
