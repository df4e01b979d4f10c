//! What a user runs, on simulated GPUs: the commands, what a run writes, and the lessons.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::harness::{program, program_path, repository, without_launcher};
use crate::machine::{
    cpu_events, end, events, gpu_events, in_parallel, on_gpus, parsed, refused, simulate, succeed,
};

#[test]
fn comm_shows_the_values_of_cpu_ranks() {
    let args = ["comm", "--log-format=json"];
    for ranks in [2, 3] {
        let count = format!("--nproc-per-node={ranks}");
        let on_cpu = program(&[&args[..], &[&count]].concat());
        let [gpu, cpu] = [on_gpus(ranks, &args), on_cpu].map(|command| {
            let mut rows = events(command);
            // NCCL sends along a ring, the ranks of one process read from each other.
            for moved in ["sent", "received"] {
                rows.iter_mut().for_each(|row| drop(row.as_object_mut().unwrap().remove(moved)));
            }
            rows
        });
        assert_eq!(gpu, cpu, "{ranks} ranks");
        assert!(gpu.len() > 8 * ranks, "{gpu:?}");
    }
}

#[test]
fn verify_passes_with_every_backend() {
    for (flag, backend) in [("--backend=auto", "nccl"), ("--backend=threaded", "threaded")] {
        let found = events(on_gpus(2, &["verify", "--log-format=json", flag]));
        let strategies: Vec<&Value> = found.iter().map(|it| &it["strategy"]).collect();
        assert_eq!(strategies, ["ddp", "ddp", "dp", "ddp", "dp"], "{found:?}");
        for event in &found {
            assert_eq!((&event["ok"], &event["device"]), (&true.into(), &"GPU".into()), "{event}");
            assert_eq!(event["backend"], backend, "{event}");
        }
    }
}

#[test]
fn share_model_is_wrong_input_with_a_gpu_for_each_rank() {
    for args in [&[][..], &["bench", "step"], &["bench", "scaling"], &["verify"]] {
        let args = [args, &["--nproc-per-node=2", "--share-model"]].concat();
        let stderr = refused(on_gpus(2, &args));
        let expected =
            "--share-model: with backend nccl the 2 ranks of this process do not share memory";
        assert!(stderr.contains(expected), "{stderr}");
    }
    // The remedy in the message works.
    for args in [&["verify"][..], &["--max-epochs=1"]] {
        let args = [args, &["--nproc-per-node=2", "--share-model", "--backend=threaded"]].concat();
        succeed(on_gpus(2, &args));
    }
}

#[test]
fn bench_of_every_operation_and_step_measures() {
    let ops =
        "all-reduce reduce broadcast all-gather reduce-scatter gather scatter all-to-all send-recv";
    for op in ops.split(' ') {
        let args =
            ["bench", op, "--max-bytes=4K", "--step-factor=8", "--iters=3", "--log-format=json"];
        let rows = events(on_gpus(2, &args));
        assert!(rows.len() > 2, "{op}: {rows:?}");
        assert!(rows.iter().all(|row| row["wrong"] == 0), "{op}: {rows:?}");
    }
    for args in [&["bench", "step", "--model=mlp"][..], &["bench", "step", "--strategy=dp"]] {
        let rows = events(on_gpus(2, &[args, &["--steps=20", "--log-format=json"]].concat()));
        let of = |key: &str| rows[0][key].as_f64().unwrap();
        assert_eq!(rows[0]["world_size"], 2, "{rows:?}");
        for part in ["forward_us", "backward_us", "communication_us", "optimizer_us"] {
            assert!(of(part) > 0.0 && of(part) < of("us_per_step"), "{part}: {rows:?}");
        }
    }
}

/// Watching a run changes nothing of it, and shows its GPUs.
#[test]
fn explain_trace_and_report_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let run = ["--model=mlp", "--num-samples=400", "--val-fraction=0.2"];
    let plain = gpu_events(2, &run);
    let watched = [
        "--explain".to_string(),
        format!("--trace={}", file("trace.json")),
        format!("--report={}", file("report.html")),
        format!("--metrics={}", file("metrics.jsonl")),
        format!("--tensorboard={}", file("board")),
    ];
    let watched: Vec<&str> = watched.iter().map(String::as_str).collect();
    let args = [&run[..], &watched, &["--log-format=json"]].concat();
    let (stdout, stderr) = succeed(on_gpus(2, &args));
    let events = parsed(&stdout);
    assert_eq!(end(&events)["parameters_hash"], end(&plain)["parameters_hash"]);
    assert_eq!(end(&events)["loss"], end(&cpu_events(2, &run))["loss"]);
    assert!(stderr.contains("have trained one model") && stderr.contains("NCCL"), "{stderr}");
    let [trace, report, metrics] = ["trace.json", "report.html", "metrics.jsonl"]
        .map(|name| fs::read_to_string(file(name)).unwrap());
    let trace: Value = serde_json::from_str(&trace).unwrap();
    for rank in 0..2 {
        let lane = format!("rank {rank} (GPU:{rank})");
        assert!(trace.to_string().contains(&lane), "{lane} is not in the trace");
        assert!(report.contains(&format!("GPU:{rank}")));
    }
    assert!(metrics.lines().count() > 1);
    assert!(fs::read_dir(file("board")).unwrap().count() > 0);
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

#[test]
fn env_lists_the_gpus() {
    let found = events(on_gpus(3, &["env", "--log-format=json"]));
    assert_eq!(found[0]["gpus"].as_array().unwrap().len(), 3, "{found:?}");
    assert!(found[0]["gpu_problem"].is_null(), "{found:?}");
    assert!(found[0]["nccl"].is_string(), "{found:?}");
}

#[test]
fn every_lesson_exits_with_success() {
    let built = program_path().with_file_name("examples");
    let files = fs::read_dir(repository("examples")).unwrap();
    let names = files.map(|it| it.unwrap().file_name().into_string().unwrap());
    let lessons: Vec<String> =
        names.filter(|it| it.starts_with(|c: char| c.is_ascii_digit())).collect();
    assert!(lessons.len() > 10, "{lessons:?}");
    in_parallel(&lessons, |name| {
        let path = built.join(name.trim_end_matches(".rs"));
        assert!(path.exists(), "{} is not built: use `make test-gpus`", path.display());
        let mut command = Command::new(path);
        without_launcher(&mut command);
        simulate(&mut command, 2);
        let (stdout, _) = succeed(command);
        assert!(!stdout.is_empty(), "{name}");
        // The one that starts its ranks on GPUs: there and in two processes on the CPU they come to the same.
        if name.ends_with("-several-machines.rs") {
            let hashes: Vec<&str> =
                stdout.lines().filter_map(|it| Some(it.split_once("parameters ")?.1)).collect();
            assert!(hashes.len() > 3 && hashes.iter().all(|it| *it == hashes[0]), "{stdout}");
        }
    });
}
