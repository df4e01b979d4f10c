//! The program with `--inject-fault`: every kind of failure, at every stage, on every rank.

use serde_json::Value;

use crate::harness::run;
use crate::shared::faults;

fn everywhere(kind: &str, check: impl Fn(&str, &Value, &str) + Sync) {
    // Only a stall is found by waiting, and the other ranks wait for each other as well.
    let times = match kind {
        "stall" => ["--timeout=8s", "--grace-period=500ms"],
        _ => ["--timeout=1h", "--grace-period=1h"],
    };
    faults::everywhere(kind, 3, &times, |fault, failure, stderr| {
        assert_eq!(stderr.matches("failed").count(), 1, "no echoes: {stderr}");
        let cause = format!("ddp-mp: rank {0} (CPU:{0}) failed in ", failure["rank"]);
        assert!(stderr.contains(&cause), "{fault}: {stderr}");
        if let Some((_, step)) = fault.split_once("step=") {
            assert_eq!(failure["sequence"].to_string(), step, "{fault}");
        }
        check(fault, failure, stderr);
    });
}

#[test]
fn error_on_any_rank_at_any_stage_ends_the_run() {
    everywhere("error", |fault, failure, stderr| {
        assert_eq!(failure["error"], format!("injected by --inject-fault {fault}"));
        assert!(!stderr.contains("did not come back"), "{stderr}");
    });
}

#[test]
fn panic_on_any_rank_at_any_stage_ends_the_run() {
    everywhere("panic", |fault, failure, stderr| {
        let error = failure["error"].as_str().unwrap();
        assert!(error.starts_with("panicked at crates/engine/src/"), "it tells the place: {error}");
        assert!(error.ends_with(&format!("injected by --inject-fault {fault}")), "{error}");
        assert!(!stderr.contains("did not come back"), "{stderr}");
        assert!(!stderr.contains("thread '"), "the panic is told once: {stderr}");
    });
}

/// Long: it waits for time-outs.
#[test]
fn stall_on_any_rank_at_any_stage_names_the_rank() {
    everywhere("stall", |fault, failure, stderr| {
        let error = failure["error"].as_str().unwrap();
        assert!(error.contains(" waited 8s in "), "{fault}: {error}");
        let lines: Vec<&str> = stderr.lines().collect();
        let last = lines[lines.len() - 1];
        assert!(last.contains("did not come back within 500ms; last seen: "), "{fault}: {stderr}");
        assert!(last.contains(&format!("rank {} ", failure["rank"])), "{fault}: {stderr}");
    });
}

#[test]
fn complete_epochs_are_reported_before_the_failure() {
    let args =
        ["--nproc-per-node=2", "--max-epochs=3", "--inject-fault=error:rank=1,at=step,step=70"];
    let (code, stdout, _) = run(&args);
    assert_eq!(code, Some(1));
    let expected = "GPU_Count: 0\nCPU:0 | Epoch: 0 | Batchsize: 32 | Steps: 64\n\
                    CPU:1 | Epoch: 0 | Batchsize: 32 | Steps: 64\n";
    assert_eq!(stdout, expected);
}
