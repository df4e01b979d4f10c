//! `--inject-fault` on simulated GPUs: every kind at every stage names the rank and the cause, and leaves no process behind.
//!
//! Ranks are threads, processes of `--spawn=processes`, or processes as torchrun starts them. Threads try every rank;
//! processes try one rank at each stage, and all of them with `DDP_MP_TESTS=all`.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::harness::{as_torchrun, free_port, join, run_command, runs_every_case};
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

/// Returns a fault of this kind for each stage; of every rank, or of one rank at each stage.
fn cases(kind: &'static str, every_rank: bool) -> Vec<Case> {
    let all = every_rank || runs_every_case();
    let of_stage = |(number, (stage, operation)): (usize, (&'static str, &'static str))| {
        let ranks = (0..RANKS).filter(move |rank| all || number % RANKS == *rank);
        ranks.map(move |rank| Case { kind, stage, operation, rank })
    };
    STAGES.into_iter().enumerate().flat_map(of_stage).collect()
}

impl Case {
    fn fault(&self) -> String {
        format!("--inject-fault={}:rank={},at={}", self.kind, self.rank, self.stage)
    }

    /// Returns the program with the fault, which may be found by waiting if it `waits`.
    fn program(&self, waits: bool, more: &[&str]) -> Command {
        let timeout = if waits { "--timeout=10s" } else { "--timeout=1h" };
        let fault = self.fault();
        on_gpus(RANKS, &[&RUN[..], &[timeout, "--grace-period=2s", &fault], more].concat())
    }

    /// Checks the cause, in the failure's event or on stderr.
    #[track_caller]
    fn check_cause(&self, error: &str, stderr: &str) {
        let what = format!("{self:?}: {stderr}");
        match self.kind {
            "error" => assert!(error.contains("injected by --inject-fault error"), "{what}"),
            "panic" => assert!(error.contains("panicked at src/"), "{what}"),
            "stall" => assert!(error.contains(" waited 10s in "), "{what}"),
            "kill" => assert!(error.contains("SIGKILL"), "{what}"),
            other => panic!("no {other}"),
        }
        let injected = stderr.matches("injected by --inject-fault").count();
        assert_eq!(injected, usize::from(["error", "panic"].contains(&self.kind)), "{what}");
    }

    /// Runs it in one process, or in one that starts the others, and checks its report.
    fn is_reported(&self, spawn: &str) {
        let command = self.program(self.kind == "stall", &[spawn]);
        let output = run_without_survivors(command, &format!("{self:?} {spawn}"));
        let failure: Value = faults::failure(&self.fault(), &output, self.rank, "GPU");
        if self.kind != "kill" {
            assert_eq!(failure["operation"], self.operation, "{self:?}: {}", output.2);
        }
        self.check_cause(failure["error"].as_str().unwrap(), &output.2);
    }

    /// Runs it in processes as torchrun starts them, and checks what each of the others says.
    fn is_reported_under_torchrun(&self) {
        // There is no agent here that would end the others when one of them is killed.
        let waits = ["stall", "kill"].contains(&self.kind);
        let port = free_port();
        let start = |process| {
            let mut command = self.program(waits, &[]);
            as_torchrun(&mut command, process, RANKS, port);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        for (process, output) in join((0..RANKS).map(start).collect()).into_iter().enumerate() {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            if process == self.rank && self.kind == "kill" {
                assert_eq!(output.status.code(), None, "{self:?}: {stderr}");
                continue;
            }
            assert_eq!(output.status.code(), Some(1), "{self:?}: {stderr}");
            let named = format!("ddp-mp: rank {} (GPU:{}", self.rank, self.rank);
            let line = stderr.lines().find(|it| it.contains(" failed in "));
            assert!(line.is_some_and(|it| it.starts_with(&named)), "{self:?}, {process}: {stderr}");
            if self.kind != "kill" {
                self.check_cause(line.unwrap(), &stderr);
            }
        }
    }
}

fn with_threads(kind: &'static str) {
    in_parallel(&cases(kind, true), |case| case.is_reported("--spawn=threads"));
}

fn with_processes(kind: &'static str) {
    in_parallel_by(2, &cases(kind, false), |case| case.is_reported("--spawn=processes"));
}

fn with_torchrun(kind: &'static str) {
    let mut cases = cases(kind, false);
    // Without an agent rank 0's process serves the store: if it is killed before they have met, nobody can name it.
    cases.retain(|it| (it.kind, it.stage, it.rank) != ("kill", "rendezvous", 0));
    in_parallel_by(2, &cases, Case::is_reported_under_torchrun);
}

#[test]
fn thread_error_is_reported() {
    with_threads("error");
}

#[test]
fn thread_panic_is_reported() {
    with_threads("panic");
}

#[test]
fn thread_stall_is_reported() {
    with_threads("stall");
}

#[test]
fn process_error_is_reported() {
    with_processes("error");
}

#[test]
fn process_panic_is_reported() {
    with_processes("panic");
}

#[test]
fn process_stall_is_reported() {
    with_processes("stall");
}

#[test]
fn process_kill_is_reported() {
    with_processes("kill");
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

#[test]
fn torchrun_error_is_reported() {
    with_torchrun("error");
}

#[test]
fn torchrun_panic_is_reported() {
    with_torchrun("panic");
}

#[test]
fn torchrun_stall_is_reported() {
    with_torchrun("stall");
}

#[test]
fn torchrun_kill_is_reported() {
    with_torchrun("kill");
}
