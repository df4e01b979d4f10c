//! Runs that are stopped, killed or cut short, and go on as if nothing had happened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ddp_mp::checkpoint::{Checkpoint, CheckpointDir, Snapshot, TensorFile, TrainerState};
use ddp_mp::models::{Model, ModelConfig, ModelKind, state_dict};
use ddp_mp::trainer::{Loss, SaveEvery, Trainer};
use ddp_mp::{
    DataLoader, DdpOptions, DistributedDataParallel, DistributedSampler, Optimizer, ProcessGroup,
    Rank, Schedule, Sgd, SgdOptions, SpawnError, Targets, TensorDataset,
};
use rustix::process::Signal;
use safetensors::tensor::TensorView;
use serde_json::Value;
use tch::nn::VarStore;
use tch::{Device, Tensor};
use tempfile::TempDir;
use wait_timeout::ChildExt;

use crate::harness::{
    Reading, TIMEOUT, in_parallel, output, program, read_until, run, runs_every_case, send,
    some_of, try_ranks,
};

/// What a run came to.
#[derive(Debug, PartialEq)]
struct Outcome {
    hash: String,
    /// Of each epoch that was completed.
    losses: BTreeMap<u64, f64>,
    last_loss: f64,
    steps: u64,
    stopped: Option<String>,
}

fn outcome(stdout: &str) -> Outcome {
    let events = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let (mut losses, mut last) = (BTreeMap::new(), Value::Null);
    for event in events {
        if event["event"] == "epoch" {
            losses.insert(event["epoch"].as_u64().unwrap(), event["loss"].as_f64().unwrap());
        }
        last = event;
    }
    assert_eq!(last["event"], "end", "{stdout}");
    Outcome {
        hash: last["parameters_hash"].as_str().unwrap().into(),
        losses,
        last_loss: last["loss"].as_f64().unwrap(),
        steps: last["steps"].as_u64().unwrap(),
        stopped: last["stopped"].as_str().map(String::from),
    }
}

/// A run of `args`, with `more`, that must end well.
fn train(args: &str, more: &[&str]) -> Outcome {
    let (code, stdout, stderr) = run(&arguments(args, more));
    assert_eq!(code, Some(0), "{args} {more:?}: {stderr}");
    outcome(&stdout)
}

/// Checks that a run is refused with an error that has this part, and returns the error.
#[track_caller]
fn refused(args: &str, more: &[&str], told: &str) -> String {
    let (code, _, stderr) = run(&arguments(args, more));
    assert_eq!(code, Some(2), "{args} {more:?}: {stderr}");
    assert!(stderr.contains(told), "{args} {more:?}: {stderr}");
    stderr
}

fn arguments<'a>(args: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let ranks = (!args.contains("nproc")).then_some("--nproc-per-node=2");
    args.split_whitespace().chain(["--log-format=json"]).chain(ranks).chain(more.to_vec()).collect()
}

/// Starts the program with pipes.
fn start(args: &str, more: &[&str]) -> Child {
    let mut program = program(&arguments(args, more));
    program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn folder() -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
    (folder, dir)
}

/// What is in the folder of a run, but for `latest`, which must name the last, and `best`.
fn checkpoints(folder: &TempDir) -> Vec<PathBuf> {
    let run = folder.path().join("run");
    let mut all: Vec<PathBuf> = fs::read_dir(&run).unwrap().map(|it| it.unwrap().path()).collect();
    all.sort();
    all.retain(|path| !path.ends_with(".lock") && !path.ends_with("best"));
    let latest = all.iter().position(|path| path.ends_with("latest")).unwrap();
    let latest = fs::read_to_string(all.remove(latest)).unwrap();
    let newest = all.iter().rfind(|it| it.display().to_string().contains("/step-")).unwrap();
    assert_eq!(run.join(latest.trim_end()), *newest);
    all
}

#[test]
fn resume_after_two_stops_ends_with_the_same_bits() {
    let all = [
        "--model=mlp --momentum=0.9 --lr=0.05 --schedule=cosine --schedule-by=step --warmup-steps=5",
        "--model=mlp --optimizer=adamw --lr=0.01 --dropout=0.3 --grad-accum-steps=3 --num-samples=2500",
        "--model=mlp --optimizer=adamw --lr=0.01 --amp=fp16 --max-grad-norm=0.5 --bucket-cap-mb=0.001",
        "--model=cnn --in-features=64 --momentum=0.9 --nesterov --lr=0.02",
        "--model=cnn --in-features=64 --sync-batch-norm --optimizer=adamw --num-samples=1501",
        "--model=mlp --strategy=dp --optimizer=adamw --drop-last --num-samples=4099",
        "--find-unused-parameters --comm-hook=bf16 --lr=0.1 --no-shuffle --in-features=9 --batch-size=5 --num-samples=470",
    ];
    in_parallel(&some_of(all, 1), |args| {
        let args = format!("{args} --max-epochs=3");
        let whole = train(&args, &[]);
        let per_epoch = whole.steps / 3;
        let (_folder, dir) = folder();
        let first = per_epoch / 2 + 1;
        let stopped = train(&args, &[&dir, &format!("--max-steps={first}")]);
        assert_eq!((stopped.steps, stopped.losses.len()), (first, 0), "{args}");
        assert_eq!(stopped.stopped.as_deref(), Some("max-steps"));
        assert!(stopped.last_loss > 0.0);
        let second = format!("--max-steps={}", 2 * per_epoch + 1);
        let mut middle = train(&args, &[&dir, "--save-every=7", "--resume=auto", &second]);
        let mut end = train(&args, &[&dir, "--resume=auto"]);
        middle.losses.append(&mut end.losses);
        end.losses = middle.losses;
        assert_eq!(end, whole, "{args}");
        // There is nothing left to do, and that is said with the same numbers.
        let again = train(&args, &[&dir, "--resume=auto"]);
        assert_eq!((again.hash, again.last_loss), (whole.hash, whole.last_loss), "{args}");
    });
}

#[test]
fn saving_changes_no_bit_and_keeps_the_newest() {
    let args = "--model=mlp --optimizer=adamw --max-epochs=2";
    let without = train(args, &[]);
    let (folder, dir) = folder();
    assert_eq!(train(args, &[&dir, "--save-every=9", "--keep-last=2"]), without);
    let names = |all: Vec<PathBuf>| -> Vec<String> {
        all.iter().map(|it| it.file_name().unwrap().to_string_lossy().into()).collect()
    };
    assert_eq!(names(checkpoints(&folder)), ["step-00000126", "step-00000128"]);
    // By default at the end of each epoch.
    let (folder, dir) = self::folder();
    assert_eq!(train(args, &[&dir]), without);
    assert_eq!(names(checkpoints(&folder)), ["step-00000064", "step-00000128"]);
    refused(args, &[&dir], "holds checkpoints already, the newest is step-00000128");
}

#[test]
fn signal_stops_all_ranks_after_the_same_step() {
    let args = "--model=mlp --hidden=16 --momentum=0.9 --lr=0.01";
    for (signal, code) in some_of([("INT", 130), ("TERM", 143), ("USR1", 0), ("HUP", 129)], 1) {
        let (_folder, dir) = folder();
        let mut child = start(args, &[&dir, "--max-epochs=1000000"]);
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut text = read_until("\"epoch\":1", &mut stdout);
        send(signal, child.id());
        stdout.read_to_string(&mut text).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        let stopped = outcome(&text);
        assert_eq!(stopped.stopped, Some(format!("SIG{signal}")));
        let told = format!("stopped by SIG{signal} after {} steps, saved in", stopped.steps);
        assert!(stderr.contains(&told), "{stderr}");
        let length = format!("--max-epochs={}", stopped.losses.len() + 1);
        let whole = train(args, &[&length]);
        let mut rest = train(args, &[&dir, "--resume=auto", &length]);
        assert!(stopped.steps < whole.steps);
        rest.losses.extend(stopped.losses);
        assert_eq!(rest, whole);
    }
}

/// Starts a run in which rank 1 stalls in its first step, and returns it once it has printed a line.
fn stalled_run(more: &[&str]) -> Child {
    let mut child = start("--inject-fault=stall:rank=1,at=step,step=0 --stall-warning=9m", more);
    read_until("\n", &mut BufReader::new(child.stdout.take().unwrap()));
    child
}

/// No step ends, so that the ranks cannot stop after one.
#[test]
fn signal_ends_a_run_that_hangs_after_the_grace_period() {
    for (signal, code, spawn) in [("TERM", 143, "threads"), ("INT", 130, "processes")] {
        let spawn = format!("--spawn={spawn}");
        let child = stalled_run(&[&spawn, "--grace-period=1s"]);
        send(signal, child.id());
        let output = output(child);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        for told in [
            format!("ddp-mp: SIG{signal}: stopping after this step; a second signal ends"),
            format!("SIG{signal} requested a stop, but no rank made progress for 1s"),
        ] {
            assert_eq!(stderr.matches(&told).count(), 1, "{stderr}");
        }
        assert!(stderr.contains("rank 1 (CPU:1"), "{stderr}");
    }
}

#[test]
fn second_signal_ends_the_process_at_once() {
    for (signal, code, spawn) in [
        ("INT", 130, "--spawn=threads"),
        ("TERM", 143, "--spawn=threads"),
        ("TERM", 143, "--spawn=processes"),
    ] {
        let mut child = stalled_run(&["--grace-period=1h", spawn]);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        send(signal, child.id());
        read_until(&format!("SIG{signal}: stopping after this step"), &mut stderr);
        // No step ends: one rank stalls in the first.
        assert_eq!(child.wait_timeout(Duration::from_millis(300)).unwrap(), None);
        // A termination that comes at once may be the same request, of a launcher's agent.
        let (tries, moment) =
            if signal == "INT" { (1, TIMEOUT) } else { (1000, Duration::from_millis(200)) };
        let status = (0..tries).find_map(|_| {
            send(signal, child.id());
            child.wait_timeout(moment).unwrap()
        });
        let _ = child.kill();
        assert_eq!(status.expect("it ends").code(), Some(code), "{signal} {spawn}");
    }
}

/// Schedulers send SIGUSR1. Without a handler it kills a process, and handlers come after libtorch's constructors.
#[test]
fn signal_before_the_handlers_is_not_lost() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("config");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let config = format!("--config={}", pipe.display());
    let both = 1 << (Signal::USR1.as_raw() - 1) | 1 << (Signal::USR2.as_raw() - 1);
    for more in [&["--spawn=threads", &config][..], &["--spawn=processes"]] {
        let args = arguments("--num-samples=65536 --max-epochs=100", more);
        // It stays before its handlers until the test goes on: with threads it waits for its configuration, and with
        // processes it says where they run, in a pipe that is full.
        let (reader, writer) = full_pipe();
        let mut child = program(&args).stdout(Stdio::null()).stderr(writer).spawn().unwrap();
        let holds_both = || {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
            let held = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(held.trim(), 16).unwrap() & both == both
        };
        let began = Instant::now();
        while !holds_both() {
            assert!(
                began.elapsed() < TIMEOUT,
                "it does not hold the signals until it handles them"
            );
            thread::yield_now();
        }
        send("USR2", child.id());
        send("USR1", child.id());
        let stderr = Reading::of(reader);
        if more.contains(&&*config) {
            // Opening it waits for a reader. A thread does that, because there may be none.
            let pipe = pipe.clone();
            thread::Builder::new().spawn(move || fs::write(pipe, "")).unwrap();
        }
        let ended = child.wait_timeout(TIMEOUT).unwrap();
        child.kill().unwrap();
        let stderr = String::from_utf8(stderr.end()).unwrap();
        assert_eq!(ended.expect("it ends").code(), Some(0), "{more:?}: {stderr}");
        assert!(stderr.contains("stopped by SIGUSR1 after "), "{more:?}: {stderr}");
    }
}

/// Returns a pipe in which nothing can be written before something is read.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'\n'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

/// As often as `KILLS` says, if it is set: `KILLS=500 cargo test --release run_killed_at_any_moment`.
/// Long: it starts a run for each kill.
#[test]
fn run_killed_at_any_moment_resumes_to_the_same_bits() {
    let usual = if runs_every_case() { 15 } else { 4 };
    let rounds: u32 = std::env::var("KILLS").map_or(usual, |kills| kills.parse().unwrap());
    let args = "--num-samples=16384 --model=mlp --hidden=32 --optimizer=adamw --max-epochs=6";
    let whole = train(args, &[]);
    let (folder, dir) = folder();
    let latest = folder.path().join("run/latest");
    let (mut resumed, mut random) = (0, 1u64);
    for round in 0..rounds {
        let mut child = start(args, &[&dir, "--save-every=7", "--resume=auto"]);
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        // Some are killed before their ranks have met, others once they have saved.
        let awaited = match round % 4 {
            0 => "",
            2 => "\"event\":\"start\"",
            _ => "\"event\":\"epoch\"",
        };
        while !text.contains(awaited) && stdout.read_line(&mut text).unwrap() > 0 {}
        // A thread writes the checkpoints.
        let awaits_one = awaited.contains("epoch");
        while awaits_one && !latest.exists() && child.try_wait().unwrap().is_none() {
            thread::yield_now();
        }
        let moment = Duration::from_millis((random >> 33) % 200);
        let ended = child.wait_timeout(moment).unwrap();
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stderr.contains("checkpoint /"), "round {round}: {stderr}");
        resumed += u32::from(stderr.contains("resuming from"));
        if let Some(status) = ended {
            assert!(status.success(), "round {round}: {stderr}");
            stdout.read_to_string(&mut text).unwrap();
            assert_eq!(outcome(&text).hash, whole.hash);
            fs::remove_dir_all(folder.path().join("run")).unwrap();
        }
    }
    assert!(resumed >= rounds.div_ceil(5), "{resumed} of {rounds} had something to go on from");
    let end = train(args, &[&dir, "--resume=auto"]);
    assert_eq!((end.hash, end.last_loss), (whole.hash, whole.last_loss));
    assert!(checkpoints(&folder).len() <= 3, "what the killed left behind is gone");
}

/// A file of a checkpoint, what happens to it, and what is said then.
type Damage = (&'static str, fn(&Path), &'static str);

#[test]
fn damaged_checkpoint_is_refused_and_an_older_one_offered() {
    let args = "--model=mlp --momentum=0.9 --max-epochs=2 --save-every=40";
    let (folder, dir) = folder();
    let whole = train(args, &[&dir]);
    let all = checkpoints(&folder);
    let damage: [Damage; 7] = [
        (
            "trainer.json",
            |it| reword(it, "\"epoch\": 2", "\"epoch\": 1"),
            " is damaged: it was changed after it was written",
        ),
        ("model.safetensors", cut_off, " is damaged: it has 100 bytes instead of"),
        ("optimizer.safetensors", flip, " is damaged: its xxh3"),
        ("trainer.json", cut_off, " is damaged: EOF"),
        ("trainer.json", remove, " cannot be read"),
        ("model.safetensors", remove, "model.safetensors: No such file"),
        (
            "trainer.json",
            |it| reword(it, "\"format\": 1", "\"format\": 2"),
            "has format 2, but this version of ddp-mp reads format 1",
        ),
    ];
    for (number, (file, damage, reason)) in some_of(damage, 2).into_iter().enumerate() {
        damage(&all[2].join(file));
        let reason =
            if reason.starts_with(' ') { format!("{file}{reason}") } else { reason.into() };
        let named = format!("checkpoint {}/", all[2].display());
        let error = refused(args, &[&dir, "--resume=auto"], &named);
        assert!(error.contains(&reason), "{error}");
        let older = all[1].display();
        assert!(error.contains(&format!("use {older}")), "{error}");
        // What is offered works, with the damaged one out of the way.
        let end = train(args, &[&dir, &format!("--resume={older}")]);
        assert_eq!(end.hash, whole.hash);
        assert_eq!(checkpoints(&folder).len(), 4 + number, "one more of them aside");
    }
    let read = || Checkpoint::read(&all[2]).unwrap_err().to_string();
    all[1..].iter().for_each(|it| cut_off(&it.join("model.safetensors")));
    assert!(read().ends_with(&format!("use {}", all[0].display())), "{}", read());
    cut_off(&all[0].join("model.safetensors"));
    assert!(read().ends_with("no older one to use instead: start over in another folder"));
}

fn cut_off(file: &Path) {
    fs::File::options().write(true).open(file).unwrap().set_len(100).unwrap();
}

fn remove(file: &Path) {
    fs::remove_file(file).unwrap();
}

fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

fn reword(file: &Path, old: &str, new: &str) {
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(old));
    fs::write(file, text.replace(old, new)).unwrap();
}

#[test]
fn init_from_starts_with_saved_parameters() {
    let (folder, dir) = folder();
    let args = "--model=mlp --max-epochs=1";
    let saved = train(args, &[&dir, "--optimizer=adamw"]);
    let file = checkpoints(&folder)[0].join("model.safetensors");
    let init = format!("--init-from={}", file.display());
    assert_eq!(train(args, &[&init, "--lr=0", "--seed=3"]).hash, saved.hash);
    let told =
        "does not fit the model; missing: `6.weight`, `6.bias`; of another shape: `4.weight`";
    let error = refused("--model=mlp --hidden=64,64,8", &[&init], told);
    assert!(error.contains("--init-from: "), "{error}");
}

/// The shapes and bytes of tensors by name.
type SavedTensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// The tensors of a checkpoint of a run with `args`, and its hash.
fn saved_by(args: &str) -> (SavedTensors, String) {
    let (folder, dir) = folder();
    let saved = train(args, &[&dir]);
    let bytes = fs::read(checkpoints(&folder)[0].join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.shape().to_vec(), view.data().to_vec()))
    };
    (tensors.iter().map(tensor).collect(), saved.hash)
}

/// Writes float32 tensors to a file, with this metadata, and returns the flag that starts from it.
fn init_from(file: &Path, tensors: &SavedTensors, metadata: &[(&str, &str)]) -> String {
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    fs::write(file, safetensors::serialize(views, Some(metadata.collect())).unwrap()).unwrap();
    format!("--init-from={}", file.display())
}

/// `safetensors.torch.save_model` keeps one name of nanoGPT's tied weight, and writes the other into the metadata.
#[test]
fn init_from_follows_the_metadata_of_tied_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (file, text) = (folder.path().join("x.safetensors"), folder.path().join("text"));
    fs::write(&text, "to be or not to be\n".repeat(20)).unwrap();
    let args = format!(
        "--model=gpt --loss=cross-entropy --n-layer=1 --n-head=1 --n-embd=8 --block-size=8 --max-epochs=1 \
         --dataset=text:{}",
        text.display()
    );
    let (mut tensors, hash) = saved_by(&args);
    let tied = tensors.remove("transformer.wte.weight").unwrap();
    tensors.insert("lm_head.weight".into(), tied);
    let names = [("format", "pt"), ("transformer.wte.weight", "lm_head.weight")];
    let init = init_from(&file, &tensors, &names);
    assert_eq!(train(&args, &[&init, "--lr=0", "--seed=3"]).hash, hash);
    let told = "missing: `transformer.wte.weight`; unexpected: `lm_head";
    refused(&args, &[&init_from(&file, &tensors, &names[..1])], told);
    let wrong = [("transformer.wte.weight", "elsewhere")];
    refused(&args, &[&init_from(&file, &tensors, &wrong)], "missing: `transformer.wte.weight`");
}

fn mlp() -> VarStore {
    let hidden = vec![64, 64];
    let config = ModelConfig { kind: ModelKind::Mlp, hidden, ..ModelConfig::default() };
    config.build(Device::Cpu, 0).unwrap().0
}

/// The error of loading these tensors of a file into an mlp.
fn misfit(tensors: impl IntoIterator<Item = (String, Tensor)>) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.safetensors");
    Tensor::write_safetensors(&Vec::from_iter(tensors), &file).unwrap();
    TensorFile::read(&file).unwrap().load_into(&mlp()).unwrap_err().to_string()
}

#[test]
fn init_from_names_what_a_wrapper_adds_to_the_names() {
    let refuses = |rename: &dyn Fn(&str) -> String, told: &str| {
        let tensors = state_dict(&mlp()).unwrap().into_iter();
        let error = misfit(tensors.map(|(name, tensor)| (rename(&name), tensor)));
        assert!(error.contains(told), "{error}");
        error
    };
    let in_ddp = refuses(&|name| format!("module.{name}"), "; a wrapper has added `module.` to ");
    let told = "does not fit the model; missing: `0.weight`, `0.bias`, `2.weight`, `2.bias`, `4.weight`, `4.bias`; \
                unexpected: `module.0.bias`, `module.0.weight`, ";
    assert!(in_ddp.contains(told), "{in_ddp}");
    for (prefix, told) in [
        ("_orig_mod.", "added `_orig_mod.` to the names: save the state_dict of the model within"),
        ("_orig_mod.module.", "added `_orig_mod.` and `module.` to"),
        ("net.layers.", "added `net.layers.` to"),
        ("model.module.", "added `model.` and `module.` to"),
    ] {
        refuses(&|name| format!("{prefix}{name}"), told);
    }
    refuses(
        &|name| name.replace('.', "._fsdp_wrapped_module."),
        "added `_fsdp_wrapped_module.` to",
    );
    let (linear, _) = ModelConfig::default().build(Device::Cpu, 0).unwrap();
    let error = misfit(state_dict(&linear).unwrap());
    assert!(error.contains("model; missing: ") && !error.contains("wrapper"), "{error}");
}

#[test]
fn init_from_refuses_weights_that_are_not_finite() {
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let tensors = state_dict(&mlp()).unwrap();
        let (_, weight) = tensors.iter().find(|(name, _)| name == "2.weight").unwrap();
        let _ = tch::no_grad(|| weight.get(0).get(1).fill_(number));
        let told = "x.safetensors does not fit the model; NaN or infinite (use weights from before training diverged): \
                    `2.weight` (1 of 4096 numbers)";
        let error = misfit(tensors);
        assert!(error.contains(told), "{error}");
    }
}

/// A run that learns its few samples by heart, so that the validation loss rises again.
const BY_HEART: &str = "--num-samples=300 --model=mlp --optimizer=adamw --val-fraction=0.3";

/// The validations of a run that must end well, and its last event.
fn validated(more: &[&str]) -> (Vec<Value>, Value, String) {
    let lr = if more.contains(&"--lr=0") { &[][..] } else { &["--lr=0.01"] };
    let (code, stdout, stderr) = run(&arguments(BY_HEART, &[more, lr].concat()));
    assert_eq!(code, Some(0), "{stderr}");
    let events = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let (validations, others): (Vec<_>, Vec<_>) =
        events.partition(|event| event["event"] == "validation");
    (validations, others.last().unwrap().clone(), stderr)
}

#[test]
fn diverged_replicas_are_not_saved() {
    let args = "--num-samples=960 --nproc-per-node=3 --lr=0.05 --max-epochs=2";
    let fault = "--inject-fault=desync:rank=0,at=step,step=13";
    let whole = train(args, &[]);
    for spawn in some_of(["--spawn=processes", "--spawn=threads"], 1) {
        let (folder, dir) = folder();
        // At an epoch's end, or in the midst of one.
        for (every, last) in [("--save-every-epochs=1", 10), ("--save-every=4", 12)] {
            let (code, stdout, stderr) = run(&arguments(args, &[&dir, fault, every, spawn]));
            assert_eq!(code, Some(1), "{stderr}");
            assert!(stderr.contains(" before a checkpoint was saved, after step "), "{stderr}");
            assert!(stderr.contains("rank 0 has another `weight` than the others"), "{stderr}");
            let failure: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
            assert_eq!((&failure["event"], &failure["rank"]), (&"failure".into(), &0.into()));
            let newest = checkpoints(&folder).pop().unwrap();
            assert!(newest.ends_with(format!("step-{last:08}")), "{}", newest.display());
            if last == 10 {
                fs::remove_dir_all(folder.path().join("run")).unwrap();
            }
        }
        // Whoever goes on does so from equal replicas.
        let end = train(args, &[&dir, "--resume=auto"]);
        assert_eq!((&end.hash, end.steps), (&whole.hash, whole.steps));
    }
}

#[test]
fn best_checkpoint_is_kept_beside_the_newest() {
    let (folder, dir) = folder();
    let (validations, end, _) = validated(&[&dir, "--max-epochs=20", "--keep-last=1"]);
    let loss = |it: &&Value| it["loss"].as_f64().unwrap();
    let best = validations.iter().min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap();
    assert_eq!(best["best"], true);
    assert_eq!(end["best"]["step"], best["step"]);
    let step = best["step"].as_u64().unwrap();
    assert!(step < end["steps"].as_u64().unwrap(), "it is best before the end");
    let kept = folder.path().join(format!("run/step-{step:08}"));
    let newest = folder.path().join(format!("run/step-{:08}", end["steps"].as_u64().unwrap()));
    assert_eq!(checkpoints(&folder), [kept.clone(), newest]);
    let pointer = folder.path().join("run/best");
    assert_eq!(fs::read_to_string(&pointer).unwrap(), format!("step-{step:08}\n"));

    // Its weights can be started from, and it can be gone on from: the rest is as it was.
    let at_best = format!("--init-from={}", pointer.display());
    let (start, _, _) = validated(&[&at_best, "--lr=0", "--max-epochs=1"]);
    assert_eq!(start[0]["loss"], best["loss"]);
    let resume = format!("--resume={}", pointer.display());
    let (again, end_again, stderr) = validated(&[&dir, &resume, "--max-epochs=20"]);
    assert!(stderr.contains(&format!("resuming from {}", kept.display())), "{stderr}");
    assert_eq!(again[..], validations[validations.len() - again.len()..]);
    assert_eq!(end_again["parameters_hash"], end["parameters_hash"]);
    assert_eq!(end_again["best"], end["best"]);

    // A best one that is set aside is the best of another run.
    let first = "--max-epochs=1";
    let (folder, dir) = self::folder();
    validated(&[&dir, first]);
    let oldest = checkpoints(&folder)[0].clone();
    validated(&[&dir, "--resume=auto", "--max-epochs=3"]);
    let resume = format!("--resume={}", oldest.display());
    validated(&[&dir, &resume, first]);
    let best = fs::read_to_string(folder.path().join("run/best")).unwrap();
    assert_eq!(oldest, folder.path().join("run").join(best.trim_end()));
}

#[test]
fn patience_stops_a_run_without_improvement() {
    let (whole, _, _) = validated(&["--max-epochs=40"]);
    let (_folder, dir) = folder();
    let (validations, end, stderr) = validated(&[&dir, "--max-epochs=40", "--patience=3"]);
    assert_eq!(validations[..], whole[..validations.len()]);
    assert_eq!(end["stopped"], "patience");
    let last_best = validations.iter().rposition(|it| it["best"] == true).unwrap();
    assert_eq!(validations.len(), last_best + 1 + 3);
    assert!(stderr.contains(&format!("smallest after epoch {last_best} (")), "{stderr}");
    // With no more patience there is nothing to go on to; with more there is.
    let (none, end, _) = validated(&[&dir, "--resume=auto", "--max-epochs=40", "--patience=3"]);
    assert_eq!((none.len(), &end["stopped"]), (0, &"patience".into()));
    let (rest, _, _) = validated(&[&dir, "--resume=auto", "--max-epochs=40"]);
    assert_eq!(rest[..], whole[validations.len()..]);
    refused("--patience=3", &[], "--patience: there are no validation samples");
}

#[test]
fn save_error_says_what_is_left_of_earlier_checkpoints() {
    let (folder, _) = folder();
    let run = folder.path().join("new/parents/run");
    let dir = CheckpointDir::create(&run, 2).unwrap();
    let save = |step| {
        let state = TrainerState { step, ..TrainerState::default() };
        dir.write(&Snapshot::take(state, &[], Vec::new()).unwrap())
    };
    let fails = |step: u64, told: &str| {
        if run.exists() {
            fs::create_dir(run.join(".unfinished")).unwrap();
        }
        let error = save(step).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        error
    };
    let none = "run has no earlier checkpoint: remove the cause, and start again";
    assert!(fails(1, none).ends_with(none));
    save(2).unwrap();
    let intact = "; earlier checkpoints are intact: remove the cause, and continue from step-00000002 with --resume";
    fails(3, intact);
    fs::remove_dir_all(&run).unwrap();
    fails(4, "run was removed during the run, with all checkpoints: start again");
}

#[test]
fn checkpoint_dir_in_use_is_refused_to_a_second_run() {
    let (folder, dir) = folder();
    let held = CheckpointDir::create(&folder.path().join("run"), 1).unwrap();
    let also = held.clone();
    drop(held);
    refused("", &[&dir], "another run is saving checkpoints in ");
    drop(also);
    train("", &[&dir]);
}

/// Returns a trainer of a program of one's own, on `data` in batches of `batch_size`, with the model of `from` if there is one.
pub(crate) fn trainer_of_program(
    rank: &Rank,
    group: Rc<ProcessGroup>,
    data: &Arc<TensorDataset>,
    batch_size: usize,
    from: Option<&Checkpoint>,
) -> anyhow::Result<Trainer<Model>> {
    let (vs, model) = ModelConfig::default().build(rank.device(), 0)?;
    if let Some(from) = from {
        from.load_model(&vs)?;
    }
    let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
    let sgd: Box<dyn Optimizer> = Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
    let sampler = DistributedSampler::new(data.len(), rank.world_size(), rank.rank())?;
    let loader = DataLoader::new(data.clone(), sampler, batch_size, rank.device())?;
    Ok(Trainer::new(ddp, sgd, Schedule::constant(0.01), loader, Loss::Mse)?)
}

/// Trains on two ranks as a program of one's own does, for two epochs of `samples` samples, from `from` if there is
/// one, and saves in `folder` after each epoch. Where each rank is then.
fn train_in_a_program(
    folder: &Path,
    samples: i64,
    batch_size: usize,
    from: Option<&Path>,
) -> Result<Vec<TrainerState>, Box<SpawnError>> {
    let dir = CheckpointDir::open(folder, 9).unwrap();
    let checkpoint = from.map(|path| Checkpoint::read(path).unwrap());
    let data = Arc::new(TensorDataset::random(samples, 20, Targets::Values(1), 1).unwrap());
    try_ranks(2, move |rank, group| {
        let every = SaveEvery { steps: None, epochs: Some(1) };
        let mut trainer = trainer_of_program(rank, group, &data, batch_size, checkpoint.as_ref())?
            .checkpoints(dir.clone(), every, Default::default());
        if let Some(checkpoint) = &checkpoint {
            trainer.resume(checkpoint)?;
        }
        trainer.train(2)?;
        Ok(trainer.state().clone())
    })
}

#[test]
fn library_resume_needs_the_same_data_and_sets_newer_aside() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let names = || {
        let entries = fs::read_dir(&run).unwrap().map(|it| name(&it.unwrap().path()));
        let names: BTreeSet<String> = entries.filter(|it| it.contains("step-")).collect();
        Vec::from_iter(names)
    };
    train_in_a_program(&run, 64, 8, None).unwrap();
    assert_eq!(names(), ["step-00000004", "step-00000008"]);
    let newest = CheckpointDir::newest_in(&run).unwrap().unwrap();
    let saved = Checkpoint::read(&newest).unwrap();
    assert_eq!((saved.state().num_samples, saved.state().batch_size), (64, 8));

    // Before anything is touched.
    let oldest = run.join("step-00000004");
    for (samples, batch_size) in [(128, 8), (64, 4)] {
        let error = train_in_a_program(&run, samples, batch_size, Some(&oldest)).unwrap_err();
        let told = format!(
            "64 samples in batches of 8, and this run has {samples} in batches of {batch_size}"
        );
        assert!(error.to_string().contains(&told), "{error}");
    }
    assert_eq!(names(), ["step-00000004", "step-00000008"]);

    let states = train_in_a_program(&run, 64, 8, Some(&oldest)).unwrap();
    assert!(states.iter().all(|state| state.step == 8));
    assert_eq!(names(), ["aside-1-step-00000008", "step-00000004", "step-00000008"]);
    assert_eq!(fs::read_to_string(run.join("latest")).unwrap(), "step-00000008\n");

    // Nor among those of another run.
    let other = folder.path().join("other");
    train_in_a_program(&other, 64, 8, None).unwrap();
    let error = train_in_a_program(&other, 64, 8, Some(&oldest)).unwrap_err().to_string();
    assert!(error.contains("the folder to save in has other checkpoints already"), "{error}");
}

#[test]
fn resume_from_an_invalid_path_names_the_newest() {
    let (folder, dir) = folder();
    let args = "--max-epochs=2";
    train(args, &[&dir]);
    let run = folder.path().join("run");
    let newest = format!("; the newest checkpoint in {0} is {0}/step-00000128", run.display());
    let refuses = |path: &str, problem: &str| {
        let error = Checkpoint::read(&run.join(path)).unwrap_err().to_string();
        assert!(error.ends_with(problem), "{path}: {error}");
    };
    refuses("step-00000100", &format!("this path does not exist{newest}"));
    refuses("best", &format!("this path does not exist{newest}"));
    fs::write(run.join("best"), "").unwrap();
    refuses("best", &format!("this is a file, but a checkpoint is a folder{newest}"));
    fs::write(run.join("best"), "step-00000001").unwrap();
    refuses("best", &format!("names step-00000001, which does not exist{newest}"));
    let path = "step-00000064/trainer.json";
    refuses(path, "a checkpoint is a folder; name the folder of a checkpoint or of its run");
    fs::create_dir(folder.path().join("empty")).unwrap();
    refuses(
        "../empty",
        "this folder has no checkpoint; name the folder of a checkpoint or of its run",
    );

    // By its name alone, in --checkpoint-dir.
    let (code, _, stderr) = self::run(&arguments("--max-epochs=1", &[&dir, "--resume=latest"]));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("step-00000128: epoch 2, step 128\n"), "{stderr}");
    let told = "nothing to do: 2 epochs are done, and --max-epochs is 1\n";
    assert!(stderr.contains(told), "{stderr}");
    train(args, &[&dir, "--resume=step-00000064"]);
    assert!(run.join("aside-1-step-00000128").exists());

    // Weights of the newest; and only where a run begins.
    let init = format!("--init-from={}", run.display());
    let begun = train("--max-epochs=1 --lr=0", &[&init]).hash;
    assert_eq!(begun, train(args, &[&dir, "--resume=auto"]).hash);
    let (_, _, stderr) = self::run(&arguments(args, &[&dir, "--resume=auto", &init]));
    let expected = "--init-from is ignored: the run continues from a checkpoint";
    assert!(stderr.contains(expected), "{stderr}");
    refused(
        args,
        &[&dir, "--resume=latest", &init],
        "--init-from: a resumed run already has parameters",
    );
}
