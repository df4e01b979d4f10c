//! What DistributedDataParallel has beside averaging: steps of several batches, mixed precision, clipping, a
//! communication hook, dropout from each rank's own random numbers, evaluation.
//!
//!     cargo run --release --example 03-the-engine

#![allow(clippy::print_stdout)]

use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::{
    AdamW, AdamWOptions, Autocast, Backend, DataLoader, Dataset, DdpOptions,
    DistributedDataParallel, DistributedSampler, Dropout, Generator, GradScaler, GradScalerOptions,
    ReduceOp, Schedule, fork_rng, hook_fn, spawn,
};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Kind, Reduction, Tensor};

const EPOCHS: u64 = 50;

/// The sine, made when it is asked for.
#[derive(Debug)]
struct Sine;

impl Dataset for Sine {
    fn len(&self) -> usize {
        1024
    }
    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let x = index as f32 / 1024.0 * 2.0 - 1.0;
        Ok((Tensor::from_slice(&[x]), Tensor::from_slice(&[(3.0 * x).sin()])))
    }
}

fn model(vs: &VarStore, generator: &Arc<Generator>) -> impl ModuleT + use<> {
    let root = vs.root();
    nn::seq_t()
        .add(nn::linear(&root / "in", 1, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(Dropout::new(0.02, generator))
        .add(nn::linear(&root / "out", 64, 1, Default::default()))
}

fn main() -> anyhow::Result<()> {
    let dataset = Arc::new(Sine);
    spawn(2, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let generator = Arc::new(Generator::new(rank.device(), 0, rank.rank())?);
        let (vs, model) = fork_rng(7, || {
            let vs = VarStore::new(rank.device());
            let model = model(&vs, &generator);
            (vs, model)
        })?;
        let mut ddp =
            DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        // What DDP does by itself, and could be anything that leaves the same on all ranks.
        ddp.register_comm_hook(hook_fn("mine", |bucket, group| {
            group.all_reduce(bucket.gradients, ReduceOp::PremulSum(1.0 / group.world_size() as f64))
        }));
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        let mut scaler =
            GradScaler::new(ddp.flat_buffers(), group.clone(), GradScalerOptions::default())?;
        let schedule = Schedule::cosine(0.01, EPOCHS, 0.0);

        let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, 32, rank.device())?;
        let loader = loader.num_workers(1, 2, &group);
        let mut step = 0;
        for epoch in 0..EPOCHS {
            let mut batches = loader.epoch(epoch)?.peekable();
            while batches.peek().is_some() {
                let of_step = batches.by_ref().take(2).collect::<Result<Vec<_>, _>>()?;
                ddp.zero_grad()?;
                for (number, batch) in of_step.iter().enumerate() {
                    // The last batch's backward averages, what all have added up.
                    let is_last = number + 1 == of_step.len();
                    let _no_sync = (!is_last).then(|| ddp.no_sync());
                    let loss = {
                        let _autocast = Autocast::new(rank.device(), Kind::Half)?;
                        let output = ddp.forward(&batch.inputs);
                        output.f_mse_loss(&batch.targets, Reduction::Mean)? / of_step.len() as f64
                    };
                    ddp.backward(&scaler.scale(&loss)?)?;
                }
                scaler.unscale_()?;
                let _ = ddp.clip_grad_norm(1.0)?;
                scaler.step(&mut optimizer, schedule.lr(epoch, step))?;
                scaler.update()?;
                step += 1;
            }
        }

        let (inputs, targets) = dataset.batch(&(0..dataset.len()).collect::<Vec<_>>())?;
        let output = tch::no_grad(|| ddp.forward_t(&inputs, false));
        let error = output.f_mse_loss(&targets, Reduction::Mean)?.double_value(&[]);
        println!(
            "rank {}: error {error:.5}, parameters {:016x}",
            rank.rank(),
            ddp.parameters_hash()?
        );
        ensure!(error < 0.01, "it should have learned the sine by now");
        Ok(())
    })?;
    Ok(())
}
