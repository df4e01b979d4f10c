//! `--report`: what is in the page is what has happened.

use std::fs;
use std::path::Path;

use ddp_mp::DistributedSampler;
use serde_json::Value;

use crate::harness::{repository, run, run_end, run_to, words};

/// What a page shows.
fn data(path: &Path) -> Value {
    let page = fs::read_to_string(path).unwrap();
    let (_, data) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    let (data, _) = data.split_once("</script>").unwrap();
    assert!(!page.contains("__REPORT_"), "all places are taken");
    serde_json::from_str(data).unwrap()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

#[test]
fn report_has_the_numbers_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pages/run.html");
    let args = words(
        "--nproc-per-node=3 --max-epochs=2 --num-samples=100 --batch-size=4 \
        --grad-accum-steps=2 --model=mlp --hidden=64,64 --bucket-cap-mb=0.01 \
        --val-fraction=0.25 --log-every=2 --seed=7",
    );
    let report = ["--report", path.to_str().unwrap()];
    let end = run_end(&[&args[..], &report].concat());
    let page = data(&path);
    assert_eq!(page["outcome"]["kind"], "done");
    for key in ["loss", "parameters_hash", "us_per_step", "seconds", "steps"] {
        assert_eq!(page[key], end[key], "{key}");
    }
    assert_eq!(page["traffic"]["sent"], end["bytes_sent_by_rank"]);
    assert_eq!(page["model"]["buckets"], end["bucket_bytes"]);
    assert_eq!(page["world"]["devices"], serde_json::json!(["CPU:0", "CPU:1", "CPU:2"]));
    assert!(
        page["command"].as_str().unwrap().starts_with("ddp-mp --nproc-per-node=3 --max-epochs=2")
    );

    // Every parameter is in a bucket, and they fit.
    let parameters = list(&page["model"]["parameters"]);
    assert_eq!(parameters.len(), 6);
    for (number, bytes) in list(&page["model"]["buckets"]).iter().enumerate() {
        let inside = parameters.iter().filter(|it| it["bucket"] == number);
        let sum: u64 = inside.map(|it| it["bytes"].as_u64().unwrap()).sum();
        assert!(sum > 0 && sum <= bytes.as_u64().unwrap(), "bucket {number}");
    }

    assert_eq!(
        (page["samples"]["dataset"].clone(), &page["samples"]["complete"]),
        (75.into(), &true.into())
    );
    assert_eq!(list(&page["samples"]["epochs"]).len(), 2);

    let hashes = list(&page["replicas"]["hashes"]);
    assert!(hashes.len() == 3 && hashes.iter().all(|it| *it == end["parameters_hash"]));
    assert_eq!(page["replicas"]["equal"], true);
    // 25 samples a rank are 7 batches an epoch, and 4 steps.
    let steps: Vec<u64> =
        list(&page["train"]).iter().map(|it| it["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4, 6, 8]);
    assert_eq!(list(&page["validation"]).len(), 2);

    let timeline = &page["timeline"];
    let name = |record: &Value| {
        timeline["operations"][record[0].as_u64().unwrap() as usize].as_str().unwrap().to_owned()
    };
    for rank in list(&timeline["ranks"]) {
        let entries = list(&rank["entries"]);
        let count = |what: &str| entries.iter().filter(|it| name(it) == what).count();
        let counts = ["forward", "backward", "optimizer", "validation"].map(count);
        assert_eq!(counts, [14, 14, 8, 2]);
        let buckets = entries.iter().filter(|it| name(it) == "all_reduce" && it[5] != -1).count();
        assert_eq!(buckets, 8 * list(&page["model"]["buckets"]).len());
        assert!(entries.iter().all(|it| list(it).len() == 11 && it[2].is_number()));
    }
    let outside = page["verdict"]["outside_collectives"].as_f64().unwrap();
    assert!(outside > 0.0 && outside < 1.0);
    assert!(page["verdict"]["advice"].is_array());
    assert_eq!(list(&page["verdict"]["phases"]).len(), 3);
}

#[test]
fn failed_stopped_and_resumed_runs_leave_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("failed.html");
    let report = ["--nproc-per-node=2", "--report", path.to_str().unwrap()];
    let fault = ["--inject-fault=error:rank=1,at=step,step=5", "--init-from=</script>"];
    run_to(1, &[&report[..], &fault[..1]].concat());
    let page = data(&path);
    assert_eq!(page["outcome"]["kind"], "failed");
    let text = page["outcome"]["text"].as_str().unwrap();
    assert!(text.contains("rank 1") && text.contains("step #5"), "{text}");
    assert!(page["loss"].is_null() && page["replicas"].is_null());
    assert!(
        page["verdict"]["overlapped"].is_null(),
        "nothing can be concluded: {}",
        page["verdict"]
    );
    assert!(list(&page["verdict"]["advice"]).is_empty(), "{}", page["verdict"]);
    // Rank 0 has come through five steps.
    let had = |page: &Value| list(&page["samples"]["epochs"][0]["ranks"][0]).len();
    assert_eq!(had(&page), 5 * 32);

    run_to(0, &[&report[..], &["--max-steps=3"]].concat());
    let page = data(&path);
    let outcome = &page["outcome"];
    assert_eq!(
        (&outcome["kind"], &outcome["text"]),
        (&"stopped".into(), &"stopped by max-steps".into())
    );
    assert_eq!(had(&page), 3 * 32);

    // It goes on, with one rank more: what is left of the epoch, and then the next.
    let saved = folder.path().join("saved");
    let save = ["--checkpoint-dir", saved.to_str().unwrap(), "--resume=auto", "--num-samples=100"];
    run_to(0, &[&report[..], &save[..], &["--batch-size=10", "--max-steps=2"][..]].concat());
    let of_first = data(&path)["train"].clone();
    let three = ["--nproc-per-node=3", "--batch-size=10", "--max-epochs=2", report[1], report[2]];
    run_to(0, &[&three[..], &save[..]].concat());
    let page = data(&path);
    let saved = &page["verdict"]["phases"][0]["save"];
    assert!(saved.as_f64() > Some(0.0), "{saved}");
    // The curves are those of the whole run.
    assert_eq!(list(&page["train"])[..1], *list(&of_first), "{of_first}");
    let steps: Vec<u64> =
        list(&page["train"]).iter().map(|it| it["step"].as_u64().unwrap()).collect();
    assert!(steps.len() > 1 && steps.is_sorted_by(|a, b| a < b), "{steps:?}");
    let epochs = list(&page["samples"]["epochs"]);
    let numbers = epochs.iter().map(|it| it["epoch"].as_u64().unwrap());
    assert_eq!(numbers.collect::<Vec<_>>(), [0, 1]);
    let of_rank = |epoch: usize, rank: usize| list(&epochs[epoch]["ranks"][rank]).len();
    assert_eq!([of_rank(0, 0), of_rank(1, 0), of_rank(1, 2)], [20, 34, 34]);
    let order = DistributedSampler::new(100, 1, 0).unwrap().indices(0).unwrap();
    // 40 samples were taken before.
    let first = list(&epochs[0]["ranks"][1]).iter().map(|it| it.as_u64().unwrap() as usize);
    assert!(first.take(19).eq(order[41..].iter().copied().step_by(3).take(19)));

    // What is refused leaves the page as it was.
    let before = fs::read(&path).unwrap();
    let (code, ..) = run(&[&report[..], &fault[1..]].concat());
    assert_eq!((code, fs::read(&path).unwrap() == before), (Some(2), true));
}

/// What the page shows of a run that ends with this exit code, and what the run has told.
fn reported(code: i32, line: &str) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.html");
    let (_, stderr) =
        run_to(code, &[&words(line)[..], &["--report", path.to_str().unwrap()]].concat());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "{line}");
    (data(&path), stderr)
}

#[test]
fn report_of_processes_is_written_once_by_rank_0() {
    let (page, _) = reported(0, "--nproc-per-node=2 --spawn=processes --num-samples=64");
    assert_eq!(list(&page["replicas"]["hashes"]).len(), 2);
    let phases = list(&page["verdict"]["phases"]);
    assert_eq!((phases.len(), &phases[0]["save"]), (2, &0.0.into()), "it has saved nothing");
    assert_eq!(list(&page["traffic"]["sent"]).len(), 2);
}

#[test]
fn report_lists_at_most_100000_samples_per_rank() {
    let (page, _) = reported(0, "--nproc-per-node=2 --num-samples=260000 --batch-size=65000");
    assert_eq!(page["samples"]["complete"], false);
    assert_eq!(list(&page["samples"]["epochs"][0]["ranks"][1]).len(), 100_000);
    // Only the samples that a run has trained on count.
    let (page, _) = reported(0, "--nproc-per-node=2 --num-samples=260000 --max-steps=1");
    assert_eq!(page["samples"]["complete"], true);
}

#[test]
fn report_shows_diverged_replicas() {
    let fault = "--nproc-per-node=2 --inject-fault=desync:rank=1,at=step,step=5";
    let (page, stderr) = reported(1, fault);
    assert!(stderr.contains("the ranks do not hold the same parameters; --check-replicas-every 1"));
    assert_eq!(page["replicas"]["equal"], false);
    assert!(page["verdict"]["advice"][0].as_str().unwrap().contains("--check-replicas-every 1"));
}

#[test]
fn report_in_assets_is_current() {
    let page = fs::read_to_string(repository("assets/report.html")).unwrap();
    for part in [
        include_str!("../crates/views/src/report/page.css"),
        include_str!("../crates/views/src/report/helpers.js"),
        include_str!("../crates/views/src/report/verdict.js"),
        include_str!("../crates/views/src/report/curves.js"),
        include_str!("../crates/views/src/report/timeline.js"),
        include_str!("../crates/views/src/report/samples.js"),
        include_str!("../crates/views/src/report/page.js"),
    ] {
        assert!(page.contains(part.trim()), "make it anew: make page");
    }
    // The program knows it for its own.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("report.html");
    fs::write(&copy, &page).unwrap();
    let report = format!("--report={}", copy.display());
    run_to(0, &["--nproc-per-node=2", &report]);
}
