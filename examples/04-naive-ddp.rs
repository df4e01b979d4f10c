//! 04. Naive DDP: the loop of lesson 1 on several ranks, each with a part of the batch. The losses are the same.
//!
//!     cargo run --release --example 04-naive-ddp
//!
//! Two things are needed: the same initial parameters (broadcast), and the same gradients in each step (all_reduce).
//! `DistributedDataParallel` does both, and faster.

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::prelude::*;
use tch::nn::{self, Module, OptimizerConfig, VarStore};

/// The number of samples per step, over all ranks.
const BATCH: usize = 64;

/// Returns the loss of each epoch, and the hash of each rank's parameters.
fn train(ranks: usize) -> anyhow::Result<(Vec<f64>, Vec<u64>)> {
    let x = Tensor::linspace(-1.0, 1.0, 1024, tch::kind::FLOAT_CPU).unsqueeze(1);
    let dataset = Arc::new(TensorDataset::new(x.shallow_clone(), (x * 3.0).sin())?);
    let trained = spawn(ranks, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        // Of an epoch's shuffled samples, rank r of n takes number r, r + n, r + 2n, ... In each step all ranks
        // together have the samples that one rank would have.
        let sampler = DistributedSampler::new(dataset.len(), ranks, rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, BATCH / ranks, rank.device())?;

        // Each rank draws other initial parameters, which the broadcast below replaces. Rank 0 draws those of lesson 1.
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7 + rank.rank() as u64, || {
            nn::seq()
                .add(nn::linear(vs.root() / "in", 1, 64, Default::default()))
                .add_fn(|x| x.tanh())
                .add(nn::linear(vs.root() / "out", 64, 1, Default::default()))
        })?;
        let mut optimizer = nn::Sgd::default().build(&vs, 0.03)?;
        // In creation order, which is the same on all ranks. (`variables` has no defined order.)
        let mut parameters = vs.trainable_variables();
        for parameter in &mut parameters {
            group.broadcast(parameter, 0)?; // exercise
        }

        let mut losses = Vec::new();
        for epoch in 0..8 {
            let mut sum = Tensor::from_slice(&[0f64]);
            for batch in loader.epoch(epoch)? {
                let batch = batch?;
                optimizer.zero_grad();
                let loss = model.forward(&batch.inputs).mse_loss(&batch.targets, Reduction::Mean);
                loss.f_backward()?;
                for parameter in &parameters {
                    group.all_reduce(&mut parameter.grad(), ReduceOp::Avg)?;
                }
                optimizer.step(); // the same step on every rank, so parameters stay equal
                sum += loss.double_value(&[]);
            }
            group.all_reduce(&mut sum, ReduceOp::Avg)?;
            losses.push(sum.double_value(&[0]) / loader.num_batches() as f64);
        }
        Ok((losses, parameters_hash(&vs)?))
    })?;
    let (losses, hashes): (Vec<_>, Vec<_>) = trained.into_iter().unzip();
    Ok((losses[0].clone(), hashes)) // every rank has the same averages
}

fn main() -> anyhow::Result<()> {
    let (one, one_hash) = train(1)?;
    let (four, hashes) = train(4)?;
    println!("          1 rank x 64    4 ranks x 16   difference");
    for (epoch, (one, four)) in one.iter().zip(&four).enumerate() {
        println!("epoch {epoch}   {one:.9}    {four:.9}    {:8.1e}", four - one);
    }
    // One rank sums the gradients of 64 samples; four ranks sum 16 each, and then four sums. The rounding differs.
    println!("parameters of the one rank   {:016x}", one_hash[0]);
    for (rank, hash) in hashes.iter().enumerate() {
        println!("parameters of rank {rank} of 4   {hash:016x}");
    }
    ensure!(hashes.iter().all(|hash| *hash == hashes[0]), "the replicas must hold the same bits");
    let are_close = one.iter().zip(&four).all(|(one, four)| (one - four).abs() < 1e-5);
    ensure!(are_close, "the losses may differ by rounding only");
    Ok(())
}
