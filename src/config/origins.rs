//! The options that a command line gives, and the origin of each option's value: a flag, the file of `--config`, or the
//! default.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error as ClapError, FromArgMatches};
use serde::Serialize;
use serde_with::SerializeDisplay;
use toml::{Table, Value};

use super::option_rules::{RefusedBy, Tool};
use super::{Config, flag_name};
use crate::error::{Error, Result, Shown};

/// The options that flags and a file gave. Two configurations with the same values are equal, whatever their origins.
#[derive(Debug, Clone, Default)]
pub(super) struct Origins {
    file: Option<PathBuf>,
    in_file: BTreeSet<String>,
    flags: BTreeSet<String>,
}

impl PartialEq for Origins {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// The origin of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SerializeDisplay)]
pub enum Origin<'a> {
    /// Neither a flag nor a file gives it.
    Default,
    /// The file of `--config`.
    File(&'a Path),
    /// A flag, which wins over a file.
    Flag,
    /// The launcher of this name, by its variables.
    Launcher(&'static str),
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => f.write_str(&path.shown()),
            Origin::Flag => f.write_str("flag"),
            Origin::Launcher(name) => f.write_str(name),
        }
    }
}

/// An option with its value and the origin of the value.
#[derive(Debug, Clone, Serialize)]
pub struct OptionValue<'a> {
    /// The key in a file.
    pub key: String,
    /// The value. `None` if it has none.
    pub value: Option<serde_json::Value>,
    /// The origin of the value.
    pub origin: Origin<'a>,
}

impl Origins {
    pub(super) fn new(file: Option<&Path>, in_file: &Table, flags: &Table) -> Self {
        let keys = |table: &Table| table.keys().cloned().collect();
        Self { file: file.map(Path::to_owned), in_file: keys(in_file), flags: keys(flags) }
    }

    fn of(&self, key: &str) -> Origin<'_> {
        match &self.file {
            _ if self.flags.contains(key) => Origin::Flag,
            Some(file) if self.in_file.contains(key) => Origin::File(file),
            _ => Origin::Default,
        }
    }
}

impl Config {
    /// Returns the name of the option `key` for an error about its value: the flag, or the file and the key.
    pub(crate) fn name_of(&self, key: &str) -> String {
        match self.origins.of(key) {
            Origin::File(file) => format!("{}: {key}", file.shown()),
            Origin::Flag | Origin::Launcher(_) | Origin::Default => flag_name(key),
        }
    }

    /// Returns all options, in the order of the help, with their values and where these come from.
    ///
    /// # Errors
    /// As [`Config::options`].
    pub fn values_with_origins(&self) -> Result<Vec<OptionValue<'_>>> {
        let values = self.values()?;
        let command = Self::command();
        let option = |arg: &clap::Arg| {
            let key = arg.get_id().as_str();
            OptionValue {
                key: key.to_owned(),
                value: values.get(key).cloned(),
                origin: self.origins.of(key),
            }
        };
        Ok(command.get_arguments().map(option).collect())
    }
}

/// The given options: texts by key, as a file has them.
#[derive(Debug, Clone, Default)]
pub struct Given(Table);

impl Given {
    /// Refuses an option that has no effect on `tool`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) that names the flag.
    pub fn check_for(&self, tool: Tool) -> Result<()> {
        let command = Config::command();
        let is_refused = |arg: &&Arg| {
            let by = arg.get::<RefusedBy>();
            by.is_some_and(|by| by.0.contains(&tool)) && self.0.contains_key(arg.get_id().as_str())
        };
        match command.get_arguments().find(is_refused) {
            Some(arg) => Err(Error::InvalidInput(format!(
                "{}: {}; leave this out",
                flag_name(arg.get_id().as_str()),
                tool.purpose()
            ))),
            None => Ok(()),
        }
    }
}

impl std::ops::Deref for Given {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.0
    }
}

impl Args for Given {
    fn augment_args(command: Command) -> Command {
        Config::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Config::augment_args_for_update(command)
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, ClapError> {
        let text = |arg: &Arg| {
            let key = arg.get_id().as_str();
            if matches.value_source(key) != Some(ValueSource::CommandLine) {
                return None;
            }
            let value = match arg.get_action() {
                ArgAction::SetTrue => Value::Boolean(true),
                _ => {
                    let texts = matches.get_raw(key)?.map(|text| text.to_string_lossy());
                    Value::String(texts.collect::<Vec<_>>().join(","))
                }
            };
            Some((key.to_owned(), value))
        };
        Ok(Self(Config::command().get_arguments().filter_map(text).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), ClapError> {
        self.0.extend(Self::from_arg_matches(matches)?.0);
        Ok(())
    }
}
