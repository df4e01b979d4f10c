//! Texts in messages: counts, ranks, and what comes from outside.

use std::borrow::Cow;
use std::fmt::Display;
use std::path::Path;

/// Formats a count with what is counted: `1 rank`, `2 ranks`, `0 processes`.
pub fn counted(count: impl Display, what: &str) -> String {
    let count = count.to_string();
    let ending = match &count[..] {
        "1" => "",
        _ if what.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {what}{ending}")
}

/// Formats ascending ranks: `rank 3`, `ranks 0 and 1`, `ranks 0-2, 5`.
pub fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        [first, second] => format!("ranks {first} and {second}"),
        _ => format!("ranks {}", runs(ranks)),
    }
}

/// Formats ascending numbers as ranges: `0-2, 5, 7, 8`.
pub fn runs(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let text = |(first, last): (usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    runs.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Returns `text` with control characters and characters that change the text direction escaped, as in `\u001b`. Text
/// from outside the process must not control the terminal. Line breaks and tabs stay. JSON keeps its meaning.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escape_all_but(text, &['\n', '\t'])
}

/// Escapes like [`escaped`], and also line breaks and tabs, so that the text stays on one line.
pub fn escaped_line(text: &str) -> Cow<'_, str> {
    escape_all_but(text, &[])
}

/// A path, or what names paths, in a message.
pub trait Shown {
    /// Returns it as text on one line: the name of a file may have line breaks and other control characters.
    fn shown(&self) -> Cow<'_, str>;
}

impl Shown for Path {
    fn shown(&self) -> Cow<'_, str> {
        Cow::Owned(escaped_line(&self.to_string_lossy()).into_owned())
    }
}

fn escape_all_but<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let directs = |c: char| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let harms = |c: char| (c.is_control() || directs(c)) && !kept.contains(&c);
    if !text.contains(harms) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if harms(c) { escaped.push_str(&format!("\\u{:04x}", c as u32)) } else { escaped.push(c) }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_list_joins_consecutive_ranks() {
        let listed = [&[3][..], &[0, 1], &[2, 5], &[0, 1, 2, 5], &[0, 1, 3]].map(list_ranks);
        assert_eq!(
            listed,
            ["rank 3", "ranks 0 and 1", "ranks 2 and 5", "ranks 0-2, 5", "ranks 0, 1, 3"]
        );
    }

    #[test]
    fn escape_makes_only_control_characters_visible() {
        let plain = "rank 1 (CPU:1) \u{4e2d}\u{6587}\tä\n  \"next\" line";
        assert!(matches!(escaped(plain), Cow::Borrowed(text) if text == plain));
        assert_eq!(escaped("\u{1b}[2Jx\r\u{7f}\u{9b}31m"), "\\u001b[2Jx\\u000d\\u007f\\u009b31m");
        assert_eq!(escaped("a\u{202e}b\u{2066}c"), "a\\u202eb\\u2066c");
        assert_eq!(escaped_line("a\nddp-mp: b\t"), "a\\u000addp-mp: b\\u0009");
    }
}
