//! `ddp-mp bench`: right results, right columns, wrong input.

use std::fs;

use serde_json::Value;

use crate::harness::{
    in_parallel, run_all_refused, run_end, run_events, run_refused, run_to, some_of, words,
};

const OPS: &str =
    "all_reduce reduce broadcast all_gather reduce_scatter gather scatter all_to_all send_recv";

fn rows(args: &[&str]) -> Vec<Value> {
    run_events(&[&["bench", "--iters=3"], args].concat())
}

#[test]
fn bench_of_every_operation_has_no_wrong_values() {
    // From less than an element a rank to several chunks of the check, and up to several pieces of processes.
    let threads = ["--min-bytes=1", "--max-bytes=3M", "--step-factor=999"];
    let processes = ["--min-bytes=1", "--max-bytes=9M", "--step-factor=3000", "--spawn=processes"];
    let ways = [("2", &threads[..]), ("3", &threads), ("2", &processes)];
    // Of three cases in a row, one of each operation, one is kept.
    let cases = words(OPS).into_iter().enumerate();
    let cases = cases.flat_map(|(number, op)| (number..number + 3).map(move |way| (op, way % 3)));
    for (op, way) in some_of(cases, 9) {
        let (ranks, sizes) = ways[way];
        let rows = rows(&[&[op, "--nproc-per-node", ranks], sizes].concat());
        assert_eq!(rows.len(), 3, "{op}");
        for row in &rows {
            assert_eq!(row["op"], op);
            assert_eq!(row["dtype"], "float32");
            assert_eq!(row["wrong"], 0, "{row}");
            let number = |key: &str| row[key].as_f64().unwrap();
            assert!(number("time_us") > 0., "{row}");
            let algbw = number("bytes") / number("time_us") / 1e3;
            assert!((number("algbw") / algbw - 1.).abs() < 1e-6, "{row}");
            let n: f64 = ranks.parse().unwrap();
            let factor = match op {
                "all_reduce" => 2. * (n - 1.) / n,
                "reduce" | "broadcast" | "send_recv" => 1.,
                _ => (n - 1.) / n,
            };
            assert!((number("busbw") / (algbw * factor) - 1.).abs() < 1e-6, "{row}");
            let parts = if factor == (n - 1.) / n && op != "all_reduce" { n } else { 1. };
            assert_eq!(number("bytes"), number("count") * 4. * parts, "{row}");
        }
    }
}

#[test]
fn bench_of_every_dtype_and_reduce_op_has_no_wrong_values() {
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
    let pairs: Vec<_> = pairs.into_iter().enumerate().collect();
    in_parallel(&some_of(pairs, 5), |&(i, (kind, reduce_op))| {
        let op = ["all-reduce", "reduce", "reduce-scatter"][i % 3];
        let ranks = ["1", "3", "4"][i / 3 % 3];
        let flags = ["--dtype", kind, "--reduce-op", reduce_op, "--nproc-per-node", ranks];
        let rows = rows(&[&[op, "--min-bytes=1K", "--max-bytes=1K"], &flags[..]].concat());
        assert_eq!(rows[0]["wrong"], 0, "{}", rows[0]);
        assert_eq!((&rows[0]["dtype"], &rows[0]["reduce_op"]), (&kind.into(), &reduce_op.into()));
    });
}

#[test]
fn bench_sizes_are_those_requested() {
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
fn bench_table_has_the_columns_of_nccl_tests() {
    let flags = ["--nproc-per-node=2", "--min-bytes=4K", "--max-bytes=8K", "--iters=2"];
    let (stdout, _) = run_to(0, &[&["bench", "all-reduce"], &flags[..]].concat());
    let (comments, rows): (Vec<_>, Vec<_>) = stdout.lines().partition(|l| l.starts_with('#'));
    let head = ["size", "count", "type", "redop", "time", "algbw", "busbw", "wrong"];
    let names = |line: &&str| line.trim_start_matches('#').split_whitespace().eq(head);
    assert_eq!(comments.iter().filter(|line| names(line)).count(), 1, "{stdout}");
    assert!(comments.contains(&"# wrong values: 0 OK"), "{stdout}");
    let first: Vec<_> = rows.iter().map(|row| row.split_whitespace().next().unwrap()).collect();
    assert_eq!(first, ["4096", "8192"]);
    assert!(rows.iter().all(|row| row.split_whitespace().count() == head.len()));
    assert!(stdout.lines().all(|line| line.len() <= 80), "{stdout}");
}

#[test]
fn bench_invalid_requests_are_refused() {
    // tests/flags.rs tries the values of each flag on its own.
    run_all_refused(&[
        ("bench all-reduce --min-bytes=8 --max-bytes=4", "and the smaller one for --min-bytes"),
        ("bench all-reduce --dtype=float32 --reduce-op=band", "it is for integers and bool"),
        ("bench all-reduce --max-bytes=2T", "use at most 1T"),
        ("bench send-recv --nproc-per-node=1", "send-recv needs 2 ranks"),
        ("bench", "<OP>"),
    ]);
}

#[test]
fn bench_step_reports_its_phases_and_refuses_run_flags() {
    for (model, more, strategy) in [
        ("linear", "--batch-size=8", "ddp"),
        ("mlp", "--hidden=16", "dp"),
        ("mlp", "--spawn=processes", "ddp"),
        ("cnn", "--in-features=64", "ddp"),
    ] {
        let flags = ["--steps=30", "--nproc-per-node=2", "--model", model];
        let more = [more, "--strategy", strategy];
        let row = run_end(&[&["bench", "step"], &flags[..], &more].concat());
        assert_eq!((&row["model"], &row["world_size"]), (&model.into(), &2.into()));
        let batch_size = if model == "linear" { 8 } else { 32 };
        let what = (&row["batch_size"], &row["amp"], &row["strategy"]);
        assert_eq!(what, (&batch_size.into(), &"off".into(), &strategy.into()));
        let number = |key: &str| row[key].as_f64().unwrap();
        let (least, middle, most) = (number("us_min"), number("us_per_step"), number("us_max"));
        assert!(0. < least && least <= middle && middle <= most, "{row}");
        for part in ["forward_us", "backward_us", "communication_us", "optimizer_us"] {
            assert!(number(part) > 0. && number(part) <= most, "{row}");
        }
    }
    let of_runs = "--max-epochs=2 --checkpoint-dir=x --inject-fault=error:rank=0,at=init --val-fraction=0.1 \
                   --patience=3 --skip-nonfinite=1";
    for flag in some_of(words(of_runs), 3) {
        let stderr = run_refused(&["bench", "step", flag]);
        let name = flag.split('=').next().unwrap();
        let reason = format!("ddp-mp: {name}: bench step measures single steps; leave this out");
        assert!(stderr.starts_with(&reason), "{stderr}");
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, "val_fraction = 0.1\npatience = 3\n").unwrap();
    let config = format!("--config={}", file.path().display());
    run_all_refused(&[("bench step --grad-accum-steps=2", "steps of one batch")]);
    let (stdout, _) = run_to(0, &["bench", "step", "--steps=5", "--nproc-per-node=1", &config]);
    assert!(stdout.starts_with("# linear, batch 32, 1 rank: medians of 5 steps"), "{stdout}");
}

#[test]
fn bench_step_simulates_a_cluster() {
    let cluster = "nodes=4,gpus=2,latency=1ms,bandwidth=1Gbit/s,algorithm=ring";
    let flags = ["--steps=5", "--model=mlp", "--hidden=600,600", "--bucket-cap-mb=0.5"];
    let flags = [&["bench", "step", "--simulate-cluster", cluster], &flags[..]].concat();
    let objects = run_events(&flags);
    let (step, rows) = objects.split_first().unwrap();
    // What was not said is one rank.
    assert_eq!(step["world_size"], 1);
    let numbers = |key: &str| -> Vec<f64> {
        step[key].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
    };
    let (bytes, complete) = (numbers("bucket_bytes"), numbers("bucket_complete_us"));
    let parameters = (20 + 1) * 600 + (600 + 1) * 600 + 600 + 1;
    let padding = 64. * 6.;
    let total = bytes.iter().sum::<f64>() - 4. * f64::from(parameters);
    assert!(bytes.len() > 1 && (0. ..padding).contains(&total), "{step}");
    // Backward completes them in their order.
    assert_eq!(complete.len(), bytes.len());
    assert!(complete[0] > 0. && complete.is_sorted(), "{step}");
    assert!(*complete.last().unwrap() <= step["backward_us"].as_f64().unwrap(), "{step}");

    let places: Vec<_> = rows.iter().map(|row| (&row["nodes"], &row["world_size"])).collect();
    let expected = [(1, 1), (1, 2), (2, 4), (4, 8)].map(|(a, b)| (Value::from(a), b.into()));
    assert_eq!(places, expected.each_ref().map(|(a, b)| (a, b)));
    // `src: commands::bench` and `src: runtime` have the times by hand.
    for row in rows {
        assert!(row["us_per_step"].as_f64() > Some(0.) && row["efficiency"].as_f64() <= Some(1.));
        assert!(row["cluster"].as_str().unwrap().starts_with("nodes=4,gpus=2,algorithm=ring,"));
    }
    assert_eq!((&rows[0]["all_reduce"], &rows[0]["hidden"]), (&"-".into(), &Value::Null));

    let (stdout, _) = run_to(0, &flags);
    assert!(stdout.lines().all(|line| line.len() <= 92), "{stdout}");
    assert!(stdout.contains("#   node-latency=3us\n"), "{stdout}");
    assert!(stdout.contains("This is a model"), "{stdout}");
    let table = stdout.lines().filter(|line| line.split_whitespace().count() == 9);
    assert_eq!(table.filter(|line| !line.starts_with('#')).count(), 4, "{stdout}");
}

#[test]
fn bench_scaling_compares_with_one_rank() {
    let args = ["bench", "scaling", "--nproc-per-node=3", "--steps=3", "--repetitions=2"];
    let rows = run_events(&args);
    assert_eq!(rows.len(), 6);
    for (rows, scaling, batches) in
        [(&rows[..3], "weak", [32, 32, 32]), (&rows[3..], "strong", [96, 48, 32])]
    {
        let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
        let of_one = number(&rows[0], "samples_per_second");
        for (row, (ranks, batch)) in rows.iter().zip((1..).zip(batches)) {
            assert_eq!((&row["scaling"], &row["world_size"]), (&scaling.into(), &ranks.into()));
            assert_eq!(row["batch_size"], batch);
            assert!(
                row["cores"].as_u64().unwrap() > 0 && row["threads_per_rank"].as_u64().unwrap() > 0
            );
            let samples = f64::from(ranks * batch);
            let per_second = number(row, "samples_per_second");
            assert!((per_second * number(row, "us_per_step") / 1e6 / samples - 1.0).abs() < 1e-9);
            assert!((number(row, "speedup") / (per_second / of_one) - 1.0).abs() < 1e-9, "{row}");
            // Efficiency is against one rank with as many threads: the first, if it has as many.
            let base = number(row, "samples_per_second_of_one");
            let is_first = row["threads_per_rank"] == rows[0]["threads_per_rank"];
            assert!(!is_first || (base / of_one - 1.0).abs() < 1e-9, "{row}");
            assert!(is_first || base != of_one, "{row}");
            let efficiency = per_second / base / f64::from(ranks);
            assert!((number(row, "efficiency") / efficiency - 1.0).abs() < 1e-9, "{row}");
        }
    }
    let (stdout, _) = run_to(0, &args);
    assert!(stdout.starts_with("# linear, ") && stdout.contains(" CPU core"), "{stdout}");
    assert!(stdout.contains("by those of one rank with as many threads times the"), "{stdout}");
    let (_, stderr) = run_to(2, &["bench", "scaling", "--nproc-per-node=2", "--batch-size=4096"]);
    assert!(stderr.contains("--batch-size: 2 ranks with 4096 samples each need more"), "{stderr}");
}
