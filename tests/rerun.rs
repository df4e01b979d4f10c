//! `rerun`, `bisect` and `lesson`: what a checkpoint may make them do, and what a signal leaves of them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use ddp_mp::checkpoint::{Checkpoint, CheckpointDir, Snapshot, TrainerState};
use serde_json::{Value, json};
use wait_timeout::ChildExt;

use crate::harness::{in_parallel, output, program, program_path, run_command, send};

/// Trains in `folder`, and saves checkpoints in its folder `run`.
fn train(folder: &Path, more: &[&str]) {
    let args = [&["--checkpoint-dir=run", "--quiet"], more].concat();
    let (code, _, stderr) = run_in(folder, &args);
    assert_eq!(code, Some(0), "{stderr}");
}

/// Runs the program in `folder`.
fn run_in(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program(args);
    command.current_dir(folder);
    run_command(command)
}

/// Writes a checkpoint without tensors into the folder `dir`, with a right hash: that of `run/step-00000004` with a change.
fn forge(folder: &Path, dir: &str, change: impl FnOnce(&mut TrainerState)) {
    let mut state = Checkpoint::read(&folder.join("run/step-00000004")).unwrap().state().clone();
    change(&mut state);
    let snapshot = Snapshot::take(state, &[], Vec::new()).unwrap();
    CheckpointDir::create(&folder.join(dir), 1).unwrap().write(&snapshot).unwrap();
}

/// All files and folders below `folder`.
fn all_in(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| {
            let below = if path.is_dir() { all_in(&path) } else { BTreeSet::new() };
            below.into_iter().chain([path])
        })
        .collect()
}

/// Whoever can write a checkpoint can give its `trainer.json` a right hash.
#[test]
fn a_checkpoint_sets_no_option_that_a_run_does_not_save() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    train(folder, &["--nproc-per-node=2", "--max-steps=4"]);
    let path = |name: &str| Value::from(folder.join("made").join(name).to_str().unwrap());
    let forged = [
        ("trace", path("t.json")),
        ("report", path("r.html")),
        ("record", path("r")),
        ("metrics", path("m.jsonl")),
        ("tensorboard", path("t")),
        ("prometheus", path("p.prom")),
        ("checkpoint_dir", path("c")),
        ("init_from", path("i")),
        ("inject_fault", "kill:rank=0,at=step,step=1".into()),
        ("inject-fault", "kill:rank=0,at=step,step=1".into()),
        ("max_restarts", 3.into()),
        ("spawn", "processes".into()),
        ("nproc_per_node", 1.into()),
        ("live", true.into()),
        ("max_epochs", 3.into()), // saved with a cosine schedule only
    ];
    in_parallel(&forged, |(key, value)| {
        forge(folder, &format!("with-{key}"), |state| {
            state.total_steps = 0;
            state.options.insert((*key).into(), value.clone());
        });
        let flag = format!("--{}", key.replace('_', "-"));
        let before = all_in(&folder.join(format!("with-{key}")));
        for step in ["2", "5"] {
            let dir = format!("--checkpoint-dir=with-{key}");
            let step = format!("--step={step}");
            let keep = format!("--keep=kept-{key}");
            let (code, _, stderr) = run_in(folder, &["rerun", &dir, &step, &keep]);
            assert_eq!(code, Some(2), "{key}: {stderr}");
            let expected = format!("its trainer.json sets {flag}, which no run saves");
            assert!(stderr.contains(&expected), "{key}: {stderr}");
            assert!(!folder.join(format!("kept-{key}")).exists(), "{key}");
        }
        assert_eq!(all_in(&folder.join(format!("with-{key}"))), before, "{key}");
    });
    forge(folder, "gpt", |state| {
        state.options.insert("model".into(), "gpt".into());
        state.options.insert("dataset".into(), "text:x".into());
        state.options.insert("trace".into(), path("t.json"));
    });
    let (code, _, stderr) = run_in(folder, &["sample", "--checkpoint=gpt"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("its trainer.json sets --trace, which no run saves"), "{stderr}");
    assert!(!folder.join("made").exists());
    // Options that do not fit together, or into this machine.
    for (name, key, value, expected) in [
        ("nesterov", "nesterov", json!(true), "its trainer.json sets --nesterov: "),
        ("width", "in_features", json!(1u64 << 60), "this machine has"),
    ] {
        forge(folder, name, |state| {
            state.options.insert(key.into(), value);
        });
        let dir = format!("--checkpoint-dir={name}");
        let (code, _, stderr) = run_in(folder, &["rerun", &dir, "--step=2", "--keep=kept"]);
        assert_eq!(code, Some(2), "{name}: {stderr}");
        assert!(stderr.contains(expected), "{name}: {stderr}");
    }
}

/// A run makes none of its files before its checkpoint has been read.
#[test]
fn a_refused_checkpoint_leaves_no_file_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    train(folder, &["--nproc-per-node=2", "--max-steps=4"]);
    let before = all_in(folder);
    for refused in [["--resume=run", "--seed=7"], ["--init-from=none", "--checkpoint-dir=made/c"]] {
        let outputs =
            ["--trace=made/t", "--report=made/r", "--record=made/r.record", "--metrics=made/m"];
        let more = ["--tensorboard=made/b", "--prometheus=made/p.prom"];
        let args = [&["--nproc-per-node=2"], &refused[..], &outputs, &more].concat();
        let (code, _, stderr) = run_in(folder, &args);
        assert_eq!(code, Some(2), "{refused:?}: {stderr}");
        assert_eq!(all_in(folder), before, "{refused:?}: {stderr}");
    }
}

#[test]
fn rerun_refuses_a_step_after_the_end_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let refused = |dir: &str, step: u64| {
        let (dir, step) = (format!("--checkpoint-dir={dir}"), format!("--step={step}"));
        let (code, _, stderr) = run_in(folder, &["rerun", &dir, &step, "--keep=kept"]);
        assert_eq!(code, Some(2), "{dir} {step}: {stderr}");
        stderr
    };
    train(folder, &["--nproc-per-node=2", "--max-steps=4"]);
    fs::rename(folder.join("run"), folder.join("short")).unwrap();
    train(folder, &["--nproc-per-node=2", "--max-epochs=1"]);
    for (dir, step, expected) in [
        ("run", 3000, "--step 3000: the run ends after 64 steps; name a step from 0 to 63"),
        ("run", 64, "--step 64: the run ends after 64 steps"),
        ("short", 4, "--step 4: the run ends after 4 steps; name a step from 0 to 3"),
        ("run", i64::MAX as u64, "the run ends after 64 steps"),
    ] {
        let stderr = refused(dir, step);
        assert!(stderr.contains(expected), "{stderr}");
    }
    // A run that goes on with other numbers of ranks and steps.
    train(folder, &["--resume=auto", "--nproc-per-node=4", "--max-epochs=3"]);
    let stderr = refused("run", 128);
    assert!(stderr.contains("the run ends after 128 steps"), "{stderr}");
}

/// The program that `args` start, with its temporary files in `temporary`.
fn with_temporary_files(args: &[&str], temporary: &Path) -> Command {
    fs::create_dir(temporary).unwrap();
    let mut command = program(args);
    command.env("TMPDIR", temporary).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const SIGNALS: [(&str, i32); 3] = [("TERM", 143), ("INT", 130), ("HUP", 129)];

/// The training and the shell are processes of their own. They hold the pipe open as long as they run.
#[test]
fn a_signal_to_bisect_ends_its_training_and_removes_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    in_parallel(&SIGNALS, |(signal, code)| {
        let (pipe, temporary) =
            (folder.path().join(signal), folder.path().join(format!("{signal}.tmp")));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let train = format!(
            "{} --log-format=json --max-epochs=1000000000 --spawn=processes --nproc-per-node=2",
            program_path().display()
        );
        // The last command makes the shell wait.
        let good = format!("exec >{}; true; {train}", pipe.display());
        let kept = folder.path().join(format!("{signal}.kept"));
        let keep = format!("--keep={}", kept.display());
        let args = ["bisect", "--good", &good, "--bad", &train, &keep];
        let child = with_temporary_files(&args, &temporary).spawn().unwrap();
        let mut events = BufReader::new(File::open(&pipe).unwrap());
        let mut first = String::new();
        events.read_line(&mut first).unwrap();
        assert!(first.contains("\"event\":\"start\""), "{first}");
        send(signal, child.id());
        events.read_to_end(&mut Vec::new()).unwrap();
        let ended = output(child);
        assert_eq!(ended.status.code(), Some(*code), "{ended:?}");
        assert_eq!(all_in(&temporary), BTreeSet::new(), "{signal}");
        assert!(!kept.exists(), "{signal}"); // the next try can use the name
    });
}

#[test]
fn a_signal_to_rerun_or_a_lesson_has_its_exit_code_and_removes_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    train(folder, &["--nproc-per-node=2", "--max-steps=4", "--record=run.record"]);
    forge(folder, "long", |state| (state.step, state.total_steps) = (1 << 40, 0));
    let path = |name: &str| folder.join(name).display().to_string();
    let (dir, record) = (path("long"), path("run.record"));
    let rerun = ["--step=1000000000", "--keep=kept", "--record", &record, "--checkpoint-dir", &dir];
    let commands = [
        ("rerun", [&["rerun"], &rerun[..]].concat()),
        ("lesson", vec!["lesson", "bad-core", "--solution"]),
    ];
    for (name, args) in commands {
        in_parallel(&SIGNALS, |(signal, code)| {
            let temporary = folder.join(format!("{name}-{signal}"));
            let mut command = with_temporary_files(&args, &temporary);
            let mut child = command.current_dir(folder).spawn().unwrap();
            let has_record = || all_in(&temporary).iter().any(|path| path.is_file());
            while !has_record() {
                // Only time brings the file.
                assert!(
                    child.wait_timeout(Duration::from_millis(20)).unwrap().is_none(),
                    "it has ended"
                );
            }
            send(signal, child.id());
            let ended = output(child);
            assert_eq!(ended.status.code(), Some(*code), "{name}: {ended:?}");
            assert_eq!(all_in(&temporary), BTreeSet::new(), "{name} {signal}");
        });
    }
    assert!(!folder.join("kept").exists());
}
