//! What `--explain` tells is short, the same each time, and what the run has really done.

use std::process::Command;

use ddp_mp::DistributedSampler;
use serde_json::Value;
use textwrap::core::display_width;

use crate::harness::{
    last_event, program, refused, run, run_command_to, run_refused, run_to, some_of,
};

const TWO: [&str; 2] = ["--nproc-per-node=2", "--explain"];

/// What it tells of a run that goes well.
fn told_by(command: Command) -> String {
    let (_, stderr) = run_command_to(0, command);
    let end = stderr.find("ddp-mp: loss ").expect("it ends with the loss");
    // A rank may really have been slow, on a machine that does other things as well.
    let lines = stderr[..end].split_inclusive('\n');
    lines.filter(|line| !line.contains(" was the straggler: ")).collect()
}

fn told(args: &[&str]) -> String {
    told_by(program(args))
}

fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The cells of each rank's row below the `heading`; the samples are not numbers of it.
fn rows(text: &str, heading: &str) -> Vec<Vec<String>> {
    let section = text.lines().skip_while(|line| !line.contains(heading)).skip(1);
    let section = section.take_while(|line| line.starts_with("  "));
    let cells = |line: &str| line.split("  ").map(str::trim).map(String::from).collect::<Vec<_>>();
    let rows = section.filter(|line| is_row(line));
    rows.map(|row| cells(row).into_iter().filter(|cell| !cell.is_empty()).collect()).collect()
}

/// Whether it is the row of a rank, and no line of a text that happens to begin so.
fn is_row(line: &str) -> bool {
    let rest = line.strip_prefix("  rank ").map(|it| it.trim_start_matches(char::is_numeric));
    rest.is_some_and(|rest| rest.starts_with("  "))
}

fn number(cell: &str) -> f64 {
    cell.trim_matches(['(', ')']).parse().unwrap_or_else(|_| panic!("{cell:?} is no number"))
}

/// The last of six digits that are shown, of a number above 1.
const SHOWN: f64 = 1e-5;

fn near(one: f64, other: f64, tolerance: f64) {
    assert!((one - other).abs() <= tolerance, "{one} is not {other}");
}

/// Checks all numbers of two told steps; returns the samples, a row for each rank and step.
fn check_numbers(text: &str, ranks: usize, lr: f64, is_exact: bool) -> Vec<String> {
    let (first, second) = (rows(text, ": Step 0: different"), rows(text, ": Step 1: "));
    let updates = rows(text, ": Step 0: the same update");
    assert_eq!([first.len(), second.len(), updates.len()], [ranks; 3], "{text}");
    for step in [&first, &second] {
        let mean = step.iter().map(|row| number(&row[3])).sum::<f64>() / ranks as f64;
        for row in step {
            assert_eq!(row[4], step[0][4], "all ranks have the same after the all-reduce");
            near(number(&row[4]), mean, if is_exact { SHOWN } else { 0.01 * mean.abs() });
        }
    }
    assert_ne!(first[0][3], first[1][3], "each rank has a gradient of its own");
    let by_hand = text.lines().find(|line| line.contains("by hand: ")).unwrap();
    let by_hand = by_hand.rsplit(" = ").next().unwrap();
    near(number(by_hand), number(&first[0][4]), if is_exact { SHOWN } else { 0.01 });
    for (rank, row) in updates.iter().enumerate() {
        // weight - lr * gradient = new weight
        let parts: Vec<&str> = row[1].split([' ']).collect();
        let [weight, "-", told_lr, "*", gradient, "=", new] = parts[..] else { panic!("{row:?}") };
        assert_eq!(number(told_lr), lr);
        if is_exact {
            assert_eq!(number(gradient), number(&first[0][4]));
        }
        near(number(new), number(weight) - lr * number(gradient), 2e-8);
        assert_ne!(weight, new);
        // And from there to the next.
        near(number(&second[rank][5]), number(new) - lr * number(&second[0][4]), 2e-8 + lr * SHOWN);
    }
    let samples = |row: &Vec<String>| row[1].clone();
    first.iter().chain(&second).map(samples).collect()
}

#[test]
fn numbers_can_be_checked_by_hand() {
    for (ranks, more) in [(2, &[][..]), (4, &[]), (2, &["--model=mlp", "--lr=0.5"])] {
        let nproc = format!("--nproc-per-node={ranks}");
        let text = told(&[&[&nproc, "--explain"][..], more].concat());
        let lr = if more.is_empty() { 0.001 } else { 0.5 };
        for (place, samples) in check_numbers(&text, ranks, lr, true).iter().enumerate() {
            let (rank, step) = (place % ranks, place / ranks);
            let all = DistributedSampler::new(4096, ranks, rank).unwrap().indices(0).unwrap();
            let mut mine = all[32 * step..].iter();
            let shown: Vec<&str> = samples.split(' ').collect();
            let (dots, shown) = shown.split_last().unwrap();
            assert!(*dots == "..." && shown.len() > 1, "{samples}");
            assert!(shown.iter().all(|it| *it == mine.next().unwrap().to_string()), "{samples}");
        }
    }
}

/// The numbers are those of replicas with whole optimizers, and the text says what differs.
#[test]
fn other_layouts_are_told_with_the_same_numbers() {
    let replicas = told(&TWO);
    let headings = [": Step 0: different", ": Step 1: ", ": Step 0: the same update"];
    let shared = [
        "share one copy of the parameters (--share-model)",
        "updates its part of the parameters for all ranks",
    ];
    for (layout, same, says) in [
        ("--share-model", &headings[..], &shared[..]),
        ("--zero", &headings[..2], &["The ranks partition the optimizer (--zero)."]),
    ] {
        let text = told(&[&TWO[..], &[layout]].concat());
        check_numbers(&text, 2, 0.001, false);
        for heading in same {
            assert_eq!(rows(&text, heading), rows(&replicas, heading), "{layout}");
        }
        let text = in_one_line(&text);
        assert!(says.iter().all(|it| text.contains(it)), "{text}");
    }
}

#[test]
fn exact_mean_shows_the_factor_of_each_loss() {
    for (samples, factors, counts) in [
        ("63", "32 * 2 / 63, 31 * 2 / 63", [[32, 31]; 2]),
        ("64", "32 * 2 / 64, 32 * 2 / 64", [[32, 32]; 2]),
        // The second step of rank 1 has no samples.
        ("65", "32 * 2 / 64, 32 * 2 / 64", [[32, 32], [1, 0]]),
    ] {
        let num_samples = format!("--num-samples={samples}");
        let args = [&TWO[..], &["--exact-mean", "--max-epochs=2", &num_samples]].concat();
        let text = told(&args);
        let told_factors = format!("of its mean loss times {factors} (--exact-mean:");
        assert!(in_one_line(&text).contains(&told_factors), "{text}");
        check_numbers(&text, 2, 0.001, true);
        for (heading, counts) in [": Step 0: different", ": Step 1: "].into_iter().zip(counts) {
            for (row, count) in rows(&text, heading).iter().zip(counts) {
                match (count, counts[0] == counts[1]) {
                    (0, _) => assert!(row[1..3] == ["-", "-"] && number(&row[3]) == 0.0, "{row:?}"),
                    (_, true) => assert!(!row[1].contains(':'), "{row:?}"),
                    (_, false) => assert!(row[1].starts_with(&format!("{count}: ")), "{row:?}"),
                }
            }
        }
    }
    let args = ["--nproc-per-node=3", "--explain", "--exact-mean", "--num-samples=7"];
    let text = in_one_line(&told(&args));
    assert!(text.contains("They do not go round, so ranks up to 0 get one more."), "{text}");
}

#[test]
fn accumulation_compression_and_clipping_are_explained() {
    let text = told(&[&TWO[..], &["--comm-hook=bf16", "--grad-accum-steps=4"]].concat());
    assert!(in_one_line(&text).contains("They travel as bfloat16"), "{text}");
    assert!(in_one_line(&text).contains("the mean over 4 batches"), "{text}");
    assert!(text.contains("its 128 samples") && text.contains("with 16 steps an epoch"), "{text}");
    check_numbers(&text, 2, 0.001, false);

    let text = told(&[&TWO[..], &["--max-grad-norm=0.01", "--num-samples=4095"]].concat());
    let flat = in_one_line(&text);
    assert!(flat.contains("a norm of 0.01") && flat.contains("get as many: 1."), "{text}");
    let stepped_by = rows(&text, "the same update")[0][1].split(' ').nth(4).map(number).unwrap();
    let averaged = number(&rows(&text, "different gradients")[0][4]);
    assert!(stepped_by / averaged > 0.0 && stepped_by.abs() < 0.01, "{stepped_by} of {averaged}");

    let text = told(&[&TWO[..], &["--optimizer=adamw"]].concat());
    assert!(text.contains("optimizer (adamw, lr 0.001)") && !text.contains(" * "), "{text}");
}

#[test]
fn step_loss_is_the_mean_over_unequal_batches() {
    let args = ["--num-samples=84", "--batch-size=32", "--grad-accum-steps=2", "--max-epochs=2"];
    let (stdout, stderr) = run_to(0, &[&TWO[..], &args, &["--log-format=json"]].concat());
    assert!(stderr.contains("its 42 samples"), "batches of 32 and of 10: {stderr}");
    let events = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let epochs = events.filter(|it| it["event"] == "epoch").map(|it| it["loss"].as_f64().unwrap());
    let steps = [": Step 0: different", ": Step 1: "].map(|heading| {
        let of_ranks = rows(&stderr, heading);
        of_ranks.iter().map(|row| number(&row[2])).sum::<f64>() / of_ranks.len() as f64
    });
    let epochs: Vec<f64> = epochs.collect();
    assert!(epochs.len() >= steps.len(), "{stdout}");
    for (step, epoch) in steps.iter().zip([epochs[0], epochs[epochs.len() - 1]]) {
        near(*step, epoch, SHOWN);
    }
}

/// The fields of the last event.
fn end(args: &[&str]) -> (Value, String) {
    let (stdout, stderr) = run_to(0, args);
    (last_event(&stdout), stderr)
}

#[test]
fn explaining_changes_no_bit_and_repeats_its_text() {
    for more in some_of([&["--model=mlp"][..], &["--model=mlp", "--spawn=processes"]], 1) {
        let plain = [&["--nproc-per-node=2", "--log-format=json"], more].concat();
        let explained = [&plain[..], &["--explain"]].concat();
        let (with, text) = end(&explained);
        let (without, nothing) = end(&plain);
        assert_eq!(with["parameters_hash"], without["parameters_hash"]);
        assert_eq!(with["loss"], without["loss"]);
        assert!(text.starts_with(&nothing), "{nothing}");
        assert_eq!(text, end(&explained).1);
        let told: Vec<Vec<String>> = rows(&text, ": The end");
        let hash = with["parameters_hash"].as_str().unwrap();
        assert_eq!(told, [["rank 0", hash], ["rank 1", hash]]);
        check_numbers(&text, 2, 0.001, true);
    }
    let plain: Vec<_> = run(&TWO[..1]).1.lines().map(String::from).collect();
    assert_eq!(run(&TWO).1.lines().collect::<Vec<_>>(), plain, "stdout is as without it");
}

#[test]
fn text_fits_two_screens_of_80_columns_in_both_languages() {
    for language in ["--language=en", "--language=zh"] {
        for more in some_of(
            [
                &[][..],
                &["--model=mlp"],
                &["--spawn=processes"],
                &["--num-samples=4095"],
                &["--num-samples=63", "--exact-mean"],
            ],
            2,
        ) {
            let text = told(&[&TWO[..], &[language], more].concat());
            assert!(text.lines().count() <= 48, "{}: {text}", text.lines().count());
            let widest = text.lines().max_by_key(|line| display_width(line)).unwrap();
            assert!(display_width(widest) <= 80, "{widest}");
            let is_chinese = text.contains("梯度");
            assert_eq!(is_chinese, language.ends_with("zh"));
        }
    }
}

#[test]
fn one_rank_and_many_ranks_are_explained() {
    let text = told(&["--nproc-per-node=1", "--explain"]);
    assert!(text.contains("There is one rank") && !text.contains("divided by"), "{text}");
    let text = told(&["--nproc-per-node=9", "--explain", "--max-steps=1"]);
    assert!(text.contains("  by hand: (rank 0 + rank 1 + ...) / 9 = "), "{text}");
    assert_eq!(rows(&text, "different gradients").len(), 7, "the first and the last: {text}");
    assert!(text.contains("\n  rank 8  ") && !text.contains("Step 1"), "{text}");
    assert!(text.contains("After 1 step the ranks"), "{text}");
}

#[test]
fn resumed_run_is_explained_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let save = format!("--checkpoint-dir={}", folder.path().display());
    let common = [&TWO[..], &[&save, "--max-epochs=2"]].concat();
    told(&[&common[..], &["--max-steps=70"]].concat());
    let text = told(&[&common[..], &["--resume=auto"]].concat());
    assert!(in_one_line(&text).contains("Rank 0 takes those of a checkpoint, after 70"), "{text}");
    assert!(text.contains(": Step 70: different") && text.contains(": Step 71: other"), "{text}");
    let of_start = rows(&text, "The same start");
    let [of_0, of_1] = [&of_start[0], &of_start[1]];
    assert!(of_0[1] == of_0[2] && of_1[1] != of_1[2] && of_0[2] == of_1[2], "{of_start:?}");
    assert!(!in_one_line(&text).contains("the same already"), "{text}");
    // The 7th batch of epoch 1.
    let mine = DistributedSampler::new(4096, 2, 1).unwrap().indices(1).unwrap();
    let samples = &rows(&text, ": Step 70: different")[1][1];
    assert!(samples.starts_with(&format!("{} {} ", mine[6 * 32], mine[6 * 32 + 1])), "{samples}");
    assert!(text.contains("After 128 steps"), "{text}");

    let init_from = format!("--init-from={}", folder.path().display());
    let text = told(&[&TWO[..], &[&init_from]].concat());
    assert!(in_one_line(&text).contains("Rank 0 takes those of a file (--init-from)"), "{text}");
    let of_start = rows(&text, "The same start");
    assert!(of_start[0][1] == of_start[1][2] && of_start[1][1] != of_start[1][2], "{text}");
}

#[test]
fn replicas_with_own_buffers_are_not_called_the_same() {
    let cnn = ["--model=cnn", "--in-features=64", "--num-samples=256", "--channels=4,4"];
    let text = told(&[&TWO[..], &cnn].concat());
    assert!(text.contains("The same to the bit: 2 ranks have trained one model."), "{text}");
    let text = told(&[&TWO[..], &cnn, &["--no-broadcast-buffers"]].concat());
    assert!(text.contains("Not the same! ") && !text.contains("The same to the bit"), "{text}");
}

#[test]
fn incompatible_flags_are_refused() {
    let of_strategy = "--explain: needs --strategy ddp; remove it, or use that strategy\n";
    for (line, complaint) in [
        ("--explain --strategy=dp", of_strategy),
        ("--explain --amp=fp16", "--explain: shows the first steps, and amp"),
        ("--explain --skip-nonfinite=1", "--explain: shows the first steps, and amp"),
        ("--language=zh", "--language: needs --explain"),
    ] {
        let error = refused(line);
        assert!(error.starts_with(complaint.trim_end()), "{error}");
    }
    assert!(run_refused(&["verify", "--explain"]).starts_with("ddp-mp: --explain: "));
}
