//! `--live` without a terminal, and frames of `replay`. tests/interop/live.py drives both in a terminal.

use std::fs;
use std::path::Path;

use crate::harness::{program, run, run_command, some_of};

/// Trains two ranks, of which the second is slow, and writes a trace into `folder`.
fn traced(folder: &Path, options: &[&str]) {
    let slow = "--inject-fault=slow=60ms:rank=1,at=step";
    let args = ["--nproc-per-node=2", "--max-steps=12", "--trace=t.json", slow];
    let mut command = program(&[&args, options].concat());
    command.current_dir(folder);
    let (code, _, stderr) = run_command(command);
    assert_eq!(code, Some(0), "{stderr}");
}

fn replay(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program(&[&["replay"], args].concat());
    command.current_dir(folder);
    run_command(command)
}

/// Returns the frame of a trace at the middle of step 8 of rank 0, when it waits for rank 1.
fn frame_of_a_wait(folder: &Path, traces: &[&str]) -> String {
    let text = fs::read_to_string(folder.join(traces[0])).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let times = |event: &serde_json::Value| event["ts"].as_f64();
    let slices = || events.iter().filter(|event| event["ph"] == "X");
    // The replay begins with the first operation of any process.
    let starts = traces.iter().flat_map(|trace| {
        let text = fs::read_to_string(folder.join(trace)).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap().clone();
        events
            .into_iter()
            .filter(|event| event["ph"] == "X")
            .filter_map(|event| event["ts"].as_f64())
    });
    let start = starts.fold(f64::INFINITY, f64::min);
    let step = slices().find(|event| event["name"] == "step 8" && event["tid"] == 0).unwrap();
    let middle = times(step).unwrap() + step["dur"].as_f64().unwrap() / 2.0;
    let time = format!("--frame={}", (middle - start) / 1e6);
    let (code, frame, stderr) = replay(folder, &[traces, &[&time]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    frame
}

#[test]
fn replayed_frame_names_the_slow_rank() {
    let folder = tempfile::tempdir().unwrap();
    traced(folder.path(), &[]);
    let threads = frame_of_a_wait(folder.path(), &["t.json"]);
    let folder = tempfile::tempdir().unwrap();
    traced(folder.path(), &["--spawn=processes"]);
    let processes = frame_of_a_wait(folder.path(), &["t.0.json", "t.1.json"]);
    for frame in [threads, processes] {
        for part in [
            "step 8 ",
            ">0 CPU:0 W waits for rank 1",
            " 1 CPU:1 ",
            "S step #8",
            "rank 1 came last in ",
            "called at src/",
        ] {
            assert!(frame.contains(part), "{part:?} is not in\n{frame}");
        }
        let (_, delay) = frame.split_once(": rank 1, ").unwrap();
        let milliseconds = delay.split(|c: char| !c.is_ascii_digit()).next().unwrap();
        assert!(milliseconds.parse::<u32>().unwrap() >= 40, "{frame}");
    }
    // Of one process alone it is not known who came last.
    let (code, frame, stderr) = replay(folder.path(), &["t.0.json", "--frame=0.2"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(frame.contains(" 1  ? not in these traces"), "{frame}");
    assert!(!frame.contains("came last in "), "{frame}");
}

#[test]
fn wrong_traces_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    traced(folder.path(), &[]);
    let good = fs::read_to_string(folder.path().join("t.json")).unwrap();
    let about = r#""otherData":{"program":"ddp-mp 0","process":0,"processes":1,"world_size":1}"#;
    let event = |fields: &str| format!(r#"{{"traceEvents":[{{{fields}}}],{about}}}"#);
    let slice = r#""ph":"X","cat":"phase","name":"forward""#;
    for (name, text, problem) in some_of(
        [
            ("empty.json", String::new(), "the file is empty"),
            ("text.json", "[1, 2]".into(), "not a trace of ddp-mp"),
            ("cut.json", good[..good.len() / 2].into(), "not a trace of ddp-mp"),
            (
                "other.json",
                good.replace("\"program\":\"ddp-mp", "\"program\":\"cargo"),
                "a trace of",
            ),
            ("none.json", format!(r#"{{"traceEvents":[],{about}}}"#), "no operations"),
            ("rank.json", event(&format!(r#"{slice},"tid":640"#)), "of rank 10, and the run has 1"),
            ("long.json", event(&format!(r#"{slice},"tid":0,"ts":0,"dur":1e30"#)), "cannot be"),
            (
                "back.json",
                event(&format!(r#"{slice},"tid":0,"ts":0,"dur":-1"#)),
                "times that cannot be",
            ),
            (
                "new.json",
                event(r#""ph":"X","cat":"phase","name":"dream","tid":0,"ts":0,"dur":1"#),
                "the operation \"dream\" is unknown",
            ),
            (
                "many.json",
                good.replace("\"world_size\":2", "\"world_size\":99999999999"),
                "which cannot be",
            ),
        ],
        4,
    ) {
        fs::write(folder.path().join(name), text).unwrap();
        let (code, stdout, stderr) = replay(folder.path(), &[name, "--frame=1"]);
        assert_eq!((code, &*stdout), (Some(2), ""), "{name}: {stderr}");
        assert!(stderr.contains(problem), "{name}: {stderr}");
    }
    for (args, problem) in some_of(
        [
            (&["t.json", "t.json", "--frame=1"][..], "are both of process 0; give each file once"),
            (&["nothing.json", "--frame=1"], "nothing.json: No such file"),
            (&["/dev/zero", "--frame=1"], "this is a device"),
            (&["t.json", "--frame=-1"], "use a number of seconds"),
            (&["t.json", "--speed=nan"], "use a number from"),
            (&["t.json"], "stderr is not a terminal, so nothing can be played"),
        ],
        3,
    ) {
        let (code, stdout, stderr) = replay(folder.path(), args);
        assert_eq!((code, &*stdout), (Some(2), ""), "{args:?}: {stderr}");
        assert!(stderr.contains(problem), "{args:?}: {stderr}");
    }
}

/// A frame can be drawn at any time of a run, also before its start and after its end.
#[test]
fn every_time_of_a_trace_has_a_frame() {
    let folder = tempfile::tempdir().unwrap();
    traced(folder.path(), &[]);
    let (_, last, _) = replay(folder.path(), &["t.json", "--frame=1e12"]);
    assert_eq!(last.lines().count(), 24, "{last}");
    for number in some_of(0..12, 4) {
        let time = format!("--frame={}", f64::from(number) * 0.02);
        let (code, frame, stderr) = replay(folder.path(), &["t.json", &time]);
        assert_eq!((code, frame.lines().count()), (Some(0), 24), "{time}: {stderr}");
    }
}

#[test]
fn live_without_a_terminal_is_a_note() {
    let args = ["--nproc-per-node=2", "--max-epochs=2"];
    let (_, plain, _) = run(&args);
    for spawn in ["--spawn=threads", "--spawn=processes"] {
        let (code, stdout, stderr) = run(&[&args[..], &["--live", spawn]].concat());
        assert_eq!(code, Some(0), "{stderr}");
        let sorted = |text: &str| {
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&stdout), sorted(&plain));
        let notes = stderr.matches("--live: stderr is not a terminal, so there is no live view");
        assert_eq!(notes.count(), 1, "{stderr}");
    }
}
