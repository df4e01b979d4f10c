//! Errors of the command line. Each names the flag that is wrong, and the one that was meant.

use std::borrow::Cow;
use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

use super::trains;
use crate::config::{Advice, ENOUGH, advice_on, likeness, why_replaced};

/// Refuses an argument that is not UTF-8: neither a configuration nor a message could hold it. Names the flag it
/// belongs to.
pub(super) fn check_utf8(args: &[OsString]) -> Result<(), String> {
    // The program's name is not used.
    let Some(wrong) = args.iter().skip(1).position(|arg| arg.to_str().is_none()) else {
        return Ok(());
    };
    let (before, bytes) = (&args[wrong], args[wrong + 1].as_encoded_bytes());
    // `--flag=value`, or `--flag value`.
    let equals = bytes.iter().position(|byte| *byte == b'=').filter(|_| bytes.starts_with(b"--"));
    let is_flag = |text: &&str| text.starts_with("--") && !text.contains('=');
    let (flag, value) = match equals {
        Some(equals) => (Some(String::from_utf8_lossy(&bytes[..equals])), &bytes[equals + 1..]),
        None => (before.to_str().filter(is_flag).map(Cow::Borrowed), bytes),
    };
    let flag = flag.map_or(String::new(), |flag| format!("{flag}: "));
    Err(format!(
        "{flag}\"{}\" is not UTF-8; write it in UTF-8 (for a file, use a link that has such a name)",
        value.escape_ascii()
    ))
}

/// Returns what clap says of a mistake.
pub(super) fn error(command: &Command, problem: String) -> Error {
    command.clone().error(ErrorKind::InvalidUtf8, problem)
}

/// Names the flag or command that does what an unknown one does in other programs, or what the program brings in its
/// place.
pub(super) fn suggest(mut error: Error, command: &Command, args: &[OsString]) -> Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let unknown = text(ContextKind::InvalidSubcommand).or(text(ContextKind::InvalidArg));
    let is_of_value = matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation);
    let tip = unknown.and_then(|unknown| match error.kind() {
        ErrorKind::ArgumentConflict if command.find_subcommand(unknown).is_some() => {
            let program = command.get_name();
            Some(format!("write the command first, as '{program} {unknown} [OPTIONS]'"))
        }
        ErrorKind::ArgumentConflict => tip_for_word(unknown, command),
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            if unknown.starts_with('-') {
                tip_for_flag(unknown.trim_start_matches('-'), command, invoked(command, args))
            } else {
                tip_for_word(unknown, command)
            }
        }
        _ if is_of_value => tip_for_value(unknown, command),
        _ => None,
    });
    let misleads = match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(guess)) => {
            let name = |flag: &str| flag.trim_start_matches('-').to_owned();
            unknown.is_none_or(|unknown| likeness(&name(unknown), &name(guess)) <= ENOUGH)
        }
        _ => false,
    };
    if misleads || tip.is_some() && !is_of_value {
        // Clap's own guess, and the usage that it shows for it.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedSubcommand);
        error.remove(ContextKind::Usage);
    }
    if let Some(tip) = tip {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    }
    error
}

/// Returns the advice on an unknown flag of the command `invoked`.
fn tip_for_flag(name: &str, command: &Command, invoked: &Command) -> Option<String> {
    let is_known =
        |name: &str| invoked.get_arguments().any(|argument| argument.get_long() == Some(name));
    let why = || why_replaced(command, &name.replace('-', "_")).filter(|_| trains(invoked));
    match advice_on(name, is_known) {
        Some(Advice::Call(option)) => {
            let per_machine = if option == "nproc-per-node" { " (per machine)" } else { "" };
            Some(format!("{} calls it '--{option}'{per_machine}", command.get_name()))
        }
        Some(Advice::Do(remedy)) => why().or_else(|| trains(invoked).then(|| remedy.into())),
        None => why(),
    }
}

/// The commands, and those of other programs that do the same.
const OTHER_COMMANDS: [(&str, &str); 7] = [
    ("bench", "benchmark"),
    ("diff", "compare"),
    ("env", "doctor info"),
    ("new", "create init"),
    ("sample", "generate"),
    ("train", "fit launch run start"),
    ("verify", "test"),
];

/// The programs that start Python files.
const STARTERS: [&str; 6] =
    ["accelerate", "deepspeed", "lightning", "python", "python3", "torchrun"];

/// Returns the advice on a word that is no command and no value.
fn tip_for_word(word: &str, command: &Command) -> Option<String> {
    let program = command.get_name();
    let is_there = |name| command.find_subcommand(name).is_some();
    if word.ends_with(".py") || word.ends_with(".ipynb") || STARTERS.contains(&word) {
        let own =
            format!("; '{program} new NAME' creates a project for a model of your own, in Rust");
        let own = if is_there("new") { own } else { String::new() };
        return Some(format!("{program} trains by itself and runs no Python file{own}"));
    }
    let (same, _) = OTHER_COMMANDS
        .into_iter()
        .find(|&(same, others)| others.split(' ').any(|other| other == word) && is_there(same))?;
    let or_none = if same == "train" { ", and needs no command for it" } else { "" };
    Some(format!("{program} calls it '{same}'{or_none}"))
}

/// Returns the advice on a wrong value of `flag`, which is shown with the form of its value.
fn tip_for_value(flag: &str, command: &Command) -> Option<String> {
    if flag.starts_with("--nnodes ") {
        return Some("a run ends with the machines that it starts with".into());
    }
    let what =
        ["model", "loss"].into_iter().find(|what| flag.starts_with(&format!("--{what} ")))?;
    let program = command.get_name();
    let new = command.find_subcommand("new")?.get_name();
    Some(format!("'{program} {new} NAME' creates a project for a {what} of your own"))
}

/// Returns the command that `args` are for: the last subcommand that they name.
fn invoked<'a>(command: &'a Command, args: &[OsString]) -> &'a Command {
    let next =
        |command: &'a Command, arg: &OsString| command.find_subcommand(arg).unwrap_or(command);
    args.iter().skip(1).fold(command, next)
}
