//! What the report of a run shows of its options.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::run_views::Opening;
use crate::config::Config;
use engine::error::{Result, escaped_line};
use views::{Dealing, ReportFacts};

/// Returns what the report of a run shows of its options.
pub(super) fn report_facts(run: &Opening<'_>) -> Result<ReportFacts> {
    let Opening { config, joined_launch, data, backend, .. } = *run;
    let world_size = joined_launch.world_size();
    Ok(ReportFacts {
        program: config.program.with_version(),
        command: command(config.program.name),
        began: date(SystemTime::now()),
        options: options(config)?,
        nnodes: joined_launch.nnodes(),
        backend: backend.to_owned(),
        model: config.model_name(),
        dealing: dealing(config, data.training.len(), world_size)?,
        overlaps: !config.is_data_parallel() && world_size > 1,
        checked_every: config.ddp.check_replicas_every,
        num_workers: config.data.num_workers,
        lr: config.lr_for(world_size).0,
    })
}

/// Returns how a run deals the samples of a data set of `dataset` samples.
fn dealing(config: &Config, dataset: usize, world_size: usize) -> Result<Dealing> {
    let sampler = |rank| config.sampler(dataset, world_size, rank);
    Ok(Dealing {
        samplers: (0..world_size).map(sampler).collect::<Result<_>>()?,
        dataset,
        batch_size: config.training.batch_size,
        accumulate: config.ddp.grad_accum_steps,
        drop_last_batch: config.data.drop_last_batch,
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

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use tch::Device;

    use super::*;
    use engine::data::{DataLoader, Targets, TensorDataset};

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

    /// Returns the samples of all steps, by epoch and rank, as the loaders of a run deal them.
    fn trained(config: &Config, samples: usize, ranks: usize) -> Vec<Vec<Vec<usize>>> {
        let data =
            Arc::new(TensorDataset::random(samples as i64, 1, Targets::Values(1), 0).unwrap());
        let loader = |rank| {
            let sampler = config.sampler(samples, ranks, rank).unwrap();
            let loader =
                DataLoader::new(data.clone(), sampler, config.training.batch_size, Device::Cpu);
            let loader = loader.unwrap().drop_last(config.data.drop_last_batch);
            loader.in_step(config.ddp.exact_mean)
        };
        let rank_samples = |rank, epoch| {
            let loader = loader(rank);
            let batches = loader.num_batches();
            let steps = batches.div_ceil(config.ddp.grad_accum_steps as usize) as u64;
            assert_eq!(steps, config.steps_per_epoch(ranks), "{samples} on {ranks}: {config}");
            loader.samples(epoch, 0, 0, batches).unwrap()
        };
        let epoch_samples = |epoch| {
            let all: Vec<Vec<usize>> = (0..ranks).map(|rank| rank_samples(rank, epoch)).collect();
            let loader = loader(0);
            let dealt = loader.dealt_in(0, loader.num_batches());
            let total = all.iter().map(Vec::len).sum::<usize>();
            assert!(dealt.is_none_or(|dealt| dealt == total), "{dealt:?} {total}: {config}");
            all
        };
        (0..config.training.max_epochs).map(epoch_samples).collect()
    }

    #[test]
    fn listed_samples_are_those_trained_on() {
        const FLAGS: [[bool; 3]; 8] = [
            [false, false, false],
            [true, false, false],
            [false, true, false],
            [false, false, true],
            [true, false, true],
            [false, true, true],
            [true, true, false],
            [true, true, true],
        ];
        for [drop_last, exact_mean, drop_last_batch] in FLAGS {
            for (samples, ranks, accumulate) in
                [(31, 2, 1), (32, 2, 1), (33, 2, 3), (31, 3, 2), (50, 3, 1), (16, 1, 1)]
            {
                let mut config = Config::default();
                (config.training.max_epochs, config.training.batch_size) = (2, 8);
                (config.ddp.grad_accum_steps, config.ddp.exact_mean) = (accumulate, exact_mean);
                config.data.num_samples = Some(samples as i64);
                (config.data.drop_last, config.data.drop_last_batch) = (drop_last, drop_last_batch);
                let expected = trained(&config, samples, ranks);
                let steps = config.steps(ranks);
                let listed = dealing(&config, samples, ranks).unwrap().deal(0, 0, steps).unwrap();
                let listed: Vec<Vec<Vec<usize>>> =
                    listed.epochs.into_iter().map(|epoch| epoch.ranks).collect();
                assert_eq!(listed, expected, "{samples} on {ranks} ranks: {config}");
            }
        }
    }
}
