//! What a run did not write: in the folder where it saves, nothing of that is touched.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use ddp_mp::CheckpointDir;
use ddp_mp::checkpoint::{Checkpoint, Snapshot, TrainerState};
use tempfile::TempDir;

use crate::harness::{
    as_torchrun, free_port, program, run_command_to, run_refused, run_to, some_of, words,
};

/// Names that a run creates, replaces, renames or removes where it saves. A run of two epochs ends after step 4.
const NAMES: &str =
    ".lock latest best step-00000002 step-00000004 step-00000009 .unfinished trainer.json";

/// Each epoch has two steps.
const ARGS: &str = "--num-samples=128 --nproc-per-node=2 --val-fraction=0.02 --save-every=1";

/// Something that another program has left at the path, with `other` to link to.
type Foreign = (&'static str, fn(&Path, &Path));

const FOREIGN: [Foreign; 10] = [
    ("a file", |path, _| fs::write(path, "of others\n").unwrap()),
    ("a file of zeros", |path, _| fs::write(path, [0; 100]).unwrap()),
    ("a file that looks like a pointer", |path, _| fs::write(path, "step-4\n").unwrap()),
    ("a folder", |path, _| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("notes.txt"), "of others").unwrap();
    }),
    ("a folder with a file of a checkpoint's name", |path, _| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("model.safetensors"), "of others, and long enough").unwrap();
    }),
    ("a link to a file", |path, other| symlink(other.join("file"), path).unwrap()),
    ("a link to a folder", |path, other| symlink(other, path).unwrap()),
    ("a link to nothing", |path, other| symlink(other.join("nothing"), path).unwrap()),
    ("a hard link", |path, other| fs::hard_link(other.join("file"), path).unwrap()),
    ("a pipe", |path, _| {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }),
];

/// All that is below `folder`: what each is, with its permissions, number of links, contents or target.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, String> {
    fn add(path: &Path, all: &mut BTreeMap<PathBuf, String>) {
        let found = fs::symlink_metadata(path).unwrap();
        let mut text = format!("{:o} {} {} ", found.mode(), found.ino(), found.mtime_nsec());
        if found.is_file() {
            text += &format!("{} {:?}", found.nlink(), fs::read(path).unwrap());
        } else if found.is_symlink() {
            text += &fs::read_link(path).unwrap().display().to_string();
        } else if found.is_dir() {
            fs::read_dir(path).unwrap().for_each(|it| add(&it.unwrap().path(), all));
        }
        all.insert(path.into(), text);
    }
    let mut all = BTreeMap::new();
    add(folder, &mut all);
    all
}

/// The folder `run`, with the checkpoints of a run in it if it `has_run`, and with `foreign` at `name`.
fn folder_with(name: &str, foreign: Foreign, has_run: bool) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (run, other) = (folder.path().join("run"), folder.path().join("other"));
    fs::create_dir(&other).unwrap();
    fs::write(other.join("file"), "of others\n").unwrap();
    fs::create_dir(&run).unwrap();
    if has_run {
        let dir = CheckpointDir::create(&run, 3).unwrap();
        for step in [1, 3] {
            let state = TrainerState { step, ..TrainerState::default() };
            dir.write(&Snapshot::take(state, &[], Vec::new()).unwrap()).unwrap();
        }
    }
    let path = run.join(name);
    let _ = fs::remove_file(&path);
    foreign.1(&path, &other);
    (folder, run)
}

#[test]
fn checkpoint_dir_with_a_foreign_file_under_its_names_is_refused() {
    for name in words(NAMES) {
        for foreign in FOREIGN {
            for has_run in [false, true] {
                let (folder, run) = folder_with(name, foreign, has_run);
                let before = snapshot(folder.path());
                let opened = if has_run {
                    CheckpointDir::open(&run, 1)
                } else {
                    CheckpointDir::create(&run, 1)
                };
                let case = format!("{} at {name}, with a run: {has_run}", foreign.0);
                let error = opened.err().unwrap_or_else(|| panic!("opened with {case}"));
                assert!(error.to_string().contains(name), "{case}: {error}");
                assert_eq!(snapshot(folder.path()), before, "{case}");
            }
        }
    }
}

#[test]
fn run_with_a_foreign_checkpoint_dir_changes_nothing() {
    let cases = words(NAMES).into_iter().zip(FOREIGN.into_iter().cycle());
    for (name, foreign) in some_of(cases, 2) {
        for resume in ["", "--resume=auto"] {
            let (folder, dir) = folder_with(name, foreign, false);
            let args = format!("{ARGS} --checkpoint-dir={}", dir.display());
            if !resume.is_empty() {
                fs::remove_dir_all(&dir).unwrap();
                run_to(0, &words(&format!("{args} --max-epochs=2")));
                let path = dir.join(name);
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
                foreign.1(&path, &folder.path().join("other"));
            }
            let before = snapshot(folder.path());
            let out = folder.path().display();
            let files = format!("--metrics={out}/metrics --tensorboard={out}/board");
            let stderr = run_refused(&words(&format!("{args} {files} --max-epochs=3 {resume}")));
            let case = format!("{} at {name}, {resume:?}: {stderr}", foreign.0);
            assert!(stderr.contains(name), "{case}");
            // It is not taken for a damaged checkpoint.
            assert!(!stderr.contains("start over") && stderr.contains("move it away"), "{case}");
            assert_eq!(snapshot(folder.path()), before, "{case}");
        }
    }
}

#[test]
fn foreign_files_beside_checkpoints_stay() {
    let is_root = fs::read_to_string("/proc/self/status").unwrap().contains("Uid:\t0\t0");
    for foreign in FOREIGN {
        let (folder, run) = folder_with("aside-1-step-00000003", foreign, true);
        foreign.1(&run.join("step-of-others"), &folder.path().join("other"));
        foreign.1(&run.join("notes"), &folder.path().join("other"));
        let before = snapshot(folder.path());
        let dir = CheckpointDir::open(&run, 1).unwrap();
        let older = Checkpoint::read(&run.join("step-00000001")).unwrap();
        let aside = dir.set_aside_after(&older).unwrap();
        assert_eq!(aside, [run.join("aside-2-step-00000003")]);
        let after = snapshot(folder.path());
        for (path, text) in before {
            let is_run = path == run
                || path.ends_with("latest")
                || path.starts_with(run.join("step-00000003"));
            assert!(is_run || after.get(&path) == Some(&text), "{}: {}", foreign.0, path.display());
        }
    }
    // Nobody may read it: neither may a run, unless it is root's.
    let (folder, run) = folder_with("latest", FOREIGN[0], true);
    fs::set_permissions(run.join("latest"), Permissions::from_mode(0o000)).unwrap();
    let error = CheckpointDir::open(&run, 1).unwrap_err().to_string();
    assert!(is_root || error.contains("ermission denied"), "{error}");
    drop(folder);
}

#[test]
fn checkpoint_under_the_name_of_another_step_is_refused() {
    let (_folder, dir) = folder_with("notes", FOREIGN[0], true);
    fs::rename(dir.join("step-00000003"), dir.join("step-00000007")).unwrap();
    let before = snapshot(&dir);
    let error = CheckpointDir::open(&dir, 1).unwrap_err().to_string();
    assert!(error.contains("holds step 3, so its name should be step-00000003"), "{error}");
    let flag = format!("--checkpoint-dir={}", dir.display());
    for resume in ["--resume=auto", "--resume=step-00000001"] {
        run_to(2, &[&flag, resume, "--nproc-per-node=2"]);
    }
    assert_eq!(snapshot(&dir), before);
}

#[test]
fn parts_left_by_a_killed_run_are_removed() {
    let (_folder, dir) = folder_with("notes", FOREIGN[0], true);
    let half = dir.join(".unfinished");
    fs::create_dir(&half).unwrap();
    let model = fs::read(dir.join("step-00000003/model.safetensors")).unwrap();
    fs::write(half.join("model.safetensors"), &model[..model.len() / 2]).unwrap();
    fs::write(half.join("optimizer.safetensors"), "").unwrap();
    fs::write(half.join("trainer.json"), "{\n  \"for").unwrap();
    fs::write(half.join("latest"), "step-0000").unwrap();
    fs::write(half.join("best"), "").unwrap();
    let opened = CheckpointDir::open(&dir, 1).unwrap();
    let state = TrainerState { step: 4, ..TrainerState::default() };
    opened.write(&Snapshot::take(state, &[], Vec::new()).unwrap()).unwrap();
    let mut names: Vec<String> = fs::read_dir(&dir)
        .unwrap()
        .map(|it| it.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "latest", "notes", "step-00000004"]);
}

#[test]
fn restart_removes_no_file_but_the_tensors_that_were_kept() {
    let folder = tempfile::tempdir().unwrap();
    let keep = format!("--keep={}", folder.path().join("kept").display());
    let start = |code, count: &str, flags: &[&str]| {
        let args = [&["--max-steps=2", &keep], flags].concat();
        let mut command = program(&args);
        as_torchrun(&mut command, 0, 1, free_port());
        command.env("TORCHELASTIC_RESTART_COUNT", count);
        run_command_to(code, command).1
    };
    let text = || fs::read(folder.path().join("kept")).unwrap();
    for code in ["0", "1"] {
        fs::write(folder.path().join("kept"), "of others").unwrap();
        assert!(start(2, code, &[]).contains("this file exists; remove it"));
        assert_eq!(text(), b"of others");
    }
    fs::remove_file(folder.path().join("kept")).unwrap();
    start(0, "0", &[]);
    let kept = text();
    // Another output is refused.
    start(2, "1", &["--trace=/dev/null"]);
    assert_eq!(text(), kept);
    start(0, "1", &["--keep-step=1"]);
    assert_ne!(text(), kept);
}

/// A run is refused as a whole: whoever corrects the flag finds everything as it was.
#[test]
fn refused_output_leaves_nothing_of_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("foreign"), "of others\n").unwrap();
    let foreign = at("foreign");
    let outputs = words("trace record metrics tensorboard report prometheus checkpoint-dir");
    for refused in &outputs[..6] {
        let path = |flag: &&str| {
            let path = if flag == refused { foreign.clone() } else { at(&format!("new/{flag}")) };
            format!("--{flag}={path}")
        };
        let flags: Vec<String> = outputs.iter().map(path).collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let stderr = run_refused(&[&["--nproc-per-node=1"], &flags[..]].concat());
        assert!(stderr.contains(&format!("--{refused}")), "{stderr}");
        let names: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{refused}: {names:?}");
    }
    assert_eq!(fs::read_to_string(&foreign).unwrap(), "of others\n");
}
