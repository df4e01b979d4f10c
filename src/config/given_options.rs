//! The options that a command line gives. They override those of a file.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error as ClapError, FromArgMatches};
use toml::{Table, Value};

use super::option_rules::{RefusedBy, Tool};
use super::{Config, flag_name};
use crate::error::{Error, Result};

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
