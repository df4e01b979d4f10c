//! The program with `--inject-fault`: every kind of failure, at every stage, on every rank.

use serde_json::Value;

use crate::harness::{in_parallel, run, some_of};
use crate::shared::faults::{self, RUN};

/// Runs with a fault, and checks the exit code and that the report blames `rank`.
fn report(fault: &str, rank: usize) -> (Value, String) {
    // Only a stall is found by waiting.
    let timeout = if fault.starts_with("stall") { "--timeout=4s" } else { "--timeout=1h" };
    let fault = format!("--inject-fault={fault}");
    let grace_period =
        if timeout == "--timeout=4s" { "--grace-period=500ms" } else { "--grace-period=1h" };
    let output = run(&[&RUN[..], &["--nproc-per-node=3", timeout, grace_period, &fault]].concat());
    let failure = faults::failure(&fault, &output, rank, "CPU");
    let stderr = output.2;
    let cause = format!("ddp-mp: rank {rank} (CPU:{rank}) failed in ");
    assert_eq!(stderr.matches("failed").count(), 1, "no echoes: {stderr}");
    assert!(stderr.contains(&cause), "{fault}: {stderr}");
    (failure, stderr)
}

fn everywhere(kind: &str, check: impl Fn(&str, &Value, &str) + Sync) {
    in_parallel(&some_of(faults::everywhere(), 5), |&(stage, operation, rank)| {
        let fault = format!("{kind}:rank={rank},at={stage}");
        let (failure, stderr) = report(&fault, rank);
        assert_eq!(failure["operation"], operation, "{fault}");
        if let Some((_, step)) = stage.split_once("step=") {
            assert_eq!(failure["sequence"].to_string(), step, "{fault}");
        }
        check(&fault, &failure, &stderr);
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
        assert!(error.starts_with("panicked at src/"), "it tells the place: {error}");
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
        assert!(error.contains(" waited 4s in "), "{fault}: {error}");
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
