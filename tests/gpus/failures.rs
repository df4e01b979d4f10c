//! `--inject-fault` on simulated GPUs: every kind at every stage names the rank and the cause, and leaves no process behind.
//!
//! Ranks are threads, or processes of `--spawn=processes`; those under torchrun are in `launchers/faults.py`. At each
//! stage one rank is tried, and all of them with `DDP_MP_TESTS=all`.

use std::process::Command;

use serde_json::Value;

use crate::harness::runs_every_case;
use crate::machine::{in_parallel, in_parallel_by, on_gpus, run_without_survivors};
use crate::shared::faults::{self, RANKS, RUN, STAGES};

/// A fault of `rank` at a stage.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: &'static str,
    stage: &'static str,
    operation: &'static str,
    rank: usize,
}

/// Returns a fault of each kind for each stage.
fn cases(kinds: &[&'static str]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &kind in kinds {
        for (number, (stage, operation)) in STAGES.into_iter().enumerate() {
            let ranks = (0..RANKS).filter(|rank| runs_every_case() || number % RANKS == *rank);
            cases.extend(ranks.map(|rank| Case { kind, stage, operation, rank }));
        }
    }
    cases
}

impl Case {
    /// Returns the program with the fault, which is found by waiting if that `waits`.
    fn program(&self, waits: bool, more: &[&str]) -> Command {
        let timeout = if waits { "--timeout=10s" } else { "--timeout=1h" };
        let fault = format!("--inject-fault={}:rank={},at={}", self.kind, self.rank, self.stage);
        on_gpus(RANKS, &[&RUN[..], &[timeout, "--grace-period=2s", &fault], more].concat())
    }

    /// Runs it in one process, or in one that starts the others, and checks its report.
    fn is_reported(&self, spawn: &str) {
        let what = format!("{self:?} {spawn}");
        let output = run_without_survivors(self.program(self.kind == "stall", &[spawn]), &what);
        let failure: Value = faults::failure(&what, &output, self.rank, "GPU");
        let what = format!("{what}: {}", output.2);
        if self.kind != "kill" {
            assert_eq!(failure["operation"], self.operation, "{what}");
        }
        let cause = match self.kind {
            "error" => "injected by --inject-fault error",
            "panic" => "panicked at crates/engine/src/",
            "stall" => " waited 10s in ",
            _ => "SIGKILL",
        };
        assert!(failure["error"].as_str().unwrap().contains(cause), "{what}");
        let injected = output.2.matches("injected by --inject-fault").count();
        assert_eq!(injected, usize::from(["error", "panic"].contains(&self.kind)), "{what}");
    }
}

#[test]
fn failures_of_threads_are_reported() {
    in_parallel(&cases(&["error", "panic", "stall"]), |case| case.is_reported("--spawn=threads"));
}

#[test]
fn failures_of_processes_are_reported() {
    in_parallel_by(2, &cases(&["error", "kill"]), |case| case.is_reported("--spawn=processes"));
}
