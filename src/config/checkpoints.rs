//! The options of checkpoints: when to save, and what to resume from.

use std::path::PathBuf;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use serde::Serialize;
use serde_with::skip_serializing_none;

use super::Config;
use super::option_rules::{
    Conflict, DefaultInWords, InShortHelp, MayDiffer, OnlyIf, RefusedBy, Use,
};
use super::values::whole;
use engine::trainer::SaveEvery;

/// When to save, and what to resume from.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Checkpoints")]
#[group(skip)]
pub struct CheckpointsSection {
    /// Save checkpoints in this folder
    ///
    /// A checkpoint holds the model, the optimizer and all else that a run needs to continue
    #[arg(long, value_name = "DIR", add = InShortHelp, add = Use::Keeps)]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub checkpoint_dir: Option<PathBuf>,
    /// Save a checkpoint every N steps
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..), add = Conflict(no_folder))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub save_every: Option<u64>,
    /// Save a checkpoint every N epochs
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..), add = Conflict(no_folder))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    #[arg(add = DefaultInWords("1 without --save-every"))]
    pub save_every_epochs: Option<u64>,
    /// Keep the newest N checkpoints, besides the best
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..), default_value_t = 3)]
    #[arg(add = FOLDER, add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    pub keep_last: u64,
    /// Continue from a checkpoint
    ///
    /// auto (the newest in --checkpoint-dir, or the beginning if there is none); best, latest or step-... in
    /// --checkpoint-dir; or a path
    #[arg(long, value_name = "auto|PATH", value_parser = NonEmptyStringValueParser::new())]
    #[arg(add = Conflict(newest_of_no_folder), add = InShortHelp)]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    pub resume: Option<String>,
    /// Read the initial parameters and buffers from a file
    ///
    /// A safetensors file, as PyTorch saves it; a checkpoint; or the folder of a run, for its newest checkpoint
    #[arg(long, value_name = "FILE", add = Conflict(resumes))]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    pub init_from: Option<PathBuf>,
}

const FOLDER: OnlyIf = OnlyIf(
    |config| config.checkpoints.checkpoint_dir.is_some(),
    "needs --checkpoint-dir, the folder of this run's checkpoints",
);

fn no_folder(config: &Config) -> Option<String> {
    let OnlyIf(has_folder, problem) = FOLDER;
    (!has_folder(config)).then(|| problem.into())
}

fn newest_of_no_folder(config: &Config) -> Option<String> {
    let needs = no_folder(config).filter(|_| config.checkpoints.resume.as_deref() == Some("auto"));
    needs.map(|problem| format!("auto {problem}"))
}

fn resumes(config: &Config) -> Option<String> {
    let path = config.checkpoints.resume.as_deref().filter(|path| *path != "auto");
    path.map(|_| "a resumed run already has parameters; remove one of the two flags".into())
}

/// Returns whether `text` is the name of a checkpoint in the folder of a run: `best`, `latest` or `step-...`.
pub(super) fn is_checkpoint_name(text: &str) -> bool {
    ["best", "latest"].contains(&text) || (text.starts_with("step-") && !text.contains('/'))
}

impl Config {
    /// Returns how often to save.
    pub fn save_every(&self) -> SaveEvery {
        let steps = self.checkpoints.save_every;
        let by_default = steps.is_none().then_some(1);
        SaveEvery { steps, epochs: self.checkpoints.save_every_epochs.or(by_default) }
    }

    /// Returns the path that `--resume` names. `best`, `latest` and `step-...` are in the folder of the run, if it
    /// has one. `None` for `auto`, and without `--resume`.
    pub fn resume_path(&self) -> Option<PathBuf> {
        let CheckpointsSection { resume, checkpoint_dir, .. } = &self.checkpoints;
        let path = resume.as_deref().filter(|path| *path != "auto" || checkpoint_dir.is_none())?;
        Some(match checkpoint_dir {
            Some(dir) if is_checkpoint_name(path) => dir.join(path),
            _ => path.into(),
        })
    }
}
