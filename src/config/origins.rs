//! The options that a command line gives, and the origin of each option's value: a flag, the file of `--config`, or the
//! default.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error as ClapError, FromArgMatches};
use serde::Serialize;
use serde_with::SerializeDisplay;
use toml::{Table, Value};

use super::files::expand_homes;
use super::option_rules::{Tool, is_refused_by};
use super::{Config, Invalid, Program, flag_name};
use engine::error::{Error, Result, Shown};

/// The options that flags and a file gave. Two configurations with the same values are equal, whatever their origins.
#[derive(Debug, Clone, Default)]
pub(super) struct Origins {
    /// The file of `--config`.
    pub file: Option<PathBuf>,
    /// What the defaults of the program give.
    pub of_program: Table,
    pub in_file: Table,
    pub flags: Table,
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
    /// The program of this name has a default of its own.
    Program(&'static str),
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
            Origin::Program(name) => write!(f, "default of {name}"),
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

impl Config {
    /// Returns the name of the option `key` for an error about its value: the flag, or the file and the key.
    pub(crate) fn name_of(&self, key: &str) -> String {
        match self.origin_of(key) {
            Origin::File(file) => format!("{}: {key}", file.shown()),
            Origin::Program(name) => format!("the defaults of {name}: {key}"),
            Origin::Flag | Origin::Launcher(_) | Origin::Default => flag_name(key),
        }
    }

    /// Returns what is wrong with a value, after the name of its option.
    pub(super) fn explained(&self, Invalid { key, problem }: Invalid) -> String {
        format!("{}: {problem}", self.name_of(&key))
    }

    pub(super) fn origin_of(&self, key: &str) -> Origin<'_> {
        let origins = &self.origins;
        match &origins.file {
            _ if origins.flags.contains_key(key) => Origin::Flag,
            Some(file) if origins.in_file.contains_key(key) => Origin::File(file),
            _ if origins.of_program.contains_key(key) => Origin::Program(self.program.name),
            _ => Origin::Default,
        }
    }

    /// Returns all options, in the order of the help, with their values and where these come from.
    ///
    /// # Errors
    /// As [`Config::options`].
    pub fn values_with_origins(&self) -> Result<Vec<OptionValue<'_>>> {
        let values = self.values()?;
        let command = self.program.command();
        let option = |arg: &clap::Arg| {
            let key = arg.get_id().as_str();
            OptionValue {
                key: key.to_owned(),
                value: values.get(key).cloned(),
                origin: self.origin_of(key),
            }
        };
        Ok(command.get_arguments().map(option).collect())
    }
}

/// The options that a command line gives, as clap has read them. The program says which there are.
#[derive(Debug, Clone, Default)]
pub struct Given(ArgMatches);

impl Given {
    /// Returns the given options of `program`: texts by key, as a file has them.
    pub(crate) fn options(&self, program: &Program) -> Table {
        let Self(matches) = self;
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
        let command = program.command();
        let mut options = command.get_arguments().filter_map(text).collect();
        expand_homes(&command, &mut options);
        options
    }
}

impl Args for Given {
    /// Adds nothing: a program adds its options.
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, ClapError> {
        Ok(Self(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), ClapError> {
        self.0 = matches.clone();
        Ok(())
    }
}

/// Refuses an option of `given` that has no effect on `tool`.
///
/// # Errors
/// [`Error::Input`] that names the flag.
pub(crate) fn check_for(tool: Tool, program: &Program, given: &Table) -> Result<()> {
    let command = program.command();
    let is_refused =
        |arg: &&Arg| is_refused_by(arg, tool) && given.contains_key(arg.get_id().as_str());
    match command.get_arguments().find(is_refused) {
        Some(arg) => Err(Error::usage(format!(
            "{}: {}; leave this out",
            flag_name(arg.get_id().as_str()),
            tool.purpose()
        ))),
        None => Ok(()),
    }
}
