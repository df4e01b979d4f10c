//! Parsers of values, for the command line and for files. Their errors say what is expected.

use std::iter;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serializer;
use strum::VariantNames;

use engine::launch::{BackendChoice, Nproc};
use engine::process_group::Backend;
use engine::runtime::MAX_WAIT;

/// The largest count that TOML can hold as well.
const MAX_WHOLE_NUMBER: u64 = i64::MAX as u64;

/// Parses one of the names of `T`. The help lists them.
pub fn name<T>() -> impl TypedValueParser<Value = T>
where
    T: VariantNames + FromStr<Err = strum::ParseError> + Clone + Send + Sync + 'static,
{
    let names = T::VARIANTS.iter().copied();
    PossibleValuesParser::new(names).try_map(|name: String| name.parse::<T>())
}

/// Parses a backend's name, or `auto`. The help lists all of them.
pub(crate) fn backend() -> impl TypedValueParser<Value = BackendChoice> {
    let names = iter::once("auto").chain(Backend::all().map(Backend::name));
    PossibleValuesParser::new(names).try_map(|name: String| name.parse::<BackendChoice>())
}

/// Parses a whole number in `range`.
pub fn whole<T>(range: impl RangeBounds<u64>) -> impl TypedValueParser<Value = T>
where
    T: TryFrom<u64> + Clone + Send + Sync + 'static,
{
    let (least, most) = match (range.start_bound(), range.end_bound()) {
        (Bound::Included(&least), Bound::Included(&most)) => (least, most),
        (Bound::Included(&least), _) => (least, MAX_WHOLE_NUMBER),
        _ => (0, MAX_WHOLE_NUMBER),
    };
    move |text: &str| {
        let number = text.parse::<u64>().ok().filter(|number| (least..=most).contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| expected_whole(text, least, most))
    }
}

/// Describes the numbers from `least` to `most`, and the one that `text` may have meant.
fn expected_whole(text: &str, least: u64, most: u64) -> String {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let too_large = digits && text.parse::<u64>().map_or(true, |number| number > most);
    let expected = if most < MAX_WHOLE_NUMBER || too_large {
        format!("expected a whole number from {least} to {most}")
    } else {
        format!("expected a whole number, {least} or more")
    };
    // Above 2^53 a float does not say which whole number it is.
    let meant =
        text.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && number.abs() < 9e15);
    match meant.map(|number| number as i64).and_then(|number| u64::try_from(number).ok()) {
        Some(meant) if !digits && (least..=most).contains(&meant) => {
            expected + &format!("; write {meant}")
        }
        _ => expected,
    }
}

/// Parses a number in `range`, with or without a fraction.
pub(crate) fn number(
    range: impl RangeBounds<f64> + Clone + Send + Sync + 'static,
) -> impl TypedValueParser<Value = f64> {
    move |text: &str| {
        let number = text.parse().ok().filter(|number: &f64| range.contains(number));
        number.ok_or_else(|| expected_number(range.start_bound(), range.end_bound()))
    }
}

/// Describes the numbers between two ends. None of the options is without an end.
fn expected_number(start: Bound<&f64>, end: Bound<&f64>) -> String {
    let number = |end: Bound<&f64>| match end {
        Bound::Included(number) | Bound::Excluded(number) => format_number(*number),
        Bound::Unbounded => "any".into(),
    };
    let (least, most) = (number(start), number(end));
    match (start, end) {
        (Bound::Included(_), Bound::Included(_)) => {
            format!("expected a number from {least} to {most}")
        }
        (Bound::Included(_), _) => {
            format!("expected a number at least {least} and less than {most}")
        }
        _ => format!("expected a number above {least} and at most {most}"),
    }
}

/// The largest number that the optimizers accept. They step in float32, whose largest number is a little above.
pub(crate) const MAX_F32: f64 = 3.4e38;

/// Numbers above 0 that float32 can hold.
pub(super) const POSITIVE: (Bound<f64>, Bound<f64>) =
    (Bound::Excluded(0.0), Bound::Included(MAX_F32));

/// Returns `value` as text, with an exponent where it would be long.
pub(super) fn format_number(value: f64) -> String {
    let is_short = value == 0.0 || (1e-5..1e16).contains(&value.abs());
    if is_short { format!("{value}") } else { format!("{value:e}") }
}

/// Parses a duration: `500ms`, `30s`, `10m`; a plain number is in seconds.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let with_unit = if text.parse::<u64>().is_ok() { &format!("{text}s") } else { text };
    let parsed = humantime::parse_duration(with_unit);
    parsed.map(|duration| duration.min(MAX_WAIT)).map_err(|_| {
        "expected a duration, as 500ms, 30s or 10m; a plain number is seconds".to_owned()
    })
}

/// Parses a duration that is not 0.
pub fn positive_duration(text: &str) -> Result<Duration, String> {
    let parsed = duration(text)?;
    let problem = "expected a duration above 0, as 500ms, 30s or 10m";
    if parsed.is_zero() { Err(problem.into()) } else { Ok(parsed) }
}

/// Returns `duration` as text that [`duration()`] parses: the default of an option.
pub(super) fn format_duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

/// Writes a number of ranks as a number, and any other choice by its name.
pub(super) fn nproc<S: Serializer>(nproc: &Nproc, to: S) -> Result<S::Ok, S::Error> {
    match nproc {
        Nproc::Auto => to.serialize_str("auto"),
        Nproc::Gpu => to.serialize_str("gpu"),
        Nproc::Cpu => to.serialize_str("cpu"),
        Nproc::Count(count) => to.serialize_u64(*count as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_integer_error_states_the_range_and_a_correction() {
        for (text, said) in [
            ("-5", "expected a whole number, 1 or more"),
            ("1.5", "expected a whole number, 1 or more"),
            ("many", "expected a whole number, 1 or more"),
            ("", "expected a whole number, 1 or more"),
            ("1e3", "expected a whole number, 1 or more; write 1000"),
            ("32.0", "expected a whole number, 1 or more; write 32"),
            ("0", "expected a whole number, 1 or more"),
            ("99999999999999999999", "expected a whole number from 1 to 9223372036854775807"),
            ("1e300", "expected a whole number, 1 or more"),
        ] {
            assert_eq!(expected_whole(text, 1, MAX_WHOLE_NUMBER), said, "{text}");
        }
        for text in ["70000", "7e4"] {
            let said = "expected a whole number from 1 to 65535";
            assert_eq!(expected_whole(text, 1, 65535), said);
        }
    }
}
