//! Losses and gradients that are infinite or not a number: told with rank, step and samples, or passed over.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use ddp_mp::checkpoint::CheckpointDir;
use ddp_mp::ddp::Compress;
use ddp_mp::optim::Schedule;
use ddp_mp::prelude::Forward;
use ddp_mp::trainer::{Loss, Trainer, TrainerOptions};
use ddp_mp::{
    Backend, DataLoader, DdpOptions, DistributedDataParallel, DistributedSampler, Optimizer, Rank,
    Sgd, SgdOptions, Spawn, TensorDataset,
};
use serde_json::Value;
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{
    events, last_event, run, run_all_refused, run_end, run_to, some_of, try_ranks,
};

/// A run on 400 samples of a file, number 17 of which has something that is no number. Its exit code, its last
/// event, and stderr.
fn on_spoiled_file(more: &[&str]) -> (Option<i32>, Value, String) {
    on_samples(0..400, more)
}

/// The same on some of the samples.
fn on_samples(samples: impl Iterator<Item = i32>, more: &[&str]) -> (Option<i32>, Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data.csv");
    let row = |i: i32| match i {
        17 => "0.1,NaN,0.3\n".into(),
        i => format!("{},{},{}\n", f64::from(i) / 400.0, f64::from(i % 7) / 7.0, i % 2),
    };
    fs::write(&file, samples.map(row).collect::<String>()).unwrap();
    let dataset = format!("--dataset=csv:{}", file.display());
    let ranks = (!more.iter().any(|it| it.contains("nproc"))).then_some("--nproc-per-node=2");
    let args: Vec<&str> = ["--log-format=json", &dataset].into_iter().chain(ranks).collect();
    let (code, stdout, stderr) = run(&[&args[..], more].concat());
    (code, last_event(&stdout), stderr)
}

#[test]
fn nonfinite_training_sample_is_named() {
    let all = [
        &[][..],
        &["--skip-nonfinite=0"],
        &["--grad-accum-steps=3"],
        &["--num-workers=2", "--amp=bf16"],
        &["--model=mlp", "--skip-nonfinite=0", "--dropout=0.1"],
        &["--no-overlap", "--no-shuffle"],
        // The number in the file, and not that among those which are not held back.
        &["--val-fraction=0.1", "--seed=5"],
    ];
    for more in some_of(all, 4) {
        let (code, event, stderr) = on_spoiled_file(more);
        assert_eq!(code, Some(1), "{more:?}: {stderr}");
        assert_eq!(event["event"], "failure");
        let told = "the loss is NaN for sample 17, whose data is not finite";
        let error = event["error"].as_str().unwrap();
        assert!(error.contains(told), "{more:?}: {error}");
        let place = format!("in step {} on rank {} ", event["sequence"], event["rank"]);
        assert!(error.starts_with(&place), "{more:?}: {event}");
    }
}

#[test]
fn nonfinite_validation_loss_is_named() {
    // The sample is with rank 0 or 1 alone, in any of its batches; the loss is that of all ranks.
    let all = [
        &["--seed=4"][..],
        &["--seed=5", "--batch-size=8", "--skip-nonfinite=3"],
        &["--seed=4", "--model=mlp", "--amp=bf16", "--nproc-per-node=3"],
        &["--seed=4", "--strategy=dp"],
        &["--seed=5", "--max-epochs=3", "--val-every=2", "--patience=1"],
    ];
    for more in some_of(all, 3) {
        let (code, event, stderr) = on_spoiled_file(&[&["--val-fraction=0.3"], more].concat());
        assert_eq!((code, &event["event"]), (Some(1), &"failure".into()), "{more:?}: {stderr}");
        let epoch = u32::from(more.contains(&"--val-every=2"));
        let told = format!(
            " on rank {} the validation loss after epoch {epoch} is NaN; check the data, or use a smaller --lr or --max-grad-norm",
            event["rank"]
        );
        let error = event["error"].as_str().unwrap();
        assert!(error.ends_with(&told), "{more:?}: {error}");
        assert!(!stderr.contains("then rank"), "{stderr}");
    }
    // One step so large that nothing is finite on any rank.
    let of_sgd = "the validation loss after epoch 0 is inf; ";
    let of_adamw =
        "is inf, because the parameter `bias` is not finite after the steps before; check";
    for (optimizer, told) in [("--optimizer=sgd", of_sgd), ("--optimizer=adamw", of_adamw)] {
        let args = ["--nproc-per-node=2", "--num-samples=100", "--batch-size=80", "--lr=1e38"];
        let (_, stderr) = run_to(1, &[&args[..], &["--val-fraction=0.2", optimizer]].concat());
        assert!(stderr.contains("in step 0 on rank ") && stderr.contains(told), "{stderr}");
    }
}

#[test]
fn skip_nonfinite_skips_the_allowed_number_of_steps() {
    let (code, end, stderr) = on_spoiled_file(&["--skip-nonfinite=1", "--batch-size=8"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!((end["steps"].as_u64(), end["skipped_steps"].as_u64()), (Some(25), Some(1)));
    assert!(
        stderr.contains("1 of 25 steps skipped: losses or gradients were not finite"),
        "{stderr}"
    );
    // The loss is the mean over all others: with a learning rate of 0 that of the file without this step's samples.
    let args = ["--batch-size=8", "--no-shuffle", "--lr=0", "--skip-nonfinite=1"];
    let loss = |(_, event, _): (_, Value, _)| event["loss"].as_f64().unwrap();
    let without = on_samples((0..400).filter(|i| !(16..32).contains(i)), &args);
    assert_eq!(without.1["skipped_steps"], 0);
    assert!((loss(on_spoiled_file(&args)) - loss(without)).abs() < 1e-12);
    // The second time is one too many, in the same run or in one that goes on.
    let (code, event, _) = on_spoiled_file(&["--skip-nonfinite=1", "--max-epochs=2"]);
    assert_eq!((code, &event["event"]), (Some(1), &"failure".into()));
    let error = event["error"].as_str().unwrap();
    assert!(error.contains("the loss is NaN for sample 17"), "{error}");
    // Where nothing is wrong, looking changes nothing.
    let hash = |more: &[&str]| {
        let args = ["--nproc-per-node=2", "--model=mlp", "--momentum=0.9"];
        run_end(&[&args[..], more].concat())["parameters_hash"].clone()
    };
    assert_eq!(hash(&[]), hash(&["--skip-nonfinite=5"]));
}

#[test]
fn skipped_step_leaves_batch_norm_statistics_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data.csv");
    let pixel = |i: usize, j: usize| match (i, j) {
        (17, 3) => "NaN".into(),
        _ => format!("{}", (i * 7 + j * j) % 11),
    };
    let row =
        |i: usize| (0..64).map(|j| pixel(i, j) + ",").collect::<String>() + &(i % 2).to_string();
    fs::write(&file, (0..200).map(|i| row(i) + "\n").collect::<String>()).unwrap();
    let dataset = format!("--dataset=csv:{}", file.display());
    let args = "--nproc-per-node=2 --log-format=json --model=cnn --channels=4 --loss=cross-entropy --batch-size=8 \
                --val-fraction=0.2 --seed=1 --sync-batch-norm --skip-nonfinite=1";
    let args: Vec<&str> = args.split_whitespace().chain([&dataset[..]]).collect();
    let (stdout, stderr) = run_to(0, &args);
    assert!(stderr.contains("1 of 10 steps skipped"), "{stderr}");
    // In evaluation the running statistics count: of all ranks, and so of the one with the sample, too.
    let events = events(&stdout);
    let validation = events.iter().find(|event| event["event"] == "validation").unwrap();
    assert!(validation["loss"].as_f64().is_some(), "{validation}");
}

#[test]
fn nonfinite_loss_or_parameter_ends_the_run_with_a_reason() {
    let (stdout, stderr) = run_to(1, &["--nproc-per-node=2", "--lr=100", "--log-format=json"]);
    assert!(stdout.lines().last().unwrap().starts_with("{\"event\":\"failure\""), "{stdout}");
    assert!(stderr.contains("the loss is inf for samples "), "{stderr}");
    assert!(stderr.contains("use a smaller --lr"), "{stderr}");
    // Square errors are too large for float32 before their gradients are: those are steps to pass over, too.
    let (_, step) = stdout.split_once("\"sequence\":").unwrap();
    let first: u64 = step.split_once(',').unwrap().0.parse().unwrap();
    let passing = ["--nproc-per-node=2", "--lr=100", "--skip-nonfinite=2"];
    let (_, stderr) = run_to(1, &passing);
    let place = format!("failed in step #{}: in step {} on rank ", first + 2, first + 2);
    assert!(stderr.contains(&place) && stderr.contains("the loss is inf for samples "), "{stderr}");
    // After the last step there is no loss any more to show it; nothing of it is saved.
    let folder = tempfile::tempdir().unwrap();
    let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
    let file = folder.path().join("data.csv");
    fs::write(&file, "0.5,100\n".repeat(64)).unwrap();
    let dataset = format!("--dataset=csv:{}", file.display());
    for more in [&[&dir[..], "--save-every=1"][..], &["--max-steps=1", &dir], &["--max-steps=1"]] {
        let args = ["--nproc-per-node=2", "--lr=1e37", "--batch-size=8", &dataset];
        let (_, stderr) = run_to(1, &[&args, more].concat());
        let told = "in step 0 on rank 0 the parameter `bias` is not finite, after this step";
        assert!(stderr.contains(told), "{stderr}");
        assert_eq!(CheckpointDir::newest_in(&folder.path().join("run")).unwrap(), None);
    }
    run_all_refused(&[
        (
            "--amp=fp16 --skip-nonfinite=1",
            "--skip-nonfinite: fp16 already skips steps whose gradients overflow",
        ),
        ("--strategy=dp --lr=1 --skip-nonfinite=1", "needs --strategy ddp"),
    ]);
}

/// A trainer on samples 0 to 7 of `data`, of which rank 1 has the odd ones, in batches of 2.
fn trainer<M: Forward>(
    ddp: DistributedDataParallel<M>,
    rank: &Rank,
    data: TensorDataset,
    (loss, lr): (Loss, f64),
    skip_nonfinite: Option<u64>,
) -> anyhow::Result<Trainer<M>> {
    let sampler = DistributedSampler::new(8, 2, rank.rank())?.shuffle(false);
    let loader = DataLoader::new(Arc::new(data), sampler, 2, rank.device())?;
    let sgd: Box<dyn Optimizer> = Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
    let options = TrainerOptions { skip_nonfinite, ..TrainerOptions::default() };
    let trainer = Trainer::new(ddp, sgd, Schedule::constant(lr), loader, loss)?.options(options)?;
    Ok(trainer)
}

/// Trains `model` on 2 ranks, on samples 0 to 7 of which rank 1 has the odd ones; how that fails.
fn fails(
    loss: Loss,
    inputs: fn() -> Tensor,
    targets: fn() -> Tensor,
    model: Model,
    as_fp16: bool,
) -> String {
    let failed = try_ranks(2, move |rank, group| {
        let vs = VarStore::new(Device::Cpu);
        let mut weight = vs.root().var("weight", &[1, 2], nn::Init::Const(0.5));
        tch::no_grad(|| weight.copy_(&Tensor::from_slice(&model.1).view([1, 2])));
        let forward = nn::func_t(move |x, _| model.0(x, &weight));
        let mut ddp = DistributedDataParallel::new(forward, &vs, group, DdpOptions::default())?;
        if as_fp16 {
            ddp.register_comm_hook(Box::new(Compress::fp16()))?;
        }
        let data = TensorDataset::new(inputs(), targets())?;
        trainer(ddp, rank, data, (loss, 0.0), Some(0))?.train(1)?;
        Ok(())
    });
    failed.unwrap_err().to_string()
}

/// What it does with inputs and weight, and the weight.
type Model = (fn(&Tensor, &Tensor) -> Tensor, [f32; 2]);

#[test]
fn nonfinite_gradient_is_traced_to_its_samples() {
    // The square root has no slope at 0, where sample 5 is: the third batch of rank 1 is 5 and 7.
    let inputs = || Tensor::from_slice(&[1f32, 2., 3., 4., 5., 0., 6., 7.]).view([8, 1]);
    let targets = || Tensor::zeros([8, 1], (Kind::Float, Device::Cpu));
    let root: Model = (|x, weight| (x * weight.get(0).get(0)).sqrt(), [0.5, 0.5]);
    let error = fails(Loss::Mse, inputs, targets, root, false);
    let told = "in step 1 on rank 1 the gradient of `weight` is not finite for samples 5, 7; check";
    assert!(error.contains(told), "{error}");

    // Each rank's own gradient is finite; as float16 it is not.
    let inputs = || Tensor::full([8, 1], 1e6, (Kind::Float, Device::Cpu));
    let targets = || Tensor::zeros([8], (Kind::Int64, Device::Cpu));
    let overflow: Model = (Tensor::matmul, [0., 0.]);
    let error = fails(Loss::CrossEntropy, inputs, targets, overflow, true);
    assert!(error.contains("in step 0 on rank"), "{error}");
    assert!(error.contains("the mean of all ranks' gradients is not finite; check"), "{error}");
}

/// Trains on tokens with 2 ranks, where rank 1 has a fault in step 1. Returns how many steps are skipped, and the hash.
fn with_nan_in_tokens(
    has_own_step: bool,
    skip_nonfinite: Option<u64>,
) -> Result<Vec<(u64, u64)>, String> {
    let spawn = Spawn::new(2).threads_per_rank(1).timeout(Duration::from_secs(60));
    let spawn = spawn.fault(Some("nan:rank=1,at=step,step=1".parse().unwrap()));
    let results = spawn.run(move |rank| {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().var("weight", &[1, 1], nn::Init::Const(0.5));
        let forward = nn::func_t(move |x, _| x.to_kind(Kind::Float).matmul(&weight));
        let group = rank.init_process_group(Backend::Threaded)?;
        let ddp = DistributedDataParallel::new(forward, &vs, group, DdpOptions::default())?;
        let tokens = Tensor::arange(8, (Kind::Int64, Device::Cpu)).view([8, 1]);
        let data = TensorDataset::new(tokens.shallow_clone(), tokens.to_kind(Kind::Float))?;
        let mut trainer = trainer(ddp, rank, data, (Loss::Mse, 0.001), skip_nonfinite)?;
        if has_own_step {
            trainer = trainer.step(|context, batch| {
                let loss = Loss::Mse.of(&context.forward(batch, true), &batch.targets)?;
                context.backward(&loss)?;
                Ok(loss)
            });
        }
        trainer.train(2)?;
        Ok((trainer.state().skipped_steps, trainer.ddp().parameters_hash()?))
    });
    results.map_err(|error| error.to_string())
}

#[test]
fn injected_nan_reaches_tokens_with_and_without_own_step() {
    for has_own_step in [false, true] {
        let error = with_nan_in_tokens(has_own_step, None).unwrap_err();
        let told = "in step 1 on rank 1 the loss is NaN for samples 5, 7; check";
        assert!(error.contains(told), "{has_own_step}: {error}");
    }
    let built_in = with_nan_in_tokens(false, Some(1)).unwrap();
    assert_eq!(built_in[0].0, 1);
    assert_eq!(with_nan_in_tokens(true, Some(1)).unwrap(), built_in);
}
