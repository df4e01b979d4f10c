//! The files of a run. No output may be an input or another output.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};

use clap::Command;
use clap::builder::ValueHint;
use toml::{Table, Value};

use super::checkpoints::is_checkpoint_name;
use super::option_rules::Use;
use super::{Config, Invalid, flag_name};
use engine::checkpoint::{CheckpointDir, is_used};
use engine::data::DatasetSpec;
use engine::error::{Error, Result, Shown};
use engine::files::{Place, expand_home, process_path};
use engine::launch::SpawnChoice;

/// A path that a run uses.
struct Used {
    key: String,
    usage: Use,
    place: Place,
}

/// Makes the paths in `options`, which are relative to the folder of `file`, relative to the working directory. The names
/// of checkpoints in `--checkpoint-dir` are no paths. A pipe, and a file that only this process has opened, are in no
/// folder.
///
/// # Errors
/// An explanation for the user if the name of the folder is not UTF-8.
pub(super) fn put_into_folder_of(
    file: &Path,
    command: &Command,
    options: &mut Table,
    flags: &Table,
) -> Result<(), String> {
    let folder = file.parent().unwrap_or(Path::new(""));
    if !file.is_file() || Place::of(file).is_of_this_process() {
        return Ok(());
    }
    let join = |path: &str| {
        let not_utf8 = |_| "its folder has a name that is not UTF-8; use another folder".to_owned();
        folder.join(path).into_os_string().into_string().map_err(not_utf8)
    };
    change_paths(command, options, flags, join)
}

/// Puts the home folder in the place of a leading `~/` of the paths in `options`.
pub(super) fn expand_homes(command: &Command, options: &mut Table) {
    let expand = |path: &str| Ok::<_, Infallible>(expand_home(path).into_owned());
    let Ok(()) = change_paths(command, options, &Table::new(), expand);
}

/// Applies `change` to each path in `options`. `flags` are further options.
fn change_paths<E>(
    command: &Command,
    options: &mut Table,
    flags: &Table,
    change: impl Fn(&str) -> Result<String, E>,
) -> Result<(), E> {
    let saves = [&*options, flags].iter().any(|given| given.contains_key("checkpoint_dir"));
    for arg in command.get_arguments() {
        let key = arg.get_id().as_str();
        let is_path = arg.get_value_hint() == ValueHint::AnyPath;
        let changed = |text: &str| match text.parse::<DatasetSpec>() {
            Ok(spec) if key == "dataset" => Ok(spec.with_paths(&change)?.to_string()),
            _ if key == "resume" && (text == "auto" || saves && is_checkpoint_name(text)) => {
                Ok(text.into())
            }
            _ if key == "resume" || is_path => change(text),
            _ => Ok(text.into()),
        };
        match (options.get_mut(key), arg.get_value_delimiter()) {
            (Some(Value::String(text)), None) => *text = changed(text)?,
            (Some(Value::String(list)), Some(delimiter)) => {
                let all = list.split(delimiter).map(changed).collect::<Result<Vec<_>, E>>()?;
                *list = all.join(&delimiter.to_string());
            }
            (Some(Value::Array(list)), _) => {
                for item in list {
                    if let Value::String(text) = item {
                        *text = changed(text)?;
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

impl Config {
    /// Checks the paths of a run of `processes` processes: no output may be an input or another output. All processes
    /// must be able to read `file`, that of `--config`.
    ///
    /// # Errors
    /// [`Error::Input`] that names both flags.
    pub(crate) fn check_files(&self, file: Option<&Path>, processes: usize) -> Result<()> {
        let used = self.files(file, processes)?;
        let refused = |invalid| Error::usage(self.explained(invalid));
        check_places(&used).map_err(refused)?;
        if let Some(file) = file {
            self.check_read_again(file).map_err(refused)?;
        }
        check_own_output(&used).map_err(refused)
    }

    /// Refuses a `--config` that cannot be read again, if this process starts others: each reads the file itself.
    fn check_read_again(&self, file: &Path) -> Result<(), Invalid> {
        let starts_others =
            self.launch.spawn == SpawnChoice::Processes || self.launch.max_restarts > 0;
        if !starts_others || (file.is_file() && !Place::of(file).is_of_this_process()) {
            return Ok(());
        }
        let problem = format!(
            "{} can be read only once, and the processes that --spawn=processes and --max-restarts start read it \
             again; save it as a file",
            file.shown()
        );
        Err(Invalid { key: "config".into(), problem })
    }

    /// Returns all paths, the inputs first.
    fn files(&self, file: Option<&Path>, processes: usize) -> Result<Vec<Used>> {
        let used =
            |key: &str, usage, path: &Path| Used { key: key.into(), usage, place: Place::of(path) };
        let mut all: Vec<Used> =
            file.map(|path| used("config", Use::Reads, path)).into_iter().collect();
        all.extend(self.data.dataset.files().iter().map(|path| used("dataset", Use::Reads, path)));
        let from =
            [("init_from", self.checkpoints.init_from.clone()), ("resume", self.resume_path())];
        for (key, path) in from {
            let Some(path) = &path else { continue };
            all.push(used(key, if path.is_dir() { Use::Keeps } else { Use::Reads }, path));
            // The path may be a checkpoint in the folder of a run.
            all.extend(CheckpointDir::around(path).map(|run| used(key, Use::Keeps, &run)));
        }
        let (values, command) = (self.values()?, self.program.command());
        let mut declared: Vec<(Use, &str)> = command
            .get_arguments()
            .filter_map(|arg| Some((*arg.get::<Use>()?, arg.get_id().as_str())))
            .collect();
        declared.sort_by_key(|(usage, _)| *usage);
        for (usage, key) in declared {
            let Some(path) = values.get(key).and_then(|path| path.as_str()) else { continue };
            let path = Path::new(path);
            let processes = if usage == Use::WritesEach { processes } else { 1 };
            let paths = (0..processes).map(|process| process_path(path, [process, processes]));
            // A path may have no place for a process number.
            let paths: BTreeSet<PathBuf> = paths.collect();
            all.extend(paths.iter().map(|path| used(key, usage, path)));
        }
        all.retain(|used| !used.place.is_device()); // such as /dev/null, which many may use
        Ok(all)
    }
}

/// Refuses a path that cannot be used as another one is, too.
fn check_places(used: &[Used]) -> Result<(), Invalid> {
    for (index, later) in used.iter().enumerate() {
        for earlier in &used[..index] {
            if let Some(problem) = conflict(earlier, later) {
                return Err(Invalid { key: later.key.clone(), problem });
            }
        }
    }
    Ok(())
}

/// Refuses files that stdout or stderr go to. Lines may be appended there, between the other lines.
fn check_own_output(used: &[Used]) -> Result<(), Invalid> {
    let outputs = [
        ("stdout", Place::from_output(io::stdout())),
        ("stderr", Place::from_output(io::stderr())),
    ];
    for (name, output) in outputs {
        let is_same = |used: &&Used| output.as_ref().is_some_and(|it| used.place.is(it));
        if let Some(same) = used.iter().filter(|used| used.usage != Use::Appends).find(is_same) {
            let problem = format!("{name} of this process goes to that file; use another");
            return Err(Invalid { key: same.key.clone(), problem });
        }
    }
    Ok(())
}

/// Returns the problem with two paths of a run, worded for the later one. `None` if there is no problem.
fn conflict(earlier: &Used, later: &Used) -> Option<String> {
    use Use::{Fills, Keeps, Reads};
    let other = flag_name(&earlier.key);
    let is_at = |used: &Used, file: &Used| {
        let is_there = || used.place.is(&file.place) || used.place.within(&file.place).is_some();
        ![Fills, Keeps].contains(&file.usage) && is_there()
    };
    let is_in_checkpoint = |used: &Used, folder: &Used| {
        folder.usage == Keeps && is_of_checkpoint(&used.place, &folder.place)
    };
    match (earlier.usage, later.usage) {
        // The inputs come first: both are inputs.
        (_, Reads) => None,
        // A run may read and write checkpoints in one folder, but must not write into a checkpoint.
        (Keeps, Keeps) => (later.key == "checkpoint_dir" && is_in_checkpoint(later, earlier))
            .then(|| format!("this folder is inside a checkpoint of {other}; use another folder")),
        _ if is_at(earlier, later) || is_at(later, earlier) => {
            Some(format!("{other} already names this path, or a part of it; use another"))
        }
        (Reads, Keeps) => None,
        _ => (is_in_checkpoint(later, earlier) || is_in_checkpoint(earlier, later))
            .then(|| format!("this or {other} has a name that checkpoints use; use another")),
    }
}

/// Returns whether `path` is, or is below, a name that checkpoints use in `folder`.
fn is_of_checkpoint(path: &Place, folder: &Place) -> bool {
    path.within(folder)
        .is_some_and(|rest| rest.iter().next().is_some_and(|name| is_used(&name.to_string_lossy())))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn each_path_of_a_list_is_changed() {
        let files = clap::Arg::new("files").value_delimiter(',');
        let files = files.value_parser(clap::value_parser!(std::path::PathBuf));
        let command = Command::new("own").arg(files.action(clap::ArgAction::Append));
        for (given, expected) in [
            ("files = \"a,b\"", "files = \"in/a,in/b\""),
            ("files = [\"a\", \"b\"]", "files = [\"in/a\", \"in/b\"]"),
            ("files = \"a\"", "files = \"in/a\""),
        ] {
            let mut options: Table = given.parse().unwrap();
            let change = |path: &str| Ok::<_, Infallible>(format!("in/{path}"));
            let Ok(()) = change_paths(&command, &mut options, &Table::new(), change);
            assert_eq!(options, expected.parse::<Table>().unwrap());
        }
    }

    #[test]
    fn empty_path_is_refused_with_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        let command = Config::command();
        let paths =
            command.get_arguments().filter(|arg| arg.get_value_hint() == ValueHint::AnyPath);
        for arg in paths.chain(command.get_arguments().filter(|arg| arg.get_id() == "resume")) {
            let key = arg.get_id().as_str();
            let is_checked = arg.get::<Use>().is_some() || ["init_from", "resume"].contains(&key);
            assert!(is_checked, "{key} has no `Use`");
            fs::write(&file, format!("{key} = \"\"\n")).unwrap();
            let error = Config::resolve(Some(&file), &toml::Table::new()).unwrap_err().to_string();
            let flag = super::flag_name(key);
            assert!(error.contains("run.toml: TOML parse error at line 1"), "{error}");
            assert!(error.contains(&format!("a value is required for '{flag} <")), "{error}");
        }
    }

    #[test]
    fn paths_in_a_file_are_relative_to_it_and_those_of_flags_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.toml");
        let of = |text: &str, flags: &str| {
            fs::write(&file, text).unwrap();
            Config::resolve(Some(&file), &flags.parse().unwrap()).unwrap().values().unwrap()
        };
        let at = |path: &str| folder.path().join(path).into_os_string().into_string().unwrap();
        let command = Config::command();
        let paths =
            command.get_arguments().filter(|arg| arg.get_value_hint() == ValueHint::AnyPath);
        let keys: Vec<&str> = paths.map(|arg| arg.get_id().as_str()).collect();
        assert!(keys.contains(&"trace") && keys.len() > 7, "{keys:?}");
        for key in keys.into_iter().chain(["resume"]) {
            assert_eq!(of(&format!("{key} = \"../x\""), "")[key], at("../x"), "{key}");
            assert_eq!(of(&format!("{key} = \"/x\""), "")[key], "/x", "{key}");
            let given = format!("{key} = \"flag\"");
            assert_eq!(of(&format!("{key} = \"x\""), &given)[key], "flag", "{key}");
        }
        for (dataset, expected) in [
            ("digits", "digits".into()),
            ("csv:a.csv", format!("csv:{}", at("a.csv"))),
            ("npy:x.npy,/y.npy", format!("npy:{},/y.npy", at("x.npy"))),
            ("idx:.", format!("idx:{}", at("."))),
        ] {
            let text = format!("dataset = \"{dataset}\"");
            assert_eq!(of(&text, "")["dataset"], expected);
        }
        // A name of a checkpoint in the folder of the run is no path.
        for name in ["auto", "best", "latest", "step-00000003"] {
            let text = format!("resume = \"{name}\"");
            assert_eq!(of(&text, "checkpoint_dir = \"run\"")["resume"], name);
            assert_eq!(of(&format!("{text}\ncheckpoint_dir = \"run\""), "")["resume"], name);
        }
        assert_eq!(of("resume = \"best\"", "")["resume"], at("best"));
        // What is read through a descriptor is in no folder.
        fs::write(&file, "trace = \"t.json\"").unwrap();
        let opened = File::open(&file).unwrap();
        let descriptor = format!("/dev/fd/{}", opened.as_raw_fd());
        let config = Config::resolve(Some(descriptor.as_ref()), &Table::new()).unwrap();
        assert_eq!(config.output.trace.as_deref(), Some(Path::new("t.json")));
    }

    #[test]
    fn config_file_of_one_process_only_cannot_be_read_again() {
        let mut config = Config::default();
        config.launch.spawn = SpawnChoice::Processes;
        let may = |path: &Path| config.check_read_again(path).is_ok();
        for folder in ["/dev/shm", "/tmp"] {
            let Ok(folder) = tempfile::tempdir_in(folder) else { continue };
            let (file, link) = (folder.path().join("run.toml"), folder.path().join("link"));
            fs::write(&file, "").unwrap();
            symlink("run.toml", &link).unwrap();
            assert!(may(&file) && may(&link), "{}", file.display());
            let opened = File::open(&file).unwrap();
            let number = opened.as_raw_fd();
            for own_file in [format!("/dev/fd/{number}"), format!("/proc/self/fd/{number}")] {
                assert!(Path::new(&own_file).is_file());
                assert!(!may(Path::new(&own_file)), "{own_file}");
                fs::remove_file(&link).unwrap();
                symlink(&own_file, &link).unwrap();
                assert!(!may(&link), "{own_file}");
            }
        }
        assert!(!may(Path::new("/dev/stdin")));
        assert!(config.check_read_again(Path::new("/dev/null")).is_err());
    }
}
