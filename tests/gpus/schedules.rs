//! The same bits whatever the order in which GPUs work, and whatever their allocations wait for.

use std::process::Command;

use crate::harness::run_command;
use crate::machine::{cpu_events, events, in_parallel, on_gpus, results};
use crate::same::args;

/// How many random schedules are tried, in turn with each of the runs.
const SCHEDULES: usize = 200;

/// Runs that order streams in different ways: buckets, side streams, copies, messages.
const RUNS: [(usize, &str); 8] = [
    (2, "linear --batch-size=64"),
    (2, "mlp --batch-size=64 --bucket-cap-mb=0.001"),
    (2, "mlp --batch-size=64 --num-workers=2 --prefetch-factor=3"),
    (3, "mlp --batch-size=64 --comm-hook=powersgd --powersgd-start-iter=1"),
    (2, "mlp --batch-size=64 --max-grad-norm=0.1 --amp=fp16"),
    (2, "mlp --batch-size=64 --grad-accum-steps=2 --find-unused-parameters --val-fraction=0.2"),
    (2, "mlp --batch-size=64 --strategy=dp --dropout=0.2"),
    (2, "cnn --sync-batch-norm --batch-size=40"),
];

fn gpu_run(ranks: usize, row: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = on_gpus(ranks, &[&args(row)[..], &["--log-format=json"]].concat());
    command.envs(variables.iter().copied());
    command
}

fn expected() -> Vec<Vec<String>> {
    RUNS.map(|(ranks, row)| results(&cpu_events(ranks, &args(row)))).into()
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
    let cases: Vec<(usize, &str)> =
        (0..RUNS.len()).flat_map(|run| [(run, "1"), (run, "2")]).collect();
    in_parallel(&cases, |(run, waits)| {
        let (ranks, row) = RUNS[*run];
        let found = events(gpu_run(ranks, row, &[("SIM_MALLOC_WAITS", waits)]));
        assert_eq!(results(&found), expected[*run], "SIM_MALLOC_WAITS={waits}, {row}");
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
    let same = RUNS.into_iter().enumerate().take(3).filter(|run| is_same(*run)).count();
    assert!(same < 3, "no run depends on the order of streams");
}
