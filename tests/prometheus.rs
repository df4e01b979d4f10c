//! `--prometheus`: the latest metrics of a run, and how it has ended. `make prometheus` reads such files with a parser of
//! Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::harness::{TIMEOUT, events, program, run, run_to, send, words};

/// The samples of a file, by metric and labels.
fn samples(file: &Path) -> BTreeMap<String, f64> {
    let text = fs::read_to_string(file).unwrap();
    assert!(text.starts_with("# HELP ddpmp_") && text.ends_with('\n'), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.replace("{run=\"run\"}", "").replace("run=\"run\",", ""), value.parse().unwrap())
    };
    lines.map(sample).collect()
}

fn state(samples: &BTreeMap<String, f64>) -> &str {
    let current: Vec<&String> = samples
        .iter()
        .filter(|(name, value)| name.starts_with("ddpmp_run_state") && **value == 1.0)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(current.len(), 1, "{samples:?}");
    current[0].split('"').nth(1).unwrap()
}

#[test]
fn file_has_the_last_metrics_and_the_end_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let [file, metrics] = ["run.prom", "metrics"].map(|name| folder.path().join(name));
    let flag = format!("--prometheus={}", file.display());
    let flags = words(
        "--nproc-per-node=2 --dataset=digits --loss=cross-entropy --val-fraction=0.2 \
         --max-grad-norm=1 --max-epochs=2",
    );
    let files = [&*flag, &format!("--metrics={}", metrics.display())];
    let (stdout, _) = run_to(0, &[&files[..], &flags].concat());
    let found = samples(&file);
    let rows = fs::read_to_string(&metrics).unwrap();
    let rows = events(&rows);
    let last = |event: &str| rows.iter().rfind(|row| row["event"] == event).unwrap();
    for (name, event, key) in [
        ("steps_total", "train", "step"),
        ("epoch", "train", "epoch"),
        ("loss", "train", "loss"),
        ("learning_rate", "train", "lr"),
        ("gradient_norm", "train", "grad_norm"),
        ("samples_per_second", "train", "samples_per_second"),
        ("validation_loss", "validation", "loss"),
        ("validation_accuracy", "validation", "accuracy"),
    ] {
        assert_eq!(found[&format!("ddpmp_{name}")], last(event)[key], "{name}");
    }
    assert_eq!(
        (state(&found), found["ddpmp_ranks"], found["ddpmp_restarts_total"]),
        ("done", 2.0, 0.0)
    );
    assert!(found["ddpmp_rank_collective_seconds{rank=\"1\"}"] > 0.0, "{found:?}");
    assert!(found["ddpmp_last_update_time_seconds"] >= found["ddpmp_start_time_seconds"]);
    // The file changes nothing, and a later run replaces it.
    assert_eq!(run(&flags).1, stdout);
    let fault = "--inject-fault=error:rank=1,at=step,step=4";
    let (code, ..) = run(&[&flag, "--nproc-per-node=2", "--log-every=1", fault]);
    let found = samples(&file);
    assert_eq!((code, state(&found)), (Some(1), "failed"));
    // Rank 0 may end before it has written the last of the four steps.
    assert!((3.0..=4.0).contains(&found["ddpmp_steps_total"]), "{found:?}");
    assert!(!found.contains_key("ddpmp_validation_loss"));
    let (_, _, stderr) = run(&[&flag, "--nproc-per-node=2", "--max-steps=3"]);
    let found = samples(&file);
    assert_eq!((state(&found), found["ddpmp_steps_total"]), ("stopped", 3.0), "{stderr}");
    // A restart continues the count of the run.
    let restarted = ["--spawn=processes", "--max-restarts=1", "--log-every=1"];
    let (code, ..) = run(&[&[&*flag, "--nproc-per-node=2", fault], &restarted[..]].concat());
    let found = samples(&file);
    assert_eq!((code, state(&found), found["ddpmp_restarts_total"]), (Some(0), "done", 1.0));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn collector_never_reads_a_part_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.prom");
    let flag = format!("--prometheus={}", file.display());
    let hang = format!("--max-seconds={}", TIMEOUT.as_secs());
    let long = ["--nproc-per-node=2", "--log-every=1", "--max-epochs=1000000"];
    let mut run = program(&[&long[..], &[&flag, &hang]].concat());
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let (mut states, mut steps) = (Vec::new(), BTreeSet::new());
    loop {
        let has_ended = run.try_wait().unwrap();
        if file.exists() {
            let found = samples(&file);
            states.push(state(&found).to_owned());
            // The run goes on until enough of its files have been seen.
            if steps.insert(found["ddpmp_steps_total"] as u64) && steps.len() == 100 {
                send("TERM", run.id());
            }
        }
        if let Some(status) = has_ended {
            assert_eq!(status.code(), Some(143));
            break;
        }
        thread::sleep(Duration::from_millis(1)); // between two looks at what the run writes
    }
    states.dedup();
    assert_eq!(states, ["running", "stopped"]);
}
