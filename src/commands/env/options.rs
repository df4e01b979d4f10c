//! The options of the run, with the origin of each value: a flag, a file, the launcher, or the default.

use std::io::{self, Write};

use serde_json::Value;

use crate::config::{Config, OptionValue, Origin};
use engine::error::Result;
use engine::launch::{Launch, LaunchKind};

/// Returns the options that differ from their defaults, or `all` of them. A launcher's variables set some options of
/// `launch` that are not given.
///
/// # Errors
/// As [`Config::options`].
pub(super) fn options<'a>(
    config: &'a Config,
    launch: Option<&Launch>,
    all: bool,
) -> Result<Vec<OptionValue<'a>>> {
    let mut options = config.values_with_origins()?;
    if let Some(launch) = launch.filter(|launch| launch.kind != LaunchKind::Local) {
        let master = launch.master.as_ref();
        for option in options.iter_mut().filter(|option| option.origin == Origin::Default) {
            let value: Option<Value> = match &*option.key {
                "nnodes" => launch.nnodes.map(Value::from),
                "master_addr" => master.map(|master| master.addr.clone().into()),
                "master_port" => master.map(|master| master.port.into()),
                _ => None,
            };
            if value.is_some() {
                (option.value, option.origin) = (value, Origin::Launcher(launch.kind.name()));
            }
        }
    }
    options.retain(|option| all || option.origin != Origin::Default);
    Ok(options)
}

/// Writes the options as a file for `--config`, with their origins as comments. What a file need not say is a comment.
pub(super) fn write(options: &[OptionValue], all: bool, out: &mut dyn Write) -> io::Result<()> {
    let which = match (all, options) {
        (true, _) => "all options",
        (false, []) => return writeln!(out, "\nall options have their defaults; --all lists them"),
        (false, _) => "options without their default (--all lists all)",
    };
    writeln!(out, "\n{which}, as a file for --config:\n")?;
    for OptionValue { key, value, origin } in options {
        let line = match value.as_ref().map(toml::Value::try_from).transpose() {
            Ok(Some(toml::Value::Float(number))) => format!("{key} = {number:?}"), // with an exponent where it is long
            Ok(Some(value)) => format!("{key} = {value}"),
            Ok(None) => format!("{key} is not set"),
            Err(error) => return Err(io::Error::other(error)),
        };
        let is_hidden = value.is_none() || matches!(origin, Origin::Launcher(_));
        let line = format!("{}{line}", if is_hidden { "# " } else { "" });
        writeln!(out, "{line:<36} # {origin}")?;
    }
    Ok(())
}
