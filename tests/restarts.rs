//! `--max-restarts`: after any failure the ranks go on from the newest saved state, to the hash of an undisturbed run.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::LazyLock;

use serde_json::Value;
use wait_timeout::ChildExt;

use crate::harness::{
    Reading, TIMEOUT, in_parallel, last_event, program, program_under, read_until, run,
    run_command, run_end, run_to, send, some_of,
};
use crate::spawn_processes::{end, events, long_run, process_of, processes_of, rest};

const WAYS: [&str; 2] = ["--spawn=threads", "--spawn=processes"];

const RUN: [&str; 4] = ["--nproc-per-node=2", "--model=mlp", "--momentum=0.9", "--max-epochs=2"];

/// The hash of an undisturbed run.
static WHOLE: LazyLock<Value> = LazyLock::new(|| run_end(&RUN)["parameters_hash"].clone());

fn restarts(event: &Value) -> Vec<&str> {
    let restarts = event["restarts"].as_array().map(|it| it.iter().filter_map(Value::as_str));
    restarts.into_iter().flatten().collect()
}

/// The checkpoints in the folder of a run, and nothing unfinished beside them.
fn saved_whole(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().all(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.starts_with("step-") || ["latest", ".lock"].contains(&&name[..])
    })
}

/// Long: it waits for a time-out.
#[test]
fn restart_after_any_failure_ends_with_the_same_bits() {
    let kinds = ["error", "kill", "panic", "stall"];
    let all = kinds.iter().flat_map(|kind| WAYS.map(|spawn| (*kind, spawn)));
    in_parallel(&some_of(all, 2), |&(kind, spawn)| {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("run");
        let save = format!("--checkpoint-dir={}", dir.display());
        let fault = format!("--inject-fault={kind}:rank=1,at=step,step=40");
        let timeout = if kind == "stall" { "--timeout=12s" } else { "--timeout=50s" };
        let more = [spawn, "--max-restarts=2", "--save-every=7", "--grace-period=1s"];
        let (code, events, stderr) = events(&[&RUN[..], &more, &[&save, &fault, timeout]].concat());
        let what = format!("{spawn} {kind}: {stderr}");
        assert_eq!(code, Some(0), "{what}");
        let end = events.last().unwrap();
        assert_eq!(end["parameters_hash"], *WHOLE, "{what}");
        assert_eq!(end["steps"], 128, "{what}");
        let [reason] = restarts(end)[..] else { panic!("{end}") };
        let named = match (kind, spawn) {
            ("kill", "--spawn=threads") => "the process of all ranks (process ",
            ("kill", _) => "rank 1 (process ",
            _ => "rank 1 (CPU:1) failed in step #40: ",
        };
        assert!(reason.starts_with(named), "{what}");
        assert_eq!(reason.contains("was killed by SIGKILL"), kind == "kill", "{what}");
        assert!(stderr.contains(&format!("ddp-mp: {reason}\n")), "{what}");
        // A killed process leaves none of its threads.
        let nobody_is_left = kind == "kill" && spawn == "--spawn=threads";
        let (from, step) = if nobody_is_left {
            (format!("from the newest checkpoint in {}\n", dir.display()), 35)
        } else {
            ("at step #40, from the state that rank 0 has saved\n".into(), 40)
        };
        assert!(stderr.contains(&format!("restart 1 of 2, {from}")), "{what}");
        let resumed = format!("resuming from {}/step-{step:08}: epoch 0, step ", dir.display());
        assert!(stderr.contains(&resumed), "{what}");
        // A failure that is made good is no failure of the run.
        assert!(events.iter().all(|it| it["event"] != "failure"), "{what}");
        assert!(saved_whole(&dir), "{what}");
    });
}

#[test]
fn restart_without_a_state_starts_from_the_beginning() {
    let more = ["--max-restarts=1", "--inject-fault=kill:rank=0,at=step,step=40"];
    let (code, all, stderr) = events(&[&RUN[..], &more].concat());
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(all.last().unwrap()["parameters_hash"], *WHOLE);
    let told = "restart 1 of 1, from the beginning: no rank could save the state, and without --checkpoint-dir the run has \
                no checkpoints";
    assert!(stderr.contains(told), "{stderr}");
    // With a folder in which nothing was saved yet.
    let folder = tempfile::tempdir().unwrap();
    let save = format!("--checkpoint-dir={}", folder.path().join("run").display());
    let more = ["--max-restarts=1", "--inject-fault=kill:rank=0,at=step,step=3", &save];
    let (code, all, stderr) = events(&[&RUN[..], &more].concat());
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(all.last().unwrap()["parameters_hash"], *WHOLE);
    assert!(stderr.contains("/run yet: starting from the beginning"), "{stderr}");
}

#[test]
fn failure_after_the_last_restart_lists_all_reasons_and_that_they_repeat() {
    for spawn in some_of(WAYS, 1) {
        let more = ["--lr=1e30", "--max-restarts=2", spawn];
        let (code, all, stderr) = events(&[&RUN[..], &more].concat());
        assert_eq!(code, Some(1), "{stderr}");
        let failures: Vec<&Value> = all.iter().filter(|it| it["event"] == "failure").collect();
        let [failure] = failures[..] else { panic!("{all:?}") };
        let restarts = restarts(failure);
        assert_eq!(restarts.len(), 2, "{stderr}");
        for (number, reason) in (1..).zip(restarts) {
            assert!(reason.contains("use a smaller --lr"), "{reason}");
            let told = format!("  restart {number} was needed: {reason}");
            assert!(stderr.lines().any(|line| line == told), "{stderr}");
            assert!(stderr.contains(&format!("restart {number} of 2, from")), "{stderr}");
        }
        assert!(!stderr.contains("restart 3"), "{stderr}");
        // They fail at one step, which is reported, too.
        let of_restarts: Vec<&str> = stderr.lines().filter(|it| it.contains(" of 2, ")).collect();
        let again = " failed again in step #1: without a change this start will probably also fail";
        let are_told: Vec<bool> = of_restarts.iter().map(|line| line.contains(again)).collect();
        assert_eq!(are_told, [false, true], "{stderr}");
        let told = " failed again in step #1: 3 failures in a row, with no progress between them";
        assert_eq!(stderr.lines().filter(|it| it.ends_with(told)).count(), 1, "{stderr}");
        assert_eq!(all.last().unwrap()["repeated"], 3, "{stderr}");
    }
}

#[test]
fn restart_without_a_state_names_the_checkpoint_that_the_run_began_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let save = format!("--checkpoint-dir={}", path("first"));
    run_to(0, &[&RUN[..], &[&save, "--max-steps=40"]].concat());
    let resume = format!("--resume={}/step-00000040", path("first"));
    let again = format!("--checkpoint-dir={}", path("second"));
    for more in [&[][..], &[&*again]] {
        let fault = ["--max-restarts=1", "--inject-fault=error:rank=1,at=init", &resume];
        let (code, all, stderr) = events(&[&RUN[..], &fault, more].concat());
        assert_eq!(code, Some(0), "{stderr}");
        assert_eq!(all.last().unwrap()["parameters_hash"], *WHOLE);
        let told =
            format!("restart 1 of 1, from {}/step-00000040, where the run began\n", path("first"));
        assert!(stderr.contains(&told), "{stderr}");
    }
}

/// A run whose processes are killed in each start, from outside: its exit code, all events and stderr.
fn killed_in_each_start(spawn: &str, restarts: usize) -> (Option<i32>, Vec<Value>, String) {
    let max_restarts = format!("--max-restarts={restarts}");
    let args = ["--nproc-per-node=2", "--max-epochs=1000000", "--log-format=json", spawn];
    let mut command = program(&[&args[..], &[&max_restarts]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut events = Vec::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if event["event"] == "start" {
            let victim = match spawn {
                "--spawn=threads" => processes_of(&child).next(),
                _ => process_of(&child, 1),
            };
            send("KILL", victim.unwrap());
        }
        events.push(event);
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), events, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn kill_after_the_last_restart_is_a_failure_event() {
    for spawn in WAYS {
        let (code, events, stderr) = killed_in_each_start(spawn, 1);
        assert_eq!(code, Some(1), "{stderr}");
        let starts = events.iter().filter(|it| it["event"] == "start");
        let starts: Vec<&Value> = starts.map(|it| &it["restart"]).collect();
        assert_eq!(starts, [&Value::Null, &1.into()], "{stderr}");
        let failure = events.last().unwrap();
        assert_eq!(failure["event"], "failure", "{stderr}");
        assert!(failure["error"].as_str().unwrap().contains(" was killed by SIGKILL"), "{failure}");
        assert_eq!(restarts(failure).len(), 1, "{failure}");
        let known = spawn == "--spawn=processes";
        for key in ["rank", "device", "operation", "sequence"] {
            assert_eq!(!failure.get(key).unwrap().is_null(), known, "{failure}");
        }
        assert_eq!(events.iter().filter(|it| it["event"] == "failure").count(), 1);
    }
}

#[test]
fn folder_removed_during_the_run_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let dir = format!("--checkpoint-dir={}", run.display());
    let args =
        ["--nproc-per-node=2", "--max-epochs=1000000", "--max-restarts=1", "--save-every=50"];
    let most = format!("--max-seconds={}", TIMEOUT.as_secs());
    let mut command = program(&[&args[..], &[&dir, &most]].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while !run.join("latest").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        std::thread::yield_now();
    }
    let away = folder.path().join("away");
    fs::rename(&run, &away).unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut told = Vec::new();
    for line in lines {
        if line.contains("warning: ") {
            send("TERM", child.id());
        }
        told.push(line);
    }
    assert_eq!(child.wait().unwrap().code(), Some(143), "{told:?}");
    let run = run.display();
    for expected in [
        format!("{run} was removed during the run, with all checkpoints: start again"),
        format!("restart 1 of 1, from the start of the run, because {run} has no checkpoint"),
        format!("warning: {run} was removed during the run, with all checkpoints: this restart"),
    ] {
        assert!(told.iter().any(|line| line.contains(&expected)), "{expected}: {told:?}");
    }
}

#[test]
fn restarted_run_prints_its_start_once() {
    let all = [
        ("--spawn=threads", "rendezvous"),
        ("--spawn=threads", "step,step=40"),
        ("--spawn=processes", "step,step=40"),
        ("--spawn=processes", "rendezvous"),
    ];
    for (spawn, at) in some_of(all, 2) {
        let fault = format!("--inject-fault=error:rank=1,at={at}");
        let args = ["--nproc-per-node=2", "--max-restarts=1", spawn, &fault];
        let (code, stdout, stderr) = run(&args);
        assert_eq!(code, Some(0), "{stderr}");
        assert_eq!(stdout.matches("GPU_Count: 0").count(), 1, "{spawn} {at}: {stdout}");
    }
}

#[test]
fn max_restarts_under_a_launcher_is_refused() {
    let by_hand = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--max-restarts=3"];
    let (code, _, stderr) = run(&by_hand);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("this is process 1 of 2 (by hand: "), "{stderr}");
    let mut of_torchrun = program(&["--max-restarts=3"]);
    of_torchrun.envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")]);
    of_torchrun.env("LOCAL_WORLD_SIZE", "1");
    let (code, _, stderr) = run_command(of_torchrun);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("torchrun --max-restarts=3"), "{stderr}");
}

#[test]
fn signal_stops_the_run_without_a_restart() {
    let signals = [("INT", 130), ("TERM", 143), ("HUP", 129)];
    let all = WAYS.iter().flat_map(|spawn| signals.map(|signal| (*spawn, signal)));
    for (spawn, (signal, code)) in some_of(all, 3) {
        let (child, stdout) = long_run(&["--nproc-per-node=2", "--max-restarts=3", spawn]);
        send(signal, child.id());
        let text = rest(stdout);
        assert_eq!(end(child).0, Some(code), "{spawn} {signal}");
        assert_eq!(last_event(&text)["stopped"], format!("SIG{signal}"), "{text}");
        assert!(!text.contains("\"start\""), "{text}");
    }
}

/// A start whose ranks have all ended goes on in its process. A rank that hangs cannot be ended there, and a killed process
/// has nothing left.
#[test]
fn ranks_that_have_all_ended_start_again_in_their_process() {
    for (kind, stays) in some_of([("error", true), ("panic", true), ("stall", false)], 2) {
        let fault = format!("--inject-fault={kind}:rank=1,at=step,step=40");
        let args = ["--nproc-per-node=2", "--max-epochs=1000000", "--log-format=json"];
        let limits = ["--timeout=3s", "--grace-period=1s", "--max-restarts=2", &fault];
        let mut command = program(&[&args[..], &limits].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let stderr = Reading::of(child.stderr.take().unwrap());
        read_until("\"start\"", &mut stdout);
        let first = processes_of(&child).next();
        read_until("\"restart\":1", &mut stdout);
        let second = processes_of(&child).next();
        assert_eq!(first == second, stays, "{kind}: {first:?} {second:?}");
        send("KILL", second.unwrap());
        read_until("\"restart\":2", &mut stdout);
        // The signals that were handled in an earlier start still are.
        send("INT", child.id());
        let text = rest(stdout);
        assert_eq!(end(child).0, Some(130), "{kind}");
        let stderr = String::from_utf8(stderr.end()).unwrap();
        assert_eq!(last_event(&text)["stopped"], "SIGINT", "{text}");
        assert!(stderr.contains("restart 1 of 2, at step #40, from the state"), "{stderr}");
        assert!(stderr.contains("restart 2 of 2, at step #40, "), "{stderr}");
    }
}

/// What fails twice in the same step may have its cause in the process: the first two starts share one, and the others do not.
#[test]
fn run_that_fails_again_in_the_same_step_gets_a_new_process() {
    let args = ["--nproc-per-node=2", "--lr=1e30", "--max-restarts=3"];
    let mut command = program(&args);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let stderr = Reading::of(child.stderr.take().unwrap());
    let mut seen = BTreeSet::new();
    let code = loop {
        seen.extend(processes_of(&child)); // each is there for a tenth of a second and more
        if let Some(status) = child.try_wait().unwrap() {
            break status.code();
        }
    };
    let stderr = String::from_utf8(stderr.end()).unwrap();
    assert_eq!((code, seen.len()), (Some(1), 3), "{stderr}");
    assert!(stderr.contains("restart 3 of 3, "), "{stderr}");
}

#[test]
fn signals_reach_a_start_in_the_process_of_an_earlier_one() {
    let fault = "--inject-fault=error:rank=1,at=step,step=40";
    let (mut child, mut stdout) = long_run(&["--nproc-per-node=2", "--max-restarts=2", fault]);
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    read_until("\"restart\":1", &mut stdout);
    send("USR2", child.id());
    let mut told = read_until("what each rank does", &mut errors);
    let errors = Reading::of(errors);
    send("INT", child.id());
    let text = rest(stdout);
    assert_eq!(end(child).0, Some(130), "{text}");
    assert_eq!(last_event(&text)["stopped"], "SIGINT", "{text}");
    told += &String::from_utf8(errors.end()).unwrap();
    assert_eq!(told.matches("what each rank does").count(), 1, "{told}");
    assert_eq!(told.matches("SIGINT: stopping after this step").count(), 1, "{told}");
}

/// A script that starts a program with `&` ignores SIGINT for it, and nohup SIGHUP.
#[test]
fn signals_that_were_ignored_at_the_start_stay_ignored() {
    for spawn in WAYS {
        let args = ["--nproc-per-node=2", "--max-epochs=1000000", "--log-format=json", spawn];
        let mut command = program_under("trap '' INT HUP TSTP USR2", &args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        read_until("\"epoch\":1", &mut stdout);
        for signal in ["INT", "HUP", "TSTP", "USR2", "INT", "HUP", "USR1"] {
            send(signal, child.id());
        }
        let rest = Reading::of(stdout);
        let ended = child.wait_timeout(TIMEOUT).unwrap();
        child.kill().unwrap();
        rest.end();
        let stderr = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
        assert_eq!(ended.expect("it ends").code(), Some(0), "{spawn}: {stderr}");
        assert!(stderr.contains("stopped by SIGUSR1 after "), "{spawn}: {stderr}");
        assert!(!stderr.contains("what each rank does"), "{spawn}: {stderr}");
    }
}

#[test]
fn failure_while_stopping_is_not_restarted() {
    // No step ends, so that the run is still stopping when a rank fails.
    let stall = "--inject-fault=stall:rank=1,at=step,step=0";
    let args = ["--nproc-per-node=2", "--max-restarts=3", "--spawn=processes", stall];
    let (mut child, stdout) = long_run(&args);
    send("TERM", child.id());
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    read_until("SIGTERM: stopping after this step", &mut stderr);
    let errors = Reading::of(stderr);
    send("KILL", process_of(&child, 1).unwrap());
    let text = rest(stdout);
    assert_eq!(end(child).0, Some(1), "{}", String::from_utf8_lossy(&errors.end()));
    assert!(!text.contains("\"start\""), "{text}");
    assert!(text.contains("\"event\":\"failure\""), "{text}");
}

#[test]
fn output_files_hold_the_last_start() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let flag = |flag: &str, name: &str| format!("{flag}={}", at(name).display());
    let files = [
        flag("--checkpoint-dir", "run"),
        flag("--metrics", "metrics.jsonl"),
        flag("--trace", "trace.json"),
        flag("--report", "report.html"),
        flag("--tensorboard", "board"),
    ];
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let more = [
        "--max-restarts=1",
        "--inject-fault=error:rank=1,at=step,step=100",
        "--log-every=4",
        "--save-every=20",
    ];
    let (code, _, stderr) = events(&[&RUN[..], &more, &files].concat());
    assert_eq!(code, Some(0), "{stderr}");
    // The rows of each start have its number.
    let text = fs::read_to_string(at("metrics.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let rows: Vec<(u64, u64)> =
        rows.map(|it| (it["run"].as_u64().unwrap(), it["step"].as_u64().unwrap())).collect();
    let steps: BTreeSet<u64> = rows.iter().map(|row| row.1).collect();
    assert_eq!(steps, (4..=128).step_by(4).collect(), "{stderr}");
    assert!(rows.is_sorted() && rows[0].0 == 1 && rows[rows.len() - 1] == (2, 128), "{rows:?}");
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(at("trace.json")).unwrap()).unwrap();
    assert!(trace.to_string().contains("127"), "the last step is in the trace");
    let report = fs::read_to_string(at("report.html")).unwrap();
    assert!(report.contains("restart 1 was needed: rank 1 (CPU:1) failed in step #100"));
    assert!(fs::read_dir(at("board")).unwrap().count() >= 1);
}
