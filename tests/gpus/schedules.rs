//! The same bits whatever the order in which GPUs work, and whatever their allocations wait for.

use std::process::Command;

use crate::harness::run_command;
use crate::machine::{SHARES_GPUS, cpu_events, events, in_parallel, on_gpus, results};
use crate::same::args;

/// How many random schedules are tried, in turn with each of the runs.
const SCHEDULES: usize = 64;

/// Runs that order streams in different ways: buckets, side streams, copies, messages; ranks that share a GPU.
const RUNS: [(usize, &str); 8] = [
    (2, "mlp --batch-size=64 --bucket-cap-mb=0.001 --max-grad-norm=0.1 --amp=fp16"),
    (2, "mlp --batch-size=64 --num-workers=2 --prefetch-factor=3"),
    (2, "mlp --batch-size=64 --grad-accum-steps=2 --find-unused-parameters --val-fraction=0.2"),
    (2, "mlp --batch-size=64 --strategy=dp --dropout=0.2"),
    (2, "cnn --sync-batch-norm --batch-size=40"),
    (3, "mlp --batch-size=64 --bucket-cap-mb=0.001 --backend=threaded"),
    (2, "mlp --share-model --optimizer=adamw --val-fraction=0.2 --backend=threaded"),
    (3, "mlp --batch-size=64 --bucket-cap-mb=0.001 --zero --backend=nccl"),
];

/// Runs `ranks` on a GPU each, or on one GPU if `row` names the backend.
fn gpu_run(ranks: usize, row: &str, variables: &[(&str, &str)]) -> Command {
    let gpus = if row.contains("--backend") { 1 } else { ranks };
    let count = format!("--nproc-per-node={ranks}");
    let mut command = on_gpus(gpus, &[&args(row)[..], &["--log-format=json", &count]].concat());
    command.envs(variables.iter().copied()).envs(SHARES_GPUS);
    command
}

fn expected() -> Vec<Vec<String>> {
    let on_cpu = |row: &'static str| row.split(" --backend").next().unwrap_or_default();
    RUNS.map(|(ranks, row)| results(&cpu_events(ranks, &args(on_cpu(row))))).into()
}

#[test]
fn random_stream_schedules_change_no_bit() {
    let expected = expected();
    let seeds: Vec<usize> = (0..SCHEDULES).collect();
    in_parallel(&seeds, |seed| {
        let (ranks, row) = RUNS[seed % RUNS.len()];
        let text = seed.to_string();
        let found =
            events(gpu_run(ranks, row, &[("SIM_SEED", &text), ("SIM_DELAY_MAX_US", "500")]));
        assert_eq!(results(&found), expected[seed % RUNS.len()], "SIM_SEED={seed}, {row}");
    });
}

#[test]
fn blocking_allocations_change_no_bit() {
    let expected = expected();
    let runs: Vec<usize> = (0..RUNS.len()).collect();
    in_parallel(&runs, |&run| {
        let (ranks, row) = RUNS[run];
        let found = events(gpu_run(ranks, row, &[("SIM_MALLOC_WAITS", "1")]));
        assert_eq!(results(&found), expected[run], "{row}");
    });
}

/// On a machine that orders nothing, runs must break or come to something else: otherwise the tests above see nothing.
#[test]
fn ignored_stream_waits_are_noticed() {
    let expected = expected();
    let is_same = |(run, (ranks, row)): (usize, (usize, &str))| {
        let variables = [("SIM_IGNORE_WAITS", "1"), ("SIM_SEED", "1"), ("SIM_DELAY_MAX_US", "500")];
        let command = gpu_run(ranks, &format!("{row} --timeout=5s --grace-period=1s"), &variables);
        let (code, stdout, _) = run_command(command);
        let events = stdout.lines().map_while(|line| serde_json::from_str(line).ok());
        code == Some(0) && results(&events.collect::<Vec<_>>()) == expected[run]
    };
    for runs in [0..3, RUNS.len() - 3..RUNS.len()] {
        let same = runs.clone().filter(|&run| is_same((run, RUNS[run]))).count();
        assert!(same < runs.len(), "no run of {runs:?} depends on the order of streams");
    }
}
