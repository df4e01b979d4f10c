//! `--fault` on ranks that are processes: every kind at every stage names the rank, once, and leaves nobody behind.
//!
//! Each stage meets one of the ranks; with `MATRIX=all` it meets all of them. `make test-launchers` does the same under
//! torchrun, and `failures` on threads.

use serde_json::Value;

use crate::harness::run;

const RANKS: usize = 3;

/// Every stage, as it is written in a fault, and the operation that the report names.
const STAGES: [(&str, &str); 6] = [
    ("rendezvous", "rendezvous"),
    ("init", "init"),
    ("broadcast", "broadcast"),
    ("step,step=0", "step"),
    ("step,step=9", "step"), // the last of 2 epochs of ceil(ceil(400 / 3) / 32) = 5 steps
    ("barrier", "barrier"),
];

/// The failure event and stderr of a run in which `rank` fails in this way.
fn failure(kind: &str, stage: &str, rank: usize) -> (Value, String) {
    let fault = format!("--fault={kind}:rank={rank},at={stage}");
    // A stall alone is found by waiting.
    let timeout = if kind == "stall" { "--timeout=5s" } else { "--timeout=50s" };
    let run_of = ["--spawn=processes", "--nproc-per-node=3", "--max-epochs=2", "--num-samples=400"];
    let args = ["--log-format=json", "--grace-period=1s", timeout, &fault];
    let (code, stdout, stderr) = run(&[&run_of[..], &args].concat());
    assert_eq!(code, Some(1), "{fault}: {stderr}");
    let events: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let failures: Vec<&Value> = events.iter().filter(|it| it["event"] == "failure").collect();
    let [failure] = failures[..] else { panic!("{fault}: {stdout}{stderr}") };
    assert_eq!(failure["rank"], rank, "{fault}: {stderr}");
    assert_eq!(failure["device"], format!("CPU:{rank}"), "{fault}: {stderr}");
    (failure.clone(), stderr)
}

fn everywhere(kind: &str, check: impl Fn(&str, &Value, &str)) {
    let all = std::env::var("MATRIX").is_ok_and(|it| it == "all");
    let mut runs = 0;
    for (number, (stage, operation)) in STAGES.into_iter().enumerate() {
        if kind == "stall" && ["broadcast", "barrier"].contains(&stage) {
            continue; // who stalls within a collective looks to other processes like those that wait in it
        }
        for rank in (0..RANKS).filter(|rank| all || number % RANKS == *rank) {
            let (failure, stderr) = failure(kind, stage, rank);
            let what = format!("{kind} of rank {rank} at {stage}: {stderr}");
            // A rank that is killed cannot tell: the others know its step, or nothing.
            if kind != "kill" {
                assert_eq!(failure["operation"], operation, "{what}");
            }
            check(&what, &failure, &stderr);
            runs += 1;
        }
    }
    println!("{kind}: {runs} runs, the rank named in each");
}

#[test]
fn an_error_names_its_rank() {
    everywhere("error", |what, failure, stderr| {
        assert!(
            failure["error"].as_str().unwrap().starts_with("injected by --fault error"),
            "{what}"
        );
        assert_eq!(stderr.matches("injected by --fault").count(), 1, "{what}");
    });
}

#[test]
fn a_panic_names_its_rank() {
    everywhere("panic", |what, failure, stderr| {
        assert!(failure["error"].as_str().unwrap().starts_with("panicked at src/"), "{what}");
        assert_eq!(stderr.matches("injected by --fault").count(), 1, "{what}");
    });
}

#[test]
fn a_killed_process_names_its_rank() {
    everywhere("kill", |what, failure, _| {
        let told = format!("rank {} (process ", failure["rank"]);
        let error = failure["error"].as_str().unwrap();
        assert!(error.starts_with(&told) && error.contains(" was killed by SIGKILL"), "{what}");
    });
}

#[test]
fn a_stall_names_its_rank() {
    everywhere("stall", |what, failure, _| {
        assert!(failure["error"].as_str().unwrap().contains(" waited 5s in "), "{what}");
    });
}
