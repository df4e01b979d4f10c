//! 07. Your own model: a model and a data set of your own, trained on all ranks. It classifies points on two spirals.
//!
//!     cargo run --release --example 07-your-own-model

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::prelude::*;
use tch::nn::{self, Module, VarStore};

/// Returns points in the plane on two spiral arms. The target of a point is the number of its arm.
fn spirals(points_per_arm: i64) -> anyhow::Result<TensorDataset> {
    let along = Tensor::linspace(0.3, 2.5, points_per_arm, tch::kind::FLOAT_CPU);
    let arm = |turn: f64| {
        let angle = &along * 2.5 + turn;
        Tensor::stack(&[&along * angle.cos(), &along * angle.sin()], 1)
    };
    let inputs = Tensor::cat(&[arm(0.), arm(std::f64::consts::PI)], 0);
    let targets = Tensor::arange(2 * points_per_arm, tch::kind::INT64_CPU) // 0, 0, ..., 1, 1
        .divide_scalar_mode(points_per_arm, "floor");
    Ok(TensorDataset::new(inputs, targets)?)
}

/// Returns the model. Any `Module` with its parameters in a `VarStore` works.
fn model(vs: &VarStore) -> impl Module + use<> {
    let root = vs.root();
    nn::seq()
        .add(nn::linear(&root / "in", 2, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(&root / "middle", 64, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(&root / "out", 64, 2, Default::default()))
}

fn main() -> anyhow::Result<()> {
    // All ranks share one copy in memory.
    let dataset = Arc::new(spirals(1000)?);
    spawn(2, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;

        // All threads share libtorch's random number generator. fork_rng makes these draws reproducible.
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7, || model(&vs))?;
        // From here on all ranks have rank 0's parameters, and keep them equal.
        let mut ddp =
            DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;

        let (ranks, number) = (rank.world_size(), rank.rank()); // exercise
        let sampler = DistributedSampler::new(dataset.len(), ranks, number)?;
        let loader = DataLoader::new(dataset.clone(), sampler, 50, rank.device())?;
        let mut accuracy = 0.;
        for epoch in 0..16 {
            let mut correct = Tensor::from_slice(&[0f64, 0.]);
            for batch in loader.epoch(epoch)? {
                let batch = batch?;
                ddp.zero_grad()?;
                let output = ddp.forward(&batch.inputs);
                let loss = output.cross_entropy_for_logits(&batch.targets);
                ddp.backward(&loss)?; // averages the gradients over the ranks
                optimizer.step(0.5)?;
                let hits = output.argmax(1, false).eq_tensor(&batch.targets).sum(Kind::Double);
                correct += Tensor::stack(&[hits, Tensor::from(batch.len() as f64)], 0);
            }
            // Every rank has counted its own half of the points.
            group.all_reduce(&mut correct, ReduceOp::Sum)?;
            accuracy = correct.double_value(&[0]) / correct.double_value(&[1]);
            if rank.rank() == 0 && (epoch + 1).is_power_of_two() {
                let count = correct.double_value(&[1]);
                println!("epoch {epoch}: {:.1} % of {count} points right", 100. * accuracy);
            }
        }
        ensure!(accuracy > 0.95, "the model has not learned the spirals");
        Ok(())
    })?;
    Ok(())
}
