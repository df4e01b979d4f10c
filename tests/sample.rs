//! Text from a gpt: the same tokens as nanoGPT's `generate` draws, and `ddp-mp sample`.

use std::io::Read;
use std::process::Stdio;

use ddp_mp::checkpoint::{CheckpointDir, Snapshot, TrainerState};
use ddp_mp::ffi::fork_rng;
use ddp_mp::models::{Generate, GenerateOptions, Model, ModelConfig, ModelKind};
use serde_json::Value;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::harness::{TIMEOUT, program, run, run_refused, run_to, some_of};
use wait_timeout::ChildExt;

const CONTEXT: i64 = 8;

/// A gpt with its initial parameters: all tokens are about as likely.
fn gpt() -> (VarStore, Model) {
    let (n_layer, n_head, n_embd) = (1, 2, 16);
    let sizes = ModelConfig { n_layer, n_head, n_embd, ..ModelConfig::default() };
    let (kind, in_features) = (ModelKind::Gpt, CONTEXT);
    let config = ModelConfig { kind, in_features, out_features: 256, ..sizes };
    config.build(Device::Cpu, 3).unwrap()
}

fn prompt() -> Vec<i64> {
    b"First Citizen:".iter().map(|&byte| byte.into()).collect()
}

/// Returns `count` tokens after the prompt.
fn generated(model: &Model, options: GenerateOptions, count: usize) -> Vec<i64> {
    let options = GenerateOptions { block_size: CONTEXT, ..options };
    let tokens = Generate::new(model, &prompt(), options, Device::Cpu).unwrap();
    tokens.take(count).collect::<Result<_, _>>().unwrap()
}

/// Returns the same as nanoGPT's `generate` after `torch.manual_seed(seed)`, with libtorch's own `multinomial`.
fn generated_with_multinomial(model: &Model, options: GenerateOptions, count: usize) -> Vec<i64> {
    let GenerateOptions { temperature, top_k, seed, .. } = options;
    let mut tokens = prompt();
    let draw_all = || {
        for _ in 0..count {
            let seen = &tokens[tokens.len().saturating_sub(CONTEXT as usize)..];
            let logits = model.forward_t(&Tensor::from_slice(seen).unsqueeze(0), false);
            let mut logits = logits.get(0).get(-1) / temperature;
            if let Some(k) = top_k {
                let smallest = logits.topk(k, -1, true, true).0.get(-1);
                logits = logits.masked_fill(&logits.lt_tensor(&smallest), f64::NEG_INFINITY);
            }
            let token = logits.softmax(-1, Kind::Float).multinomial(1, false);
            tokens.push(token.int64_value(&[0]));
        }
    };
    tch::no_grad(|| fork_rng(seed, draw_all)).unwrap();
    tokens.split_off(prompt().len())
}

#[test]
fn tokens_are_those_that_multinomial_draws() {
    let (_vs, model) = gpt();
    for (temperature, top_k, seed) in
        [(1.0, None, 0), (0.8, Some(200), 1337), (2.5, Some(3), 5), (0.01, None, 9)]
    {
        let options = GenerateOptions { temperature, top_k, seed, ..Default::default() };
        let expected = generated_with_multinomial(&model, options, 60);
        assert_eq!(generated(&model, options, 60), expected, "{options:?}");
    }
}

#[test]
fn temperature_and_top_k_restrict_the_draws() {
    let (_vs, model) = gpt();
    let of = |temperature, top_k| {
        generated(&model, GenerateOptions { temperature, top_k, ..Default::default() }, 40)
    };
    let likeliest = of(0.0, None);
    assert_eq!(of(1.0, Some(1)), likeliest);
    assert_eq!(of(1e-9, None), likeliest);
    assert_eq!(of(1.0, Some(1000)), of(1.0, None), "there are 256 tokens");
    assert_ne!(of(1.0, None), likeliest);
}

#[test]
fn wrong_options_are_refused() {
    let (_vs, model) = gpt();
    let valid = GenerateOptions::default();
    for (options, prompt, problem) in [
        (valid, vec![], "the prompt is empty"),
        (GenerateOptions { block_size: 0, ..valid }, vec![1], "a context of 0 tokens"),
        (GenerateOptions { temperature: -1.0, ..valid }, vec![1], "the temperature -1"),
        (GenerateOptions { temperature: f64::NAN, ..valid }, vec![1], "the temperature NaN"),
        (GenerateOptions { top_k: Some(0), ..valid }, vec![1], "top_k is too small"),
    ] {
        let error = Generate::new(&model, &prompt, options, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    // No row of the embedding: an error, and not a panic.
    let mut tokens = Generate::new(&model, &[256], valid, Device::Cpu).unwrap();
    let error = tokens.next().unwrap().unwrap_err().to_string();
    assert!(error.contains("index out of range"), "{error}");
}

/// Trains a small gpt for a few steps, and returns its folder and what `sample` takes to read it.
fn trained() -> (TempDir, String) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let text = folder.join("text.txt");
    std::fs::write(&text, "To be, or not to be: that is the question. ".repeat(20)).unwrap();
    let run_folder = folder.join("run");
    let [text, saved] = [&text, &run_folder].map(|path| path.to_str().unwrap());
    let (dataset, dir) = (format!("--dataset=text:{text}"), format!("--checkpoint-dir={saved}"));
    let model = ["--model=gpt", "--n-layer=1", "--n-head=2", "--n-embd=16", "--block-size=8"];
    let more = [&dataset, &dir, "--nproc-per-node=2", "--batch-size=4", "--lr=0.1"];
    run_to(0, &[&model[..], &more].concat());
    let checkpoint = format!("--checkpoint={saved}");
    (temporary, checkpoint)
}

#[test]
fn model_without_finite_logits_is_an_error() {
    let (vs, model) = gpt();
    for mut parameter in vs.trainable_variables() {
        let _ = tch::no_grad(|| parameter.fill_(f64::NAN));
    }
    for temperature in [0.0, 1.0] {
        let options = GenerateOptions { block_size: CONTEXT, temperature, ..Default::default() };
        let mut tokens = Generate::new(&model, &prompt(), options, Device::Cpu).unwrap();
        let error = tokens.next().unwrap().unwrap_err().to_string();
        assert!(error.contains("the model's largest logit is NaN"), "{error}");
    }
}

#[test]
fn sample_continues_the_prompt_without_control_characters_and_follows_its_seed() {
    let (_folder, checkpoint) = &trained();
    let text = |flags: &[&str]| {
        let (code, stdout, stderr) = run(&[&["sample", checkpoint], flags].concat());
        assert_eq!((code, &stderr[..]), (Some(0), ""), "{stdout}");
        stdout
    };
    let one = text(&["--prompt=To be", "--num-tokens=50"]);
    assert!(one.starts_with("To be") && one.ends_with('\n'), "{one:?}");
    assert_eq!(text(&["--prompt=To be", "--num-tokens=50"]), one);
    assert_ne!(text(&["--prompt=To be", "--num-tokens=50", "--seed=1"]), one);
    assert_eq!(text(&["--num-tokens=0"]), "\n");
    // It would change the terminal.
    assert_eq!(text(&["--prompt=a\u{1b}[2Jé", "--num-tokens=0"]), "a\\u001b[2Jé\n");
    let same = ["--temperature=0", "--num-tokens=20"];
    assert_eq!(text(&same), text(&[&same[..], &["--seed=7"]].concat()));
}

#[test]
fn sample_ends_when_nobody_reads() {
    let (_folder, checkpoint) = &trained();
    let mut command = program(&["sample", checkpoint, "--num-tokens=1000000000"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap(); // then the pipe is closed
    let ended = child.wait_timeout(TIMEOUT).unwrap();
    if ended.is_none() {
        child.kill().unwrap();
    }
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
}

#[test]
fn sample_refuses_wrong_input() {
    let (folder, checkpoint) = &trained();
    let linear = folder.path().join("linear");
    let linear = linear.to_str().unwrap();
    run_to(0, &[&format!("--checkpoint-dir={linear}"), "--nproc-per-node=1"]);
    let newest = std::fs::read_to_string(folder.path().join("run/latest")).unwrap();
    let in_checkpoint = &format!("{checkpoint}/{}/model.safetensors", newest.trim());
    let (of_linear, nowhere) = (&format!("--checkpoint={linear}"), "--checkpoint=/nowhere");
    for (flags, problem) in [
        (&[][..], "--checkpoint"),
        (&[nowhere], "/nowhere"),
        (&[of_linear], "it holds a linear model, which writes no text"),
        (&[in_checkpoint], "this is a file, but a checkpoint is a folder; name "),
        (&[checkpoint, "--prompt="], "--prompt: the prompt is empty"),
    ] {
        let stderr = run_refused(&[&["sample"], flags].concat());
        assert!(stderr.contains(problem) && stderr.lines().count() < 12, "{stderr}");
    }
}

/// Whoever can write a checkpoint can give its `trainer.json` a right hash.
#[test]
fn a_checkpoint_sets_no_option_that_a_run_does_not_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| Value::from(folder.path().join("made").join(name).to_str().unwrap());
    let of_gpt = [("model", "gpt".into()), ("dataset", "text:x".into()), ("in_features", 8.into())];
    let forged = [
        ("trace", path("t.json")),
        ("report", path("r.html")),
        ("record", path("r")),
        ("checkpoint_dir", path("c")),
        ("init_from", path("i")),
        ("inject_fault", "kill:rank=0,at=step,step=1".into()),
        ("max_restarts", 3.into()),
        ("spawn", "processes".into()),
        ("max_epochs", 3.into()), // saved with a cosine schedule only
        ("nesterov", true.into()),
    ];
    for (key, value) in some_of(forged, 4) {
        let options = of_gpt.iter().cloned().chain([(key, value)]);
        let options = options.map(|(key, value)| (key.to_owned(), value)).collect();
        let state = TrainerState { world_size: 1, options, ..TrainerState::default() };
        let dir = folder.path().join(key);
        let snapshot = Snapshot::take(state, &[], Vec::new()).unwrap();
        CheckpointDir::create(&dir, 1).unwrap().write(&snapshot).unwrap();
        let (_, stderr) = run_to(2, &["sample", &format!("--checkpoint={}", dir.display())]);
        let flag = key.replace('_', "-");
        let why = if key == "nesterov" { ": " } else { ", which no run saves" };
        let told = format!("its trainer.json sets --{flag}{why}");
        assert!(stderr.contains(&told), "{stderr}");
    }
    assert!(!folder.path().join("made").exists());
}
