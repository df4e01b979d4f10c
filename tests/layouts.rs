//! N ranks give one answer, wherever they run: as threads, as processes, and as processes that share no memory, as those of
//! several hosts do.

use std::process::{Output, Stdio};

use proptest::prelude::*;
use proptest::sample::select;
use tempfile::tempdir;

use crate::harness::{free_port, join, last_event, program, run_to, runs_every_case};

/// The ranks of each host; one host has them as threads or as processes.
const LAYOUTS: [(&[usize], &str); 5] = [
    (&[4], "--spawn=threads"),
    (&[4], "--spawn=processes"),
    (&[2, 2], "--shared-memory=off"),
    (&[3, 1], "--shared-memory=off"),
    (&[1, 1, 2], "--shared-memory=off"),
];

/// Runs the program with `options` in a layout. Returns what each host's process has printed.
pub(crate) fn run_in((counts, how): (&[usize], &str), options: &[&str]) -> Vec<Output> {
    let port = format!("--master-port={}", free_port());
    let (nnodes, at) = (format!("--nnodes={}", counts.len()), "--master-addr=127.0.0.1");
    let start = |(host, count): (usize, &usize)| {
        let ranks = format!("--nproc-per-node={count}");
        let host = format!("--node-rank={host}");
        let hosts = [&nnodes, &host, at, &port].map(|flag| flag as &str);
        let hosts = if counts.len() > 1 { &hosts[..] } else { &[] };
        let args = [options, hosts, &[&ranks, how, "--log-format=json"]].concat();
        program(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    join(counts.iter().enumerate().map(start).collect())
}

/// Returns the hash of the parameters after a run of `options` in a layout.
fn hash_in((counts, how): (&[usize], &str), options: &[&str]) -> String {
    // Processes cannot share a model, which has the same bits.
    let are_allowed = |option: &&&str| how != "--spawn=processes" || **option != "--share-model";
    let options: Vec<&str> = options.iter().filter(are_allowed).copied().collect();
    let ended = run_in((counts, how), &options);
    for host in &ended {
        assert!(host.status.success(), "{counts:?}: {}", String::from_utf8_lossy(&host.stderr));
    }
    let end = last_event(std::str::from_utf8(&ended[0].stdout).unwrap());
    end["parameters_hash"].as_str().expect("a hash").to_owned()
}

/// Options whose numbers go through reductions of all sizes, on their way to the parameters.
fn options() -> impl Strategy<Value = String> {
    let model = select(vec![
        "",
        "--model=mlp --hidden=40,30",
        "--model=mlp --hidden=700,700 --bucket-cap-mb=1",
        "--model=mlp --hidden=1000,1000 --in-features=100",
        "--model=cnn --in-features=64 --channels=5,8 --sync-batch-norm",
        "--model=cnn --in-features=64 --channels=8",
        "--model=gpt --dataset=text:assets/shakespeare.txt --n-layer=2 --n-head=2 --n-embd=32 --block-size=32",
    ]);
    let optimizer = select(vec![
        "--momentum=0.9",
        "--optimizer=adamw --weight-decay=0.1",
        "--optimizer=adamw --zero",
        "--momentum=0.9 --zero",
        "--max-grad-norm=0.1 --zero",
        "--max-grad-norm=0.1",
        "--optimizer=adamw --share-model",
        "--max-grad-norm=0.1 --share-model",
    ]);
    let average = select(vec![
        "",
        "--grad-accum-steps=3",
        "--comm-hook=fp16",
        "--comm-hook=bf16",
        "--no-overlap",
        "--amp=bf16",
    ]);
    let samples = select(vec!["--num-samples=600", "--num-samples=613 --exact-mean"]);
    (model, optimizer, average, samples).prop_filter_map(
        "options that cannot be combined",
        |(model, optimizer, average, samples)| {
            let reads_a_text = model.contains("gpt");
            let samples = if reads_a_text { "--num-samples=600" } else { samples };
            let both = average.contains("accum") && samples.contains("exact-mean");
            (!both).then(|| [model, optimizer, average, samples].join(" "))
        },
    )
}

#[test]
fn records_of_two_layouts_are_equal() {
    let folder = tempdir().unwrap();
    let record = |name: &str| folder.path().join(name).display().to_string();
    let names = ["threads", "hosts"].map(record);
    for (layout, name) in [LAYOUTS[0], LAYOUTS[3]].into_iter().zip(&names) {
        let file = format!("--record={name}");
        hash_in(layout, &["--model=mlp", "--optimizer=adamw", "--max-steps=5", &file]);
    }
    let (stdout, _) = run_to(0, &["diff", &names[0], &names[1]]);
    assert!(stdout.contains("Equal: the start and 5 steps (0 to 4)."), "{stdout}");
}

fn cases() -> u32 {
    if runs_every_case() { 12 } else { 3 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_layout_gives_one_answer_and_goes_on_from_any_other(
        options in options(), from in select(&LAYOUTS[..]), to in select(&LAYOUTS[..]), step in 1..8,
    ) {
        let options: Vec<&str> = options.split_whitespace().collect();
        let whole = [&options[..], &["--max-epochs=2", "--val-fraction=0.1", "--seed=5"]].concat();
        let expected = hash_in(LAYOUTS[0], &whole);
        for layout in &LAYOUTS[1..] {
            prop_assert_eq!(&hash_in(*layout, &whole), &expected, "{:?} {:?}", layout, whole);
        }
        let folder = tempdir().unwrap();
        let folder = format!("--checkpoint-dir={}", folder.path().display());
        let stop = format!("--max-steps={step}");
        hash_in(from, &[&whole[..], &[&folder, &stop]].concat());
        let resumed = hash_in(to, &[&whole[..], &[&folder, "--resume=auto"]].concat());
        prop_assert_eq!(&resumed, &expected, "step {} of {:?} resumed in {:?}: {:?}", step, from, to, whole);
    }
}
