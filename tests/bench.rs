//! `ddp-mp bench`: right results, right columns, wrong input.

use std::fs;

use serde_json::Value;

use crate::harness::run;

const OPS: [&str; 9] = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
];

fn rows(args: &[&str]) -> Vec<Value> {
    let (code, stdout, stderr) =
        run(&[&["bench", "--log-format=json", "--iters=3"], args].concat());
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_operation_measures_right_results() {
    for op in OPS {
        for ranks in ["2", "3"] {
            // From less than an element a rank to several chunks of the check.
            let sizes = ["--min-bytes=1", "--max-bytes=3M", "--step-factor=999"];
            let rows = rows(&[&[op, "--nproc-per-node", ranks], &sizes[..]].concat());
            assert_eq!(rows.len(), 3, "{op}");
            for row in &rows {
                assert_eq!(row["op"], op);
                assert_eq!(row["kind"], "float32");
                assert_eq!(row["wrong"], 0, "{row}");
                let number = |key: &str| row[key].as_f64().unwrap();
                assert!(number("time_us") > 0. && number("limit_us") > 0., "{row}");
                let algbw = number("bytes") / number("time_us") / 1e3;
                assert!((number("algbw") / algbw - 1.).abs() < 1e-6, "{row}");
                let n: f64 = ranks.parse().unwrap();
                let factor = match op {
                    "all_reduce" => 2. * (n - 1.) / n,
                    "reduce" | "broadcast" | "send_recv" => 1.,
                    _ => (n - 1.) / n,
                };
                assert!((number("busbw") / (algbw * factor) - 1.).abs() < 1e-6, "{row}");
                let parts = match op {
                    "all_reduce" | "reduce" | "broadcast" | "send_recv" => 1.,
                    _ => n,
                };
                assert_eq!(number("bytes"), number("count") * 4. * parts, "{row}");
            }
        }
    }
}

#[test]
fn every_kind_and_reduce_op_measures_right_results() {
    let floats = ["float64", "float32", "float16", "bfloat16"];
    let integers = ["int64", "int32", "int16", "int8", "uint8"];
    let everywhere = ["sum", "product", "min", "max"];
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for kind in floats {
        pairs.extend(everywhere.iter().chain(&["avg"]).map(|op| (kind, *op)));
    }
    for kind in integers {
        pairs.extend(everywhere.iter().chain(&["band", "bor", "bxor"]).map(|op| (kind, *op)));
    }
    pairs.extend(["min", "max", "band", "bor", "bxor"].map(|op| ("bool", op)));
    // Sums of bytes wrap with many ranks; a float16 does not hold every number.
    for (i, (kind, reduce_op)) in pairs.into_iter().enumerate() {
        let op = ["all-reduce", "reduce", "reduce-scatter"][i % 3];
        let ranks = ["1", "3", "4"][i / 3 % 3];
        let flags = ["--kind", kind, "--reduce-op", reduce_op, "--nproc-per-node", ranks];
        let rows = rows(&[&[op, "--min-bytes=1K", "--max-bytes=1K"], &flags[..]].concat());
        assert_eq!(rows[0]["wrong"], 0, "{}", rows[0]);
        assert_eq!((&rows[0]["kind"], &rows[0]["reduce_op"]), (&kind.into(), &reduce_op.into()));
    }
}

#[test]
fn sizes_are_those_that_were_asked_for() {
    let sizes = |args: &[&str]| -> Vec<u64> {
        let args = [&["all_gather", "--nproc-per-node=2"], args].concat();
        rows(&args).iter().map(|row| row["bytes"].as_u64().unwrap()).collect()
    };
    assert_eq!(
        sizes(&["--min-bytes=1K", "--max-bytes=16K", "--step-factor=4"]),
        [1024, 4096, 16384]
    );
    // Whole elements for every rank, and none twice.
    assert_eq!(sizes(&["--min-bytes=1", "--max-bytes=32"]), [8, 16, 32]);
    assert_eq!(sizes(&["--min_bytes=100", "--max_bytes=100"]), [96]);
}

#[test]
fn the_table_has_nccl_tests_columns() {
    let flags = ["--nproc-per-node=2", "--min-bytes=4K", "--max-bytes=8K", "--iters=2"];
    let (code, stdout, stderr) = run(&[&["bench", "all-reduce"], &flags[..]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let (comments, rows): (Vec<_>, Vec<_>) = stdout.lines().partition(|l| l.starts_with('#'));
    let head =
        ["size", "count", "type", "redop", "time", "algbw", "busbw", "wrong", "limit", "ratio"];
    let names = |line: &&str| line.trim_start_matches('#').split_whitespace().eq(head);
    assert_eq!(comments.iter().filter(|line| names(line)).count(), 1, "{stdout}");
    assert!(comments.contains(&"# wrong values: 0 OK"), "{stdout}");
    let first: Vec<_> = rows.iter().map(|row| row.split_whitespace().next().unwrap()).collect();
    assert_eq!(first, ["4096", "8192"]);
    assert!(rows.iter().all(|row| row.split_whitespace().count() == head.len()));
    assert!(stdout.lines().all(|line| line.len() <= 80), "{stdout}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (args, reason) in [
        (&["all-reduce", "--min-bytes=8", "--max-bytes=4"][..], "the smaller one first"),
        (&["all-reduce", "--min-bytes=0"], "use sizes from 1 on"),
        (&["all-reduce", "--step-factor=1"], "--step-factor: use 2 or more"),
        (&["all-reduce", "--iters=0"], "--iters: use 1 or more"),
        (&["all-reduce", "--kind=float32", "--reduce-op=band"], "it is for integers and bool"),
        (&["all-reduce", "--kind=float3"], "use one of float64, float32"),
        (&["all-reduce", "--reduce-op=mean"], "use one of sum, avg"),
        (&["all-reduce", "--max-bytes=many"], "invalid value 'many'"),
        (&["all-reduce", "--max-bytes=2T"], "more than 1T"),
        (&["send-recv", "--nproc-per-node=1"], "send-recv needs 2 ranks"),
        (&["all-together"], "possible values: all-reduce, reduce"),
        (&[], "<OP>"),
    ] {
        let (code, stdout, stderr) = run(&[&["bench"], args].concat());
        assert_eq!((code, &stdout[..]), (Some(2), ""), "{args:?}: {stderr}");
        assert!(stderr.contains(reason), "{args:?}: {stderr}");
    }
}

#[test]
fn a_step_and_its_parts() {
    for (model, more) in
        [("linear", "--batch-size=8"), ("mlp", "--hidden=16"), ("cnn", "--in-features=64")]
    {
        let flags =
            ["--steps=30", "--nproc-per-node=2", "--log-format=json", "--model", model, more];
        let (code, stdout, stderr) = run(&[&["bench", "step"], &flags[..]].concat());
        assert_eq!(code, Some(0), "{stderr}");
        let row: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((&row["model"], &row["world_size"]), (&model.into(), &2.into()));
        let batch_size = if model == "linear" { 8 } else { 32 };
        let what = (&row["batch_size"], &row["amp"], &row["strategy"]);
        assert_eq!(what, (&batch_size.into(), &"off".into(), &"ddp".into()));
        let number = |key: &str| row[key].as_f64().unwrap();
        let (least, middle, most) = (number("us_min"), number("us_per_step"), number("us_max"));
        assert!(0. < least && least <= middle && middle <= most, "{row}");
        for part in ["forward_us", "backward_us", "communication_us", "optimizer_us"] {
            assert!(number(part) > 0. && number(part) <= most, "{row}");
        }
    }
    for flag in [
        "--max-epochs=2",
        "--save-dir=x",
        "--fault=error:rank=0,at=init",
        "--val-fraction=0.1",
        "--patience=3",
        "--skip-nonfinite=1",
    ] {
        let (code, stdout, stderr) = run(&["bench", "step", flag]);
        assert_eq!((code, &stdout[..]), (Some(2), ""), "{stderr}");
        let name = flag.split('=').next().unwrap();
        let reason =
            format!("ddp-mp: {name}: bench step measures single steps, and has no use for it");
        assert!(stderr.starts_with(&reason), "{stderr}");
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, "val_fraction = 0.1\npatience = 3\n").unwrap();
    let config = format!("--config={}", file.path().display());
    let (code, _, stderr) = run(&["bench", "step", "--steps=5", "--nproc-per-node=1", &config]);
    assert_eq!(code, Some(0), "{stderr}");
    let (code, _, stderr) = run(&["bench", "step", "--accumulate=2"]);
    assert!(code == Some(2) && stderr.contains("steps of one batch"), "{stderr}");
    let (code, stdout, _) = run(&["bench", "step", "--steps=5", "--nproc-per-node=1"]);
    assert_eq!(code, Some(0));
    assert!(stdout.starts_with("# linear, batch 32, 1 rank: medians of 5 steps"), "{stdout}");
}
