//! The old way, to compare: DDP's results, and all that goes through rank 0.

use std::fs;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use ddp_mp::ddp::Strategy;
use ddp_mp::trainer::{Loss, Trainer};
use ddp_mp::{
    DataLoader, DataParallel, DdpOptions, DistributedDataParallel, DistributedSampler, Optimizer,
    ProcessGroup, Rank, ScatterLoader, Schedule, Sgd, SgdOptions, Targets, TensorDataset,
};
use serde_json::Value;
use tch::nn::{self, Module, VarStore};
use tch::{Kind, Reduction, Tensor};

use crate::harness::{in_parallel, linear, ranks, run, some_of, try_ranks};

const MEAN: Reduction = Reduction::Mean;

/// The `end` event of a run.
fn end(args: &[&str]) -> Value {
    let (code, stdout, stderr) = run(&[&["--log-format=json"], args].concat());
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

#[test]
fn data_parallel_has_the_bits_of_ddp() {
    // Last batches that are smaller, and last steps that are made of fewer batches.
    let lists = [
        "--num-samples=101 --max-epochs=2",
        "--num-samples=133 --max-epochs=3 --model=mlp --optimizer=adamw --schedule=cosine",
        "--num-samples=110 --max-epochs=2 --model=mlp --momentum=0.9 --weight-decay=0.1 \
             --max-grad-norm=0.1 --grad-accum-steps=3 --drop-last --no-shuffle",
        "--num-samples=300 --max-epochs=2 --model=cnn --in-features=64 --channels=4,5 --grad-accum-steps=2 \
             --loss=cross-entropy --out-features=3 --optimizer=adamw --max-grad-norm=0.5",
    ];
    let all = ["1", "2", "3", "4"].iter().flat_map(|ranks| lists.map(|flags| (*ranks, flags)));
    let cases = some_of(all, 3);
    let count = cases.len();
    let hashes = Mutex::new(Vec::new());
    in_parallel(&cases, |&(ranks, flags)| {
        let common = ["--nproc-per-node", ranks, "--batch-size=7", "--lr=0.01"];
        let flags: Vec<&str> = common.into_iter().chain(flags.split_whitespace()).collect();
        let ddp = end(&[&flags[..], &["--strategy=ddp"]].concat());
        let dp = end(&[&flags[..], &["--strategy=dp"]].concat());
        for key in ["parameters_hash", "steps", "loss"] {
            assert_eq!(dp[key], ddp[key], "{key}, {flags:?}");
        }
        hashes.lock().unwrap().push(dp["parameters_hash"].to_string());
    });
    let mut hashes = hashes.into_inner().unwrap();
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), count, "other flags give other bits");
}

/// 64 numbers for each rank: weights, and a bias that has a cache line to itself.
fn layer(vs: &VarStore, world_size: usize) -> nn::Linear {
    linear(vs.root(), 64 * world_size as i64 - 16, 1)
}

/// Two samples for each rank.
fn data_for(world_size: usize) -> TensorDataset {
    let features = 64 * world_size as i64 - 16;
    TensorDataset::random(2 * world_size as i64, features, Targets::Values(1), 0).unwrap()
}

fn own_loader(rank: &Rank, of_rank: usize) -> DataLoader {
    let dataset = data_for(rank.world_size());
    let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), of_rank).unwrap();
    DataLoader::new(Arc::new(dataset), sampler, 2, rank.device()).unwrap()
}

fn scatter_loader(rank: &Rank, group: &Rc<ProcessGroup>) -> ddp_mp::Result<ScatterLoader> {
    let ranks = if rank.rank() == 0 { 0..rank.world_size() } else { 0..0 };
    ScatterLoader::new(ranks.map(|of_rank| own_loader(rank, of_rank)).collect(), group.clone())
}

#[test]
fn data_parallel_moves_all_bytes_through_rank_0() {
    for world_size in 1..5 {
        let others = world_size as u64 - 1;
        let old_way = ranks(world_size, |rank, group| {
            let vs = VarStore::new(rank.device());
            let model = layer(&vs, rank.world_size());
            let _buffer = vs.root().add("count", Tensor::from(0i64), false);
            let mut dp = DataParallel::new(model, &vs, group.clone())?;
            let loader = scatter_loader(rank, &group)?;
            let before = group.traffic();
            for batch in loader.epoch(0)? {
                let batch = batch?;
                dp.replicate()?;
                dp.backward(&dp.module().forward(&batch.inputs).mse_loss(&batch.targets, MEAN))?;
            }
            let after = group.traffic();
            Ok((after.sent - before.sent, after.received - before.received))
        });
        let parameters = 4 * 64 * world_size as u64;
        let (count, inputs, targets) = (8, 2 * (parameters - 4 * 16), 2 * 4);
        let to_each = parameters + count + inputs + targets;
        let mut expected = vec![(parameters, to_each); world_size];
        expected[0] = (others * to_each, others * parameters);
        assert_eq!(old_way, expected);

        let ddp = ranks(world_size, |rank, group| {
            let vs = VarStore::new(rank.device());
            let (model, options) = (layer(&vs, rank.world_size()), DdpOptions::default());
            let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
            let before = group.traffic();
            for batch in own_loader(rank, rank.rank()).epoch(0)? {
                let batch = batch?;
                ddp.backward(&ddp.module().forward(&batch.inputs).mse_loss(&batch.targets, MEAN))?;
            }
            let after = group.traffic();
            Ok((after.sent - before.sent, after.received - before.received))
        });
        // Each rank reduces its 64 numbers: they come from all others, and go to all others.
        let both_ways = 2 * others * 4 * 64;
        assert_eq!(ddp, vec![(both_ways, both_ways); world_size]);
    }
}

#[test]
fn end_event_has_the_bytes_of_each_rank() {
    let moved = |strategy: &str| {
        let flags = ["--nproc-per-node=4", "--model=mlp", "--max-epochs=4", strategy];
        let end = end(&flags);
        let bytes = |key: &str| -> Vec<u64> {
            end[key].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect()
        };
        (bytes("bytes_sent_by_rank"), bytes("bytes_received_by_rank"))
    };
    let (sent, received) = moved("--strategy=dp");
    assert_eq!((sent.len(), received.len()), (4, 4));
    assert_eq!(
        sent.iter().sum::<u64>(),
        received.iter().sum::<u64>(),
        "whatever is sent is received"
    );
    for rank in 1..4 {
        // Three times as much; and the batches, which go one way.
        assert!(sent[0] > 3 * sent[rank] && received[0] > received[rank], "{sent:?} {received:?}");
    }
    let (sent, received) = moved("--strategy=ddp");
    let (least, most) = (sent.iter().min().unwrap(), received.iter().max().unwrap());
    assert!((*most as f64) < 1.1 * *least as f64, "{sent:?} {received:?}");
}

#[test]
fn optimizer_state_is_on_rank_0_only() {
    ranks(3, |rank, group| {
        let vs = VarStore::new(rank.device());
        let weight = vs.root().var("weight", &[2], nn::Init::Const(1. + rank.rank() as f64));
        let mut dp = DataParallel::new((), &vs, group)?;
        assert_eq!(Vec::<f32>::try_from(&weight.detach())?, [1., 1.], "rank 0's");
        let mine = rank.rank() as f64;
        dp.backward(&(&weight * mine).sum(Kind::Float))?;
        let Some(buffers) = dp.flat_buffers() else {
            assert!(rank.rank() > 0);
            assert_eq!(Vec::<f32>::try_from(weight.grad())?, [mine as f32; 2], "its own");
            let refused = dp.clip_grad_norm(1.).unwrap_err().to_string();
            assert!(refused.contains("on rank 0; call it there"), "{refused}");
            dp.replicate()?;
            assert_eq!(Vec::<f32>::try_from(&weight.detach())?, [0.5; 2], "as rank 0 stepped it");
            return Ok(());
        };
        assert_eq!(rank.rank(), 0);
        assert_eq!(Vec::<f32>::try_from(weight.grad())?, [1.; 2], "the mean of 0, 1 and 2");
        Sgd::new(buffers, SgdOptions::default())?.step(0.5)?;
        dp.replicate()?;
        Ok(())
    });
}

#[test]
fn no_sync_accumulates_and_rank_0_provides_the_buffers() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let root = vs.root();
        let mine = rank.rank() as f64;
        let weight = root.var("weight", &[1], nn::Init::Const(1.));
        let unused = root.var("unused", &[1], nn::Init::Const(1.));
        let frozen = root.var("frozen", &[1], nn::Init::Const(mine)).set_requires_grad(false);
        let mut mean = root.add("running_mean", Tensor::from_slice(&[mine]), false);
        let mut dp = DataParallel::new((), &vs, group)?;
        assert_eq!((frozen.double_value(&[0]), mean.double_value(&[0])), (0., 0.));
        let _ = mean.f_fill_(mine + 5.)?;
        dp.replicate()?;
        assert_eq!(mean.double_value(&[0]), 5.);
        for factor in [1., 10.] {
            let _no_sync = (factor == 1.).then(|| dp.no_sync());
            dp.backward(&(&weight * ((mine + 1.) * factor)).sum(Kind::Float))?;
        }
        let expected = if rank.rank() == 0 { (11. + 22.) / 2. } else { 22. };
        assert_eq!(weight.grad().double_value(&[0]), expected);
        assert_eq!(unused.grad().double_value(&[0]), 0.);
        dp.zero_grad()?;
        assert!(!weight.grad().defined());
        Ok(())
    });
}

#[test]
fn replaced_gradient_is_an_error_with_its_name() {
    let error = try_ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let weight = vs.root().var("weight", &[2], nn::Init::Const(2.));
        let mut dp = DataParallel::new((), &vs, group)?;
        dp.backward(&weight.sum(Kind::Float))?;
        weight.grad().set_data(&Tensor::zeros([2], (Kind::Float, rank.device())));
        dp.backward(&weight.sum(Kind::Float))?;
        Ok(())
    });
    let message = error.unwrap_err().failure.error.clone();
    assert!(message.contains("the gradient of `weight` is no longer a view"), "{message}");
}

#[test]
fn loaders_that_cannot_be_scattered_are_refused() {
    let refusal = |loaders: fn(&Rank) -> Vec<DataLoader>| {
        let run = try_ranks(2, move |rank, group| {
            ScatterLoader::new(loaders(rank), group)?;
            Ok(())
        });
        run.unwrap_err().failure.error.clone()
    };
    let everywhere = refusal(|rank| vec![own_loader(rank, 0), own_loader(rank, 1)]);
    assert!(everywhere.contains("the others need none; rank 1 has 2"), "{everywhere}");
    let nowhere = refusal(|_| Vec::new());
    assert!(nowhere.contains("it needs a loader for each"), "{nowhere}");
    let unlike = refusal(|rank| {
        let other = TensorDataset::random(4, 3, Targets::Values(1), 0).unwrap();
        let sampler = DistributedSampler::new(4, 2, 1).unwrap();
        let other = DataLoader::new(Arc::new(other), sampler, 2, rank.device()).unwrap();
        if rank.rank() == 0 { vec![own_loader(rank, 0), other] } else { Vec::new() }
    });
    assert!(unlike.contains("the ranks' loaders differ"), "{unlike}");
}

#[test]
fn failing_rank_ends_the_run() {
    for rank in 0..3 {
        for kind in ["error", "panic", "stall"] {
            let fault = format!("--inject-fault={kind}:rank={rank},at=step,step=3");
            let flags = ["--strategy=dp", "--nproc-per-node=3", "--log-format=json", &fault];
            // Only a stall is found by waiting.
            let (timeout, grace) = if kind == "stall" { ("1s", "500ms") } else { ("1h", "1h") };
            let times = [format!("--timeout={timeout}"), format!("--grace-period={grace}")];
            let (code, stdout, stderr) = run(&[&flags[..], &[&times[0], &times[1]]].concat());
            assert_eq!(code, Some(1), "{fault}: {stderr}");
            let failure: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
            assert_eq!(failure["event"], "failure", "{fault}");
            assert_eq!((&failure["rank"], &failure["operation"]), (&rank.into(), &"step".into()));
            assert_eq!(failure["sequence"], 3, "{fault}");
        }
    }
}

#[test]
fn ddp_options_are_refused() {
    for flag in [
        "bucket-cap-mb=1",
        "no-overlap",
        "comm-hook=fp16",
        "find-unused-parameters",
        "static-graph",
        "no-broadcast-buffers",
        "sync-batch-norm",
    ] {
        let name = flag.split('=').next().unwrap();
        let flag = format!("--{flag}");
        let model = ["--strategy=dp", "--model=cnn", "--in-features=64", &flag];
        let (code, stdout, stderr) = run(&model);
        assert_eq!((code, &stdout[..]), (Some(2), ""), "{flag}");
        assert_eq!(
            stderr,
            format!("ddp-mp: --{name}: needs --strategy ddp; remove it, or use that strategy\n")
        );
    }
    let (code, _, stderr) = run(&["--strategy=dp", "--amp=fp16"]);
    assert_eq!(code, Some(2));
    assert!(stderr.starts_with("ddp-mp: --amp: fp16 needs --strategy ddp"), "{stderr}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    fs::write(&file, "strategy = \"dp\"\ncomm_hook = \"bf16\"\n").unwrap();
    let (code, _, stderr) = run(&["--config", file.to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(
        stderr.ends_with(
            "run.toml: comm_hook: needs --strategy ddp; remove it, or use that strategy\n"
        ),
        "{stderr}"
    );
}

#[test]
fn bench_step_measures_data_parallel() {
    let flags = ["--strategy=dp", "--steps=30", "--nproc-per-node=2", "--log-format=json"];
    let (code, stdout, stderr) = run(&[&["bench", "step"], &flags[..]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let row: Value = serde_json::from_str(&stdout).unwrap();
    for part in ["forward_us", "backward_us", "communication_us", "optimizer_us"] {
        assert!(row[part].as_f64() > Some(0.) && row[part].as_f64() < row["us_max"].as_f64());
    }
}

#[test]
fn one_rank_prints_no_note_about_rank_0() {
    let (code, _, stderr) = run(&["--strategy=dp", "--nproc-per-node=1"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("through rank 0"), "{stderr}");
}

#[test]
fn gradients_accumulate_without_zero_grad() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let weight = vs.root().var("weight", &[2], nn::Init::Const(1.));
        let mut dp = DataParallel::new((), &vs, group)?;
        for _ in 0..3 {
            dp.backward(&(&weight * (rank.rank() as f64 + 1.)).sum(Kind::Float))?;
        }
        if rank.rank() == 0 {
            assert_eq!(Vec::<f32>::try_from(weight.grad())?, [4.5; 2]);
        }
        Ok(())
    });
}

#[test]
fn optimizer_is_required_on_rank_0_only() {
    ranks(2, |rank, group| {
        for (dp, given) in [(false, 0), (true, 1)] {
            let vs = VarStore::new(rank.device());
            let model = layer(&vs, rank.world_size());
            let vs_of_sgd = VarStore::new(rank.device());
            let _ = layer(&vs_of_sgd, rank.world_size());
            let own =
                DistributedDataParallel::new((), &vs_of_sgd, group.clone(), DdpOptions::default())?;
            let sgd = Sgd::new(own.flat_buffers(), SgdOptions::default())?;
            let optimizer = (rank.rank() == given).then(|| Box::new(sgd) as Box<dyn Optimizer>);
            let strategy: Strategy<_> = if dp {
                DataParallel::new(model, &vs, group.clone())?.into()
            } else {
                DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?
                    .into()
            };
            let loader = own_loader(rank, rank.rank());
            let made =
                Trainer::new(strategy, optimizer, Schedule::constant(0.1), loader, Loss::Mse);
            let refused = made.map(drop).err().map(|error| error.to_string());
            let has =
                if dp && rank.rank() == 1 { "rank 1 has an optimizer" } else { "has no optimizer" };
            let is_right = !dp && rank.rank() == 0;
            assert_eq!(refused.is_none(), is_right, "{refused:?}");
            assert!(is_right || refused.unwrap().contains(has));
        }
        Ok(())
    });
}
