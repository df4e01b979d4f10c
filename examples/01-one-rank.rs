//! 01. One rank: the training loop whose result data parallelism must reproduce. Only the data comes from `ddp_mp`.
//!
//!     cargo run --release --example 01-one-rank

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::prelude::*;
use tch::nn::{self, Module, OptimizerConfig, VarStore};

/// The samples of the first of two ranks that share a batch of 64.
const FIRST: i64 = 32; // exercise

fn main() -> anyhow::Result<()> {
    // The model learns the sine from 1024 points.
    let x = Tensor::linspace(-1.0, 1.0, 1024, tch::kind::FLOAT_CPU).unsqueeze(1);
    let dataset = Arc::new(TensorDataset::new(x.shallow_clone(), (x * 3.0).sin())?);
    // Shuffles the samples. The order follows from the seed and the epoch. There is only one rank so far.
    let sampler = DistributedSampler::new(dataset.len(), 1, 0)?;
    let loader = DataLoader::new(dataset.clone(), sampler, 64, Device::Cpu)?;

    // Initializes the model with the same random numbers in every run. (Without threads, use tch::manual_seed.)
    let vs = VarStore::new(Device::Cpu);
    let model = fork_rng(7, || {
        nn::seq()
            .add(nn::linear(vs.root() / "in", 1, 64, Default::default()))
            .add_fn(|x| x.tanh())
            .add(nn::linear(vs.root() / "out", 64, 1, Default::default()))
    })?;
    let compute_loss = |x: &Tensor, y: &Tensor| model.forward(x).mse_loss(y, Reduction::Mean);
    let mut optimizer = nn::Sgd::default().build(&vs, 0.03)?;

    let mut mean = f64::INFINITY;
    for epoch in 0..8 {
        let mut sum = 0.0;
        for batch in loader.epoch(epoch)? {
            let batch = batch?;
            optimizer.zero_grad(); // otherwise gradients add up from step to step
            let loss = compute_loss(&batch.inputs, &batch.targets);
            loss.f_backward()?; // computes the gradient of the loss for each parameter
            optimizer.step(); // moves each parameter a small step against its gradient
            sum += loss.double_value(&[]);
        }
        mean = sum / loader.num_batches() as f64;
        println!("epoch {epoch}: {} steps of 64 samples, loss {mean:.6}", loader.num_batches());
    }
    ensure!(mean < 0.05, "the model has not learned the sine");

    // Why ranks can share a batch: the mean over 64 samples is the mean of two means over 32 samples each. The same
    // holds for the gradient. Two ranks with the same parameters and half of the samples average their gradients.
    let (x, y) = dataset.batch(&(0..64).collect::<Vec<_>>())?;
    let gradients = |start, count| {
        let loss = compute_loss(&x.narrow(0, start, count), &y.narrow(0, start, count));
        Tensor::f_run_backward(&[loss], &vs.trainable_variables(), false, false)
    };
    let (whole, first, second) =
        (gradients(0, 64)?, gradients(0, FIRST)?, gradients(FIRST, 64 - FIRST)?);
    println!("the first number of each gradient: of 64 samples, of {FIRST}, and of {}", 64 - FIRST);
    for (index, name) in ["in.weight", "in.bias", "out.weight", "out.bias"].iter().enumerate() {
        let [whole, first, second] = [&whole, &first, &second].map(|all| all[index].flatten(0, -1));
        let number = |gradient: &Tensor| gradient.double_value(&[0]);
        println!(
            "{name:10} {:9.6} = ({:9.6} + {:9.6}) / 2",
            number(&whole),
            number(&first),
            number(&second)
        );
        // The bits may differ, because a sum of rounded numbers depends on its order.
        let difference = (whole - (first + second) / 2.0).abs().max().double_value(&[]);
        ensure!(difference < 1e-5, "{name}: the gradients differ by {difference}");
    }
    Ok(())
}
