//! Errors of the command line. Each names the flag that is wrong, and the one that was meant.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

use super::trains;
use crate::config::{option_of_other_name, why_replaced};

/// Refuses an argument that is not UTF-8: neither a configuration nor a message could hold it. Names the flag it
/// belongs to.
pub(super) fn check_utf8(args: &[OsString]) -> Result<(), String> {
    // The program's name is not used.
    let Some(wrong) = args.iter().skip(1).position(|arg| arg.to_str().is_none()) else {
        return Ok(());
    };
    let (before, arg) = (&args[wrong], &args[wrong + 1]);
    // `--flag=value`, or `--flag value`.
    let text = arg.to_string_lossy();
    let (flag, value) = match text.split_once('=') {
        Some((flag, _)) if flag.starts_with("--") => {
            let value = &arg.as_encoded_bytes()[flag.len() + 1..];
            (Some(flag.to_owned()), value.escape_ascii().to_string())
        }
        _ => {
            let flag = before.to_str().filter(|text| text.starts_with("--") && !text.contains('='));
            (flag.map(str::to_owned), arg.as_encoded_bytes().escape_ascii().to_string())
        }
    };
    let flag = flag.map_or(String::new(), |flag| format!("{flag}: "));
    Err(format!(
        "{flag}\"{value}\" is not UTF-8; write it in UTF-8 (for a file, use a link that has such a name)"
    ))
}

/// Returns what clap says of a mistake.
pub(super) fn error(command: &Command, problem: String) -> Error {
    command.clone().error(ErrorKind::InvalidUtf8, problem)
}

/// Names the flag that does what an unknown one does in other programs, or what the program brings in its place.
pub(super) fn suggest(mut error: Error, command: &Command, args: &[OsString]) -> Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let program = command.get_name();
    let invoked = invoked(command, args);
    let is_known =
        |name: &str| invoked.get_arguments().any(|argument| argument.get_long() == Some(name));
    let name = unknown.trim_start_matches('-');
    let why = || why_replaced(command, &name.replace('-', "_")).filter(|_| trains(invoked));
    let tip = option_of_other_name(name, is_known)
        .map(|option| {
            let per_machine = if option == "nproc-per-node" { " (per machine)" } else { "" };
            format!("{program} calls it '--{option}'{per_machine}")
        })
        .or_else(why);
    if let Some(tip) = tip {
        let tip = StyledStr::from(tip);
        // Clap's own guess, and the usage that it shows for it.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// Returns the command that `args` are for: the last subcommand that they name.
fn invoked<'a>(command: &'a Command, args: &[OsString]) -> &'a Command {
    let next =
        |command: &'a Command, arg: &OsString| command.find_subcommand(arg).unwrap_or(command);
    args.iter().skip(1).fold(command, next)
}
