//! Options that must be the same: wherever a run continues, and in all its processes.

use std::collections::BTreeSet;
use std::sync::Arc;

use clap::Command;
use clap::builder::ValueHint;
use serde_json::{Map, Value};

use super::open_data::SIZES;
use super::option_rules::MayDiffer;
use super::{Config, Invalid, Program, ScheduleKind, flag_name};
use engine::checkpoint::TRAINER;
use engine::data::DatasetSpec;
use engine::error::{Error, Result};

/// The length of a cosine schedule, which spans the whole run. Checkpoints save it with that schedule, and the user
/// gets a note if it changes.
const OF_COSINE: &str = "max_epochs";

/// With this many differences the user most likely forgot `--config`.
const MANY_DIFFERENCES: usize = 3;

/// Returns where the values of the option `key` may differ. `None` if nowhere, and for an option of another version.
fn may_differ(command: &Command, key: &str) -> Option<MayDiffer> {
    command.get_arguments().find(|arg| arg.get_id() == key)?.get::<MayDiffer>().copied()
}

impl Config {
    /// Returns all options with their values. Those without a value are not there.
    pub(crate) fn values(&self) -> Result<Map<String, Value>> {
        let values = serde_json::to_value(self).and_then(serde_json::from_value);
        let mut values: Map<String, Value> = values.map_err(|error| {
            Error::Internal(format!("the options cannot be serialized: {error}"))
        })?;
        values.retain(|key, _| self.program.brings(key).is_none());
        values.extend(self.own.values.clone());
        Ok(values)
    }

    /// Returns the options that a checkpoint saves.
    ///
    /// # Errors
    /// [`Error::Internal`] if an option cannot be written as JSON, which does not happen.
    pub fn options(&self) -> Result<Map<String, Value>> {
        let (mut all, command) = (self.values()?, self.program.command());
        let is_cosine = self.optimization.schedule == ScheduleKind::Cosine;
        all.retain(|key, _| {
            may_differ(&command, key) < Some(MayDiffer::OnResume) || (is_cosine && key == OF_COSINE)
        });
        Ok(all)
    }

    /// Returns the configuration of a run of `program` from the options that its checkpoint saved. Those that it did not
    /// save have their defaults.
    ///
    /// # Errors
    /// [`Error::Input`] if an option is unknown or has a wrong value, because the checkpoint is from another
    /// version; and if it is one that no checkpoint saves, because another program has written it: a file to write to,
    /// for example.
    pub(crate) fn of_saved(program: &Arc<Program>, saved: &Map<String, Value>) -> Result<Self> {
        let command = program.command();
        let options = toml::Table::try_from(saved).map_err(|error| error.to_string());
        let parsed = options.and_then(|options| Self::of_options(program, &command, &options));
        let config = parsed.map_err(|problem| {
            Error::data(format!(
                "it is from another version of {}; use the version that saved it ({problem})",
                program.name
            ))
        })?;
        let written = config.options()?;
        if let Some(key) = saved.keys().find(|key| !written.contains_key(*key)) {
            return Err(Error::data(format!(
                "its {TRAINER} sets {}, which no run saves, so another program has changed it; use a checkpoint that \
                 you trust",
                flag_name(key)
            )));
        }
        let checked = config.validate(&config.changed(&command)?);
        checked.map_err(|Invalid { key, problem }| {
            Error::data(format!("its {TRAINER} sets {}: {problem}", flag_name(&key)))
        })?;
        Ok(config)
    }

    /// Returns the options that must be the same in all processes of a run, with their values. Processes may write to
    /// different paths, but all or none must write.
    ///
    /// # Errors
    /// As [`Config::options`].
    pub fn shared_options(&self) -> Result<Vec<(String, String)>> {
        let mut all = self.values()?;
        all.insert("log_every".into(), self.log_every().into()); // the default, too
        let command = self.program.command();
        let is_shared = |arg: &&clap::Arg| {
            arg.get::<MayDiffer>().is_none_or(|where_to| *where_to < MayDiffer::BetweenProcesses)
        };
        let shared = command.get_arguments().filter(is_shared);
        let text = |arg: &clap::Arg| {
            let key = arg.get_id().as_str();
            let is_path = arg.get_value_hint() == ValueHint::AnyPath;
            let value = match all.get(key)? {
                _ if is_path => "set".into(),
                // Each process may have the files in another folder.
                _ if key == "dataset" => self.data.dataset.names(),
                value => value.to_string(),
            };
            Some((flag_name(key), value))
        };
        Ok(shared.filter_map(text).collect())
    }

    /// Compares this with the options of a checkpoint to resume from. Returns notes on the differences. An option
    /// that the checkpoint lacks is newer than it, and had its default.
    ///
    /// # Errors
    /// [`Error::Input`] that names the options that must not differ, with both values.
    pub fn check_resume(&self, saved: &Map<String, Value>) -> Result<Vec<String>> {
        let mine = self.options()?;
        let mut was = Self::default_of(&self.program).options()?;
        was.extend(saved.clone());
        let saved = &was;
        let mut keys: BTreeSet<&String> = mine.keys().chain(saved.keys()).collect();
        // Older checkpoints lack these keys, and without the schedule they have no effect.
        let is_known = |key: &str| mine.contains_key(key) && saved.contains_key(key);
        keys.retain(|key| *key != OF_COSINE || is_known(key));
        let value = |map: &Map<String, Value>, key: &String| {
            map.get(key).map_or("not set".into(), Value::to_string)
        };
        let differ = |key: &&&String| mine.get(**key) != saved.get(**key);
        let command = self.program.command();
        // The files may have been moved, or are named from another folder.
        let names = |map: &Map<String, Value>| {
            map.get("dataset")?.as_str()?.parse().ok().map(|spec: DatasetSpec| spec.names())
        };
        let is_noted = |key: &&&String| match &key[..] {
            OF_COSINE => true,
            "dataset" => names(saved).is_some_and(|was| names(&mine) == Some(was)),
            key => may_differ(&command, key) == Some(MayDiffer::OnResumeWithNote),
        };
        let (noted, mut wrong): (Vec<&&String>, Vec<&&String>) =
            keys.iter().filter(differ).partition(is_noted);
        if wrong.iter().any(|key| ["dataset", "val_fraction", "block_size"].contains(&&key[..])) {
            wrong.retain(|key| !SIZES.contains(&&key[..])); // the sizes follow from these
        }
        let note = |key: &&String| {
            let (was, is) = (value(saved, key), value(&mine, key));
            let (name, why) = match &key[..] {
                "num_samples" => ("the number of training samples (num_samples)".to_owned(), ""),
                OF_COSINE => (
                    flag_name(key),
                    "; the cosine schedule spans the whole run, so the learning rate changes",
                ),
                key => (flag_name(key), ""),
            };
            format!("{name} was {was} in the checkpoint and is {is} now{why}")
        };
        if !wrong.is_empty() {
            let same = if wrong.len() < MANY_DIFFERENCES { "" } else { " (is --config missing?)" };
            let differences: Vec<String> = wrong.into_iter().map(note).collect();
            return Err(Error::mismatch(format!(
                "this is not the run that was saved: {}; give the same values{same}, or start another run without \
                 --resume",
                differences.join("; ")
            )));
        }
        Ok(noted.into_iter().map(note).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(toml: &str) -> Config {
        Config::resolve(None, &toml.parse().unwrap()).unwrap()
    }

    #[test]
    fn resume_key_missing_in_the_checkpoint_counts_as_default() {
        let all = config("").options().unwrap();
        assert!(all.len() > 20);
        for key in all.keys() {
            let mut older = all.clone();
            older.remove(key);
            assert_eq!(config("").check_resume(&older).unwrap(), [""; 0], "{key}");
        }
        let mut older = all;
        older.remove("exact_mean");
        older.remove("nesterov");
        let error = config("exact_mean = true").check_resume(&older).unwrap_err().to_string();
        let expected = "saved: --exact-mean was false in the checkpoint and is true now; give";
        assert!(error.contains(expected), "{error}");
        // An option that this version does not know.
        older.insert("colour".into(), 1.into());
        let error = config("").check_resume(&older).unwrap_err().to_string();
        assert!(error.contains("--colour was 1 in the checkpoint and is not set now"), "{error}");
    }

    #[test]
    fn resume_other_cosine_length_warns() {
        let cosine = "schedule = \"cosine\"\nmax_epochs";
        let saved = config(&format!("{cosine} = 2")).options().unwrap();
        let told = |toml: &str| config(toml).check_resume(&saved).unwrap();
        assert_eq!(told(&format!("{cosine} = 2")), [""; 0]);
        assert_eq!(
            told(&format!("{cosine} = 3")),
            [
                "--max-epochs was 2 in the checkpoint and is 3 now; the cosine schedule spans the whole run, so the \
              learning rate changes"
            ]
        );
        assert_eq!(
            told("max_epochs = 3"),
            ["--schedule was \"cosine\" in the checkpoint and is \"constant\" now"]
        );
        // The value of a key that the checkpoint lacks is not known.
        let mut older = saved.clone();
        older.remove("max_epochs");
        let now = config(&format!("{cosine} = 3"));
        assert_eq!(now.check_resume(&older).unwrap(), [""; 0]);
    }

    #[test]
    fn resume_moved_data_warns_and_other_data_is_refused() {
        let of = |data: &str| {
            config(&format!(
                "dataset = \"{data}\"\nnum_samples = 9\nin_features = 2\nout_features = 1"
            ))
        };
        let saved = of("npy:a/x.npy,a/y.npy").options().unwrap();
        let moved = of("npy:/b/x.npy,../y.npy").check_resume(&saved).unwrap();
        assert_eq!(
            moved,
            [
                "--dataset was \"npy:a/x.npy,a/y.npy\" in the checkpoint and is \"npy:/b/x.npy,../y.npy\" now"
            ]
        );
        for other in ["npy:a/x.npy,a/z.npy", "safetensors:a/x.npy", "random"] {
            let error = of(other).check_resume(&saved).unwrap_err();
            assert!(error.to_string().contains("--dataset was"), "{error}");
        }
    }

    #[test]
    fn resume_differences_are_refused_or_warned_by_name() {
        let saved = config("").options().unwrap();
        let check = |toml: &str| config(toml).check_resume(&saved);
        assert_eq!(check("max_epochs = 9\nlog_format = \"json\"\ntimeout = 5").unwrap(), [""; 0]);
        let told = check("lr = 0.1\nmax_grad_norm = 2.0").unwrap();
        assert_eq!(
            told,
            [
                "--lr was 0.001 in the checkpoint and is 0.1 now",
                "--max-grad-norm was not set in the checkpoint and is 2.0 now"
            ]
        );
        let error = config("model = \"mlp\"\nactivation = \"tanh\"").check_resume(&saved);
        assert!(
            error.unwrap_err().to_string().contains("--activation was \"relu\" in the checkpoint")
        );
        let error = check("lr = 0.1\nbatch_size = 8\nseed = 1").unwrap_err().to_string();
        let expected = "this is not the run that was saved: --batch-size was 32 in the checkpoint and is 8 now; \
                        --seed was 0 in the checkpoint and is 1 now; give the same";
        assert!(error.starts_with(expected), "{error}");

        // Differences that follow from another one are not named. Many differences have one cause.
        let mut held_back = config("");
        held_back.data.num_samples = Some(3277);
        held_back.data.val_fraction = Some(0.2);
        let error = config("").check_resume(&held_back.options().unwrap()).unwrap_err().to_string();
        let expected = "saved: --val-fraction was 0.2 in the checkpoint and is not set now; give the same values, or";
        assert!(error.contains(expected), "{error}");
        let error = check("num_samples = 9").unwrap_err().to_string();
        let expected = "saved: the number of training samples (num_samples) was 4096 in the checkpoint and is 9 now;";
        assert!(error.contains(expected), "{error}");
        let error = check("model = \"mlp\"\nbatch_size = 8\nseed = 1").unwrap_err().to_string();
        assert!(
            error.contains("; give the same values (is --config missing?), or start"),
            "{error}"
        );
    }
}
