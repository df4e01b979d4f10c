//! The failures that `--inject-fault` injects, and what every run must report of one.

use serde_json::Value;

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

/// Returns every stage with its operation, for every rank.
pub(crate) fn everywhere() -> impl Iterator<Item = (&'static str, &'static str, usize)> {
    STAGES
        .iter()
        .flat_map(|(stage, operation)| (0..RANKS).map(move |rank| (*stage, *operation, rank)))
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
