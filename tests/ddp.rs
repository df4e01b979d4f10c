//! Data parallelism: N ranks are one, and all replicas are the same.

use std::rc::Rc;
use std::sync::Arc;

use ddp_mp::models::{ModelConfig, ModelKind};
use ddp_mp::{
    DataLoader, DdpOptions, DistributedDataParallel, DistributedSampler, Optimizer, ProcessGroup,
    Rank, Sgd, SgdOptions, Targets, TensorDataset,
};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use crate::harness::{ranks, run_end, runs_every_case, try_ranks, wrapped};

fn mlp() -> ModelConfig {
    let (kind, hidden) = (ModelKind::Mlp, vec![17, 9]);
    ModelConfig { kind, in_features: 6, out_features: 2, hidden, ..ModelConfig::default() }
}

fn random_data(samples: i64) -> Arc<TensorDataset> {
    Arc::new(TensorDataset::random(samples, 6, Targets::Values(2), 5).unwrap())
}

/// Trains, and returns the parameters.
fn train(
    rank: &Rank,
    group: Rc<ProcessGroup>,
    dataset: &Arc<TensorDataset>,
    batch_size: usize,
) -> anyhow::Result<Vec<f32>> {
    // Every rank starts from parameters of its own: rank 0's must win.
    let (vs, model) = mlp().build(rank.device(), 100 + rank.rank() as u64)?;
    let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?.seed(3);
    let loader = DataLoader::new(dataset.clone(), sampler, batch_size, rank.device())?;
    for epoch in 0..3 {
        for batch in loader.epoch(epoch)? {
            let batch = batch?;
            ddp.zero_grad()?;
            let loss = ddp.forward(&batch.inputs).mse_loss(&batch.targets, Reduction::Mean);
            ddp.backward(&loss)?;
            optimizer.step(0.05)?;
        }
    }
    let parameters: Vec<Tensor> =
        vs.trainable_variables().iter().map(|p| p.detach().flatten(0, -1)).collect();
    Ok(Vec::<f32>::try_from(Tensor::cat(&parameters, 0))?)
}

#[test]
fn n_ranks_match_one_rank_with_the_n_fold_batch() {
    let dataset = random_data(240);
    for world_size in [2, 3, 4, 5] {
        let of_ranks = |world_size: usize, batch_size: usize| {
            let dataset = dataset.clone();
            let all =
                ranks(world_size, move |rank, group| train(rank, group, &dataset, batch_size));
            assert!(all.iter().all(|one| one == &all[0]), "the replicas are the same");
            all.into_iter().next().unwrap()
        };
        let (expected, found) = (of_ranks(1, 8 * world_size), of_ranks(world_size, 8));
        // The same numbers are added in another order: after 18 to 45 steps in single precision the
        // parameters, of size 1, differ by no more than a few units in the last place.
        let largest = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
        assert!(largest < 1e-6, "{world_size} ranks: {largest:e}");
    }
}

#[test]
fn replaced_gradient_is_an_error_with_its_name() {
    let error = try_ranks(2, |_, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[2], DdpOptions::default())?;
        ddp.backward(&weight.sum(Kind::Float))?;
        weight.grad().set_data(&Tensor::zeros([2], (Kind::Float, Device::Cpu)));
        ddp.backward(&weight.sum(Kind::Float))?;
        Ok(())
    })
    .unwrap_err();
    let message = &error.failure.error;
    assert!(message.contains("the gradient of `weight` is no longer a view"), "{message}");
}

#[test]
fn frozen_parameter_is_copied_from_rank_0_and_not_trained() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let root = vs.root();
        let frozen = root.var("frozen", &[2], nn::Init::Const(1. + rank.rank() as f64));
        let trained = root.var("trained", &[3], nn::Init::Const(1.));
        let frozen = frozen.set_requires_grad(false);
        let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
        assert_eq!(ddp.num_parameters(), 3);
        ddp.backward(&(trained.sum(Kind::Float) * frozen.sum(Kind::Float)))?;
        Sgd::new(ddp.flat_buffers(), SgdOptions::default())?.step(0.5)?;
        assert_eq!(Vec::<f32>::try_from(&frozen)?, [1., 1.], "rank 0's, and unchanged");
        assert_eq!(Vec::<f32>::try_from(&trained)?, [0.; 3]);
        Ok(())
    });
}

#[test]
fn buffers_of_every_dtype_are_copied_from_rank_0() {
    ranks(3, |rank, group| {
        let vs = VarStore::new(rank.device());
        let root = vs.root();
        let _weight = root.var("weight", &[2], nn::Init::Const(1.));
        let mine = rank.rank() as f64;
        let mean = root.add("running_mean", Tensor::from_slice(&[mine, 2. * mine + 1.]), false);
        let count = root.add("num_batches", Tensor::from(rank.rank() as i64 + 7), false);
        DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
        assert_eq!(Vec::<f64>::try_from(&mean)?, [0., 1.]);
        assert_eq!(count.int64_value(&[]), 7);
        Ok(())
    });
}

/// The error of a run in which rank 1 builds its model with `build(vs, true)`.
fn model_mismatch(build: impl Fn(&nn::Path, bool) + Send + Sync + 'static) -> String {
    try_ranks(2, move |rank, group| {
        let vs = VarStore::new(Device::Cpu);
        build(&vs.root(), rank.rank() == 1);
        DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
        Ok(())
    })
    .unwrap_err()
    .failure
    .error
}

#[test]
fn model_mismatch_error_names_the_first_difference() {
    let one = nn::Init::Const(1.);
    let shape = model_mismatch(move |root, other| {
        let _ = root.var("a", &[2], one);
        let _ = root.var("b", if other { &[4, 3] } else { &[3, 4] }, one);
    });
    let told = "at tensor 1 (of 2 on rank 0, 2 on rank 1) rank 0 has (parameter `b`, float32 [3, 4]), \
                rank 1 has (parameter `b`, float32 [4, 3])";
    assert!(shape.contains(told), "{shape}");
    let name = model_mismatch(move |root, other| {
        let _ = root.var(if other { "y" } else { "x" }, &[2], one);
    });
    assert!(name.contains("rank 0 has (parameter `x`"), "{name}");
    assert!(name.contains("rank 1 has (parameter `y`"), "{name}");
    let count = model_mismatch(move |root, other| {
        let _ = root.var("a", &[2], one);
        if !other {
            let _ = root.var("b", &[2], one);
        }
    });
    assert!(count.contains("at tensor 1 (of 2 on rank 0, 1 on rank 1)"), "{count}");
    assert!(count.ends_with("rank 1 has nothing; build the same model on every rank"), "{count}");
    let kind = model_mismatch(move |root, other| {
        let _ = root.var("a", &[2], one);
        let kind = if other { Kind::Double } else { Kind::Float };
        let _ = root.add("buffer", Tensor::zeros([2], (kind, Device::Cpu)), false);
    });
    assert!(kind.contains("(buffer `buffer`, float64 [2])"), "{kind}");
    let nothing = model_mismatch(|_, _| {});
    assert!(nothing.contains("no parameters to train"), "{nothing}");
}

/// Long: it starts a dozen runs.
#[test]
fn same_flags_give_the_same_bits() {
    let hash = |args: &[&str]| {
        let end = run_end(&[&["--model=mlp", "--max-epochs=2"], args].concat());
        assert_eq!(end["event"], "end");
        end["parameters_hash"].as_str().unwrap().to_string()
    };
    let repeats = if runs_every_case() { 3 } else { 1 };
    let mut hashes = Vec::new();
    for ranks in ["--nproc-per-node=1", "--nproc-per-node=2", "--nproc-per-node=5"] {
        let first = hash(&[ranks]);
        assert_eq!(first.len(), 16);
        assert!((0..repeats).all(|_| hash(&[ranks]) == first), "{ranks}");
        hashes.push(first);
    }
    hashes.push(hash(&["--nproc-per-node=2", "--seed=1"]));
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), 4, "other flags give other bits");
}
