//! The options of the run, with the origin of each value: a flag, a file, the launcher, or the default.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;

use crate::config::{Config, Origin};
use crate::error::Result;
use crate::launch::{Launch, LaunchKind};

/// The origin of a value that nobody gives: the text of [`Origin::Default`].
const DEFAULT: &str = "default";

/// An option with its value.
#[derive(Serialize)]
pub(super) struct ShownOption {
    key: String,
    /// `None` if it is not set.
    value: Option<Value>,
    /// `flag`, the path of the file, the name of the launcher, or `default`.
    origin: String,
    /// Whether a flag or a file gives it.
    #[serde(skip)]
    is_given: bool,
}

/// Returns the options that have not their default, or `all` of them. A launcher's variables set some options of
/// `launch` that are not given.
///
/// # Errors
/// As [`Config::options`].
pub(super) fn options(
    config: &Config,
    launch: Option<&Launch>,
    all: bool,
) -> Result<Vec<ShownOption>> {
    let from_launcher = |key: &str| {
        let launch = launch.filter(|launch| launch.kind != LaunchKind::Local)?;
        let value = match key {
            "nnodes" => launch.nnodes?.into(),
            "master_addr" => launch.master.as_ref()?.addr.clone().into(),
            "master_port" => launch.master.as_ref()?.port.into(),
            _ => return None,
        };
        Some((value, launch.kind.name().to_owned()))
    };
    let options = config.values_with_origins()?.into_iter().map(|option| {
        let is_given = option.origin != Origin::Default;
        match from_launcher(&option.key).filter(|_| !is_given) {
            Some((value, origin)) => {
                ShownOption { key: option.key, value: Some(value), origin, is_given }
            }
            None => {
                let origin = option.origin.to_string();
                ShownOption { key: option.key, value: option.value, origin, is_given }
            }
        }
    });
    Ok(options.filter(|option| all || option.origin != DEFAULT).collect())
}

/// Writes the options as a file for `--config`, with their origins as comments. What a file need not say is a comment.
pub(super) fn write_options(
    options: &[ShownOption],
    all: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let which = match (all, options) {
        (true, _) => "all options",
        (false, []) => return writeln!(out, "\nall options have their defaults; --all lists them"),
        (false, _) => "options without their default (--all lists all)",
    };
    writeln!(out, "\n{which}, as a file for --config:\n")?;
    for ShownOption { key, value, origin, is_given } in options {
        let line = match value {
            Some(value) => {
                let value = toml::Value::try_from(value).map_err(io::Error::other)?;
                let hidden = if *is_given || origin == DEFAULT { "" } else { "# " };
                let value = match value {
                    toml::Value::Float(number) => format!("{number:?}"), // with an exponent where it is long
                    value => value.to_string(),
                };
                format!("{hidden}{key} = {value}")
            }
            None => format!("# {key} is not set"),
        };
        writeln!(out, "{line:<36} # {origin}")?;
    }
    Ok(())
}
