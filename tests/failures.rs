//! The program with `--fault`: every kind of failure, at every stage, on every rank.

use serde_json::Value;

use crate::harness::run;

const RANKS: usize = 3;

/// Runs with a fault, and checks the exit code and that the report blames `rank`.
fn report(fault: &str, rank: usize) -> (Value, String) {
    // Only a stall is found by waiting.
    let timeout = if fault.starts_with("stall") { "--timeout=1s" } else { "--timeout=1h" };
    let fault = format!("--fault={fault}");
    let args = [
        "--nproc-per-node=3",
        "--max-epochs=2",
        "--num-samples=400",
        "--log-format=json",
        timeout,
        if timeout == "--timeout=1s" { "--grace-period=500ms" } else { "--grace-period=1h" },
        &fault,
    ];
    let (code, stdout, stderr) = run(&args);
    assert_eq!(code, Some(1), "{fault}: {stderr}");
    let events: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let failures: Vec<&Value> = events.iter().filter(|e| e["event"] == "failure").collect();
    assert_eq!(failures.len(), 1, "{fault}: {stdout}");
    assert!(events.iter().all(|e| e["event"] != "end"), "{fault}: {stdout}");
    assert_eq!(failures[0]["rank"], rank, "{fault}: {stderr}");
    assert_eq!(failures[0]["device"], format!("CPU:{rank}"), "{fault}");
    let cause = format!("ddp-mp: rank {rank} (CPU:{rank}) failed in ");
    assert_eq!(stderr.matches("failed").count(), 1, "no echoes: {stderr}");
    assert!(stderr.contains(&cause), "{fault}: {stderr}");
    (failures[0].clone(), stderr)
}

/// Every stage, as it is written in a fault, and the operation that the report names.
const STAGES: [(&str, &str); 6] = [
    ("rendezvous", "rendezvous"),
    ("init", "init"),
    ("broadcast", "broadcast"),
    ("step,step=0", "step"),
    ("step,step=9", "step"), // the last of 2 epochs of ceil(ceil(400 / 3) / 32) = 5 steps
    ("barrier", "barrier"),
];

fn everywhere(kind: &str, check: impl Fn(&str, &Value, &str)) {
    for (stage, operation) in STAGES {
        for rank in 0..RANKS {
            let fault = format!("{kind}:rank={rank},at={stage}");
            let (failure, stderr) = report(&fault, rank);
            assert_eq!(failure["operation"], operation, "{fault}");
            if let Some((_, step)) = stage.split_once("step=") {
                assert_eq!(failure["sequence"].to_string(), step, "{fault}");
            }
            check(&fault, &failure, &stderr);
        }
    }
}

#[test]
fn an_error_on_any_rank_at_any_stage_ends_the_run() {
    everywhere("error", |fault, failure, stderr| {
        assert_eq!(failure["error"], format!("injected by --fault {fault}"));
        assert!(!stderr.contains("did not come back"), "{stderr}");
    });
}

#[test]
fn a_panic_on_any_rank_at_any_stage_ends_the_run() {
    everywhere("panic", |fault, failure, stderr| {
        let error = failure["error"].as_str().unwrap();
        assert!(error.starts_with("panicked at src/"), "it tells the place: {error}");
        assert!(error.ends_with(&format!("injected by --fault {fault}")), "{error}");
        assert!(!stderr.contains("did not come back"), "{stderr}");
        assert!(!stderr.contains("thread '"), "the panic is told once: {stderr}");
    });
}

#[test]
fn a_stall_of_any_rank_at_any_stage_ends_the_run_and_names_the_rank() {
    everywhere("stall", |fault, failure, stderr| {
        let error = failure["error"].as_str().unwrap();
        assert!(error.contains(" waited 1s in "), "{fault}: {error}");
        let lines: Vec<&str> = stderr.lines().collect();
        let last = lines[lines.len() - 1];
        assert!(last.contains("did not come back within 500ms; last seen: "), "{fault}: {stderr}");
        assert!(last.contains(&format!("rank {} ", failure["rank"])), "{fault}: {stderr}");
    });
}

#[test]
fn epochs_that_were_complete_are_reported_before_the_failure() {
    let args = ["--nproc-per-node=2", "--max-epochs=3", "--fault=error:rank=1,at=step,step=70"];
    let (code, stdout, _) = run(&args);
    assert_eq!(code, Some(1));
    let expected = "GPU_Count: 0\nCPU:0 | Epoch: 0 | Batchsize: 32 | Steps: 64\n\
                    CPU:1 | Epoch: 0 | Batchsize: 32 | Steps: 64\n";
    assert_eq!(stdout, expected);
}
