//! The facts about a run that its report shows: options, command line, date, and the ranks' collectives.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;
use strum::IntoEnumIterator;

use crate::config::Config;
use crate::error::{Result, escaped_line};
use crate::operation::Operation;
use crate::runtime::{Entry, FlightRecorderDump, RankRecords};
use crate::telemetry::report::CollectiveTotals;

/// Returns `time` as a date, at the nearest end of the years 1970 to 9999 if a wrong clock is outside them.
pub(super) fn date(time: SystemTime) -> String {
    let latest = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    humantime::format_rfc3339_seconds(time.clamp(SystemTime::UNIX_EPOCH, latest)).to_string()
}

/// Returns the command line, quoted so that a shell reads the same arguments.
pub(super) fn command() -> String {
    let quoted = |text: &str| in_shell(text).into_owned();
    let shown = |arg: OsString| {
        let arg = arg.to_string_lossy();
        match arg.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => format!("{flag}={}", quoted(value)),
            _ => quoted(&arg),
        }
    };
    let args = std::env::args_os().skip(1).map(shown);
    ["ddp-mp".to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
}

/// Returns `text` as one word of a shell, on one line: bash and zsh read line breaks and other control characters in
/// `$''`.
fn in_shell(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return shlex::try_quote(text).unwrap_or(Cow::Borrowed(text)); // fails for a NUL, which no argument has
    }
    let text = text.replace('\\', "\\\\").replace('\'', "\\'");
    Cow::Owned(format!("$'{}'", escaped_line(&text)))
}

/// Returns `path` as a word of a shell that no program takes for a flag.
pub(crate) fn path_in_shell(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_flag = text.starts_with('-');
    in_shell(&if is_flag { Cow::Owned(format!("./{text}")) } else { text }).into_owned()
}

/// Returns all options as text. Those that differ from their default come first.
pub(super) fn options(config: &Config) -> Result<Vec<(String, String)>> {
    let (all, default) = (config.values()?, Config::default().values()?);
    let (given, rest): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(key, value)| default.get(key) != Some(value));
    let text = |(key, value): (String, Value)| match value {
        Value::String(text) => (key, text),
        value => (key, value.to_string()),
    };
    Ok(given.into_iter().chain(rest).map(text).collect())
}

/// Returns the number of steps of the whole run that rank 0 has finished.
pub(super) fn steps_of(dump: &FlightRecorderDump) -> u64 {
    let records = dump.ranks.first().into_iter().flat_map(|rank| &rank.records);
    let stepped = |entry: &&Entry| {
        entry.begin.at.operation == Operation::Optimizer && entry.finished_at.is_some()
    };
    records.filter(stepped).map(|entry| entry.begin.at.sequence + 1).max().unwrap_or(0)
}

/// Returns the collectives that the ranks of this process have called.
pub(super) fn collectives(dump: &FlightRecorderDump) -> Vec<CollectiveTotals> {
    let called = |operation: Operation| {
        let rank_totals = |rank: &RankRecords| {
            let found = rank.totals.iter().find(|(called, _)| *called == operation);
            found.map_or([0, 0], |(_, totals)| *totals)
        };
        let totals: Vec<[u64; 2]> = dump.ranks.iter().map(rank_totals).collect();
        CollectiveTotals {
            operation: operation.to_string(),
            calls: totals.iter().map(|[calls, _]| *calls).collect(),
            bytes: totals.iter().map(|[_, bytes]| *bytes).collect(),
        }
    };
    let all = Operation::iter().map(called);
    all.filter(|called| called.calls.iter().any(|calls| *calls > 0)).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn shell_reads_a_path_as_it_is() {
        for path in ["a b", "-x", "it's $HOME", "a\nb", "\\n'\t\u{9b}\u{202e}", "", "ä"] {
            let word = path_in_shell(Path::new(path));
            assert!(!word.contains('\n'), "{word}");
            let mut bash = Command::new("bash");
            let output =
                bash.env("LC_ALL", "C.UTF-8").args(["-c", &format!("printf %s {word}")]).output();
            let read = String::from_utf8(output.unwrap().stdout).unwrap();
            assert_eq!(read.strip_prefix("./").unwrap_or(&read), path, "{word}");
        }
        assert_eq!(path_in_shell(Path::new("-x")), "./-x");
    }

    #[test]
    fn date_of_a_wrong_clock_is_clamped() {
        let day = Duration::from_secs(86400);
        for (time, text) in [
            (SystemTime::UNIX_EPOCH - day * 400, "1970-01-01T00:00:00Z"),
            (SystemTime::UNIX_EPOCH + day, "1970-01-02T00:00:00Z"),
            (SystemTime::UNIX_EPOCH + day * 366 * 9000, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(date(time), text);
        }
    }
}
