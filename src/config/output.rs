//! The options of the output: the files of a run, and what it prints.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde_with::skip_serializing_none;

use super::Config;
use super::ddp::needs_ddp;
use super::option_rules::{
    Conflict, DefaultInWords, InShortHelp, MayDiffer, OnlyIf, RefusedBy, Use,
};
use super::values::{name, whole};
use engine::trainer::{Amp, FingerprintOptions, KeepTensors};
use views::{Language, LogFormat};

/// The files of a run, and what it prints.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Output")]
#[group(skip)]
pub struct OutputSection {
    /// Write scalars and histograms for TensorBoard
    #[arg(long, value_name = "DIR")]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    #[arg(add = Use::Fills)]
    pub tensorboard: Option<PathBuf>,
    /// Write a timeline of all ranks
    ///
    /// For Perfetto (ui.perfetto.dev) and chrome://tracing
    #[arg(long, value_name = "FILE", add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    #[arg(add = Use::WritesEach)]
    pub trace: Option<PathBuf>,
    /// Write a web page about the run
    ///
    /// Curves, timeline, samples, buckets and a verdict
    #[arg(long, value_name = "FILE", add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    #[arg(add = Use::Writes)]
    pub report: Option<PathBuf>,
    /// Write fingerprints of each step for the command diff
    ///
    /// Of each rank's samples, gradients, averages, parameters and buffers, a line of JSON for each rank and step. A run
    /// with --resume appends
    #[arg(long, value_name = "FILE", add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    #[arg(add = Conflict(needs_ddp))]
    #[arg(add = Use::WritesEach)]
    pub record: Option<PathBuf>,
    /// Record every N-th step only
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS, add = RECORD)]
    #[arg(add = DefaultInWords("1"))]
    pub record_every: Option<u64>,
    /// Record the outputs of layers, and their gradients
    ///
    /// Of those that the model names: the built-in ones name all, and one of your own those that it calls layer_output for
    #[arg(long, add = MayDiffer::OnResume, add = RefusedBy::TOOLS, add = RECORD)]
    pub record_modules: bool,
    /// Record whole tensors in each step
    ///
    /// Otherwise a step has one part of 32768 elements of each larger tensor, in turn
    #[arg(long, add = MayDiffer::OnResume, add = RefusedBy::TOOLS, add = RECORD)]
    pub record_whole: bool,
    /// Keep all tensors of one step in a safetensors file
    ///
    /// Of the batch, the output, the loss, the rank's own gradients, the averages, the parameters before and after the
    /// step, and the buffers
    #[arg(long, value_name = "FILE", add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    #[arg(add = Conflict(needs_ddp))]
    #[arg(add = Use::Writes)]
    pub keep: Option<PathBuf>,
    /// Keep the tensors of step N
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>(..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS, add = KEEP)]
    pub keep_step: u64,
    /// Keep the tensors of rank R
    #[arg(long, value_name = "R", default_value_t = 0, value_parser = whole::<usize>(..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS, add = KEEP)]
    pub keep_rank: usize,
    /// Append metrics to FILE, one JSON object per line
    #[arg(long, value_name = "FILE")]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    #[arg(add = Use::Appends)]
    pub metrics: Option<PathBuf>,
    /// Write the latest metrics for Prometheus
    ///
    /// For the textfile collector of the node exporter, which reads FILE.prom
    #[arg(long, value_name = "FILE")]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    #[arg(add = Use::Writes)]
    pub prometheus: Option<PathBuf>,
    /// Report progress every N steps
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    #[arg(add = DefaultInWords("50; with --report 10"))]
    pub log_every: Option<u64>,
    /// Show the ranks live in the terminal
    ///
    /// q stops the run after the current step
    #[arg(long, add = InShortHelp, add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    pub live: bool,
    /// Choose the format of the results on stdout
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>())]
    #[arg(default_value_t = LogFormat::Text, add = MayDiffer::BetweenProcesses)]
    pub log_format: LogFormat,
    /// Explain the first steps on stderr, with their numbers
    #[arg(long, add = InShortHelp, add = Conflict(may_skip_steps))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub explain: bool,
    /// Choose the language of --explain
    #[arg(long, value_name = "NAME", value_parser = name::<Language>())]
    #[arg(default_value_t = Language::En, add = EXPLANATION)]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    pub language: Language,
}

const EXPLANATION: OnlyIf =
    OnlyIf(|config| config.output.explain, "needs --explain: no other text is translated");

const RECORD: OnlyIf =
    OnlyIf(|config| config.output.record.is_some(), "has no effect without --record; add it");

const KEEP: OnlyIf =
    OnlyIf(|config| config.output.keep.is_some(), "has no effect without --keep; add it");

fn may_skip_steps(config: &Config) -> Option<String> {
    let skips = config.training.amp == Amp::Fp16 || config.optimization.skip_nonfinite.is_some();
    let problem = "shows the first steps, and amp fp16 or skip_nonfinite may skip them; leave out one of the two";
    needs_ddp(config).or_else(|| skips.then(|| problem.into()))
}

impl Config {
    /// Returns the step and the rank whose tensors are kept, and the file. `None` without `--keep`.
    pub(crate) fn keep(&self) -> Option<KeepTensors> {
        let OutputSection { keep, keep_step, keep_rank, .. } = &self.output;
        let file = keep.clone()?;
        Some(KeepTensors { file, step: *keep_step, rank: *keep_rank })
    }

    /// Returns what is recorded of each rank. `None` without `--record`.
    ///
    /// # Errors
    /// Those of [`options`](Self::options).
    pub(crate) fn fingerprints(&self) -> anyhow::Result<Option<FingerprintOptions>> {
        let OutputSection { record, record_every, record_modules, record_whole, .. } = &self.output;
        if record.is_none() {
            return Ok(None);
        }
        Ok(Some(FingerprintOptions {
            every: record_every.unwrap_or(1),
            whole: *record_whole,
            modules: *record_modules,
            program: format!("{} {}", self.program.name, self.program.version),
            options: self.options()?,
        }))
    }

    /// Returns the steps between reports of progress: fewer for the curves of a report.
    pub fn log_every(&self) -> u64 {
        self.output.log_every.unwrap_or(if self.output.report.is_some() { 10 } else { 50 })
    }
}
