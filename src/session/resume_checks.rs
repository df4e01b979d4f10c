//! Whether a run can resume from a checkpoint: its options, its state and its data files.

use crate::config::Config;
use engine::checkpoint::{Checkpoint, TRAINER, TrainerState};
use engine::error::{Error, Result, Shown, counted, escaped_line};
use engine::optim::GradScalerState;
use engine::records::DataFile;
use engine::trainer::Amp;
use views::Printer;

/// Checks the rest of `trainer.json` against this run, which has these data files. They may be in another folder.
fn check(state: &TrainerState, config: &Config, data_files: &[DataFile]) -> Result<()> {
    let wrong = |problem: String| Err(Error::mismatch(format!("{TRAINER}: {problem}")));
    let (samples, batch_size) =
        (config.data.num_samples.unwrap_or_default() as usize, config.training.batch_size);
    for (field, saved, here) in
        [("num_samples", state.num_samples, samples), ("batch_size", state.batch_size, batch_size)]
    {
        if saved != 0 && saved != here {
            return wrong(format!(
                "{field} is {saved}, and this run has {here}; use another checkpoint"
            ));
        }
    }
    let checked = state.check(samples);
    checked.map_err(|problem| Error::mismatch(format!("{problem}; use another checkpoint")))?;
    if state.scaler.is_some() != (config.training.amp == Amp::Fp16) {
        let saved = if state.scaler.is_some() { "set" } else { "not set" };
        return wrong(format!(
            "scaler is {saved}, which does not match --amp {}; use another checkpoint",
            config.training.amp
        ));
    }
    if let Some(Err(error)) = state.scaler.as_ref().map(GradScalerState::check) {
        return wrong(error.to_string());
    }
    if state.data_files.is_empty() {
        return Ok(()); // not known
    }
    let (files, saved) = (data_files.len(), state.data_files.len());
    if files != saved {
        return Err(Error::mismatch(format!(
            "the data set has {files} files, but had {saved} when the checkpoint was saved; use the same files"
        )));
    }
    for (file, saved) in data_files.iter().zip(&state.data_files) {
        if file.xxh3 != saved.xxh3 {
            return Err(Error::mismatch(format!(
                "data file {} has changed since the checkpoint was saved (xxh3 {} then, {} now); restore the file, or \
                 start a new run without --resume",
                escaped_line(&file.path),
                escaped_line(&saved.xxh3),
                file.xxh3
            )));
        }
    }
    Ok(())
}

/// Refuses to resume another run, and prints what will differ.
pub(super) fn compare(
    checkpoint: &Checkpoint,
    config: &Config,
    data_files: &[DataFile],
    world_size: usize,
    printer: &Printer,
) -> Result<()> {
    let state = checkpoint.state();
    let path = checkpoint.path().shown();
    let wrong = |error: Error| error.named(format_args!("checkpoint {path}"));
    let remarks = config.check_resume(&state.options).map_err(wrong)?;
    check(state, config, data_files).map_err(wrong)?;
    printer.info(&format!("resuming from {path}: epoch {}, step {}", state.epoch, state.step));
    if state.epoch >= config.training.max_epochs {
        let (done, epochs) =
            (state.epoch, if state.epoch == 1 { "epoch is" } else { "epochs are" });
        printer.info(&format!(
            "nothing to do: {done} {epochs} done, and --max-epochs is {}",
            config.training.max_epochs
        ));
    }
    for remark in remarks {
        printer.info(&remark);
    }
    if state.world_size != world_size {
        printer.info(&format!(
            "the checkpoint is from {} and this run has {world_size}: the rest of the epoch has another order, and \
             each step another number of samples",
            counted(state.world_size, "rank")
        ));
    }
    Ok(())
}
