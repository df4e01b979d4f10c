//! The failures that `--inject-fault` injects, and what every run must report of one.

use serde_json::Value;

use crate::harness::{in_parallel, run, some_of};

/// How many ranks the runs have.
pub(crate) const RANKS: usize = 3;

/// The options of the runs, besides the fault.
pub(crate) const RUN: [&str; 3] = ["--max-epochs=2", "--num-samples=400", "--log-format=json"];

/// Every stage, as it is written in a fault, and the operation that the report names.
pub(crate) const STAGES: [(&str, &str); 6] = [
    ("rendezvous", "rendezvous"),
    ("init", "init"),
    ("broadcast", "broadcast"),
    ("step,step=0", "step"),
    ("step,step=9", "step"), // the last of 2 epochs of ceil(ceil(400 / 3) / 32) = 5 steps
    ("barrier", "barrier"),
];

/// Runs with a fault of this kind at every stage on every rank, or `kept` of these, and more options. Checks the report,
/// also with `check`, which gets the fault, the failure and stderr.
pub(crate) fn everywhere(
    kind: &str,
    kept: usize,
    more: &[&str],
    check: impl Fn(&str, &Value, &str) + Sync,
) {
    // At each stage another rank is the first, so that some of the cases have several ranks.
    let all = (0..STAGES.len() * RANKS).map(|n| (&STAGES[n / RANKS], (n + n / RANKS) % RANKS));
    in_parallel(&some_of(all, kept), |&((stage, operation), rank)| {
        let fault = format!("{kind}:rank={rank},at={stage}");
        let inject = format!("--inject-fault={fault}");
        let output = run(&[&RUN[..], &["--nproc-per-node=3", &inject], more].concat());
        let failure = failure(&fault, &output, rank, "CPU");
        // A rank that is killed cannot tell: the others know its step, or nothing.
        if kind != "kill" {
            assert_eq!(failure["operation"], *operation, "{fault}: {}", output.2);
        }
        check(&fault, &failure, &output.2);
    });
}

/// Returns the one failure that a run reports, which must be of `rank`, on a device such as `CPU`.
#[track_caller]
pub(crate) fn failure(
    what: &str,
    (code, stdout, stderr): &(Option<i32>, String, String),
    rank: usize,
    device: &str,
) -> Value {
    assert_eq!(*code, Some(1), "{what}: {stderr}");
    let events: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let failures: Vec<&Value> = events.iter().filter(|it| it["event"] == "failure").collect();
    let [failure] = failures[..] else { panic!("{what}: {stdout}{stderr}") };
    assert!(events.iter().all(|it| it["event"] != "end"), "{what}: {stdout}");
    assert_eq!(failure["rank"], rank, "{what}: {stderr}");
    assert_eq!(failure["device"], format!("{device}:{rank}"), "{what}: {stderr}");
    failure.clone()
}
