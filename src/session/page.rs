//! The data of the page of `--report`: all that it shows of a run.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use strum::IntoEnumIterator;

use super::Session;
use super::artifacts::ReportFacts;
use super::dealt_samples::dealt_samples;
use super::end_messages::Outcome;
use crate::config::Config;
use crate::error::{Result, escaped_line};
use crate::ffi;
use crate::operation::Operation;
use crate::runtime::{FlightRecorderDump, OpEntry};
use crate::telemetry::report::{Conditions, Curves, Page, Tracks, advice, outside_collectives};
use crate::telemetry::{End, RankEnd, find_straggler};

/// Returns the data of the page of a run that has ended with `outcome`. A value that the run did not reach is null, or
/// an empty list.
pub(super) fn page<'a>(
    session: &Session,
    facts: &ReportFacts,
    curves: Curves,
    outcome: &Outcome,
    dump: &'a FlightRecorderDump,
) -> Result<Page<'a>> {
    let Session { config, joined_launch, data, .. } = session;
    let ReportFacts { first, parameters, buckets, end } = facts;
    let end = end.as_ref();
    let world_size = joined_launch.world_size();
    let steps = steps_of(dump).saturating_sub(first.step);
    let bytes = |bytes: fn(&RankEnd) -> u64| -> Vec<u64> {
        end.into_iter().flat_map(|end| &end.ranks).map(bytes).collect()
    };
    let facts = json!({
        "version": 1,
        "program": config.program.with_version(),
        "command": command(config.program.name),
        "began": date(session.artifacts.began),
        "libtorch": ffi::version(),
        "outcome": outcome,
        "seconds": end.map(|end| end.seconds),
        "steps": end.map(|end| end.steps_now),
        "us_per_step": end.map(|end| end.us_per_step),
        "loss": end.map(|end| end.loss),
        "parameters_hash": end.map(|end| &end.parameters_hash),
        "options": options(config)?,
        "world": {
            "size": world_size,
            "nnodes": joined_launch.nnodes(),
            "backend": session.backend(),
            // Those of this process.
            "devices": dump.ranks.iter().map(|rank| &rank.device).collect::<Vec<_>>(),
        },
        "model": {
            "name": config.model_name(),
            "parameters": parameters,
            "buckets": buckets,
        },
        "samples": dealt_samples(config, data.training.len(), world_size, first, steps)?,
        "traffic": {
            "sent": bytes(|rank| rank.bytes_sent),
            "received": bytes(|rank| rank.bytes_received),
            "collectives": collectives(dump),
        },
        "replicas": end.map(|end| replicas(end, config)),
        // Of a run that has failed, nothing can be concluded.
        "verdict": verdict(end.unwrap_or(&End::default()), &curves, session),
    });
    Ok(Page { facts, curves, timeline: Tracks::new(dump) })
}

/// Returns the hash of each rank's parameters.
fn replicas(end: &End, config: &Config) -> Value {
    let hash = |rank: &RankEnd| format!("{:016x}", rank.replica_hash);
    json!({
        "hashes": end.ranks.iter().map(hash).collect::<Vec<_>>(),
        "equal": end.replicas_equal,
        "checked_every": config.ddp.check_replicas_every,
    })
}

/// The least time, in seconds, that other ranks waited for a straggler to name it in the report.
const MIN_STRAGGLER_SECONDS: f64 = 0.05;

/// Returns the conclusions from the run's times.
fn verdict(end: &End, curves: &Curves, session: &Session) -> Value {
    let Session { config, joined_launch, .. } = session;
    let phases = end.phases();
    let overlaps = !config.is_data_parallel() && end.ranks.len() > 1;
    let straggler = find_straggler(&phases, end.seconds, MIN_STRAGGLER_SECONDS);
    let conditions = Conditions {
        straggler: straggler.as_ref(),
        overlapped: overlaps.then_some(end.statistics.hidden),
        batch_size: config.training.batch_size,
        num_workers: config.data.num_workers,
        losses: curves.losses(),
        lr: config.lr_for(joined_launch.world_size()).0,
    };
    let advice = if end.replicas_equal {
        advice(end, conditions)
    } else {
        vec![
            "First of all find out why the ranks do not hold the same parameters: --check-replicas-every 1 names the \
             step, the rank and the parameter."
                .into(),
        ]
    };
    json!({
        "outside_collectives": outside_collectives(&phases),
        "overlapped": conditions.overlapped,
        "phases": phases,
        "straggler": straggler,
        "advice": advice,
    })
}

/// Returns `time` as a date, at the nearest end of the years 1970 to 9999 if a wrong clock is outside them.
fn date(time: SystemTime) -> String {
    let latest = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    humantime::format_rfc3339_seconds(time.clamp(SystemTime::UNIX_EPOCH, latest)).to_string()
}

/// Returns the command line, quoted so that a shell reads the same arguments.
fn command(program: &str) -> String {
    let quoted = |text: &str| in_shell(text).into_owned();
    let shown = |arg: OsString| {
        let arg = arg.to_string_lossy();
        match arg.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => format!("{flag}={}", quoted(value)),
            _ => quoted(&arg),
        }
    };
    let args = std::env::args_os().skip(1).map(shown);
    [program.to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
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
fn options(config: &Config) -> Result<Vec<(String, String)>> {
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
fn steps_of(dump: &FlightRecorderDump) -> u64 {
    let entries = dump.ranks.first().into_iter().flat_map(|rank| &rank.entries);
    let stepped = |op: &&OpEntry| op.at.operation == Operation::Optimizer && !op.is_open();
    entries.filter(stepped).map(|op| op.at.sequence + 1).max().unwrap_or(0)
}

/// Returns the collectives that the ranks of this process have called.
fn collectives(dump: &FlightRecorderDump) -> Vec<Value> {
    let called = |operation: Operation| {
        let totals = || dump.ranks.iter().map(|rank| rank.totals[operation as usize]);
        totals().any(|totals| totals.calls > 0).then(|| {
            json!({
                "operation": operation.to_string(),
                "calls": totals().map(|totals| totals.calls).collect::<Vec<u64>>(),
                "bytes": totals().map(|totals| totals.bytes).collect::<Vec<u64>>(),
            })
        })
    };
    Operation::iter().filter_map(called).collect()
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
