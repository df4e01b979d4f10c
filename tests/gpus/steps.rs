//! What a step costs besides its work: the simulated machine counts waits of the host, and allocations.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::harness::run_command;
use crate::machine::{has_no_wait_behind_nccl, in_parallel, of_gpus, on_gpus, reports, succeed};
use crate::same::args;

/// The machine's counters, per GPU, of what no step may do because it can stall the GPUs.
const COUNTS: [&str; 3] = ["cuda_mallocs", "pinned_mallocs", "host_waits"];

/// Runs a command in one process, which must succeed, and returns the machine's report.
fn report(mut command: Command) -> Value {
    let folder = tempfile::tempdir().unwrap();
    command.env("SIM_REPORT", folder.path().join("report.json"));
    succeed(command);
    reports(folder.path()).remove(0)
}

/// Returns each of the counts, for each GPU, in a run of two epochs over so many samples.
fn counts(gpus: usize, row: &str, samples: usize) -> [Vec<u64>; 3] {
    let samples = format!("--num-samples={samples}");
    let row: Vec<&str> = row.split_whitespace().collect();
    let report = report(on_gpus(gpus, &[&row[..], &["--max-epochs=2", &samples]].concat()));
    COUNTS.map(|name| of_gpus(&report, name))
}

/// Runs in which the host copies something to a GPU or from it. `FOLDER` is one for files.
const COPIES: [&str; 12] = [
    "mlp --find-unused-parameters --max-epochs=2",
    "mlp --static-graph --bucket-cap-mb=0.001",
    "mlp --bucket-cap-mb=0.001 --max-epochs=2",
    "mlp --amp=fp16 --max-grad-norm=0.1",
    "mlp --num-workers=2 --max-epochs=2 --val-fraction=0.2",
    "mlp --exact-mean --check-replicas-every=3",
    "mlp --zero --optimizer=adamw --metrics=FOLDER/metrics.jsonl --checkpoint-dir=FOLDER/run --save-every=3",
    "mlp --strategy=dp --grad-accum-steps=2",
    "mlp --explain",
    "cnn --sync-batch-norm",
    "comm",
    "verify",
];

/// Such a wait ends only if the other ranks come, and no failure and no timeout ends it.
#[test]
fn host_never_waits_behind_a_collective() {
    in_parallel(&COPIES, |row| {
        let folder = tempfile::tempdir().unwrap();
        let row = row.replace("FOLDER", folder.path().to_str().unwrap());
        let args = if ["comm", "verify"].contains(&&*row) { vec![&*row] } else { args(&row) };
        has_no_wait_behind_nccl(&report(on_gpus(2, &args)), &row);
    });
}

/// Returns the name and the bytes of each collective in a trace, those of the warm-up apart from those of steps.
fn collectives(row: &str) -> [BTreeSet<(String, u64)>; 2] {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let to = format!("--trace={}", trace.display());
    succeed(on_gpus(2, &[&args(row)[..], &[&to]].concat()));
    let trace: Value = serde_json::from_slice(&fs::read(trace).unwrap()).unwrap();
    let events = trace.as_array().or_else(|| trace["traceEvents"].as_array()).unwrap();
    let mut found = [BTreeSet::new(), BTreeSet::new()];
    for event in events.iter().filter(|it| it["pid"] == 0 && it["tid"] == 0) {
        let name = event["name"].as_str().unwrap().split(' ').next().unwrap();
        if let Some(bytes) = event["args"]["bytes"].as_u64() {
            found[usize::from(event["args"]["step"].is_u64())].insert((name.into(), bytes));
        }
    }
    found
}

/// At the first call of an operation with a size, NCCL may connect and allocate.
#[test]
fn warm_up_makes_every_collective_of_a_step() {
    for row in ["mlp", "mlp --zero"] {
        let [before, in_steps] = collectives(row);
        assert!(in_steps.len() > usize::from(row.contains("zero")), "{row}: {in_steps:?}");
        assert!(in_steps.is_subset(&before), "{row}: {before:?}, then {in_steps:?}");
    }
}

/// Each process has one rank, sees all GPUs, and must leave those of other ranks alone, also when it fails.
#[test]
fn process_uses_only_the_gpu_of_its_rank() {
    for fault in ["", "remote:rank=1,call=9"] {
        let folder = tempfile::tempdir().unwrap();
        let args = ["--spawn=processes", "--model=mlp", "--num-workers=1", "--grace-period=5s"];
        let mut command = on_gpus(2, &args);
        command.env("SIM_REPORT", folder.path().join("%p.json")).env("SIM_NCCL_FAULT", fault);
        let (code, _, stderr) = run_command(command);
        assert_eq!(code, Some(i32::from(!fault.is_empty())), "{stderr}");
        let mut contexts: Vec<_> =
            reports(folder.path()).iter().map(|it| of_gpus(it, "contexts")).collect();
        contexts.retain(|used| used.contains(&1)); // not of the process that starts the others
        contexts.sort();
        assert_eq!(contexts, [[0, 1], [1, 0]], "{fault}: {stderr}");
    }
}

#[test]
fn longer_runs_make_no_more_waits_or_allocations() {
    for (gpus, row) in [
        (1, "--model=linear"),
        (2, "--model=linear"),
        (2, "--model=mlp --optimizer=adamw --bucket-cap-mb=0.01"),
        (1, "--model=mlp --amp=bf16"),
        (2, "--model=cnn --in-features=64"),
        (2, "--model=mlp --num-workers=2"),
    ] {
        let [few, many] = [640, 3200].map(|samples| counts(gpus, row, samples));
        assert_eq!(few, many, "{COUNTS:?}, {gpus} GPUs, {row}");
    }
    // Checks that the counters work: a loss scaler reads on the host whether the gradients are finite.
    let [few, many] = [640, 3200].map(|samples| counts(1, "--model=mlp --amp=fp16", samples));
    assert!(many[2][0] > few[2][0], "{few:?} and {many:?}");
}
