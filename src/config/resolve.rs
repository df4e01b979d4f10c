//! Merges defaults, a file and flags into one valid configuration.

use std::path::Path;
use std::sync::Arc;

use clap::{Arg, Command};
use toml::Table;

use super::file::{message, option, read, read_defaults, to_arg};
use super::option_rules::{Conflict, OnlyIf};
use super::origins::Origins;
use super::{Config, Invalid, Program};
use engine::error::{Error, Result};

impl Config {
    /// Returns the configuration of `flags` over `file` over the defaults. `flags` has the keys of a file, with `_`.
    ///
    /// # Errors
    /// [`Error::Input`], naming the file or flag, the value and the remedy.
    pub fn resolve(file: Option<&Path>, flags: &Table) -> Result<Self> {
        Self::resolve_for(&Arc::default(), file, flags)
    }

    /// Returns the configuration of `program` as [`resolve`](Self::resolve) does, over the defaults of the program.
    pub(crate) fn resolve_for(
        program: &Arc<Program>,
        file: Option<&Path>,
        flags: &Table,
    ) -> Result<Self> {
        let command = program.command();
        let of_program = read_defaults(program, &command)?;
        let in_file = file.map(|file| read(file, &command, flags)).transpose()?;
        let in_file = in_file.unwrap_or_default();
        let mut merged = of_program.clone();
        merged.extend(in_file.clone());
        merged.extend(flags.clone());
        let parsed = Self::of_options(program, &command, &merged).map_err(Error::usage)?;
        let file_name = file.map(Path::to_owned);
        let origins = Origins { file: file_name, of_program, in_file, flags: flags.clone() };
        let config = Self { origins, ..parsed }.leaving_sizes_to_own_data(&merged);
        let named = |invalid: Invalid| Error::usage(config.explained(invalid));
        let changed = config.changed(&command)?;
        config.validate(&changed).map_err(named)?;
        let no_effect = |arg: &Arg| {
            let key = arg.get_id().as_str();
            let rule = arg.get::<OnlyIf>().filter(|OnlyIf(has_effect, _)| !has_effect(&config));
            let problem = rule.map(|OnlyIf(_, problem)| (*problem).to_owned());
            problem.or_else(|| config.needs_other_model(key)).filter(|_| flags.contains_key(key))
        };
        refuse(&changed, no_effect).map_err(named)?;
        config.check_files(file, 1)?;
        Ok(config)
    }

    /// Returns the configuration of `program` with `options`, over the defaults.
    ///
    /// # Errors
    /// An explanation for the user.
    pub(super) fn of_options(
        program: &Arc<Program>,
        command: &Command,
        options: &Table,
    ) -> Result<Self, String> {
        let (mut ours, mut own) = (Vec::new(), Vec::new());
        for (key, value) in options {
            let Some(text) = to_arg(option(command, key)?, value)? else { continue };
            if program.owns(key) { &mut own } else { &mut ours }.push(text);
        }
        let parsed = Self::parse(ours).map_err(|error| message(&error))?;
        let own = program.parse_own(own).map_err(|error| message(&error))?;
        Ok(Self { own, program: program.clone(), ..parsed })
    }

    /// Returns the options of `command` that have another value than their default.
    ///
    /// # Errors
    /// As [`Config::options`].
    pub(super) fn changed<'a>(&self, command: &'a Command) -> Result<Vec<&'a Arg>> {
        let (mine, default) = (self.values()?, Self::default_of(&self.program).values()?);
        let is_changed = |arg: &&Arg| {
            let key = arg.get_id().as_str();
            mine.get(key) != default.get(key)
        };
        Ok(command.get_arguments().filter(is_changed).collect())
    }

    /// Checks the options `changed` with the other values, and the model for this machine's memory.
    pub(super) fn validate(&self, changed: &[&Arg]) -> Result<(), Invalid> {
        refuse(changed, |arg| arg.get::<Conflict>().and_then(|Conflict(check)| check(self)))?;
        self.validate_model()
    }
}

/// Refuses the first of `options` that has a `problem`.
fn refuse(options: &[&Arg], problem: impl Fn(&Arg) -> Option<String>) -> Result<(), Invalid> {
    options.iter().try_for_each(|arg| match problem(arg) {
        Some(problem) => Err(Invalid { key: arg.get_id().to_string(), problem }),
        None => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::config::Origin;
    use engine::launch::Nproc;

    fn flags(toml: &str) -> Table {
        toml.parse().unwrap()
    }

    #[test]
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        fs::write(&file, "max-epochs = 3\nbatch_size = 16\ntimeout = \"90s\"\n").unwrap();
        let config = Config::resolve(Some(&file), &flags("batch_size = 8")).unwrap();
        let mut expected = Config::default();
        expected.training.max_epochs = 3;
        expected.training.batch_size = 8;
        expected.launch.timeout = Duration::from_secs(90);
        assert_eq!(config, expected);
    }

    #[test]
    fn origin_of_each_value_is_known_and_errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        let of_file = "max_epochs = 1\nwarmup_steps = 200\nval-fraction = 0.0001\nlr = 0.5\n";
        fs::write(&file, of_file).unwrap();
        let config = Config::resolve(Some(&file), &flags("lr = 0.1")).unwrap();
        let origin = |key: &str| {
            let options = config.values_with_origins().unwrap();
            options.into_iter().find(|option| option.key == key).unwrap().origin
        };
        assert_eq!(origin("lr"), Origin::Flag);
        assert_eq!(origin("val_fraction"), Origin::File(&file));
        assert_eq!(origin("batch_size"), Origin::Default);
        let named = |key: &str| format!("{}: {key}: ", file.display());
        let error = config.validate_for(1).unwrap_err().to_string();
        assert!(error.starts_with(&named("warmup_steps")), "{error}");
        let error = config.clone().open_data(0).unwrap_err().to_string();
        assert!(error.starts_with(&named("val_fraction")), "{error}");
        let config = Config::resolve(Some(&file), &flags("warmup_steps = 300")).unwrap();
        let error = config.validate_for(1).unwrap_err().to_string();
        assert!(error.starts_with("--warmup-steps: a warm-up of 300 steps"), "{error}");
    }

    #[test]
    fn config_display_parses_back_to_the_same_config() {
        let given = "model = \"mlp\"\nhidden = [3, 4]\nnproc_per_node = 3\ntimeout = \"1m 30s\"\n\
                     inject_fault = \"stall:rank=1,at=step,step=4\"\nlog_format = \"json\"";
        let config = Config::resolve(None, &flags(given)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        fs::write(&file, config.to_string()).unwrap();
        assert_eq!(Config::resolve(Some(&file), &Table::new()).unwrap(), config);
        assert_eq!(config.launch.nproc_per_node, Nproc::Count(3));
    }

    #[test]
    fn wrong_type_error_states_the_expected_type() {
        for (given, complaint) in [
            (
                "batch_size = 1.5",
                "invalid value '1.5' for '--batch-size <N>': expected a whole number from 1",
            ),
            (
                "max_epochs = \"x\"",
                "invalid value 'x' for '--max-epochs <N>': expected a whole number, 1 or more",
            ),
            (
                "seed = 1.0",
                "invalid value '1.0' for '--seed <N>': expected a whole number, 0 or more; write 1",
            ),
            ("lr = \"x\"", "invalid value 'x' for '--lr <X>': expected a number from 0"),
            ("lr = true", "--lr: true is of the wrong type; expected a text or a number"),
            ("lr = [1]", "--lr: [1] is of the wrong type; expected a text or a number"),
            ("no_shuffle = 1", "--no-shuffle: 1 is of the wrong type; expected true or false"),
            ("hidden = { a = 1 }", "--hidden: { a = 1 } is of the wrong type; expected a list"),
            (
                "hidden = [1.5]",
                "invalid value '1.5' for '--hidden <N,...>': expected a whole number",
            ),
        ] {
            let error = Config::resolve(None, &flags(given)).unwrap_err().to_string();
            assert!(error.starts_with(complaint), "{given} gave {error:?}");
        }
    }

    /// Options with an invalid value, and the beginning of the error.
    const INVALID: &[(&str, &str)] = &[
        (
            "batch_size = 0",
            "invalid value '0' for '--batch-size <N>': expected a whole number from 1 to 2147483647",
        ),
        (
            "max_epochs = 0",
            "invalid value '0' for '--max-epochs <N>': expected a whole number, 1 or more",
        ),
        ("lr = -0.1", "invalid value '-0.1' for '--lr <X>': expected a number from 0 to 3.4e38"),
        (
            "bucket_cap_mb = 0.0",
            "invalid value '0.0' for '--bucket-cap-mb <MIB>': expected a number above 0 and at most 1048576",
        ),
        (
            "bucket_cap_mb = 1e300",
            "invalid value '1e300' for '--bucket-cap-mb <MIB>': expected a number above 0 and at most 1048576",
        ),
        (
            "batch_size = 9223372036854775807",
            "invalid value '9223372036854775807' for '--batch-size <N>': expected a whole number from 1 to 2147483647",
        ),
        (
            "grad_accum_steps = 2147483648",
            "invalid value '2147483648' for '--grad-accum-steps <N>': expected a whole number from 1 to 2147483647",
        ),
        (
            "num_workers = 2\nprefetch_factor = 1025",
            "invalid value '1025' for '--prefetch-factor <N>': expected a whole number from 1 to 1024",
        ),
        ("num_samples = 9223372036854775807", "--num-samples: 9223372036854775807 random samples"),
        (
            "hidden = [8, 0]",
            "invalid value '0' for '--hidden <N,...>': expected a whole number, 1 or more",
        ),
        ("hidden = [8]", "--hidden: applies only to an mlp; add --model mlp, or remove it"),
        (
            "hidden = []",
            "invalid value '' for '--hidden <N,...>': expected a whole number, 1 or more",
        ),
        ("channels = [8]", "--channels: applies only to a cnn; add --model cnn, or remove it"),
        (
            "activation = \"tanh\"",
            "--activation: applies only to an mlp or cnn; add --model mlp or cnn, or remove it",
        ),
        (
            "activation = \"swish\"",
            "invalid value 'swish' for '--activation <NAME>'\n  [possible values: relu",
        ),
        (
            "model = \"mlp\"\nsync_batch_norm = true",
            "--sync-batch-norm: applies only to a cnn; add --model cnn, or remove it",
        ),
        ("model = \"cnn\"\nin_features = 16\nhidden = [8]", "--hidden: applies only to an mlp"),
        ("model = \"cnn\"", "--in-features: 20 is not a square number"),
        (
            "model = \"cnn\"\nin_features = 9\nchannels = []",
            "invalid value '' for '--channels <N,...>': expected a whole number, 1 or more",
        ),
        (
            "model = \"cnn\"\nin_features = 9\nchannels = [0]",
            "invalid value '0' for '--channels <N,...>': expected a whole number, 1 or more",
        ),
        (
            "model = \"cnn\"\nin_features = 9",
            "--channels: 2 stages leave nothing of images of 3 x 3",
        ),
        ("timeout = \"soon\"", "invalid value 'soon' for '--timeout <TIME>': expected a duration"),
        ("nnodes = 0", "invalid value '0' for '--nnodes <N>': expected a whole number, 1 or more"),
        (
            "node_rank = -1",
            "invalid value '-1' for '--node-rank <N>': expected a whole number, 0 or more",
        ),
        (
            "master_port = 0",
            "invalid value '0' for '--master-port <PORT>': expected a whole number from 1 to 65535",
        ),
        (
            "master_port = 70000",
            "invalid value '70000' for '--master-port <PORT>': expected a whole number from 1 to 65535",
        ),
        (
            "launch = \"ray\"",
            "invalid value 'ray' for '--launch <NAME>'\n  [possible values: auto, local",
        ),
        ("timeout = 0", "invalid value '0' for '--timeout <TIME>': expected a duration above 0"),
        (
            "nproc_per_node = 0",
            "invalid value '0' for '--nproc-per-node <auto|gpu|cpu|N>': \"0\" is not a number of ranks",
        ),
        ("loss = \"cross-entropy\"", "--loss: cross-entropy over one column is always 0"),
        (
            "inject_fault = \"melt:rank=0,at=step\"",
            "invalid value 'melt:rank=0,at=step' for '--inject-fault <KIND:rank=R,at=STAGE[,step=N]>': \"melt\" is wrong; write KIND:rank=R,\
             at=STAGE[,step=N][,in=PLACE]. KIND: error, ",
        ),
        ("resume = \"\"", "a value is required for '--resume <auto|PATH>' but none was supplied"),
        ("colour = 1", "unknown field `colour`"),
    ];

    #[test]
    fn invalid_values_are_refused_with_the_flag() {
        for &(given, complaint) in INVALID {
            let error = Config::resolve(None, &flags(given)).unwrap_err().to_string();
            assert!(error.starts_with(complaint), "{given} gave {error:?}");
        }
    }

    #[test]
    fn values_impossible_for_the_world_size_are_refused() {
        let config = |toml| Config::resolve(None, &flags(toml)).unwrap();
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
