//! A communication hook that sends less: PowerSGD, from PyTorch.
//!
//!     cargo run --release --example power_sgd
//!
//! The hook itself is `power_sgd/hook.rs`. It shows that the interface suffices for more than a line of code: the hook
//! calls several collectives for a bucket, and keeps state from one step to the next. Its results are those of PyTorch's
//! `powerSGD_hook` (`tests/parity.rs` compares them).

#![allow(clippy::print_stdout)]

#[path = "power_sgd/hook.rs"]
mod hook;

use anyhow::ensure;
use ddp_mp::prelude::*;
use hook::{PowerSgd, PowerSgdOptions};
use tch::nn::{self, VarStore};

const STEPS: usize = 1000;

/// Trains a model on the sine of a sum. Returns its last loss, and the bytes that a rank sent in each step.
fn train(approximation_rank: Option<i64>) -> anyhow::Result<(f64, u64)> {
    let measured = spawn(2, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7, || {
            nn::seq()
                .add(nn::linear(vs.root() / "in", 8, 256, nn::LinearConfig::default()))
                .add_fn(|x| x.tanh())
                .add(nn::linear(vs.root() / "middle", 256, 256, nn::LinearConfig::default()))
                .add_fn(|x| x.tanh())
                .add(nn::linear(vs.root() / "out", 256, 1, nn::LinearConfig::default()))
        })?;
        let mut ddp =
            DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        if let Some(matrix_approximation_rank) = approximation_rank {
            let options =
                PowerSgdOptions { matrix_approximation_rank, start_iter: 2, ..Default::default() };
            ddp.register_comm_hook(Box::new(PowerSgd::new(options)))?;
        }
        let options = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
        let mut optimizer = Sgd::new(ddp.flat_buffers(), options)?;
        let (mut loss, before) = (f64::INFINITY, group.traffic().sent);
        for step in 0..STEPS {
            let seed = (step * rank.world_size() + rank.rank()) as u64;
            let inputs = fork_rng(seed, || Tensor::rand([32, 8], tch::kind::FLOAT_CPU))?;
            let inputs = inputs.to_device(rank.device());
            let targets = inputs.sum_dim_intlist(1, true, Kind::Float).sin();
            ddp.zero_grad()?;
            let error = ddp.forward(&inputs).mse_loss(&targets, Reduction::Mean);
            ddp.backward(&error)?;
            optimizer.step(0.003)?;
            loss = error.double_value(&[]);
        }
        let hashes = group.all_gather_object(&ddp.parameters_hash()?)?;
        ensure!(hashes[0] == hashes[1], "the replicas must hold the same bits");
        Ok((loss, (group.traffic().sent - before) / STEPS as u64))
    })?;
    Ok(measured[0])
}

fn main() -> anyhow::Result<()> {
    let (loss, all) = train(None)?;
    println!("as they are: loss {loss:.4}, {all} bytes sent in each step");
    for approximation_rank in [1, 4] {
        let (loss, sent) = train(Some(approximation_rank))?;
        println!("rank {approximation_rank}: loss {loss:.4}, {sent} bytes sent in each step");
        ensure!(sent * 4 < all, "the hook must send less");
        ensure!(loss < 0.1, "the model has not learned the sine");
    }
    Ok(())
}
