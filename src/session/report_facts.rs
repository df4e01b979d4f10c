//! The facts about a run that its report shows: options, command line, date, and the ranks' collectives.

use std::borrow::Cow;
use std::ffi::OsString;
use std::time::{Duration, SystemTime};

use serde_json::Value;
use strum::IntoEnumIterator;

use crate::config::Config;
use crate::error::Result;
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
    let quoted = |text: &str| shlex::try_quote(text).map_or_else(|_| text.into(), Cow::into_owned);
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
    use super::*;

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
