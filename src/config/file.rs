//! The file of `--config`: a TOML table whose keys are flags. Each value goes through the parser of its flag.

use std::any::TypeId;
use std::fmt;
use std::path::Path;

use clap::{Arg, ArgAction, Command, Error as ClapError};
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use toml::{Table, Value};

use super::files::{expand_homes, put_into_folder_of};
use super::{Advice, ENOUGH, Program, advice_on, flag_name, likeness, why_replaced};
use engine::error::{Error, Result, Shown};
use engine::files::{mistaken, read_stream};

/// The size limit of a file, in bytes.
const LONGEST_FILE: u64 = 1 << 20;

/// The message for a section such as `[optimization]`.
const SECTION: &str =
    "sections are not supported; put the keys at the top level, for example lr = 0.1";

/// Reads the options of `file`, with `_` in their keys. Paths are made relative to the working directory. Of values that
/// `flags` override it checks only the type.
///
/// # Errors
/// [`Error::Input`] that names the file and the line.
pub(super) fn read(file: &Path, command: &Command, flags: &Table) -> Result<Table> {
    let name = file.shown();
    let input = |problem: String| Error::usage(format!("--config {name}: {problem}"));
    let bytes = read_stream(file, LONGEST_FILE).map_err(|error| input(error.to_string()))?;
    let instead = "write options, such as lr = 0.1";
    if let Some(problem) = mistaken(&bytes, "a TOML file", instead) {
        return Err(input(problem));
    }
    let text = str::from_utf8(&bytes).map_err(|error| {
        let before = bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        let line = bytes.split(|&byte| byte == b'\n').nth(before).unwrap_or_default();
        let (number, shown) = (before + 1, line.escape_ascii());
        input(format!("line {number} is not UTF-8, which a TOML file must be: {shown}"))
    })?;
    let mut options = parse(text, command, flags).map_err(input)?;
    put_into_folder_of(file, command, &mut options, flags).map_err(input)?;
    Ok(options)
}

/// Reads the defaults of `program`, whose options are those of `command`.
///
/// # Errors
/// [`Error::Input`] that names the line.
pub(super) fn read_defaults(program: &Program, command: &Command) -> Result<Table> {
    let Some(text) = program.defaults else { return Ok(Table::new()) };
    parse(text, command, &Table::new())
        .map_err(|problem| Error::usage(format!("the defaults of {}: {problem}", program.name)))
}

/// Reads the options of `command` in `text`.
fn parse(text: &str, command: &Command, flags: &Table) -> Result<Table, String> {
    // A text that cannot be parsed has no sections; the next line returns its error.
    let sections: Table = text.parse().unwrap_or_default();
    let options = toml::Deserializer::parse(text).and_then(|deserializer| {
        deserializer.deserialize_map(Options { command, flags, sections: &sections })
    });
    let mut options = options.map_err(|error| error.to_string().trim_end().to_owned())?;
    expand_homes(command, &mut options);
    Ok(options)
}

/// Reads the keys and values of a file. The errors of a visitor have the line of what it reads.
#[derive(Clone, Copy)]
struct Options<'a> {
    command: &'a Command,
    flags: &'a Table,
    /// The whole file, to tell a section from a key.
    sections: &'a Table,
}

impl<'de> Visitor<'de> for Options<'_> {
    type Value = Table;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "options of {}", self.command.get_name())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
        let mut options = Table::new();
        while let Some(arg) = map.next_key_seed(self)? {
            let value = map.next_value_seed(Checked(self, arg))?;
            if options.insert(arg.get_id().to_string(), value).is_some() {
                return Err(A::Error::custom(format!("{} is there twice", arg.get_id())));
            }
        }
        Ok(options)
    }
}

/// Reads a key.
impl<'de, 'a> DeserializeSeed<'de> for Options<'a> {
    type Value = &'a Arg;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<&'a Arg, D::Error> {
        let key = <String as serde::Deserialize>::deserialize(from)?;
        option(self.command, &key).map_err(|problem| {
            let is_section = self.sections.get(&key).is_some_and(Value::is_table);
            D::Error::custom(if is_section { SECTION.to_owned() } else { problem })
        })
    }
}

/// Reads a value, and checks it with the parser of its option. As on the command line, a text may be a number.
struct Checked<'a>(Options<'a>, &'a Arg);

impl<'de> DeserializeSeed<'de> for Checked<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        let Self(Options { command, flags, .. }, option) = self;
        let value = <Value as serde::Deserialize>::deserialize(from)?;
        let arg = to_arg(option, &value).map_err(D::Error::custom)?;
        if flags.contains_key(option.get_id().as_str()) {
            return Ok(value);
        }
        let parsed = command.clone().try_get_matches_from(arg);
        parsed.map(|_| value).map_err(|error| D::Error::custom(message(&error)))
    }
}

/// Returns the option `key`, with `_` or `-`.
///
/// # Errors
/// The option that was meant, for the user.
pub(super) fn option<'a>(command: &'a Command, key: &str) -> Result<&'a Arg, String> {
    let with_underscores = key.replace('-', "_");
    let found = command.get_arguments().find(|arg| arg.get_id() == with_underscores.as_str());
    found.ok_or_else(|| format!("unknown field `{key}`: {}", which_was_meant(command, key)))
}

/// Returns whether the option `arg` is `true` or `false`, as a flag with a value or without.
fn is_switch(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<bool>()
}

fn wrong_type(arg: &Arg, value: &Value, expected: &str) -> String {
    let flag = flag_name(arg.get_id().as_str());
    format!("{flag}: {value} is of the wrong type; expected {expected}")
}

/// Returns `value` as an argument of a command line: `--flag=text`. `None` for a switch that is off, and for an empty
/// list that is the default.
///
/// # Errors
/// The expected type of value, for the user.
pub(super) fn to_arg(arg: &Arg, value: &Value) -> Result<Option<String>, String> {
    let (flag, delimiter) = (flag_name(arg.get_id().as_str()), arg.get_value_delimiter());
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        let is_on = value.as_bool().ok_or_else(|| wrong_type(arg, value, "true or false"))?;
        return Ok(is_on.then_some(flag));
    }
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(format!("{number:?}")),
        Value::Boolean(is_on) if is_switch(arg) => Some(is_on.to_string()),
        _ => None,
    };
    let text = match (value, delimiter) {
        (Value::Array(items), Some(_))
            if items.is_empty() && arg.get_default_values().is_empty() =>
        {
            return Ok(None);
        }
        (Value::Array(items), Some(delimiter)) => {
            if items.iter().filter_map(Value::as_str).any(|text| text.contains(delimiter)) {
                return Err(format!(
                    "{flag}: a text of the list contains {delimiter:?}, which divides texts"
                ));
            }
            items.iter().map(text).collect::<Option<Vec<_>>>().map(|texts| texts.join(","))
        }
        _ => text(value),
    };
    let expected = if delimiter.is_some() { "a list" } else { "a text or a number" };
    let text = text.ok_or_else(|| wrong_type(arg, value, expected))?;
    Ok(Some(format!("{flag}={text}")))
}

/// Returns clap's error without what is for a command line only.
pub(super) fn message(error: &ClapError) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let text = text.split("\n\nUsage:").next().unwrap_or(text);
    text.split("\n\nFor more information").next().unwrap_or(text).trim_end().to_owned()
}

/// Returns advice on the unknown key `unknown`: the option that was meant.
fn which_was_meant(command: &Command, unknown: &str) -> String {
    let unknown_key = unknown.replace('-', "_");
    if let Some(why) = why_replaced(command, &unknown_key) {
        return why;
    }
    let known = || command.get_arguments().map(|arg| arg.get_id().as_str());
    let likeness = |key: &str| likeness(&unknown_key, key);
    let is_key = |option: &str| known().any(|key| key == option.replace('-', "_"));
    let name = unknown.replace('_', "-");
    match advice_on(&name, is_key) {
        Some(Advice::Do(remedy)) => return remedy.into(),
        Some(Advice::Call(option)) => {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let value = if value.is_empty() { String::new() } else { format!(" = \"{value}\"") };
            return format!("did you mean `{}{value}`?", key.replace('-', "_"));
        }
        None => {}
    }
    let nearest = known().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    match nearest.filter(|key| likeness(key) > ENOUGH) {
        Some(key) => format!("did you mean `{key}`?"),
        None => format!("keys are the flags of {} --help, with _ for -", command.get_name()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::Config;

    #[test]
    fn unknown_key_error_suggests_the_closest_key() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        for (text, remedy) in [
            ("batchsize = 8", "unknown field `batchsize`: did you mean `batch_size`?"),
            ("max-epoch = 8", "unknown field `max-epoch`: did you mean `max_epochs`?"),
            ("learning_rate = 8", "unknown field `learning_rate`: did you mean `lr`?"),
            ("num_epochs = 8", "unknown field `num_epochs`: did you mean `max_epochs`?"),
            ("gpus = 8", "unknown field `gpus`: did you mean `nproc_per_node`?"),
            ("fp16 = true", "unknown field `fp16`: did you mean `amp = \"fp16\"`?"),
            ("num_train_epochs = 3", "did you mean `max_epochs`?"),
            ("wd = 8", "unknown field `wd`: did you mean `weight_decay`?"),
            (
                "[train]\nlr = 8",
                "sections are not supported; put the keys at the top level, for example lr = 0.1",
            ),
            (
                "xyzzy = 8",
                "unknown field `xyzzy`: keys are the flags of ddp-mp --help, with _ for -",
            ),
            (
                "model = \"mlq\"",
                "  [possible values: linear, mlp, cnn, gpt]\n\n  tip: a similar value exists: 'mlp'",
            ),
        ] {
            fs::write(&file, text).unwrap();
            let error = Config::resolve(Some(&file), &Table::new()).unwrap_err().to_string();
            assert!(error.ends_with(remedy), "{error}");
        }
    }

    #[test]
    fn value_of_another_type_is_refused_with_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        let flags: Table = "batch_size = 8".parse().unwrap();
        for (text, problem) in [
            ("lr = [0.1]", "--lr: [0.1] is of the wrong type; expected a text or a number"),
            (
                "batch_size = true",
                "--batch-size: true is of the wrong type; expected a text or a number",
            ),
            ("hidden = true", "--hidden: true is of the wrong type; expected a list"),
            ("no_shuffle = 1", "--no-shuffle: 1 is of the wrong type; expected true or false"),
            ("timeout = true", "--timeout: true is of the wrong type; expected a text or a number"),
        ] {
            fs::write(&file, format!("seed = 1\n{text}\n")).unwrap();
            let error = Config::resolve(Some(&file), &flags).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.ends_with(problem), "{error}");
        }
        for text in
            ["milestones = []", "timeout = 90", "nproc_per_node = 2", "lr = 1", "lr = \"1\""]
        {
            fs::write(&file, text).unwrap();
            Config::resolve(Some(&file), &Table::new()).unwrap();
        }
    }

    #[test]
    fn non_utf8_file_is_refused_with_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        fs::write(&file, b"lr = 0.1\ncheckpoint_dir = \"r\xffn\"\n").unwrap();
        let error = Config::resolve(Some(&file), &Table::new()).unwrap_err().to_string();
        let expected = "run.toml: line 2 is not UTF-8, which a TOML file must be: checkpoint_dir = \\\"r\\xffn\\\"";
        assert!(error.ends_with(expected), "{error}");
    }
}
