//! `--simulate-cluster` in training: the bits of a run without it, the times of the network, and wrong input.

use serde_json::Value;

use crate::harness::{run_all_refused, run_to, words};

/// Backward takes long enough, after it has completed the first bucket, to be seen beside its all-reduce.
const RUN: &str = "--model=mlp --hidden=500,500,500 --batch-size=128 --nproc-per-node=2 --max-steps=6 \
                   --log-format=json";

const NETWORK: &str = "--simulate-cluster=latency=2ms,bandwidth=100MB/s";

/// The event `end` of a run, and stderr.
fn end(more: &[&str]) -> (Value, String) {
    let (stdout, stderr) = run_to(0, &[&words(RUN)[..], more].concat());
    let mut events = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (events.next_back().unwrap(), stderr)
}

#[test]
fn simulated_network_takes_its_time_and_changes_no_bit() {
    let (plain, stderr) = end(&["--bucket-cap-mb=1"]);
    assert!(!stderr.contains("simulated"), "{stderr}");
    let ways = [&[][..], &["--no-overlap"], &["--spawn=processes"], &["--exact-mean"]];
    for more in ways {
        let (found, stderr) = end(&[more, &[NETWORK, "--bucket-cap-mb=1"]].concat());
        assert_eq!(found["parameters_hash"], plain["parameters_hash"], "{more:?}");
        let note = "ddp-mp: the network is simulated: each all_reduce takes as long as on 2 nodes of 1 rank \
                    (latency=2ms, bandwidth=100MB/s)\n";
        assert_eq!(stderr.matches(note).count(), 1, "{more:?}: {stderr}");
        let buckets: Vec<f64> = found["bucket_bytes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| it.as_f64().unwrap())
            .collect();
        assert!(buckets.len() > 1, "{found}");
        // By hand, as a ring of two: all bytes once, and two messages for each bucket. No step can take less.
        let us: f64 = buckets.iter().map(|bytes| 4000. + bytes / 100.).sum();
        let step = found["us_per_step"].as_f64().unwrap();
        assert!(step >= us, "{more:?}: {step} us, and at least {us}");
        if more == ["--no-overlap"] {
            assert_eq!(found["overlapped"], 0.0, "{found}");
        }
    }
}

#[test]
fn trace_and_report_say_that_the_network_is_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (trace, report) = (file("trace.json"), file("report.html"));
    end(&[NETWORK, &format!("--trace={trace}"), &format!("--report={report}")]);
    let trace = std::fs::read_to_string(trace).unwrap();
    assert!(trace.contains("rank 1 communication, simulated network"), "no name of the track");
    let report = std::fs::read_to_string(report).unwrap();
    assert!(report.contains("threaded, simulated network"), "the report does not say it");
}

#[test]
fn clusters_of_other_sizes_and_unmodelled_options_are_refused() {
    let refused = |more: &str, reason: &str| run_all_refused(&[(&format!("{RUN} {more}"), reason)]);
    refused(
        "--simulate-cluster=nodes=2,gpus=8",
        "--simulate-cluster: nodes=2,gpus=8 has 16 ranks, and this run has 2; leave out both keys",
    );
    refused("--simulate-cluster=speed=3", "there is no key `speed`");
    for flag in ["--strategy=dp", "--share-model", "--spawn=processes --zero"] {
        let option = flag.split_whitespace().last().unwrap().replace('=', " ");
        let reason = format!("--simulate-cluster: has no model of {option}; leave out one of the");
        refused(&format!("{NETWORK} {flag}"), &reason);
    }
    // All ranks of one machine are its GPUs.
    let (_, stderr) = end(&["--simulate-cluster=nodes=1,gpus=2"]);
    assert!(stderr.contains("on 1 node of 2 ranks ("), "{stderr}");
}
