//! What a step costs besides its work: the simulated machine notes waits of the host, and allocations.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::harness::run_command;
use crate::machine::{Log, end, gpu_events, in_parallel, on_gpus, succeed};
use crate::same::args;

/// Runs a command, which must succeed, and returns the log of its GPUs.
fn log(mut command: Command) -> Log {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log");
    command.env("SIM_LOG", &file);
    succeed(command);
    Log::read(&file)
}

/// Runs in which the host copies something to a GPU or from it. `FOLDER` is one for files.
const COPIES: [&str; 11] = [
    "mlp --find-unused-parameters --max-epochs=2",
    "mlp --static-graph --bucket-cap-mb=0.001 --max-epochs=2",
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
        assert_eq!(log(on_gpus(2, &args)).waits_behind_nccl(), [""; 0], "{row}");
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
        let file = folder.path().join("log");
        let args = ["--spawn=processes", "--model=mlp", "--num-workers=1", "--grace-period=5s"];
        let mut command = on_gpus(2, &args);
        command.env("SIM_LOG", &file).env("SIM_NCCL_FAULT", fault);
        let (code, _, stderr) = run_command(command);
        assert_eq!(code, Some(i32::from(!fault.is_empty())), "{stderr}");
        let mut contexts = Log::read(&file).contexts();
        contexts.sort();
        assert_eq!(contexts, [[0], [1]], "{fault}: {stderr}");
    }
}

/// What no step may do because it can stall the GPUs, for each of them, in a run of so many steps.
fn stalls(gpus: usize, row: &str, steps: usize) -> [Vec<usize>; 3] {
    let steps = format!("--max-steps={steps}");
    let row: Vec<&str> = row.split_whitespace().collect();
    let log = log(on_gpus(gpus, &[&row[..], &["--num-samples=3200", &steps]].concat()));
    ["cudaMalloc", "host waits", "cudaHostAlloc"].map(|event| log.counts(event, gpus))
}

#[test]
fn longer_runs_make_no_more_waits_or_allocations() {
    for (gpus, row) in [
        (1, "--model=linear"),
        (2, "--model=mlp --optimizer=adamw --bucket-cap-mb=0.01"),
        (2, "--model=cnn --in-features=64 --amp=bf16"),
        (2, "--model=mlp --num-workers=2"),
    ] {
        let [few, many] = [10, 45].map(|steps| stalls(gpus, row, steps));
        assert_eq!(few, many, "{gpus} GPUs, {row}");
    }
    // A loss scaler reads on the host whether the gradients are finite: that is noted.
    let [few, many] = [10, 45].map(|steps| stalls(1, "--model=mlp --amp=fp16", steps));
    assert!(many[1][0] > few[1][0], "{few:?} and {many:?}");
}

#[test]
fn straggler_is_found_from_gpu_times() {
    let slow = ["--inject-fault=slow=150ms:rank=1,at=step,step=2", "--num-samples=1344"];
    let events = gpu_events(3, &slow);
    let straggler = &end(&events)["straggler"];
    assert_eq!((&straggler["rank"], &straggler["phase"]), (&1.into(), &"step".into()));
}
