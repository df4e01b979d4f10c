//! Environment variables as text, numbers and ports, with uniform errors.

use std::cell::RefCell;
use std::fmt;

use crate::error::{Error, Result, escaped_line};
use crate::launch::Nproc;

/// Reads variables, and records which of them were set: these decided the result.
pub(super) struct Variables<'a> {
    look_up: &'a dyn Fn(&str) -> Option<String>,
    read: RefCell<Vec<String>>,
}

/// The most characters of a value that a message quotes.
const MAX_QUOTED_CHARS: usize = 80;

impl<'a> Variables<'a> {
    pub(super) fn new(look_up: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { look_up, read: RefCell::default() }
    }

    fn get(&self, name: &str) -> Option<String> {
        let value = (self.look_up)(name)?;
        let value = value.trim();
        // Scripts and manifests often set a variable to an empty value if they have none.
        (!value.is_empty()).then(|| value.to_string())
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns the variable's value; `None` if it is unset or empty.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let value = self.get(name)?;
        let assignment = format!("{name}={}", shortened(&value));
        let mut read = self.read.borrow_mut();
        if !read.contains(&assignment) {
            read.push(assignment);
        }
        Some(value)
    }

    /// Returns a number from 0; `None` if the variable is unset.
    pub(super) fn integer(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<u32>() {
            Ok(value) => Ok(Some(value as usize)),
            Err(_) => Err(Error::usage(format!(
                "{name}={:?} is not a whole number from 0; --launch local ignores it",
                shortened(&text)
            ))),
        }
    }

    /// Returns a number from 1, which may be written as a range of one; `None` if the variable is unset.
    pub(super) fn pods(&self, name: &str) -> Result<Option<usize>> {
        let text = self.text(name).unwrap_or_default();
        let Some((least, most)) = text.split_once(':') else { return self.count(name) };
        match (least.parse::<u32>(), most.parse::<u32>()) {
            (Ok(least), Ok(most)) if least == most => Ok(Some(least as usize)),
            _ => Err(Error::usage(format!(
                "{name}={text:?}: a number of pods that changes needs torchrun; start torchrun --no-python ddp-mp in \
                 each pod"
            ))),
        }
    }

    /// Returns a number from 0; 0 if the variable is unset.
    pub(super) fn integer_or_0(&self, name: &str) -> Result<usize> {
        Ok(self.integer(name)?.unwrap_or(0))
    }

    /// Returns a number from 1; `None` if the variable is unset.
    pub(super) fn count(&self, name: &str) -> Result<Option<usize>> {
        let count = self.integer(name)?;
        if count == Some(0) {
            return Err(Error::usage(format!("{name}=0 is too small; it counts from 1")));
        }
        Ok(count)
    }

    /// Returns how many ranks the user wants, or else the variable `name`.
    pub(super) fn nproc(&self, name: &str, given: Nproc) -> Result<Nproc> {
        match (given, self.text(name)) {
            (Nproc::Auto, Some(text)) => text.parse().map_err(|error: Error| error.named(name)),
            (given, _) => Ok(given),
        }
    }

    /// Returns the first of these variables that is set.
    pub(super) fn first_of(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.is_set(name))
    }

    /// Returns a TCP port; `None` if the variable is unset.
    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<u16>() {
            Ok(port @ 1..) => Ok(Some(port)),
            _ => Err(Error::usage(format!(
                "{name}={:?} is not a port; use a number from 1 to 65535",
                shortened(&text)
            ))),
        }
    }

    /// Checks that `RANK`, if it is set, is the process's `index`.
    pub(super) fn check_rank(&self, index: Number) -> Result<()> {
        match self.integer("RANK")? {
            Some(rank) if rank != index.value => Err(Error::usage(format!(
                "RANK={rank} contradicts {index}: unset RANK, or use --launch local to ignore both"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns `OMP_NUM_THREADS`, set by the user, or by torchrun when it starts several processes. If it is a list
    /// for levels of nesting, returns the first number. `None` if it is unset.
    pub(super) fn threads(&self) -> Result<Option<usize>> {
        let name = "OMP_NUM_THREADS";
        let Some(text) = self.text(name) else { return Ok(None) };
        let outermost = text.split(',').next().unwrap_or_default().trim();
        match outermost.parse::<u16>() {
            Ok(threads @ 1..) => Ok(Some(threads.into())),
            _ => Err(Error::usage(format!(
                "{name}={:?} is not a number of threads; use 1 or more, or unset it",
                shortened(&text)
            ))),
        }
    }

    /// Returns the variables that were read, as `NAME=value`s.
    pub(super) fn as_text(&self) -> String {
        self.read.borrow().join(" ")
    }
}

/// The value of a variable.
#[derive(Debug, Clone, Copy)]
pub(super) struct Number {
    pub name: &'static str,
    pub value: usize,
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// Checks that `index` is below `count`.
pub(super) fn check_below(index: Number, count: Number) -> Result<()> {
    if index.value < count.value {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{index} must be below {count}, because it counts from 0; check what sets them (--launch local ignores them)"
    )))
}

/// Joins names as `a`, `a and b`, `a, b and c`.
pub(super) fn and(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).into(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    }
}

/// Shortens a value to fit on a line.
pub(super) fn shortened(value: &str) -> String {
    let value = escaped_line(value);
    let mut short: String = value.chars().take(MAX_QUOTED_CHARS).collect();
    if value.chars().nth(MAX_QUOTED_CHARS).is_some() {
        short.push_str("...");
    }
    short
}
