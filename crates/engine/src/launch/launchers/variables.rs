//! Environment variables and flags as text and numbers, with uniform errors.

use std::fmt;
use std::str::FromStr;

use super::spawned::PARENT_START;
use super::{LaunchChoice, LaunchOptions};
use crate::error::{Error, Result, escaped_line};

/// Names of one variable; the first that is set counts.
pub(super) type Names = &'static [&'static str];

/// The first number of steps that srun did not start, such as batch scripts and shells of salloc.
const FIRST_OWN_STEP: u32 = 0xffff_fff0;

/// The most characters of a value that a message quotes.
const MAX_QUOTED_CHARS: usize = 80;

/// Reads variables and flags.
pub(super) struct Variables<'a> {
    pub look_up: &'a dyn Fn(&str) -> Option<String>,
    pub options: &'a LaunchOptions,
}

impl Variables<'_> {
    /// Returns the value of a variable or a flag. With `--launch local` no variable of a launcher has one.
    fn get(&self, name: &str) -> Option<String> {
        let given = self.options;
        let value = match name {
            "--nnodes" => given.nnodes.map(|number| number.to_string()),
            "--node-rank" => given.node_rank.map(|number| number.to_string()),
            "--master-addr" => given.master_addr.clone(),
            "--master-port" => given.master_port.map(|number| number.to_string()),
            PARENT_START | "OMP_NUM_THREADS" => (self.look_up)(name),
            _ if given.launch == LaunchChoice::Local => None,
            _ => (self.look_up)(name),
        }?;
        let value = value.trim();
        let is_no_step =
            name == "SLURM_STEP_ID" && value.parse().is_ok_and(|step: u32| step >= FIRST_OWN_STEP);
        // Scripts and manifests often set a variable to an empty value if they have none.
        (!value.is_empty() && !is_no_step).then(|| value.to_owned())
    }

    /// Returns the first of these variables that is set, and its value.
    pub(super) fn text(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// Returns a number from 0; `None` if no variable is set.
    pub(super) fn number(&self, names: &[&'static str]) -> Result<Option<Number>> {
        let Some((name, text)) = self.text(names) else { return Ok(None) };
        let what = match name {
            "PET_NNODES" => "a whole number from 0; for a range use torchrun --no-python ddp-mp",
            _ => "a whole number from 0; --launch local ignores it",
        };
        Ok(Some(Number { name, value: parse(name, &text, 0u32, what)? as usize }))
    }

    /// Returns a TCP port; `None` if no variable is set.
    pub(super) fn port(&self, names: &[&'static str]) -> Result<Option<u16>> {
        let Some((name, text)) = self.text(names) else { return Ok(None) };
        parse(name, &text, 1, "a port; use a number from 1 to 65535").map(Some)
    }

    /// Returns `OMP_NUM_THREADS`, set by the user, or by torchrun when it starts several processes. If it is a list
    /// for levels of nesting, returns the first number. `None` if it is unset.
    pub(super) fn threads(&self) -> Result<Option<usize>> {
        let Some((name, text)) = self.text(&["OMP_NUM_THREADS"]) else { return Ok(None) };
        let outermost = text.split(',').next().unwrap_or_default().trim();
        let what = "a number of threads; use 1 or more, or unset it";
        parse(name, outermost, 1u16, what).map(|threads| Some(threads.into()))
    }
}

/// Reads the value of `name` as a number of at least `least`. `what` says for an error what it is to be.
fn parse<T: FromStr + PartialOrd>(name: &str, text: &str, least: T, what: &str) -> Result<T> {
    text.parse::<T>().ok().filter(|value| *value >= least).ok_or_else(|| {
        let text: String = escaped_line(text).chars().take(MAX_QUOTED_CHARS).collect();
        Error::usage(format!("{name}={text:?} is not {what}"))
    })
}

/// The value of a variable.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Number {
    pub name: &'static str,
    pub value: usize,
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}
