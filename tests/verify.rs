//! `ddp-mp verify`: every way to train comes to the same, what does not is found, wrong input.

use std::fs;

use serde_json::Value;

use crate::harness::{events, run_to, some_of, words};

/// The comparisons, and stderr; it must end with this exit code.
fn verify(code: i32, args: &[&str]) -> (Vec<Value>, String) {
    let (stdout, stderr) = run_to(code, &[&["verify", "--log-format=json"], args].concat());
    (events(&stdout), stderr)
}

/// How a row was trained: strategy, ranks, batch size, accumulated batches.
fn way(row: &Value) -> (&str, u64, u64, u64) {
    let number = |key: &str| row[key].as_u64().unwrap();
    let strategy = row["strategy"].as_str().unwrap();
    (strategy, number("world_size"), number("batch_size"), number("grad_accum_steps"))
}

/// What is compared on `n` ranks with batches of 8.
fn all_ways(n: u64) -> [(&'static str, u64, u64, u64); 5] {
    [("ddp", 1, 8, n), ("ddp", n, 8, 1), ("dp", n, 8, 1), ("ddp", n, 4, 2), ("dp", n, 4, 2)]
}

#[test]
fn every_variant_matches_one_rank() {
    let all = [
        "--nproc-per-node=2 --batch-size=8 --lr=0.1",
        "--nproc-per-node=3 --batch-size=8 --model=mlp --momentum=0.9 --lr=0.05 --scale-lr",
        // More steps than the samples are good for once, and samples that are left over.
        "--nproc-per-node=4 --batch-size=8 --model=mlp --optimizer=adamw --steps=40 --num-samples=330",
        "--nproc-per-node=2 --batch-size=8 --model=mlp --schedule=cosine --schedule-by=step \
         --max-grad-norm=0.1 --bucket-cap-mb=0.001",
    ];
    for flags in some_of(all, 2) {
        let (rows, stderr) = verify(0, &words(flags));
        let n = rows[1]["world_size"].as_u64().unwrap();
        assert_eq!(rows.iter().map(way).collect::<Vec<_>>(), all_ways(n));
        for row in &rows {
            assert_eq!((&row["ok"], &row["replicas_equal"]), (&true.into(), &true.into()));
            assert_eq!((&row["backend"], &row["device"]), (&"threaded".into(), &"CPU".into()));
            let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
            let (difference, bound) = (number(row, "difference"), number(row, "bound"));
            // A bound that one wrong sample in a step would break.
            assert!(difference <= bound && bound < 1e-4, "{flags}: {row}");
            let parameters = row["parameters"].as_array().unwrap();
            let largest = parameters.iter().map(|it| number(it, "difference")).fold(0., f64::max);
            assert_eq!(largest.to_bits(), difference.to_bits(), "{row}");
            let of_it = parameters.iter().find(|it| it["name"] == row["parameter"]).unwrap();
            assert_eq!(of_it["difference"], row["difference"]);
            let equal = parameters.iter().all(|it| it["equal_bits"] == true);
            assert_eq!(row["equal_bits"], equal);
        }
        // What goes through rank 0 is added in the same order.
        assert_eq!(rows[1]["parameters"], rows[2]["parameters"], "{flags}");
        assert_eq!(rows[3]["parameters"], rows[4]["parameters"], "{flags}");
        let left_over = stderr.contains("the first 320 of 330 samples, which make whole steps");
        assert_eq!(left_over, flags.contains("330"), "{stderr}");
    }
}

#[test]
fn processes_match_one_rank_and_a_wrong_sample_is_found() {
    for memory in some_of(["require", "off"], 1) {
        let memory = format!("--shared-memory={memory}");
        let flags =
            ["--spawn=processes", "--nproc-per-node=2", "--batch-size=8", "--steps=6", &memory];
        let (rows, _) = verify(0, &flags);
        assert_eq!(rows.iter().map(way).collect::<Vec<_>>(), all_ways(2));
        assert!(rows.iter().all(|row| row["ok"] == true && row["backend"] == "gloo"), "{rows:?}");
        let fault = "--inject-fault=skip-sample:rank=1,at=step,step=3";
        let (rows, stderr) = verify(1, &[&flags[..], &[fault]].concat());
        assert!(rows[1..].iter().all(|row| row["first_step"] == 3), "{rows:?}");
        let found = "ddp-mp: 4 of 5 comparisons differ by more than rounding explains, from step 3 on; all ranks";
        assert!(stderr.contains(found), "{stderr}");
    }
}

#[test]
fn sync_batch_norm_matches_one_rank() {
    let model = ["--model=cnn", "--in-features=64", "--channels=4", "--sync-batch-norm"];
    let flags = ["--nproc-per-node=2", "--batch-size=8", "--steps=8", "--lr=0.05"];
    let (rows, stderr) = verify(0, &[&model[..], &flags].concat());
    assert_eq!(rows.iter().map(way).collect::<Vec<_>>(), [("ddp", 2, 8, 1)]);
    let names = |row: &Value| row["parameters"].as_array().unwrap().clone();
    assert!(names(&rows[0]).iter().any(|it| it["name"] == "2.running_var"), "{}", rows[0]);
    assert!(stderr.contains("without dp, which has no --sync-batch-norm"), "{stderr}");
}

#[test]
fn wrong_mean_is_found_with_its_first_step() {
    // Averaged as bfloat16: the right mean no more.
    let flags = ["--model=mlp", "--lr=0.05", "--nproc-per-node=2", "--comm-hook=bf16"];
    let (rows, stderr) = verify(1, &flags);
    assert_eq!(rows.len(), 5);
    for row in &rows {
        let (strategy, ranks, ..) = way(row);
        let hooked = strategy == "ddp" && ranks > 1;
        assert_eq!(row["ok"], !hooked, "{row}");
        let beyond = row["difference"].as_f64() > row["bound"].as_f64();
        // Wrong, and on all ranks alike.
        assert_eq!((beyond, &row["replicas_equal"]), (hooked, &true.into()), "{row}");
    }
    let reason = "2 of 5 comparisons differ by more than rounding explains, from step ";
    assert!(
        stderr.contains(reason) && stderr.contains(" on; --comm-hook sends compressed gradients"),
        "{stderr}"
    );
    let (stdout, _) = run_to(1, &[&["verify"], &flags[..]].concat());
    let verdicts = stdout.lines().filter(|line| line.contains("  TOO FAR, from step "));
    assert!(verdicts.clone().all(|line| line.starts_with(" ddp, threaded, CPU: 2 x ")));
    assert_eq!(verdicts.count(), 2, "{stdout}");
}

#[test]
fn table_lists_parameters_if_few_or_requested() {
    let lines = |args: &[&str]| {
        let flags = ["verify", "--steps=3", "--batch-size=5", "--nproc-per-node=2"];
        let (stdout, stderr) = run_to(0, &[&flags[..], args].concat());
        assert!(stderr.ends_with("bits differ where sums are made in another order\n"), "{stderr}");
        assert!(stdout.lines().all(|line| line.len() <= 92), "{stdout}");
        assert!(
            stdout.contains(", 3 steps: 2 ranks with batch 5 compared with 1 rank with batch 10\n")
        );
        // An odd batch has no half.
        let rows = stdout.lines().filter(|line| line.ends_with("  ok"));
        assert_eq!(rows.count(), 3, "{stdout}");
        stdout.lines().filter(|line| line.starts_with("   ")).count()
    };
    assert_eq!(lines(&[]), 3 * 2);
    assert_eq!(lines(&["--model=mlp"]), 0);
    assert_eq!(lines(&["--model=mlp", "--per-parameter"]), 3 * 6);
}

#[test]
fn invalid_comparisons_are_refused() {
    let wrong = [
        ("--grad-accum-steps=2", "--grad-accum-steps: verify chooses the training variants itself"),
        ("--strategy=dp", "--strategy: verify chooses"),
        ("--max-epochs=2", "--max-epochs: verify chooses"),
        ("--launch=local", "--launch: verify chooses"),
        ("--spawn=processes --nproc-per-node=1", "--nproc-per-node: one rank has nothing to"),
        ("--model=mlp --dropout=0.1", "--dropout: each rank draws its own"),
        ("--model=cnn --in-features=64", "--model cnn: each rank normalizes its own batch"),
        ("--amp=bf16", "--amp: verify's bound holds for float32"),
        ("--nproc-per-node=1", "--nproc-per-node: one rank has nothing to be compared with"),
        ("--nproc-per-node=2 --num-samples=63", "63 samples are less than a step of 2 ranks"),
        ("--steps=0", "invalid value '0'"),
        ("--trace=a.json", "--trace: "),
        ("--exact-mean --drop-last", "--drop-last: with --exact-mean verify needs the"),
        ("--exact-mean --drop-last-batch", "--drop-last-batch: with --exact-mean"),
        (
            "--nproc-per-node=2 --inject-fault=skip-sample:rank=1,at=step,step=5 --steps=5",
            "--inject-fault: there is no step 5; this run has steps 0 to 4",
        ),
        (
            "--nproc-per-node=2 --inject-fault=nan:rank=1,at=step,step=5",
            "--inject-fault: verify injects skip-sample only, not nan:",
        ),
        (
            "--nproc-per-node=2 --inject-fault=skip-sample:rank=2,at=step",
            "--inject-fault: there is no rank 2",
        ),
        (
            "--nproc-per-node=2 --inject-fault=skip-sample:rank=1,at=step,step=5 --batch-size=1",
            "--inject-fault: skip-sample puts another sample of the step",
        ),
    ];
    for (flags, reason) in some_of(wrong, 2) {
        let (rows, stderr) = verify(2, &words(flags));
        assert!(rows.is_empty() && stderr.contains(reason), "{flags}: {stderr}");
    }
    // The last step of each run is one in which ranks have unequal batches.
    for (steps, samples) in some_of([("--steps=2", 95), ("--steps=1", 31), ("--steps=3", 159)], 1) {
        let (rows, stderr) = verify(0, &["--exact-mean", "--nproc-per-node=2", steps]);
        assert_eq!(rows.len(), 3, "{stderr}");
        assert!(stderr.contains(&format!("the first {samples} of ")), "{steps}: {stderr}");
    }
    // A fault of rank 0, which also trains by itself, is not in what the others are compared with.
    let fault = "--inject-fault=skip-sample:rank=0,at=step,step=3";
    let (rows, stderr) = verify(1, &["--nproc-per-node=2", fault, "--backend=threaded"]);
    let is_found = |row: &Value| row["first_step"] == 3 && row["replicas_equal"] == true;
    assert!(rows[1..].iter().all(is_found) && rows[0]["ok"] == true, "{rows:?}");
    assert!(stderr.contains("check the samples of step 3 "), "{stderr}");
    // What is for training may stand in a file.
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, "val_fraction = 0.1\npatience = 3\ngrad_accum_steps = 4\nstrategy = \"dp\"\n")
        .unwrap();
    let config = format!("--config={}", file.path().display());
    let (rows, stderr) = verify(0, &["--steps=2", "--nproc-per-node=2", &config]);
    assert_eq!(rows.len(), 5, "{stderr}");
}
