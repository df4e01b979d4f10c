//! Calls of NCCL's that fail on one rank: it is named with NCCL's words, and nobody waits for it.

use serde_json::Value;

use crate::harness::run_command;
use crate::machine::{in_parallel_by, on_gpus, run_without_survivors};
use crate::shared::faults;

const RANKS: usize = 3;
const RUN: [&str; 4] = ["--model=mlp", "--num-samples=400", "--max-epochs=2", "--log-format=json"];

/// A fault that the simulated NCCL injects into launch number `launch` of `rank`, counted from 1.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: &'static str,
    rank: usize,
    launch: usize,
    spawn: &'static str,
}

/// Launches of the broadcast at the beginning, of the first step, and of one in the midst of training.
const LAUNCHES: [usize; 3] = [1, 4, 9];

impl Case {
    /// Runs the program with the fault, and returns its failure event and stderr.
    fn run(&self) -> (Value, String) {
        let Self { kind, rank, launch, spawn } = self;
        let args = [&RUN[..], &["--timeout=1h", "--grace-period=2s", spawn]].concat();
        let mut command = on_gpus(RANKS, &args);
        let fault = format!("{kind}:rank={rank},call={launch}");
        command.env("SIM_NCCL_FAULT", &fault);
        let output = run_without_survivors(command, &format!("{self:?}"));
        (faults::failure(&fault, &output, *rank, "GPU"), output.2)
    }
}

/// Returns a fault of this kind for every launch and rank, of threads and of processes.
fn cases(kind: &'static str) -> Vec<Case> {
    let of = |spawn| {
        LAUNCHES
            .into_iter()
            .flat_map(move |launch| (0..RANKS).map(move |rank| Case { kind, rank, launch, spawn }))
    };
    of("--spawn=threads").chain(of("--spawn=processes")).collect()
}

#[track_caller]
fn is_named(kind: &'static str, words: &str) {
    in_parallel_by(2, &cases(kind), |case| {
        let (failure, stderr) = case.run();
        let error = failure["error"].as_str().unwrap();
        assert!(error.contains(words), "{case:?}: {stderr}");
    });
}

#[test]
fn lost_connection_names_its_rank() {
    is_named("remote", "remote process exited or there was a network error");
}

#[test]
fn failed_system_call_names_its_rank() {
    is_named("system", "unhandled system error");
}

/// All ranks wait in NCCL then, which does not say for whom.
#[test]
fn rank_that_never_connects_ends_in_a_timeout() {
    for spawn in ["--spawn=threads", "--spawn=processes"] {
        let args = [&RUN[..], &["--timeout=3s", "--grace-period=1s", spawn]].concat();
        let mut command = on_gpus(RANKS, &args);
        command.env("SIM_NCCL_FAULT", "init:rank=1,call=1");
        let (code, stdout, stderr) = run_command(command);
        assert_eq!(code, Some(1), "{spawn}: {stderr}");
        let told = "waited 3s in init for NCCL to connect all ranks";
        assert!(stderr.contains(told) && stdout.contains(told), "{spawn}: {stdout}{stderr}");
    }
}

/// The others have launched their part and wait on their GPUs: they are told, and abort.
#[test]
fn failed_launch_on_one_rank_names_it() {
    is_named("launch", "unhandled cuda error");
}
