//! `--inject-fault` on simulated GPUs: every kind at every stage names the rank and the cause, and leaves no process behind.
//!
//! Ranks are threads, or processes of `--spawn=processes`; those under torchrun are in `launchers/faults.py`. Threads try
//! every rank; processes try one rank at each stage, and all of them with `DDP_MP_TESTS=all`.

use std::process::Command;

use serde_json::Value;

use crate::harness::{run_command, runs_every_case};
use crate::machine::{in_parallel, in_parallel_by, on_gpus, run_without_survivors, under_torchrun};
use crate::shared::faults::{self, RANKS, RUN, STAGES};

/// A fault of `rank` at a stage.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: &'static str,
    stage: &'static str,
    operation: &'static str,
    rank: usize,
}

/// Returns a fault of each kind for each stage; of every rank, or of one rank at each stage.
fn cases(kinds: &[&'static str], every_rank: bool) -> Vec<Case> {
    let all = every_rank || runs_every_case();
    let mut cases = Vec::new();
    for &kind in kinds {
        for (number, (stage, operation)) in STAGES.into_iter().enumerate() {
            let ranks = (0..RANKS).filter(|rank| all || number % RANKS == *rank);
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
            "panic" => "panicked at src/",
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
    in_parallel(&cases(&["error", "panic", "stall"], true), |case| {
        case.is_reported("--spawn=threads");
    });
}

#[test]
fn failures_of_processes_are_reported() {
    let cases = cases(&["error", "panic", "kill", "stall"], false);
    in_parallel_by(2, &cases, |case| case.is_reported("--spawn=processes"));
}

/// There is no agent that would end the others. Who is killed tells nobody, and is found by waiting.
#[test]
fn failed_process_is_named_without_an_agent() {
    let mut cases = cases(&["error", "kill"], false);
    // Rank 0's process serves the store: if it is killed before they have met, nobody can name it.
    cases.retain(|it| (it.kind, it.stage, it.rank) != ("kill", "rendezvous", 0));
    in_parallel_by(2, &cases, |case| {
        let kills = case.kind == "kill";
        let outputs = under_torchrun(RANKS, |_| case.program(kills, &[]));
        for (process, output) in outputs.iter().enumerate() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let is_killed = kills && process == case.rank;
            let code = (!is_killed).then_some(1);
            assert_eq!(output.status.code(), code, "{case:?}: {stderr}");
            let named = format!("ddp-mp: rank {} (GPU:{}", case.rank, case.rank);
            let mut lines = stderr.lines().filter(|it| it.contains(" failed in "));
            let is_named = lines.next().is_some_and(|it| it.starts_with(&named));
            assert!(is_named || is_killed, "{case:?}, {process}: {stderr}");
        }
    });
}

/// Processes meet at the start of a step, where they exchange whether to stop: that is a wait as any other.
#[test]
fn process_stall_warning_has_the_status_of_each_rank() {
    let args = ["--spawn=processes", "--timeout=6s", "--stall-warning=2s", "--grace-period=1s"];
    let fault = ["--inject-fault=stall:rank=1,at=step,step=5"];
    let (code, _, stderr) = run_command(on_gpus(RANKS, &[&RUN[..], &args, &fault].concat()));
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("has not ended for "), "{stderr}");
    assert!(stderr.contains("\n  rank 1 has not entered synchronize #"), "{stderr}");
    for rank in 0..RANKS {
        let launched = format!("\n  rank {rank} launched up to all_reduce #");
        assert!(stderr.contains(&launched), "{launched}: {stderr}");
    }
}
