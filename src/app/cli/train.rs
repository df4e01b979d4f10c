//! The flags of training: the options of a run, and a file of them.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use crate::config::{Config, Given, InShortHelp, Program, Tool, check_for};
use engine::error::Result;

/// The options of a run, and a file of them.
#[derive(Debug, Args)]
pub(crate) struct TrainFlags {
    /// Read options from a TOML file; flags override it
    #[arg(long, value_name = "FILE", add = InShortHelp)]
    config: Option<PathBuf>,
    #[command(flatten)]
    given: Given,
}

impl TrainFlags {
    /// Returns the configuration of `program` that these flags give over the file over the defaults.
    pub(crate) fn resolve(&self, program: &Arc<Program>) -> Result<Config> {
        Config::resolve_for(program, self.config.as_deref(), &self.given.options(program))
    }

    /// Returns the configuration for `tool`, which refuses some flags.
    pub(crate) fn resolve_tool(&self, program: &Arc<Program>, tool: Tool) -> Result<Config> {
        check_for(tool, program, &self.given.options(program))?;
        self.resolve(program)
    }
}
