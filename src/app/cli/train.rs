//! The flags of training: the options of a run, and a file of them.

use std::path::PathBuf;

use clap::Args;

use crate::config::{Config, Given, InShortHelp, Tool};

/// The options of a run, and a file of them.
#[derive(Debug, Args)]
pub(crate) struct TrainFlags {
    /// TOML file with options; flags win over it
    #[arg(long, value_name = "FILE", add = InShortHelp)]
    config: Option<PathBuf>,
    #[command(flatten)]
    given: Given,
}

impl TrainFlags {
    /// Returns the configuration of these flags over the file over the defaults.
    pub(crate) fn resolve(&self) -> crate::error::Result<Config> {
        Config::resolve(self.config.as_deref(), &self.given)
    }

    /// Returns the configuration for `tool`, which refuses some flags.
    pub(crate) fn resolve_for(&self, tool: Tool) -> crate::error::Result<Config> {
        self.given.check_for(tool)?;
        self.resolve()
    }
}
