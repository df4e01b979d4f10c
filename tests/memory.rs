//! Memory: what the program takes does not grow with the number of its steps.

use serde_json::Value;

use crate::harness::run;

/// The most that was resident in a run of so many steps.
fn peak(args: &[&str], steps: usize) -> f64 {
    let steps = format!("--max-steps={steps}");
    let always = ["--nproc-per-node=2", "--log-format=json", "--max-epochs=1000000", &steps];
    let (code, stdout, stderr) = run(&[&always[..], args].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let end: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    end["peak_memory_bytes"].as_f64().unwrap()
}

/// Bytes that 9000 further steps may take. A kilobyte a step would be 9.2 million.
const BOUND: f64 = 4e6;

#[test]
fn memory_does_not_grow_between_1000_and_10000_steps() {
    let metrics = tempfile::tempdir().unwrap();
    let metrics = format!("--metrics={}", metrics.path().join("metrics.jsonl").display());
    let mlp = ["--model=mlp", "--hidden=16", "--batch-size=8", "--num-samples=2048"];
    let all =
        ["--num-workers=1", "--amp=bf16", "--val-fraction=0.1", "--max-grad-norm=1", &metrics];
    for more in [&[][..], &all] {
        let args = [&mlp[..], more].concat();
        let (before, after) = (peak(&args, 1000), peak(&args, 10_000));
        println!("{before} bytes after 1000 steps, {after} after 10000: {args:?}");
        assert!(after - before < BOUND, "{before} bytes after 1000 steps, {after} after 10000");
    }
}
