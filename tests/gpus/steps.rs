//! What a step costs besides its work: the simulated machine counts waits of the host, and allocations.

use std::fs;

use serde_json::Value;

use crate::harness::run_command;
use crate::machine::on_gpus;

/// The machine's counters, per GPU, of what no step may do because it can stall the GPUs.
const COUNTS: [&str; 4] = ["cuda_mallocs", "cuda_frees", "pinned_mallocs", "host_waits"];

/// Returns the counts of each GPU in a run of two epochs over so many samples.
fn counts(gpus: usize, row: &str, samples: usize) -> Vec<Vec<u64>> {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.json");
    let samples = format!("--num-samples={samples}");
    let mut command = on_gpus(
        gpus,
        &[&row.split_whitespace().collect::<Vec<_>>()[..], &["--max-epochs=2", &samples]].concat(),
    );
    command.env("SIM_REPORT", &report);
    let (code, _, stderr) = run_command(command);
    assert_eq!(code, Some(0), "{row}: {stderr}");
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    let of_gpu = |gpu: &Value| COUNTS.iter().map(|it| gpu[*it].as_u64().unwrap()).collect();
    report["gpus"].as_array().unwrap().iter().map(of_gpu).collect()
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
    assert!(many[0][3] > few[0][3], "{few:?} and {many:?}");
}
