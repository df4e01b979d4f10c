//! The checkpoint that a run resumes from, and the folder that it saves to, prepared before any rank starts.

use std::path::Path;
use std::sync::Arc;

use tch::Device;
use tch::nn::VarStore;

use crate::checkpoint::{Checkpoint, CheckpointDir, TensorFile};
use crate::config::Config;
use crate::error::{Error, Result, Shown};
use crate::launch::Restarts;
use crate::process_group::ProcessGroup;
use crate::telemetry::Printer;

/// The starting point of a run, shared by its ranks.
#[derive(Debug, Default)]
pub(crate) struct StartPoint {
    pub checkpoint: Option<Arc<Checkpoint>>,
    /// The weights of `--init-from`. `None` without it, and if there is a checkpoint.
    weights: Option<TensorFile>,
    pub checkpoint_dir: Option<CheckpointDir>,
}

impl StartPoint {
    /// Returns the starting point that `config` names. Reports its errors here, before a rank would.
    pub(crate) fn of(config: &Config, world_size: usize, printer: &Printer) -> Result<Self> {
        let checkpoint_dir = config.checkpoints.checkpoint_dir.as_deref();
        // Checked first: another program's files must not be taken for a damaged checkpoint.
        checkpoint_dir.map_or(Ok(()), CheckpointDir::check)?;
        let checkpoint = match (config.resume_path(), checkpoint_dir) {
            (Some(path), _) => Some(Checkpoint::read(&path)?),
            (None, Some(dir)) if config.checkpoints.resume.is_some() => newest(dir, printer)?,
            (None, _) => None,
        };
        if let Some(checkpoint) = &checkpoint {
            compare(checkpoint, config, world_size, printer)?;
            if config.checkpoints.init_from.is_some() {
                printer.info("--init-from is ignored: the run continues from a checkpoint");
            }
        }
        let weights = match &config.checkpoints.init_from {
            Some(file) if checkpoint.is_none() => Some(TensorFile::read(file).map_err(init_from)?),
            _ => None,
        };
        let checkpoint = checkpoint.map(Arc::new);
        let mut start_point = Self { checkpoint, weights, checkpoint_dir: None };
        if start_point.checkpoint.is_some() || start_point.weights.is_some() {
            let (vs, _) = config.model_config().build(Device::Cpu, config.training.seed)?;
            start_point.load_model(&vs)?;
        }
        let open = |dir| start_point.open(dir, config);
        start_point.checkpoint_dir = checkpoint_dir.map(open).transpose()?;
        Ok(start_point)
    }

    /// Opens the folder to save in. Other files in it must not be lost.
    fn open(&self, dir: &Path, config: &Config) -> Result<CheckpointDir> {
        let keep_last = config.checkpoints.keep_last as usize;
        let Some(checkpoint) = &self.checkpoint else {
            return CheckpointDir::create(dir, keep_last);
        };
        let opened = CheckpointDir::open(dir, keep_last)?;
        if !opened.contains(checkpoint) {
            drop(opened); // unlocks it
            return CheckpointDir::create(dir, keep_last);
        }
        // The checkpoint was read before the folder was locked: the run that saved it may have saved another since.
        if config.checkpoints.resume.as_deref() == Some("auto")
            && let Some(newest) = opened.newest()?
            && newest != checkpoint.path()
        {
            return Err(Error::InvalidInput(format!(
                "another run has just saved {}; start again to continue from that",
                newest.shown()
            )));
        }
        Ok(opened)
    }

    /// Renames checkpoints that are newer than the one that the run resumes from. Called when nothing can be refused
    /// any more.
    pub(crate) fn make_room(&self, printer: &Printer) -> Result<()> {
        let (Some(dir), Some(checkpoint)) = (&self.checkpoint_dir, &self.checkpoint) else {
            return Ok(());
        };
        if !dir.contains(checkpoint) {
            return Ok(());
        }
        for aside in dir.set_aside_after(checkpoint)? {
            printer.info(&format!(
                "a newer checkpoint was renamed to {}; remove it if you do not need it",
                aside.shown()
            ));
        }
        Ok(())
    }

    /// Returns the checkpoint on every rank. With several processes, rank 0 broadcasts it: a collective.
    pub(crate) fn agreed_checkpoint(
        &self,
        group: &ProcessGroup,
    ) -> Result<Option<Arc<Checkpoint>>> {
        let mine = self.checkpoint.clone();
        if !group.spans_processes() {
            return Ok(mine);
        }
        let received = Checkpoint::broadcast(mine.as_deref(), group)?;
        // Ranks in rank 0's process share its copy.
        Ok(mine.or(received.map(Arc::new)))
    }

    /// Loads the model of rank 0, from which the other ranks get theirs.
    pub(crate) fn load_model(&self, vs: &VarStore) -> Result<()> {
        match (&self.checkpoint, &self.weights) {
            (Some(checkpoint), _) => checkpoint.load_model(vs),
            (None, Some(weights)) => weights.load_into(vs).map_err(init_from),
            (None, None) => Ok(()),
        }
    }
}

/// Returns `config` for a start after a failure. The run resumes from the newest checkpoint that it has saved. If
/// there is none, it starts where the first start began.
///
/// # Errors
/// [`Error::InvalidInput`] when the folder cannot be read.
pub(crate) fn after_restart(
    mut config: Config,
    restarts: &Restarts,
    printer: &Printer,
) -> Result<Config> {
    let Some(dir) =
        config.checkpoints.checkpoint_dir.as_deref().filter(|_| !restarts.reasons.is_empty())
    else {
        return Ok(config);
    };
    if restarts.saves && CheckpointDir::newest_in(dir)?.is_some() {
        config.checkpoints.resume = Some("auto".into());
        return Ok(config);
    }
    if config.checkpoints.resume.is_none() {
        printer.info(&format!("no checkpoint in {} yet: starting from the beginning", dir.shown()));
    }
    Ok(config)
}

fn init_from(error: Error) -> Error {
    Error::InvalidInput(format!("--init-from: {error}"))
}

fn newest(dir: &Path, printer: &Printer) -> Result<Option<Checkpoint>> {
    let Some(newest) = CheckpointDir::newest_in(dir)? else {
        let dir = dir.shown();
        printer.info(&format!(
            "--resume auto: no checkpoint in {dir} yet: starting from the beginning"
        ));
        return Ok(None);
    };
    Checkpoint::read(&newest).map(Some)
}

/// Refuses to resume another run, and prints what will differ.
fn compare(
    checkpoint: &Checkpoint,
    config: &Config,
    world_size: usize,
    printer: &Printer,
) -> Result<()> {
    let state = checkpoint.state();
    let path = checkpoint.path().shown();
    let remarks = config
        .check_resume(&state.options)
        .map_err(|error| Error::InvalidInput(format!("checkpoint {path}: {error}")))?;
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
            "the checkpoint is from {} ranks and this run has {world_size}: the rest of the epoch has another order, \
             and each step another number of samples",
            state.world_size
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Snapshot, TrainerState};
    use crate::telemetry::LogFormat;

    #[test]
    fn open_fails_after_another_run_saved_a_newer_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let save = |step| {
            let state = TrainerState { step, ..TrainerState::default() };
            let snapshot = Snapshot::take(state, &[], Vec::new()).unwrap();
            CheckpointDir::open(path, 3).unwrap().write(&snapshot).unwrap()
        };
        let printer = Printer::new(LogFormat::Text);
        let checkpoint = Some(Checkpoint::read(&save(1)).unwrap());
        let start_point =
            StartPoint { checkpoint: checkpoint.map(Arc::new), ..StartPoint::default() };
        let mut config = Config::default();
        config.checkpoints.resume = Some("auto".into());
        drop(start_point.open(path, &config).unwrap());
        let newer = save(2);
        let error = start_point.open(path, &config).unwrap_err().to_string();
        assert!(error.contains("another run has just saved "), "{error}");
        // A user who names the older checkpoint gets it.
        config.checkpoints.resume = Some("step-00000001".into());
        let checkpoint_dir = Some(start_point.open(path, &config).unwrap());
        StartPoint { checkpoint_dir, ..start_point }.make_room(&printer).unwrap();
        assert!(!newer.exists());
    }
}
