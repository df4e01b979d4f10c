//! With a GPU. Where none is visible, each test says that it is skipped, and why.

use std::thread;

use serde_json::Value;

use crate::harness::{self, program, program_on_gpus, run_command, run_command_to, run_to};

/// How many GPUs the program sees; says that this test, on its thread, is skipped if they are too few.
fn gpus_for_test(needed: usize) -> Option<usize> {
    let report = events(&["env", "--log-format=json"]).remove(0);
    let visible = report["gpus"].as_array().unwrap().len();
    if visible < needed || !report["gpu_problem"].is_null() {
        let test = thread::current();
        let test = test.name().unwrap_or_default();
        println!("skipped {test}: it needs {needed} GPUs, and {visible} can be used here");
        return None;
    }
    Some(visible)
}

fn on_gpus(args: &[&str]) -> (Option<i32>, String, String) {
    run_command(program_on_gpus(args))
}

/// The events of a run that must succeed.
fn events(args: &[&str]) -> Vec<Value> {
    harness::events(&run_command_to(0, program_on_gpus(args)).0)
}

const DEMO: [&str; 4] = ["--log-format=json", "--max-epochs=2", "--lr=0.1", "--model=mlp"];

fn last_loss(events: &[Value]) -> f64 {
    events[events.len() - 1]["loss"].as_f64().unwrap()
}

#[test]
fn runs_repeat_their_bits_and_come_near_the_cpu_loss() {
    let Some(gpus) = gpus_for_test(1) else { return };
    // The same data, order and start as on the CPU.
    let ranks = format!("--nproc-per-node={gpus}");
    let cpu = last_loss(&harness::events(&run_to(0, &[&DEMO[..], &[&ranks]].concat()).0));
    let mut float32 = None;
    for (more, backend, count) in [
        (&[][..], "nccl", gpus),
        (&["--amp=bf16"], "nccl", gpus),
        (&["--amp=fp16"], "nccl", gpus),
        (&["--nproc-per-node=3", "--backend=threaded"], "threaded", 3),
    ] {
        let [first, again] = [(); 2].map(|()| events(&[&DEMO[..], more].concat()));
        assert_eq!((&first[0]["device"], &first[0]["backend"]), (&"GPU".into(), &backend.into()));
        assert_eq!(first[0]["world_size"], count);
        let [one, other] = [&first, &again].map(|events| events.last().unwrap());
        for key in ["parameters_hash", "loss", "steps", "bytes_sent_by_rank"] {
            assert!(!one[key].is_null(), "{more:?}: {key}");
            assert_eq!(one[key], other[key], "{more:?}: {key}");
        }
        assert_eq!(one.get("scale").is_some(), more.contains(&"--amp=fp16"), "{one}");
        if backend == "nccl" {
            let (loss, plain) = (last_loss(&first), *float32.get_or_insert(last_loss(&first)));
            let (near, bound) = if more.is_empty() { (cpu, 1e-3) } else { (plain, 1e-2) };
            assert!((loss - near).abs() < bound * near, "{more:?}: {loss} and {near}");
            assert!(more.is_empty() || loss != plain, "{more:?} is not float32");
        }
    }
}

#[test]
fn batches_copied_in_the_background_are_the_same() {
    if gpus_for_test(1).is_none() {
        return;
    }
    // Large batches and a small model, so that a buffer that is filled too early would be seen.
    let args = ["--num-samples=20000", "--in-features=2000", "--batch-size=500", "--lr=0.01"];
    let hash = |args: &[&str], more: &[&str]| {
        let args = [&["--log-format=json", "--max-epochs=2", "--model=mlp"], args, more].concat();
        events(&args).pop().unwrap()["parameters_hash"].clone()
    };
    let expected = hash(&args, &[]); // picked from what is on the GPU as a whole
    for workers in
        [["--num-workers=1", "--prefetch-factor=1"], ["--num-workers=3", "--prefetch-factor=4"]]
    {
        assert_eq!(hash(&args, &workers), expected, "{workers:?}");
    }
    // Without workers, where a part of a file is picked batch by batch.
    let digits = ["--dataset=digits", "--loss=cross-entropy", "--val-fraction=0.2"];
    assert_eq!(hash(&digits, &[]), hash(&digits, &["--num-workers=2"]));
}

#[test]
fn more_ranks_than_gpus_are_refused_with_a_remedy() {
    let Some(gpus) = gpus_for_test(1) else { return };
    let (code, _, stderr) = on_gpus(&[&format!("--nproc-per-node={}", gpus + 1)]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--backend threaded"), "{stderr}");
}

#[test]
fn failing_rank_ends_the_nccl_run_and_is_named() {
    let Some(gpus) = gpus_for_test(2) else { return };
    let last = gpus - 1;
    let (code, _, stderr) = on_gpus(&[&format!("--inject-fault=error:rank={last},at=step,step=5")]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains(&format!("rank {last} (GPU:{last}) failed in step #5")), "{stderr}");
}

#[test]
fn trace_shows_gpu_work_after_its_launch() {
    let Some(gpus) = gpus_for_test(1) else { return };
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let mut command =
        program_on_gpus(&[&DEMO[..], &[&format!("--trace={}", trace.display())]].concat());
    // The clock of a simulated GPU is by 2 % slower than the host's.
    command.env("SIM_CLOCK_PPM", "-20000");
    run_command_to(0, command);
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let of = |phase: &str| {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        events.filter(|it| it["ph"] == phase).collect::<Vec<_>>()
    };
    let error: f64 = trace["otherData"]["gpu_clock_error_us"]
        .as_object()
        .map(|errors| errors.values().map(|it| it.as_f64().unwrap()).sum())
        .unwrap();
    // As far as the clocks of GPUs are known; a time of CUDA's is exact to half a microsecond.
    let error = error + 2.0;
    for rank in 0..gpus {
        let lane = |name: String| {
            let found = of("M").into_iter().find(|it| it["args"]["name"] == *name);
            found.unwrap_or_else(|| panic!("{name} is not there"))["tid"].clone()
        };
        let host = lane(format!("rank {rank} (GPU:{rank})"));
        let gpu = lane(format!("rank {rank} on GPU:{rank}"));
        let slices = |lane: &Value, name: &str| {
            let slices = of("X").into_iter().filter(|it| it["tid"] == *lane && it["name"] == name);
            slices.map(|it| it["ts"].as_f64().unwrap()).collect::<Vec<_>>()
        };
        for name in ["data", "forward", "backward", "all_reduce (bucket 0)", "optimizer"] {
            let (launched, begun) = (slices(&host, name), slices(&gpu, name));
            assert_eq!(launched.len(), begun.len(), "rank {rank}, {name}");
            assert!(!begun.is_empty(), "rank {rank}, {name}");
            // A GPU begins nothing before it is launched.
            let early =
                launched.iter().zip(&begun).find(|(launched, begun)| **begun + error < **launched);
            assert_eq!(early, None, "rank {rank}, {name}");
        }
    }
}

#[test]
fn stalled_run_reports_the_progress_of_each_gpu() {
    let Some(gpus) = gpus_for_test(2) else { return };
    let fault = format!("--inject-fault=stall:rank={},at=step,step=5", gpus - 1);
    let (code, _, stderr) = on_gpus(&[&fault, "--timeout=2s", "--grace-period=1s"]);
    assert_eq!(code, Some(1), "{stderr}");
    for rank in 0..gpus {
        let line = stderr.lines().find(|it| it.starts_with(&format!("  rank {rank} last seen")));
        let line = line.unwrap_or_else(|| panic!("{stderr}"));
        // Of the same group: in the order of their numbers.
        let number = |after: &str| -> u64 {
            let (_, rest) = line.split_once(after).unwrap_or_else(|| panic!("{stderr}"));
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap_or_else(|_| panic!("{stderr}"))
        };
        let launched = number("; launched up to all_reduce #");
        let completed = number("; its GPU had completed all_reduce #");
        assert!(completed <= launched, "{stderr}");
    }
}

#[test]
fn hidden_gpus_are_not_used() {
    if gpus_for_test(1).is_none() {
        return;
    }
    for hidden in ["", "-1"] {
        let mut command = program(&["--nproc-per-node=2", "--log-format=json"]);
        command.env("CUDA_VISIBLE_DEVICES", hidden);
        let (stdout, stderr) = run_command_to(0, command);
        assert!(stdout.contains("\"device\":\"CPU\""), "{stdout}");
        assert!(stderr.contains("no GPU is visible"), "{stderr}");
    }
}
