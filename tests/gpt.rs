//! A gpt on a text: its samples, its options, and what is measured of it.

use std::fs;
use std::path::Path;

use ddp_mp::checkpoint::{Checkpoint, CheckpointDir};
use ddp_mp::ffi::backward;
use ddp_mp::models::{Model, ModelConfig, ModelKind};
use ddp_mp::{Dataset, TextDataset};
use serde_json::Value;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::harness::{
    ranks, refused, repository, run_end, run_events, run_refused, some_of, words,
};

const VOCABULARY: i64 = TextDataset::VOCAB_SIZE;
const BLOCK_SIZE: i64 = 16;
const GPT: &str = "--model=gpt --dataset=text:assets/shakespeare.txt --n-layer=2 --n-head=2 --n-embd=32 \
                   --block-size=16 --num-samples=101 --batch-size=8 --max-epochs=2 --optimizer=adamw --lr=0.01";

fn config(dropout: f64) -> ModelConfig {
    ModelConfig {
        kind: ModelKind::Gpt,
        in_features: BLOCK_SIZE,
        out_features: VOCABULARY,
        n_layer: 2,
        n_head: 2,
        n_embd: 32,
        dropout,
        ..ModelConfig::default()
    }
}

fn shakespeare() -> TextDataset {
    TextDataset::open(&repository("assets/shakespeare.txt"), BLOCK_SIZE as usize).unwrap()
}

/// The inputs and targets of the contexts `range`.
fn contexts(text: &TextDataset, range: std::ops::Range<usize>) -> (Tensor, Tensor) {
    text.batch(&range.collect::<Vec<_>>()).unwrap()
}

/// [`GPT`] with more options, but without those that begin with one of `left_out`.
fn gpt<'a>(left_out: &[&str], more: &'a str) -> Vec<&'a str> {
    let kept = GPT.split(' ').filter(|arg| !left_out.iter().any(|flag| arg.starts_with(flag)));
    kept.chain(more.split_whitespace()).collect()
}

/// The hash of the parameters, the loss and the number of steps after a run of [`GPT`] with more options.
#[track_caller]
fn outcome(more: &str) -> [Value; 3] {
    let end = run_end(&gpt(&[], more));
    assert!(end["parameters_hash"].is_string(), "{end}");
    ["parameters_hash", "loss", "steps"].map(|key| end[key].clone())
}

/// The logits, and the gradient of every parameter.
fn step(vs: &VarStore, model: &Model) -> Vec<Tensor> {
    let (inputs, targets) = contexts(&shakespeare(), 0..4);
    let logits = model.forward_t(&inputs, true);
    let rows = logits.view([-1, VOCABULARY]);
    backward(&rows.cross_entropy_for_logits(&targets.view(-1))).unwrap();
    let gradients = vs.trainable_variables().into_iter().map(|parameter| parameter.grad());
    [logits.detach()].into_iter().chain(gradients).collect()
}

/// Without dropout, attention is one operation of libtorch; with it, several.
#[test]
fn both_ways_to_attend_give_the_same() {
    let results = ranks(1, |_, _| {
        let steps = [0., 1e-12].map(|dropout| {
            let (vs, model) = config(dropout).build(Device::Cpu, 3).unwrap();
            step(&vs, &model)
        });
        let [one, several] = &steps;
        let largest = one.iter().zip(several).map(|(one, several)| {
            let difference: Tensor = (one - several).abs().max();
            (difference.double_value(&[]), one.abs().max().double_value(&[]))
        });
        Ok(largest.collect::<Vec<_>>())
    });
    assert_eq!(results[0].len(), 1 + 2 + 2 * 12 + 2);
    for (difference, scale) in &results[0] {
        assert!(*scale > 0. && *difference <= 1e-6 * scale, "{difference} of {scale}");
    }
    assert!(results[0].iter().any(|(difference, _)| *difference > 0.), "it is the same way");
}

#[test]
fn no_position_sees_a_later_one() {
    let (inputs, _) = contexts(&shakespeare(), 0..1);
    for dropout in [0., 1e-12] {
        let (_vs, model) = config(dropout).build(Device::Cpu, 3).unwrap();
        let logits = |inputs: &Tensor| tch::no_grad(|| model.forward_t(inputs, true));
        let before = logits(&inputs);
        for place in 0..BLOCK_SIZE {
            let other = inputs.copy();
            let _ = other.narrow(1, place, 1).fill_(i64::from(b'~'));
            let equal = before.eq_tensor(&logits(&other)).all_dim(-1, false).view(-1);
            let equal = Vec::<bool>::try_from(equal).unwrap();
            let expected: Vec<bool> = (0..BLOCK_SIZE).map(|at| at < place).collect();
            assert_eq!(equal, expected, "{place}");
        }
    }
}

/// A context may be shorter than `block_size`: its logits are those of the first positions.
#[test]
fn shorter_contexts_have_the_logits_of_the_first_positions() {
    let (inputs, _) = contexts(&shakespeare(), 0..2);
    let (_vs, model) = config(0.).build(Device::Cpu, 3).unwrap();
    let logits = |inputs: &Tensor| tch::no_grad(|| model.forward_t(inputs, false));
    let (whole, short) = (logits(&inputs), logits(&inputs.narrow(1, 0, 5)));
    assert!((whole.narrow(1, 0, 5) - short).abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn options_have_the_bits_that_they_promise() {
    let all = [
        // Dropout draws from each rank's own generator.
        ("--nproc-per-node=2 --dropout=0.2", &["", "--share-model", "--zero"][..]),
        ("--nproc-per-node=3 --grad-accum-steps=2", &["--strategy=dp", "--bucket-cap-mb=0.01"]),
        (
            "--nproc-per-node=2 --exact-mean --amp=bf16 --no-bias --schedule=cosine --schedule-by=step --warmup-steps=3",
            &["--share-model", "--zero"],
        ),
        (
            "--nproc-per-node=2 --max-grad-norm=1 --weight-decay=0.1 --no-decay-on-bias-and-norm --val-fraction=0.1",
            &["--num-workers=2", "--explain", "--no-overlap", "--check-replicas-every=2", "--zero"],
        ),
    ];
    for (plain, others) in some_of(all, 1) {
        let expected = outcome(plain);
        for other in others {
            assert_eq!(outcome(&format!("{plain} {other}")), expected, "{plain} {other}");
        }
    }
    // Two processes add as two threads do.
    for options in some_of(["--dropout=0.2", "--no-bias --amp=bf16 --comm-hook=fp16"], 1) {
        let plain = &format!("--nproc-per-node=2 {options}");
        assert_eq!(outcome(&format!("{plain} --spawn=processes")), outcome(plain));
    }
}

#[test]
fn resumed_gpt_has_the_bits_of_an_undisturbed_one() {
    let folder = tempfile::tempdir().unwrap();
    let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
    let args = "--nproc-per-node=2 --dropout=0.1 --val-fraction=0.1";
    let whole = outcome(args);
    let part = run_end(&gpt(&[], &format!("{args} {dir} --max-steps=9")));
    assert_eq!((&part["steps"], &part["stopped"]), (&9.into(), &"max-steps".into()), "{part}");
    assert_eq!(outcome(&format!("{args} {dir} --resume=auto")), whole);
}

#[test]
fn verify_works_with_a_gpt() {
    let sgd = "--lr=0.1 --momentum=0.9 --nproc-per-node=2";
    let model = gpt(&["--max-epochs", "--optimizer", "--lr"], sgd);
    let rows = run_events(&[&["verify", "--steps=6"], &model[..]].concat());
    assert_eq!(rows.len(), 5);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("difference") <= number("bound") && number("bound") < 1e-4, "{row}");
    }
}

/// Three ranks share a tail that does not divide by them, nor by the batches.
#[test]
fn validation_is_that_of_the_whole_tail() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let dir = format!("--checkpoint-dir={}", run.display());
    let args = format!("--nproc-per-node=3 --val-fraction=0.25 {dir} --dropout=0.1");
    let events = run_events(&gpt(&[], &args));
    let told = events.iter().rfind(|event| event["event"] == "validation").unwrap();

    let (_, tail) = shakespeare().first(101).unwrap().split_tail(0.25).unwrap();
    assert_eq!(tail.len(), 25);
    let (inputs, targets) = contexts(&tail, 0..25);
    let (vs, model) = config(0.).build(Device::Cpu, 0).unwrap();
    let newest = CheckpointDir::newest_in(&run).unwrap().unwrap();
    Checkpoint::read(&newest).unwrap().load_model(&vs).unwrap();
    let logits = tch::no_grad(|| model.forward_t(&inputs, false)).to_kind(Kind::Double);
    let of_target = logits.log_softmax(-1, None).gather(-1, &targets.unsqueeze(-1), false);
    let loss = -of_target.mean(None).double_value(&[]);
    let correct = logits.argmax(-1, false).eq_tensor(&targets).sum(Kind::Int64).int64_value(&[]);

    let number = |key: &str| told[key].as_f64().unwrap();
    assert!((number("loss") / loss - 1.).abs() < 1e-6, "{told}, {loss}");
    assert!((number("bits_per_token") / (loss / 2f64.ln()) - 1.).abs() < 1e-6, "{told}");
    assert!((number("accuracy") - correct as f64 / (25. * 16.)).abs() < 1e-9, "{told}, {correct}");
    assert!(correct > 0 && loss < (VOCABULARY as f64).ln(), "{correct}, {loss}");
}

#[test]
fn tokens_per_second_are_samples_times_block_size() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let args = format!("--nproc-per-node=2 --metrics={} --log-every=3", file.display());
    let epochs = run_events(&gpt(&[], &args));
    let epochs = epochs.into_iter().filter(|event| event["event"] == "epoch");
    let text = fs::read_to_string(&file).unwrap();
    let steps = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps = steps.filter(|event| event["event"] == "train");
    let (epochs, steps): (Vec<_>, Vec<_>) = (epochs.collect(), steps.collect());
    assert_eq!((epochs.len(), steps.len()), (4, 6));
    for event in epochs.iter().chain(&steps) {
        let rate = |key: &str| event[key].as_f64().unwrap();
        let tokens = rate("samples_per_second") * BLOCK_SIZE as f64;
        assert!(tokens > 0. && (rate("tokens_per_second") / tokens - 1.).abs() < 1e-9, "{event}");
    }
    // Samples of other models have no tokens.
    let other = run_events(&["--nproc-per-node=1", "--max-epochs=1"]);
    assert!(other.iter().all(|event| event["tokens_per_second"].is_null()), "{other:?}");
}

fn text_of(folder: &Path, bytes: &[u8], block_size: usize) -> ddp_mp::Result<TextDataset> {
    let file = folder.join("book.txt");
    fs::write(&file, bytes).unwrap();
    TextDataset::open(&file, block_size)
}

#[test]
fn every_token_is_predicted_once_an_epoch() {
    let folder = tempfile::tempdir().unwrap();
    // All bytes, of which few are a text.
    let bytes: Vec<u8> = (0..1000).map(|i| (i * 7 % 256) as u8).collect();
    for (len, block_size, unused) in [(1000, 27, 0), (1000, 1, 0), (1000, 100, 99), (8, 7, 0)] {
        let text = text_of(folder.path(), &bytes[..len], block_size).unwrap();
        assert_eq!(text.len(), (len - 1) / block_size);
        let mut targets = Vec::new();
        for index in 0..text.len() {
            assert_eq!(text.source_index(index), index);
            let (input, target) = text.get(index).unwrap();
            assert_eq!(input.kind(), Kind::Int64);
            let [input, target] = [input, target].map(|it| Vec::<i64>::try_from(it).unwrap());
            assert_eq!((input.len(), &input[1..]), (block_size, &target[..block_size - 1]));
            assert_eq!(input[0], i64::from(bytes[index * block_size]));
            targets.extend(target);
        }
        let expected: Vec<i64> = bytes[1..len - unused].iter().map(|&byte| byte.into()).collect();
        assert_eq!(targets, expected);
    }
}

#[test]
fn tail_of_the_text_is_held_back() {
    let text = shakespeare();
    let (training, tail) = text.split_tail(0.1).unwrap();
    assert_eq!(training.len() + tail.len(), text.len());
    assert!((tail.len() as f64 / text.len() as f64 - 0.1).abs() < 1e-4);
    assert_eq!(tail.source_index(0), training.len());
    let whole = |text: &TextDataset, index| text.get(index).unwrap();
    assert_eq!(whole(&tail, 3), whole(&text, training.len() + 3));
    assert_eq!(whole(&training, training.len() - 1), whole(&text, training.len() - 1));
    for index in [tail.len(), usize::MAX] {
        assert!(tail.get(index).is_err(), "{index}");
    }
    for fraction in [0., 1., -1., f64::NAN, 1e-9] {
        assert!(text.split_tail(fraction).is_err(), "{fraction}");
    }
    assert!(text.first(0).is_err() && text.first(text.len() + 1).is_err());
    assert_eq!(text.first(text.len()).unwrap().len(), text.len());
}

#[test]
fn texts_that_cannot_be_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (empty, short, least) = (path("empty.txt"), path("short.txt"), path("least.bin"));
    fs::write(&empty, "").unwrap();
    fs::write(&short, "To be, or not to").unwrap(); // 16 bytes
    fs::write(&least, [0xFFu8; 17]).unwrap();
    for (file, error) in [
        (&empty, "the file is empty"),
        (&short, "the text has 16 bytes, and a context of 16 tokens needs 17"),
        (&path("missing.txt"), "No such file"),
        (&path(""), "a directory"),
    ] {
        let refused = TextDataset::open(Path::new(file), 16).unwrap_err().to_string();
        assert_eq!(refused.lines().count(), 1, "{refused}");
        assert!(refused.contains(error) && refused.contains(file.as_str()), "{refused}");
    }
    let refused = run_refused(&words(&format!("--model=gpt --dataset=text:{empty}")));
    assert!(refused.contains("the file is empty") && refused.contains(&empty), "{refused}");
    // One context of bytes that are no text.
    let args = format!("--model=gpt --block-size=16 --dataset=text:{least} --max-epochs=1");
    let events = run_events(&words(&format!("{args} --nproc-per-node=1")));
    assert_eq!(events.last().unwrap()["steps"], 1);
}

#[test]
fn options_that_do_not_fit_a_gpt_are_refused() {
    let part = |flag| gpt(&[flag], "");
    let whole = gpt(&[], "");
    for (base, args, error) in [
        (&[][..], "--model=gpt", "--model: a gpt reads text; use --dataset text:FILE"),
        (
            &[],
            "--dataset=text:assets/shakespeare.txt",
            "--dataset: a text is for a gpt; use --model gpt",
        ),
        (&[], "--n-layer=3", "--n-layer: applies only to a gpt; add --model gpt"),
        (&part("--n-head"), "--n-head=3", "--n-head: 3 heads cannot share a width of 32 equally"),
        (&whole, "--loss=mse", "use --loss cross-entropy"),
        (&whole, "--hidden=3", "--hidden: applies only to an mlp"),
        (&whole, "--sync-batch-norm", "--sync-batch-norm: applies only to a cnn"),
        (&whole, "--in-features=5", "--in-features"),
        (&whole, "--out-features=100", "--out-features"),
        (&part("--num-samples"), "--num-samples=99999999", "--num-samples"),
        (&part("--num-samples"), "--num-samples=3 --val-fraction=0.1", "--val-fraction"),
    ] {
        let refused = refused(&format!("{} {args}", base.join(" ")));
        let is_one_line = refused.lines().count() == 1;
        assert!(refused.contains(error) && is_one_line, "{args}: {refused}");
    }
    // The gradient of the keys' bias is what rounding leaves, and AdamW divides it by its own size.
    let refused =
        run_refused(&[&["verify", "--nproc-per-node=2"], &part("--max-epochs")[..]].concat());
    assert!(refused.contains("--optimizer adamw: "), "{refused}");
}
