//! The configuration of a run, as plain data: defaults, overridden by a TOML file, overridden by flags.
//!
//! Each option is declared once, in the struct of its section: name, help, values, default, and where it may differ.

mod checkpoints;
mod data;
mod ddp;
mod file;
mod files;
mod launch;
mod memory;
mod model;
mod open_data;
mod optimization;
mod option_rules;
mod origins;
mod other_names;
mod output;
mod program;
mod resolve;
mod resume;
mod training;
mod validation;
mod values;

use std::fmt;
use std::sync::Arc;

use clap::{Args, Command, FromArgMatches};
use serde::Serialize;

pub use checkpoints::CheckpointsSection;
pub use data::DataSection;
pub use ddp::{CommHookKind, DdpSection, StrategyKind};
pub use launch::LaunchSection;
pub(crate) use memory::check_fits;
pub use model::ModelSection;
pub use open_data::Data;
pub use optimization::{OptimizationSection, OptimizerKind, ScheduleKind};
pub(crate) use option_rules::is_refused_by;
pub use option_rules::{InShortHelp, Tool};
pub(crate) use origins::check_for;
pub use origins::{Given, OptionValue, Origin};
pub use other_names::{Advice, all_advice};
pub(crate) use other_names::{ENOUGH, advice_on, likeness};
pub use output::OutputSection;
pub use program::BuildContext;
use program::OwnOptions;
pub(crate) use program::{OwnArgs, OwnOptionsType, Program, why_replaced};
pub use training::TrainingSection;
pub(crate) use values::{MAX_F32, backend, number};
pub use values::{name, positive_duration, whole};

/// The configuration of a run. Each option is a flag, and a key of a TOML file (with `_` or `-`).
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[group(skip)]
pub struct Config {
    /// The length of the run, its loss and its seed.
    #[command(flatten)]
    #[serde(flatten)]
    pub training: TrainingSection,
    /// The architecture of the model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelSection,
    /// The optimizer and its learning rate.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimization: OptimizationSection,
    /// The samples.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataSection,
    /// The exchange of gradients between the ranks.
    #[command(flatten)]
    #[serde(flatten)]
    pub ddp: DdpSection,
    /// The ranks.
    #[command(flatten)]
    #[serde(flatten)]
    pub launch: LaunchSection,
    /// When to save, and what to resume from.
    #[command(flatten)]
    #[serde(flatten)]
    pub checkpoints: CheckpointsSection,
    /// The files of the run, and what it prints.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputSection,
    /// Where the values come from.
    #[arg(skip)]
    #[serde(skip)]
    origins: origins::Origins,
    /// The options of the program itself.
    #[arg(skip)]
    #[serde(skip)]
    own: OwnOptions,
    /// The program that is configured.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) program: Arc<Program>,
}

impl Config {
    /// Returns the declarations of all options. The last value of a flag counts.
    fn command() -> Command {
        let command = Command::new("ddp-mp").no_binary_name(true).disable_help_flag(true);
        Self::augment_args(command).args_override_self(true)
    }

    /// Returns the defaults for `program`, without those that it changes.
    fn default_of(program: &Arc<Program>) -> Self {
        let own = program.parse_own(Vec::new()).unwrap_or_default(); // some may be required
        Self { own, program: program.clone(), ..Self::default() }
    }

    /// Returns the configuration that `args` give, over the defaults.
    fn parse(args: Vec<String>) -> Result<Self, clap::Error> {
        let mut matches = Self::command().try_get_matches_from(args)?;
        Self::from_arg_matches_mut(&mut matches)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::parse(Vec::new()).expect("defaults are valid, and no option is required")
    }
}

impl fmt::Display for Config {
    /// Writes the TOML file that gives this configuration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values().map_err(|_| fmt::Error)?;
        f.write_str(toml::to_string(&values).map_err(|_| fmt::Error)?.trim_end())
    }
}

/// Returns the flag of the option `key`.
fn flag_name(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// A value that is not valid with the others.
struct Invalid {
    key: String,
    problem: String,
}
