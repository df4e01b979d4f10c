//! What a user runs, on simulated GPUs: what a run and `bench` measure, and the lesson that starts ranks on GPUs.

use std::fs;
use std::process::Command;

use crate::harness::{program_path, without_launcher};
use crate::machine::{cpu_events, end, events, gpu_events, on_gpus, parsed, simulate, succeed};

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

/// Watching a run changes no bit of it, and shows its GPUs; `cuda` reads the trace.
#[test]
fn explain_trace_and_report_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    let [trace, report, metrics, board] =
        ["trace=trace.json", "report=report.html", "metrics=metrics.jsonl", "tensorboard=board"]
            .map(|flag| {
                format!("--{}", flag.replace('=', &format!("={}/", folder.path().display())))
            });
    let run = ["--model=mlp", "--num-samples=400", "--val-fraction=0.2"];
    let watch = ["--explain", &trace, &report, &metrics, &board, "--log-format=json"];
    let watched = [&run[..], &watch].concat();
    let (stdout, stderr) = succeed(on_gpus(2, &watched));
    let (gpu, cpu) = (parsed(&stdout), cpu_events(2, &run));
    for key in ["parameters_hash", "loss"] {
        assert_eq!(end(&gpu)[key], end(&cpu)[key], "{key}");
    }
    assert!(stderr.contains("have trained one model") && stderr.contains("NCCL"), "{stderr}");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("GPU:0") && page.contains("GPU:1"));
}

#[test]
fn straggler_is_found_from_gpu_times() {
    let slow = ["--inject-fault=slow=60ms:rank=1,at=step,step=2", "--num-samples=3072"];
    for layout in ["--spawn=threads", "--spawn=processes"] {
        let events = gpu_events(3, &[&slow[..], &[layout]].concat());
        let straggler = &end(&events)["straggler"];
        assert_eq!((&straggler["rank"], &straggler["phase"]), (&1.into(), &"step".into()));
        // Thirty steps, 60 ms each.
        assert!(straggler["phase_seconds"].as_f64().unwrap() >= 1.7, "{layout}: {events:?}");
    }
    assert!(end(&gpu_events(3, &slow[1..]))["straggler"].is_null());
}

/// It starts its ranks on GPUs. There and in two processes on the CPU they come to the same.
#[test]
fn lesson_of_several_machines_has_the_same_parameters_everywhere() {
    let path = program_path().with_file_name("examples").join("13-several-machines");
    assert!(path.exists(), "{} is not built: use `make test-gpus`", path.display());
    let mut command = Command::new(path);
    without_launcher(&mut command);
    simulate(&mut command, 2);
    let (stdout, _) = succeed(command);
    let hashes: Vec<&str> =
        stdout.lines().filter_map(|it| Some(it.split_once("parameters ")?.1)).collect();
    assert!(hashes.len() > 3 && hashes.iter().all(|it| *it == hashes[0]), "{stdout}");
}
