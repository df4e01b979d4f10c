//! The checkpoint keys: when to save, what to resume from, and which options may differ on resume.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::data::SIZES;
use super::{CommHookKind, Config, Invalid, ScheduleKind, StrategyKind, flag_name};
use crate::error::{Error, Result};
use crate::trainer::{Amp, SaveEvery};

/// Keys that may differ on resume: they do not change what is trained, only how far it runs or on what.
const RESUME_IGNORES: [&str; 42] = [
    "patience",
    "skip_nonfinite",
    "check_replicas_every",
    "tensorboard",
    "metrics",
    "trace",
    "report",
    "log_every",
    "val_every",
    "num_workers",
    "prefetch_factor",
    "max_epochs",
    "max_steps",
    "max_seconds",
    "max_restarts",
    "nproc_per_node",
    "spawn",
    "launch",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "backend",
    "bucket_cap_mb",
    "no_overlap",
    "find_unused_parameters",
    "static_graph",
    "no_broadcast_buffers",
    "timeout",
    "grace_period",
    "stall_warning",
    "log_format",
    "explain",
    "language",
    "check_collectives",
    "inject_fault",
    "checkpoint_dir",
    "save_every",
    "save_every_epochs",
    "keep_last",
    "resume",
    "init_from",
];

/// Keys that may differ between the processes of a run. They do not change the result, or only rank 0's value counts.
const PER_PROCESS: [&str; 23] = [
    "tensorboard",
    "metrics",
    "num_workers",
    "prefetch_factor",
    "max_seconds",
    "max_restarts",
    "nproc_per_node",
    "spawn",
    "launch",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "backend", // the backend that it selects is compared
    "timeout",
    "grace_period",
    "stall_warning",
    "log_format",
    "language",
    "inject_fault",
    "keep_last",
    "resume",
    "init_from",
];

/// Keys that users change on purpose on resume; the user gets a note. A change of any other key is a mistake.
const RESUME_WARNS: [&str; 14] = [
    "lr",
    "weight_decay",
    "no_decay_on_bias_and_norm",
    "beta1",
    "beta2",
    "eps",
    "schedule",
    "schedule_by",
    "milestones",
    "gamma",
    "eta_min",
    "warmup_steps",
    "scale_lr",
    "max_grad_norm",
];

/// Keys that matter only to a cosine schedule, which spans the whole run. Checkpoints save them with that schedule,
/// and the user gets a note if they change.
const OF_COSINE: [&str; 1] = ["max_epochs"];

/// With this many differences the user most likely forgot `--config`.
const MANY_DIFFERENCES: usize = 3;

fn is_noted(key: &str) -> bool {
    RESUME_WARNS.contains(&key) || OF_COSINE.contains(&key)
}

impl Config {
    /// Returns how often to save.
    pub fn save_every(&self) -> SaveEvery {
        let by_default = self.save_every.is_none().then_some(1);
        SaveEvery { steps: self.save_every, epochs: self.save_every_epochs.or(by_default) }
    }

    /// Returns the path that `--resume` names. `best`, `latest` and `step-...` are in the folder of the run, if it
    /// has one. `None` for `auto`, and without `--resume`.
    pub fn resume_path(&self) -> Option<PathBuf> {
        let path =
            self.resume.as_deref().filter(|it| *it != "auto" || self.checkpoint_dir.is_none())?;
        let is_name = ["best", "latest"].contains(&path) || path.starts_with("step-");
        Some(match &self.checkpoint_dir {
            Some(dir) if is_name && !path.contains('/') => dir.join(path),
            _ => path.into(),
        })
    }

    /// Returns the options that a checkpoint saves.
    ///
    /// # Errors
    /// [`Error::Input`] if an option cannot be written as JSON, which does not happen.
    pub fn options(&self) -> Result<Map<String, Value>> {
        let all = serde_json::to_value(self).map_err(|error| Error::Input(error.to_string()))?;
        let Value::Object(mut all) = all else { return Ok(Map::new()) };
        let is_cosine = self.schedule == ScheduleKind::Cosine;
        let is_kept =
            |key: &str| !RESUME_IGNORES.contains(&key) || (is_cosine && OF_COSINE.contains(&key));
        all.retain(|key, _| is_kept(key));
        Ok(all)
    }

    /// Returns the options that must be the same in all processes of a run, with their values. Processes may write to
    /// different paths, but all or none must write.
    ///
    /// # Errors
    /// As [`Config::options`].
    pub fn shared_options(&self) -> Result<Vec<(String, String)>> {
        let all = serde_json::to_value(self).map_err(|error| Error::Input(error.to_string()))?;
        let Value::Object(mut all) = all else { return Ok(Vec::new()) };
        all.insert("log_every".into(), self.log_every().into()); // the default, too
        let shared = all.into_iter().filter(|(key, _)| !PER_PROCESS.contains(&&key[..]));
        let text = |(key, value): (String, Value)| match &key[..] {
            "checkpoint_dir" | "trace" | "report" => (flag_name(&key), "set".into()),
            _ => (flag_name(&key), value.to_string()),
        };
        Ok(shared.map(text).collect())
    }

    /// Compares this with the options of a checkpoint to resume from. Returns notes on the differences. An option
    /// that the checkpoint lacks is newer than it, and had its default.
    ///
    /// # Errors
    /// [`Error::Input`] that names the options that must not differ, with both values.
    pub fn check_resume(&self, saved: &Map<String, Value>) -> Result<Vec<String>> {
        let mine = self.options()?;
        let mut was = Self::default().options()?;
        was.extend(saved.clone());
        let saved = &was;
        let mut keys: Vec<&String> = mine.keys().chain(saved.keys()).collect();
        keys.sort();
        keys.dedup();
        // Older checkpoints lack these keys, and without the schedule they have no effect.
        let is_known = |key: &str| mine.contains_key(key) && saved.contains_key(key);
        keys.retain(|key| !OF_COSINE.contains(&&key[..]) || is_known(key));
        let value = |map: &Map<String, Value>, key: &String| {
            map.get(key).map_or("not set".into(), Value::to_string)
        };
        let differ = |key: &&&String| mine.get(**key) != saved.get(**key);
        let (noted, mut wrong): (Vec<&&String>, Vec<&&String>) =
            keys.iter().filter(differ).partition(|key| is_noted(key));
        if wrong.iter().any(|key| ["dataset", "val_fraction"].contains(&&key[..])) {
            wrong.retain(|key| !SIZES.contains(&&key[..])); // the sizes follow from these
        }
        let tell = |key: &&String| {
            let (was, is) = (value(saved, key), value(&mine, key));
            let name = match &key[..] {
                "num_samples" => "the number of training samples (num_samples)".into(),
                key => flag_name(key),
            };
            let so = match &key[..] {
                key if OF_COSINE.contains(&key) => {
                    "; the cosine schedule spans the whole run, so the learning rate changes"
                }
                _ => "",
            };
            format!("{name} was {was} in the checkpoint and is {is} now{so}")
        };
        if !wrong.is_empty() {
            let same = if wrong.len() < MANY_DIFFERENCES { "" } else { " (is --config missing?)" };
            let told: Vec<String> = wrong.into_iter().map(tell).collect();
            return Err(Error::Input(format!(
                "this is not the run that was saved: {}; give the same values{same}, or start another run without \
                 --resume",
                told.join("; ")
            )));
        }
        Ok(noted.into_iter().map(tell).collect())
    }

    pub(super) fn validate_saving(&self) -> Result<(), Invalid> {
        let refuse = |key, problem: &str| Err(Invalid { key, problem: problem.into() });
        let counts = [
            ("max_steps", self.max_steps),
            ("save_every", self.save_every),
            ("save_every_epochs", self.save_every_epochs),
            ("keep_last", Some(self.keep_last)),
            ("patience", self.patience),
        ];
        for (key, count) in counts {
            if count == Some(0) {
                return refuse(key, "0 is too small; use 1 or more");
            }
        }
        if self.max_seconds.is_some_and(|time| time.is_zero()) {
            return refuse("max_seconds", "0 leaves no time; use for example 90, 30s or 10m");
        }
        if self.init_from.is_some() && self.resume.as_deref().is_some_and(|it| it != "auto") {
            return refuse(
                "init_from",
                "a run that is resumed has its own parameters; leave out one of the two",
            );
        }
        if self.check_replicas_every.is_some() && self.strategy == StrategyKind::Dp {
            return refuse(
                "check_replicas_every",
                "needs --strategy ddp: with dp rank 0 alone has the parameters",
            );
        }
        if self.check_replicas_every == Some(0) {
            return refuse("check_replicas_every", "0 is too small; use 1 or more");
        }
        if self.skip_nonfinite.is_some() {
            let problem = match (self.amp, self.comm_hook, self.strategy) {
                (Amp::Fp16, ..) => "fp16 skips steps by a rule of its own; leave this out",
                (_, CommHookKind::PowerSgd, _) => {
                    "powersgd adds what it did not send to later steps, and a value that is not finite would stay; \
                     use another --comm-hook"
                }
                (.., StrategyKind::Dp) => {
                    "needs --strategy ddp: rank 0 alone would know which steps to skip"
                }
                _ => "",
            };
            if !problem.is_empty() {
                return refuse("skip_nonfinite", problem);
            }
        }
        let needs_dir = [
            ("save_every", self.save_every.is_some()),
            ("save_every_epochs", self.save_every_epochs.is_some()),
            ("resume", self.resume.as_deref() == Some("auto")),
        ];
        if let Some((key, _)) = needs_dir.into_iter().find(|(_, is_set)| *is_set)
            && self.checkpoint_dir.is_none()
        {
            return refuse(key, "needs --checkpoint-dir, the folder of this run's checkpoints");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(toml: &str) -> Config {
        Config::resolve(None, toml.parse().unwrap()).unwrap()
    }

    #[test]
    fn every_key_that_may_differ_exists() {
        let all = config(
            "max_steps = 1\nmax_seconds = 1\ncheckpoint_dir = \"a\"\nsave_every = 1\nweight_decay = 0.1\n\
                          save_every_epochs = 1\nresume = \"auto\"\ninit_from = \"b\"\nmax_grad_norm = 1\n\
                          schedule = \"multi-step\"\nmilestones = [1]\ninject_fault = \"error:rank=0,at=init\"\n\
                          patience = 3\nval_fraction = 0.1\nskip_nonfinite = 1\ncheck_replicas_every = 1\ntensorboard = \"c\"\nmetrics = \"d\"\nlog_every = 1\ntrace = \"e\"\nreport = \"f\"\n\
                          nnodes = 1\nnode_rank = 0\nmaster_addr = \"e\"\nmaster_port = 1",
        );
        let all = serde_json::to_value(all).unwrap();
        for key in RESUME_IGNORES.iter().chain(&RESUME_WARNS).chain(&OF_COSINE) {
            assert!(all.get(key).is_some(), "{key}");
        }
    }

    #[test]
    fn an_option_that_a_checkpoint_does_not_have_had_its_default() {
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
    fn another_length_of_a_cosine_is_told() {
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
    fn what_must_not_differ_is_named_and_what_may_is_told() {
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
        let held_back = Config { num_samples: Some(3277), val_fraction: Some(0.2), ..config("") };
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
