//! `ddp-mp bisect`: the first tensors that differ, with their values. And what a signal leaves of it, and of a lesson.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ddp_mp::checkpoint::TensorFile;
use wait_timeout::ChildExt;

use crate::harness::{
    files_below, in_parallel, output, program, program_in, program_path, run_command, send, some_of,
};

/// Runs the program in `folder`.
fn run_in(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    run_command(program_in(folder, args))
}

/// The first value of the tensor `name` in a safetensors file.
fn first_value(file: &Path, name: &str) -> f64 {
    let tensors = TensorFile::read(file).unwrap().tensors().unwrap();
    tensors[name].reshape([-1]).double_value(&[0])
}

#[test]
fn bisect_names_the_tensor_with_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let path = program_path();
    let program = path.to_str().unwrap();
    let train = format!("{program} --nproc-per-node=2 --quiet");
    let flip = "--inject-fault=flip=3:rank=1,at=step,step=7,in=gradient";
    let (good, bad) = (format!("{train} --max-steps=12"), format!("{train} --max-steps=12 {flip}"));
    let bisect = |good: &str, bad: &str, more: &[&str]| {
        run_in(folder, &[&["bisect", "--good", good, "--bad", bad], more].concat())
    };
    let (code, stdout, stderr) = bisect(&good, &bad, &["--keep=kept"]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(stdout.contains("Step 7 is the first that differs:"), "{stdout}");
    assert!(stdout.contains("gradients   1 of 2 on rank 1: `weight`"), "{stdout}");
    let row = |stdout: &str, tensor: &str| {
        let mut rows = stdout.lines().filter(|line| line.starts_with(&format!("  {tensor} ")));
        rows.next().unwrap_or("").split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let found = row(&stdout, "gradient.weight");
    assert_eq!(found[1..5], ["1", "of", "20", "[0][0]"], "{stdout}");
    assert_eq!(found.last().unwrap(), "8", "{stdout}");
    // The files of both are compared by themselves, too.
    let files = ["kept/good.safetensors", "kept/bad.safetensors"];
    let kept = files.map(|file| first_value(&folder.join(file), "gradient.weight"));
    let diff = |a: &str, b: &str| run_in(folder, &["diff", a, b]);
    let (code, stdout, stderr) = diff(files[0], files[1]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    let shown = &row(&stdout, "gradient.weight")[5..7];
    let shown: Vec<f64> = shown.iter().map(|value| value.parse::<f32>().unwrap().into()).collect();
    assert_eq!(shown, kept, "{stdout}");
    let (code, stdout, stderr) = diff(files[0], files[0]);
    assert_eq!((code, &*stderr), (Some(0), ""), "{stdout}");
    assert!(stdout.ends_with("\nEqual: 12 tensors.\n"), "{stdout}");
    let (code, _, stderr) = diff("kept/good.record", files[0]);
    assert_eq!(code, Some(2), "{stderr}");
    let kinds = "kept/good.record is a record, and kept/good.safetensors holds tensors";
    assert!(stderr.contains(kinds), "{stderr}");
    let (code, stdout, stderr) = bisect(&good, &good, &[]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    // Tensors of other shapes differ, too.
    let (code, stdout, stderr) = bisect(&good, &format!("{good} --batch-size=16"), &[]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(
        row(&stdout, "batch.0.inputs").join(" ").contains("other shape float32 [32, 20]"),
        "{stdout}"
    );
    // By the record of a run that fails.
    let failing = format!("{good} --inject-fault=error:rank=1,at=step,step=7");
    let (code, stdout, stderr) = bisect(&good, &failing, &[]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(stdout.contains("B failed in step 7: see the error of the run."), "{stdout}");
    assert!(stdout.contains("bad: rank 1 has no tensors of step 7 ("), "{stdout}");
    for (good, bad, more, expected) in [
        ("true", "true", &[][..], "--good: it has written no record"),
        ("echo lost >&2; exit 3", "true", &[], "--good: it failed (exit status: 3): lost"),
        (
            "true --checkpoint-dir=a",
            "true",
            &[],
            "--good: remove --checkpoint-dir, because it runs twice, and must do the same each time",
        ),
        ("true", "true", &["--keep=kept"], ": it exists; remove it, or use another name"),
    ] {
        let (code, stdout, stderr) = bisect(good, bad, more);
        assert_eq!((code, &*stdout), (Some(2), ""), "{expected}: {stderr}");
        assert!(stderr.lines().last().unwrap().contains(expected), "{expected}: {stderr}");
    }
}

/// The program that `args` start, with its temporary files in `temporary`.
fn with_temporary_files(args: &[&str], temporary: &Path) -> Command {
    fs::create_dir(temporary).unwrap();
    let mut command = program(args);
    command.env("TMPDIR", temporary).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const SIGNALS: [(&str, i32); 3] = [("TERM", 143), ("HUP", 129), ("INT", 130)];

/// The training and the shell are processes of their own. They hold the pipe open as long as they run.
#[test]
fn a_signal_to_bisect_ends_its_training_and_removes_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    in_parallel(&some_of(SIGNALS, 2), |(signal, code)| {
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
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "{signal}");
        assert!(!kept.exists(), "{signal}"); // the next try can use the name
    });
}

#[test]
fn a_signal_to_a_lesson_has_its_exit_code_and_removes_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    in_parallel(&some_of(SIGNALS, 1), |(signal, code)| {
        let temporary = folder.path().join(signal);
        let args = ["lesson", "bad-core", "--solution"];
        let mut child = with_temporary_files(&args, &temporary).spawn().unwrap();
        while files_below(&temporary).is_empty() {
            // Only time brings the file.
            let ended = child.wait_timeout(Duration::from_millis(20)).unwrap();
            assert!(ended.is_none(), "it has ended");
        }
        send(signal, child.id());
        let ended = output(child);
        assert_eq!(ended.status.code(), Some(*code), "{ended:?}");
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "{signal}");
    });
}
