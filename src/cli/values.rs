//! Parsers of numbers, whose errors say what is expected.

use std::ops::RangeInclusive;

use clap::builder::TypedValueParser;

/// The largest count that TOML can hold as well.
const LARGEST: u64 = i64::MAX as u64;

/// Parses a count: a whole number, at least `least`.
pub(super) fn whole(least: u64) -> impl TypedValueParser<Value = u64> {
    whole_in(least..=LARGEST)
}

/// Parses a whole number in `range`.
pub(super) fn whole_in(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = u64> {
    move |text: &str| {
        let found = text.parse().ok().filter(|number| range.contains(number));
        found.ok_or_else(|| expected(text, &range))
    }
}

/// Describes the numbers of `range`, and the one that `text` may have meant.
fn expected(text: &str, range: &RangeInclusive<u64>) -> String {
    let (least, most) = (range.start(), range.end());
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let too_large = digits && text.parse::<u64>().map_or(true, |number| number > *most);
    let mut expected = format!("expected a whole number from {least}");
    if *most < LARGEST || too_large {
        expected += &format!(" to {most}");
    }
    // Above 2^53 a float does not say which whole number it is.
    let meant = text.parse::<f64>().ok().filter(|it| it.fract() == 0.0 && it.abs() < 9e15);
    match meant.map(|it| it as i64).and_then(|it| u64::try_from(it).ok()) {
        Some(meant) if !digits && range.contains(&meant) => expected + &format!("; write {meant}"),
        _ => expected,
    }
}

/// Parses a number with or without a fraction.
pub(super) fn number() -> impl TypedValueParser<Value = f64> {
    |text: &str| {
        text.parse::<f64>().map_err(|_| "expected a number, as 10, 0.1 or 1e-3".to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_is_expected_and_what_may_have_been_meant() {
        for (text, said) in [
            ("-5", "expected a whole number from 1"),
            ("1.5", "expected a whole number from 1"),
            ("many", "expected a whole number from 1"),
            ("", "expected a whole number from 1"),
            ("1e3", "expected a whole number from 1; write 1000"),
            ("32.0", "expected a whole number from 1; write 32"),
            ("0", "expected a whole number from 1"),
            ("99999999999999999999", "expected a whole number from 1 to 9223372036854775807"),
            ("1e300", "expected a whole number from 1"),
        ] {
            assert_eq!(expected(text, &(1..=LARGEST)), said, "{text}");
        }
        assert_eq!(expected("70000", &(1..=65535)), "expected a whole number from 1 to 65535");
        assert_eq!(expected("7e4", &(1..=65535)), "expected a whole number from 1 to 65535");
    }
}
