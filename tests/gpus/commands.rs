//! What a run and `bench` measure on simulated GPUs.

use crate::machine::{cpu_events, end, events, gpu_events, on_gpus, parsed, succeed};

/// From GPU times, `bench` tells what each part of a step takes; what it calls is in `collectives`.
#[test]
fn bench_step_measures_each_part() {
    for strategy in ["--strategy=ddp", "--strategy=dp"] {
        let args = ["bench", "step", "--model=mlp", strategy, "--steps=20", "--log-format=json"];
        let rows = events(on_gpus(2, &args));
        let of = |key: &str| rows[0][key].as_f64().unwrap();
        assert_eq!(rows[0]["world_size"], 2, "{rows:?}");
        for part in ["forward_us", "backward_us", "communication_us", "optimizer_us"] {
            assert!(of(part) > 0.0 && of(part) < of("us_per_step"), "{part}: {rows:?}");
        }
    }
}

/// Watching a run changes no bit of it; `cuda` reads the trace.
#[test]
fn explain_trace_and_report_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, report] =
        ["trace", "report"].map(|flag| format!("--{flag}={}", folder.path().join(flag).display()));
    let run = ["--model=mlp", "--num-samples=400", "--val-fraction=0.2"];
    let watch = ["--explain", &trace, &report, "--log-format=json"];
    let (stdout, stderr) = succeed(on_gpus(2, &[&run[..], &watch].concat()));
    let (gpu, cpu) = (parsed(&stdout), cpu_events(2, &run));
    for key in ["parameters_hash", "loss"] {
        assert_eq!(end(&gpu)[key], end(&cpu)[key], "{key}");
    }
    assert!(stderr.contains("have trained one model") && stderr.contains("NCCL"), "{stderr}");
}

#[test]
fn straggler_is_found_from_gpu_times() {
    let slow = ["--inject-fault=slow=60ms:rank=1,at=step,step=2", "--num-samples=3072"];
    let events = gpu_events(3, &slow);
    let straggler = &end(&events)["straggler"];
    assert_eq!((&straggler["rank"], &straggler["phase"]), (&1.into(), &"step".into()));
    // Thirty steps, 60 ms each.
    assert!(straggler["phase_seconds"].as_f64().unwrap() >= 1.7, "{straggler}");
    assert!(end(&gpu_events(3, &slow[1..]))["straggler"].is_null());
}
