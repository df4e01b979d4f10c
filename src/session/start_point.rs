//! The checkpoint that a run resumes from, and the folder that it saves to, prepared before any rank starts.

use std::path::Path;
use std::sync::Arc;

use tch::Device;
use tch::nn::VarStore;

use super::resume_checks::compare;
use crate::config::Config;
use engine::checkpoint::{Checkpoint, CheckpointDir, TensorFile, check_all_in};
use engine::error::{Error, Result, Shown};
use engine::ffi::Generator;
use engine::launch::{Launch, Restarts};
use engine::process_group::ProcessGroup;
use engine::records::DataFile;
use views::Printer;

/// The starting point of a run, shared by its ranks.
#[derive(Debug, Default)]
pub(crate) struct StartPoint {
    pub checkpoint: Option<Arc<Checkpoint>>,
    /// The weights of `--init-from`. `None` without it, and if there is a checkpoint.
    weights: Option<TensorFile>,
    /// The folder to save in, if there is one and this process has rank 0.
    pub checkpoint_dir: Option<CheckpointDir>,
    /// The data files. Empty if nothing is saved and nothing was.
    pub data_files: Vec<DataFile>,
}

impl StartPoint {
    /// Reads the starting point that `config` names. Reports its errors here, before a rank would, and makes no file.
    pub(crate) fn read(config: &Config, world_size: usize, printer: &Printer) -> Result<Self> {
        let checkpoint_dir = config.checkpoints.checkpoint_dir.as_deref();
        // Checked first: another program's files must not be taken for a damaged checkpoint.
        if let Some(checkpoint_dir) = checkpoint_dir {
            check_all_in(checkpoint_dir)?;
        }
        let checkpoint = match (config.resume_path(), checkpoint_dir) {
            (Some(path), _) => Some(Checkpoint::read(&path)?),
            (None, Some(dir)) if config.checkpoints.resume.is_some() => newest(dir, printer)?,
            (None, _) => None,
        };
        let needs_hashes = checkpoint.is_some() || checkpoint_dir.is_some();
        let data_files = if needs_hashes { config.data.dataset.data_files()? } else { Vec::new() };
        if let Some(checkpoint) = &checkpoint {
            compare(checkpoint, config, &data_files, world_size, printer)?;
            if config.checkpoints.init_from.is_some() {
                printer.info("--init-from is ignored: the run continues from a checkpoint");
            }
        }
        let weights = match &config.checkpoints.init_from {
            Some(file) if checkpoint.is_none() => Some(TensorFile::read(file).map_err(init_from)?),
            _ => None,
        };
        let checkpoint = checkpoint.map(Arc::new);
        let start_point = Self { checkpoint, weights, data_files, ..Self::default() };
        if start_point.checkpoint.is_some() || start_point.weights.is_some() {
            let generator = Arc::new(Generator::new(Device::Cpu, config.training.seed, 0)?);
            let (vs, _) = config.build_model(Device::Cpu, &generator, None)?;
            start_point.load_model(&vs)?;
        }
        Ok(start_point)
    }

    /// Opens the folder of `config` to save in, or else that of `launch` for the state after a failure, if there is one.
    pub(crate) fn open_folder(&mut self, config: &Config, launch: &Launch) -> Result<()> {
        let dir = folder(config, launch);
        self.checkpoint_dir = dir.map(|dir| self.open(dir, config)).transpose()?;
        Ok(())
    }

    /// Returns the folder to save in, on a rank that has met rank 0. In a process without rank 0 the rank saves there only
    /// after a failure.
    pub(crate) fn folder_of_rank(&self, config: &Config, launch: &Launch) -> Option<CheckpointDir> {
        let opened_by_rank_0 = || CheckpointDir::of_run(folder(config, launch)?, keep_last(config));
        self.checkpoint_dir.clone().or_else(opened_by_rank_0)
    }

    /// Opens the folder to save in. Other files in it must not be lost.
    fn open(&self, dir: &Path, config: &Config) -> Result<CheckpointDir> {
        let keep_last = keep_last(config);
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
            return Err(Error::usage(format!(
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
/// [`Error::Input`] when the folder cannot be read.
pub(crate) fn after_restart(
    mut config: Config,
    launch: &Launch,
    restarts: &Restarts,
    printer: &Printer,
) -> Result<Config> {
    let Some(dir) = folder(&config, launch).filter(|_| !restarts.reasons.is_empty()) else {
        return Ok(config);
    };
    if restarts.saves
        && let Some(newest) = CheckpointDir::newest_in(dir)?
    {
        let is_checkpoint_dir = config.checkpoints.checkpoint_dir.is_some();
        let resume =
            if is_checkpoint_dir { "auto".into() } else { newest.to_string_lossy().into_owned() };
        config.checkpoints.resume = Some(resume);
        config.checkpoints.init_from = None;
        return Ok(config);
    }
    if config.checkpoints.checkpoint_dir.is_none() {
        return Ok(config);
    }
    if restarts.saves && !CheckpointDir::was_opened(dir) {
        printer.report(&format!(
            "warning: {} was removed during the run, with all checkpoints: this restart begins where the first start \
             did; do not remove the folder while a run uses it",
            dir.shown()
        ));
    } else if config.checkpoints.resume.is_none() {
        printer.info(&format!("no checkpoint in {} yet: starting from the beginning", dir.shown()));
    }
    Ok(config)
}

/// Returns the folder that the ranks save in.
fn folder<'a>(config: &'a Config, launch: &'a Launch) -> Option<&'a Path> {
    config.checkpoints.checkpoint_dir.as_deref().or(launch.state_dir.as_deref())
}

/// Returns how many checkpoints stay in that folder.
fn keep_last(config: &Config) -> usize {
    let saves = config.checkpoints.checkpoint_dir.is_some();
    if saves { config.checkpoints.keep_last as usize } else { 1 }
}

fn init_from(error: Error) -> Error {
    error.named("--init-from")
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use engine::checkpoint::{Snapshot, TrainerState};
    use engine::models::state_dict;
    use views::LogFormat;

    /// Resumes with `config` on 2 ranks, from a checkpoint of such a run with this state.
    fn resume(config: &Config, state: TrainerState) -> Result<StartPoint, String> {
        let folder = tempfile::tempdir().unwrap();
        let (vs, _) = config.model_config().build(Device::Cpu, 0).unwrap();
        let state = TrainerState { options: config.options().unwrap(), ..state };
        let snapshot = Snapshot::take(state, &state_dict(&vs).unwrap(), Vec::new()).unwrap();
        let saved = CheckpointDir::open(folder.path(), 3).unwrap().write(&snapshot).unwrap();
        let mut config = config.clone();
        config.checkpoints.resume = Some(saved.display().to_string());
        let started = StartPoint::read(&config, 2, &Printer::new(LogFormat::Text));
        started.map_err(|error| match error {
            Error::Input { problem, .. } => problem,
            other => panic!("not exit code 2: {other}"),
        })
    }

    /// Returns the state of a run of the default configuration in its second epoch, on 2 ranks.
    fn state() -> TrainerState {
        TrainerState {
            epoch: 1,
            step: 70,
            epoch_steps: 6,
            samples_seen: 384,
            world_size: 2,
            num_samples: 4096,
            batch_size: 32,
            max_epochs: 3,
            loss_sums: vec![0.5; 2],
            epoch_losses: vec![0.5],
            ..TrainerState::default()
        }
    }

    #[test]
    fn forged_state_is_refused_by_its_field() {
        let config = Config::default();
        resume(&config, state()).unwrap();
        // A program with a loop of its own may not know these.
        let unknown = TrainerState { num_samples: 0, batch_size: 0, max_epochs: 0, ..state() };
        resume(&config, unknown).unwrap();
        type Change = fn(&mut TrainerState);
        let changes: [(&str, Change); 18] = [
            ("batch_size is 16, and this run has 32", |it| it.batch_size = 16),
            ("num_samples is 512, and this run has 4096", |it| it.num_samples = 512),
            ("epoch is 65, which is more than the number of steps in", |it| it.epoch = 65),
            ("epoch is 4, which is more than max_epochs (3)", |it| it.epoch = 4),
            ("epoch is 18446744073709551615, which is more than the", |it| it.epoch = u64::MAX),
            ("samples_seen is 9223372036854775808, which", |it| it.samples_seen = 1 << 63),
            ("samples_seen is 4096, which", |it| it.samples_seen = 4096),
            ("epoch_steps is 6, which is more than samples_seen (5)", |it| it.samples_seen = 5),
            ("epoch_steps is 71, which is more than step (70)", |it| it.epoch_steps = 71),
            ("step minus epoch_steps is 18446744073709551609", |it| it.step = u64::MAX),
            ("loss_sums has 2 numbers for a world_size of 0", |it| it.world_size = 0),
            ("loss_sums has 2 numbers for a world_size of 3", |it| it.world_size = 3),
            ("loss_sums has 0 numbers for a world_size of 0", |it| {
                (it.world_size, it.loss_sums) = (0, Vec::new());
            }),
            ("skipped_steps is 71, which is more than step (70)", |it| it.skipped_steps = 71),
            ("skipped_samples is 400, which is more than samples_seen (384)", |it| {
                it.skipped_samples = 400;
            }),
            ("validations_since_best is 2, which is more than epoch (1)", |it| {
                it.validations_since_best = 2;
            }),
            ("the length of epoch_losses is 2, which is more than epoch (1)", |it| {
                it.epoch_losses.push(0.5);
            }),
            ("scaler is set, which does not match --amp off", |it| {
                it.scaler = serde_json::from_value(serde_json::json!({
                    "scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                    "_growth_tracker": 0
                }))
                .unwrap();
            }),
        ];
        for (expected, change) in changes {
            let mut forged = state();
            change(&mut forged);
            let told = resume(&config, forged).unwrap_err();
            assert!(told.contains("trainer.json") && told.contains(expected), "{expected}: {told}");
        }
    }

    #[test]
    fn changed_data_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data.csv");
        fs::write(&file, "1,2,3\n4,5,6\n").unwrap();
        let toml = format!("dataset = \"csv:{}\"", file.display());
        let config = Config::resolve(None, &toml.parse().unwrap()).unwrap();
        let (config, _) = config.open_data(0).unwrap();
        let known = config.data.dataset.data_files().unwrap();
        let state = |data_files| TrainerState {
            world_size: 2,
            num_samples: 2,
            batch_size: 32,
            data_files,
            ..TrainerState::default()
        };
        assert_eq!(resume(&config, state(known.clone())).unwrap().data_files, known);
        fs::write(&file, "1,2,3\n4,5,7\n").unwrap();
        let told = resume(&config, state(known)).unwrap_err();
        let expected =
            format!("data file {} has changed since the checkpoint was saved (", file.display());
        assert!(told.contains(&expected), "{told}");
        resume(&config, state(Vec::new())).unwrap(); // not known
    }

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
