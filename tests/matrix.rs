//! `--inject-fault` on ranks that are processes: every kind at every stage names the rank, once, and leaves nobody behind.
//!
//! `make test-launchers` does the same under torchrun, and `failures` on threads.

use serde_json::Value;

use crate::harness::{in_parallel, run, some_of};
use crate::shared::faults::{self, RUN};

/// The failure event and stderr of a run in which `rank` fails in this way.
fn failure(kind: &str, stage: &str, rank: usize) -> (Value, String) {
    let fault = format!("--inject-fault={kind}:rank={rank},at={stage}");
    // A stall alone is found by waiting.
    let timeout = if kind == "stall" { "--timeout=15s" } else { "--timeout=50s" };
    let args = ["--spawn=processes", "--nproc-per-node=3", "--grace-period=1s", timeout, &fault];
    let output = run(&[&RUN[..], &args].concat());
    (faults::failure(&fault, &output, rank, "CPU"), output.2)
}

fn everywhere(kind: &str, check: impl Fn(&str, &Value, &str) + Sync) {
    in_parallel(&some_of(faults::everywhere(), 3), |&(stage, operation, rank)| {
        let (failure, stderr) = failure(kind, stage, rank);
        let what = format!("{kind} of rank {rank} at {stage}: {stderr}");
        // A rank that is killed cannot tell: the others know its step, or nothing.
        if kind != "kill" {
            assert_eq!(failure["operation"], operation, "{what}");
        }
        check(&what, &failure, &stderr);
    });
}

#[test]
fn error_or_panic_at_any_stage_names_its_rank() {
    for (kind, start) in
        [("error", "injected by --inject-fault error"), ("panic", "panicked at src/")]
    {
        everywhere(kind, |what, failure, stderr| {
            assert!(failure["error"].as_str().unwrap().starts_with(start), "{what}");
            assert_eq!(stderr.matches("injected by --inject-fault").count(), 1, "{what}");
        });
    }
}

#[test]
fn kill_at_any_stage_names_its_rank() {
    everywhere("kill", |what, failure, _| {
        let told = format!("rank {} (process ", failure["rank"]);
        let error = failure["error"].as_str().unwrap();
        assert!(error.starts_with(&told) && error.contains(" was killed by SIGKILL"), "{what}");
    });
}

/// Long: it waits for time-outs.
#[test]
fn stall_at_any_stage_names_its_rank() {
    everywhere("stall", |what, failure, _| {
        assert!(failure["error"].as_str().unwrap().contains(" waited 15s in "), "{what}");
    });
}
