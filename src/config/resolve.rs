//! Merges defaults, a file and flags into one valid configuration.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Table;

use super::data::SIZES;
use super::{Config, Invalid, option_of_other_name};
use crate::error::{Error, Result};
use crate::files::read_stream;

impl Config {
    /// Returns the configuration of `flags` over `file` over the defaults. `flags` has the same keys as a file.
    ///
    /// # Errors
    /// [`Error::Input`], naming the file or flag, the value and the remedy.
    pub fn resolve(file: Option<&Path>, flags: Table) -> Result<Self> {
        let from_file = file.map(read).transpose()?.unwrap_or_default();
        let mut merged = from_file.clone();
        merged.extend(flags.clone());
        let origin = ValueSource { file: file.map(PathBuf::from), from_file, flags };
        let sizes = SIZES.map(|key| merged.contains_key(key));
        let mut config = Config::deserialize(merged).map_err(|error| {
            let key = origin.flags.keys().find(|key| {
                let one = Table::from_iter([((*key).clone(), origin.flags[*key].clone())]);
                Config::deserialize(one).is_err()
            });
            let flag = key.map_or(String::new(), |key| format!("{}: ", flag_name(key)));
            Error::Input(format!("{flag}{}", which_was_meant(error.message())))
        })?;
        config.leave_sizes_to_the_file(sizes);
        let named =
            |Invalid { key, problem }| Error::Input(format!("{}: {problem}", origin.name(key)));
        config.validate().map_err(named)?;
        config.validate_optimization().map_err(named)?;
        config.validate_strategy().map_err(named)?;
        config.validate_saving().map_err(named)?;
        let defaults = Table::try_from(Config::default()).unwrap_or_default();
        let set = |key: &str| origin.flags.get(key).is_some_and(|it| defaults.get(key) != Some(it));
        config.reject_ineffective_flags(set).map_err(named)?;
        config.check_files(file, 1).map_err(named)?;
        Ok(config)
    }
}

/// The source of each value, for error messages.
struct ValueSource {
    file: Option<PathBuf>,
    from_file: Table,
    flags: Table,
}

impl ValueSource {
    fn name(&self, key: &str) -> String {
        match &self.file {
            Some(file) if !self.flags.contains_key(key) && self.from_file.contains_key(key) => {
                format!("{}: {key}", file.display())
            }
            _ => flag_name(key),
        }
    }
}

pub(super) fn flag_name(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// Reads a file and checks it on its own, so that an error shows its line.
fn read(file: &Path) -> Result<Table> {
    let name = file.display();
    let input = |problem: String| Error::Input(format!("--config {name}: {problem}"));
    let bytes = read_stream(file, LONGEST_FILE).map_err(|error| input(error.to_string()))?;
    let text = str::from_utf8(&bytes).map_err(|error| {
        let line = bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count() + 1;
        let start = bytes[..error.valid_up_to()].iter().rposition(|&byte| byte == b'\n');
        let rest = &bytes[start.map_or(0, |newline| newline + 1)..];
        let shown = rest.split(|&byte| byte == b'\n').next().unwrap_or_default().escape_ascii();
        input(format!("line {line} is not UTF-8, which a TOML file must be: {shown}"))
    })?;
    let wrong = |error: toml::de::Error| {
        Error::Input(format!("--config {name}: {}", which_was_meant(error.to_string().trim_end())))
    };
    toml::from_str::<Config>(text).map_err(wrong)?;
    let table: Table = toml::from_str(text).map_err(wrong)?;
    Ok(table.into_iter().map(|(key, value)| (key.replace('-', "_"), value)).collect())
}

/// The size limit of a file, in bytes.
const LONGEST_FILE: u64 = 1 << 20;

/// Rewrites an error of serde's: states the expected type in words. For an unknown key, suggests the closest one
/// instead of listing all.
fn which_was_meant(message: &str) -> String {
    const TYPES: [(&str, &str); 7] = [
        ("expected usize", "expected a whole number from 0"),
        ("expected u64", "expected a whole number from 0"),
        ("expected u16", "expected a whole number from 0 to 65535"),
        ("expected i64", "expected a whole number"),
        ("expected f64", "expected a number"),
        ("floating point `", "number `"),
        ("expected path string", "expected a path as a string"),
    ];
    let message =
        &TYPES.iter().fold(message.to_owned(), |text, (rust, words)| text.replace(rust, words));
    const UNKNOWN: &str = "unknown field `";
    let parts = || {
        let (before, rest) = message.split_once(UNKNOWN)?;
        let (unknown, known) = rest.split_once("`, expected one of ")?;
        Some((before, unknown, known))
    };
    let Some((before, unknown, known)) = parts() else { return message.into() };
    // Both spellings of a key are in the list.
    let known = known.split(", ").map(|key| key.trim_matches('`')).filter(|key| !key.contains('-'));
    let unknown_key = unknown.replace('-', "_");
    let likeness = |key| {
        let is_short = initials(&unknown_key) == key || initials(key) == unknown_key;
        let likeness = strsim::normalized_damerau_levenshtein(&unknown_key, key);
        (if is_short { 1.0 } else { likeness }, key)
    };
    let known: Vec<&str> = known.collect();
    let is_key = |option: &str| known.contains(&option.replace('-', "_").as_str());
    let meant = option_of_other_name(&unknown.replace('_', "-"), is_key);
    let near = known.iter().copied().map(likeness).max_by(|a, b| a.0.total_cmp(&b.0));
    let remedy = match (meant, near) {
        (Some(option), _) => {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let value = if value.is_empty() { String::new() } else { format!(" = \"{value}\"") };
            format!("did you mean `{}{value}`?", key.replace('-', "_"))
        }
        (None, Some((likeness, key))) if likeness > 0.6 => format!("did you mean `{key}`?"),
        _ => "keys are the flags of ddp-mp --help, with _ for -".into(),
    };
    format!("{before}{UNKNOWN}{unknown}`: {remedy}")
}

/// Returns the initials of a key: `lr` for `learning_rate`.
fn initials(key: &str) -> String {
    key.split('_').filter_map(|word| word.chars().next()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::launch::Nproc;

    fn flags(toml: &str) -> Table {
        toml.parse().unwrap()
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        fs::write(&file, "max-epochs = 3\nbatch_size = 16\ntimeout = \"90s\"\n").unwrap();
        let config = Config::resolve(Some(&file), flags("batch_size = 8")).unwrap();
        let expected = Config {
            max_epochs: 3,
            batch_size: 8,
            timeout: Duration::from_secs(90),
            ..Config::default()
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn a_configuration_reads_what_it_prints() {
        let given = "model = \"mlp\"\nhidden = [3, 4]\nnproc_per_node = 3\ntimeout = \"1m 30s\"\n\
                     inject_fault = \"stall:rank=1,at=step,step=4\"\nlog_format = \"json\"";
        let config = Config::resolve(None, flags(given)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        fs::write(&file, config.to_string()).unwrap();
        assert_eq!(Config::resolve(Some(&file), Table::new()).unwrap(), config);
        assert_eq!(config.nproc_per_node, Nproc::Count(3));
    }

    #[test]
    fn the_key_that_was_meant_is_named() {
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
                "unknown field `train`: keys are the flags of ddp-mp --help, with _ for -",
            ),
            (
                "xyzzy = 8",
                "unknown field `xyzzy`: keys are the flags of ddp-mp --help, with _ for -",
            ),
            ("model = \"mlq\"", "unknown variant `mlq`, expected one of `linear`, `mlp`, `cnn`"),
        ] {
            fs::write(&file, text).unwrap();
            let error = Config::resolve(Some(&file), Table::new()).unwrap_err().to_string();
            assert!(error.ends_with(remedy), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_no_text_is_refused_with_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        fs::write(&file, b"lr = 0.1\ncheckpoint_dir = \"r\xffn\"\n").unwrap();
        let error = Config::resolve(Some(&file), Table::new()).unwrap_err().to_string();
        let expected = "run.toml: line 2 is not UTF-8, which a TOML file must be: checkpoint_dir = \\\"r\\xffn\\\"";
        assert!(error.ends_with(expected), "{error}");
    }

    #[test]
    fn a_value_of_another_type_is_refused_in_words() {
        for (given, complaint) in [
            (
                "batch_size = 1.5",
                "--batch-size: invalid type: number `1.5`, expected a whole number from 0",
            ),
            (
                "max_epochs = \"x\"",
                "--max-epochs: invalid type: string \"x\", expected a whole number from 0",
            ),
            ("lr = \"x\"", "--lr: invalid type: string \"x\", expected a number"),
            ("hidden = [1.5]", "--hidden: invalid type: number `1.5`, expected a whole number"),
        ] {
            let error = Config::resolve(None, flags(given)).unwrap_err().to_string();
            assert!(error.starts_with(complaint), "{given} gave {error:?}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (given, complaint) in [
            ("batch_size = 0", "--batch-size: 0 is too small; use 1 or more"),
            ("max_epochs = 0", "--max-epochs: 0 is too small"),
            ("lr = -0.1", "--lr: -0.1 is not a learning rate"),
            ("lr = nan", "--lr: NaN is not a learning rate"),
            ("bucket_cap_mb = 0.0", "--bucket-cap-mb: 0 is not a bucket size"),
            (
                "bucket_cap_mb = 1e300",
                "--bucket-cap-mb: 1e300 is not a bucket size; use a number above 0, up to 1048576",
            ),
            ("batch_size = 9223372036854775807", "--batch-size: 9223372036854775807 is too large"),
            (
                "grad_accum_steps = 2147483648",
                "--grad-accum-steps: 2147483648 is too large; use 2147483647 or less",
            ),
            (
                "num_workers = 2\nprefetch_factor = 1025",
                "--prefetch-factor: 1025 is too large; use 1024 or less",
            ),
            (
                "num_samples = 9223372036854775807",
                "--num-samples: 9223372036854775807 random samples",
            ),
            ("hidden = [8, 0]", "--hidden: 0 is too small"),
            ("hidden = [8]", "--hidden: a linear model has no hidden layers; use model mlp"),
            ("hidden = []", "--hidden: an mlp needs"),
            ("channels = [8]", "--channels: a linear model has no channels; use model cnn"),
            ("activation = \"tanh\"", "--activation: a linear model has no activation"),
            ("activation = \"swish\"", "--activation: unknown variant"),
            (
                "model = \"mlp\"\nsync_batch_norm = true",
                "--sync-batch-norm: an mlp has no batch norm",
            ),
            (
                "model = \"cnn\"\nin_features = 16\nhidden = [8]",
                "--hidden: a cnn has no hidden layers",
            ),
            ("model = \"cnn\"", "--in-features: 20 is not a square number"),
            ("model = \"cnn\"\nin_features = 9\nchannels = []", "--channels: a cnn needs"),
            ("model = \"cnn\"\nin_features = 9\nchannels = [0]", "--channels: 0 is too small"),
            (
                "model = \"cnn\"\nin_features = 9",
                "--channels: 2 stages leave nothing of images of 3 x 3",
            ),
            ("timeout = \"soon\"", "--timeout: \"soon\" is not a duration"),
            ("nnodes = 0", "--nnodes: 0 is too small"),
            ("node_rank = -1", "--node-rank: invalid value: integer `-1`"),
            ("master_port = 0", "--master-port: 0 is too small"),
            ("master_port = 70000", "--master-port: invalid value: integer `70000`"),
            ("launch = \"ray\"", "--launch: unknown variant `ray`"),
            ("timeout = 0", "--timeout: 0 leaves no time"),
            ("nproc_per_node = 0", "--nproc-per-node: \"0\" is not a number of ranks"),
            ("loss = \"cross-entropy\"", "--loss: cross-entropy over one column is always 0"),
            (
                "inject_fault = \"melt:rank=0,at=step\"",
                "--inject-fault: KIND \"melt\" is not one of",
            ),
            ("colour = 1", "--colour: unknown field"),
        ] {
            let error = Config::resolve(None, flags(given)).unwrap_err().to_string();
            assert!(error.starts_with(complaint), "{given} gave {error:?}");
        }
    }

    #[test]
    fn what_the_ranks_cannot_do_is_refused() {
        let config = |toml| Config::resolve(None, flags(toml)).unwrap();
        let error = |toml, world| config(toml).validate_for(world).unwrap_err().to_string();
        assert!(error("num_samples = 3", 4).starts_with("4 ranks for 3 samples"));
        assert!(config("num_samples = 4").validate_for(4).is_ok());
        let fault = "inject_fault = \"error:rank=2,at=init\"";
        assert!(error(fault, 2).contains("there is no rank 2"));
        assert!(config(fault).validate_for(3).is_ok());
        // ceil(ceil(4096 / 3) / 32) = 43 steps.
        assert!(error("inject_fault = \"error:rank=0,at=step,step=43\"", 3).contains("no step 43"));
        assert!(config("inject_fault = \"error:rank=0,at=step,step=42\"").validate_for(3).is_ok());
    }
}
