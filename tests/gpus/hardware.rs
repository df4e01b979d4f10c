//! The same options on the GPU of this machine and on its CPU: for the pack of `make gpu-pack`, which reads what this prints.

use std::sync::Mutex;
use std::thread::available_parallelism;

use serde_json::{Value, json};

use crate::harness::{program_on_gpus, run_command, some_of};
use crate::machine::{cpu_events, in_parallel_by};
use crate::same::{MIXED_PRECISION, MODELS, OPTIONS, args};

/// How far a loss on a GPU may be from that on the CPU, as a share of it: its kernels add up in another order.
const TOLERANCE: f64 = 1e-3;

/// The same where something has half precision, or TF32 as PyTorch's convolutions: two to three digits are exact.
const TOLERANCE_OF_HALF: f64 = 3e-2;

/// Autocast gives cross_entropy float32 on the CPU, and nll_loss alone on CUDA: simulated GPUs do not have the bits of the CPU.
const CROSS_ENTROPY: &[(usize, &str)] =
    &[(2, "digits --amp=bf16"), (2, "cnn --amp=fp16 --val-fraction=0.2")];

/// Returns the largest difference of two runs' losses, as a share of them; infinite where they tell of different things.
fn difference(here: &[Value], there: &[Value]) -> f64 {
    let of_pair = |(here, there): (&Value, &Value)| {
        let is_same = ["event", "steps", "epoch"].iter().all(|key| here[key] == there[key]);
        match (here["loss"].as_f64(), there["loss"].as_f64()) {
            (Some(here), Some(there)) if is_same && here == there => 0.0,
            (Some(here), Some(there)) if is_same && there != 0.0 => ((here - there) / there).abs(),
            (None, None) if is_same => 0.0,
            _ => f64::INFINITY,
        }
    };
    let sorted = |events: &[Value]| {
        let mut events = events.to_vec();
        events.sort_by_key(|it| (it["epoch"].as_u64(), it["rank"].as_u64()));
        events
    };
    let (here, there) = (sorted(here), sorted(there));
    let pairs = here.iter().zip(&there).map(of_pair);
    let lost = if here.len() == there.len() { 0.0 } else { f64::INFINITY };
    pairs.fold(lost, f64::max)
}

/// Returns how far a run on the GPU is from the same run on the CPU, and an error if it fails, or did not run on the GPU.
fn difference_of(ranks: usize, backend: &str, row: &str) -> Result<f64, String> {
    let [count, on] = [format!("--nproc-per-node={ranks}"), format!("--backend={backend}")];
    let options = [&args(row)[..], &["--log-format=json", &count, &on]].concat();
    let (code, stdout, stderr) = run_command(program_on_gpus(&options));
    if code != Some(0) {
        return Err(format!("{code:?}, {stderr}"));
    }
    let here: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Without a usable GPU, the threaded backend takes the CPU: the losses would be equal, and prove nothing.
    if here[0]["device"] != "GPU" {
        return Err(format!("it ran on {}", here[0]["device"]));
    }
    Ok(difference(&here, &cpu_events(ranks, &args(row))))
}

#[test]
#[ignore = "for a machine with a GPU: run.sh of `make gpu-pack` runs it"]
fn gpu_losses_match_the_cpu_of_this_machine() {
    let with_nccl = [MODELS, MIXED_PRECISION, CROSS_ENTROPY].concat();
    let shared = [MODELS, OPTIONS, MIXED_PRECISION, CROSS_ENTROPY].concat();
    let mut cases: Vec<(usize, &str, &str)> =
        shared.into_iter().map(|(ranks, row)| (ranks, "threaded", row)).collect();
    cases.extend(with_nccl.into_iter().map(|(_, row)| (1, "nccl", row)));
    // CUDA draws other random numbers than the CPU.
    cases.retain(|(_, _, row)| !row.contains("--dropout"));
    let cases = some_of(cases, 8);
    let far = Mutex::new(Vec::new());
    let cores = available_parallelism().map_or(1, usize::from);
    in_parallel_by(cores, &cases, |&(ranks, backend, row)| {
        let fail =
            |why| far.lock().unwrap().push(format!("{ranks} ranks, {backend}, {row}: {why}"));
        // A run that fails is one of the findings: the others go on.
        let found = match difference_of(ranks, backend, row) {
            Ok(found) => found,
            Err(why) => return fail(why),
        };
        println!(
            "\n{}",
            json!({"ranks": ranks, "backend": backend, "options": row, "difference": found})
        );
        let is_half =
            ["--amp", "=fp16", "=bf16", "cnn", "images"].iter().any(|it| row.contains(it));
        let tolerance = if is_half { TOLERANCE_OF_HALF } else { TOLERANCE };
        if found > tolerance {
            fail(format!("{found:e}"));
        }
    });
    let far = far.into_inner().unwrap();
    assert!(far.is_empty(), "losses on this GPU are not those of its CPU: {far:#?}");
}
