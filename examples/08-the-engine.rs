//! 08. A full training loop: the features around `DistributedDataParallel`.
//!
//!     cargo run --release --example 08-the-engine
//!
//! Gradient accumulation, mixed precision, gradient clipping, a communication hook, dropout with each rank's own random
//! number generator, and evaluation.

#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::ensure;
use ddp_mp::prelude::*;
use tch::nn::{self, ModuleT, VarStore};

const EPOCHS: u64 = 50;

/// Returns 1024 points of the sine.
fn sine() -> anyhow::Result<TensorDataset> {
    let x = Tensor::linspace(-1.0, 1.0, 1024, tch::kind::FLOAT_CPU).unsqueeze(1);
    Ok(TensorDataset::new(x.shallow_clone(), (x * 3.0).sin())?)
}

fn model(vs: &VarStore, generator: &Arc<Generator>) -> impl ModuleT + use<> {
    nn::seq_t()
        .add(nn::linear(vs.root() / "in", 1, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(Dropout::new(0.02, generator))
        .add(nn::linear(vs.root() / "out", 64, 1, Default::default()))
}

fn main() -> anyhow::Result<()> {
    let dataset = Arc::new(sine()?);
    spawn(2, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let generator = Arc::new(Generator::new(rank.device(), 0, rank.rank())?);
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7, || model(&vs, &generator))?;
        let mut ddp =
            DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        // The same as DDP's default. A hook may do anything that gives all ranks the same gradients.
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        ddp.register_comm_hook(hook_fn("mine", move |bucket, group| {
            counted.fetch_add(1, Ordering::Relaxed);
            group.all_reduce(bucket.gradients, ReduceOp::PremulSum(1.0 / group.world_size() as f64))
        }))?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        let mut scaler =
            GradScaler::new(ddp.flat_buffers(), group.clone(), GradScalerOptions::default())?;
        let schedule = Schedule::cosine(0.01, EPOCHS, 0.0);

        let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
        let loader =
            DataLoader::new(dataset.clone(), sampler, 32, rank.device())?.num_workers(1, 2, &group);
        let (whole_x, whole_y) = dataset.batch(&(0..dataset.len()).collect::<Vec<_>>())?;
        let (mut step, mut clipped, mut error) = (0, 0, f64::INFINITY);
        for epoch in 0..EPOCHS {
            let mut batches = loader.epoch(epoch)?.peekable();
            while batches.peek().is_some() {
                let step_batches = batches.by_ref().take(2).collect::<Result<Vec<_>, _>>()?;
                ddp.zero_grad()?;
                for (number, batch) in step_batches.iter().enumerate() {
                    // The backward of the last batch averages the sum of all batches.
                    let is_last = number + 1 == step_batches.len(); // exercise
                    let _no_sync = (!is_last).then(|| ddp.no_sync());
                    let loss = {
                        let _autocast = Autocast::new(rank.device(), Kind::Half)?;
                        let output = ddp.forward(&batch.inputs);
                        output.f_mse_loss(&batch.targets, Reduction::Mean)?
                            / step_batches.len() as f64
                    };
                    ddp.backward(&scaler.scale(&loss)?)?;
                }
                scaler.unscale_()?;
                clipped += usize::from(ddp.clip_grad_norm(0.3)?.double_value(&[]) > 0.3);
                scaler.step(&mut optimizer, schedule.lr(epoch, step))?;
                scaler.update()?;
                step += 1;
            }
            // Follows `model.eval()` within `torch.no_grad()`.
            let output = tch::no_grad(|| ddp.forward_t(&whole_x, false));
            error = output.f_mse_loss(&whole_y, Reduction::Mean)?.double_value(&[]);
            if rank.rank() == 0 && epoch % 10 == 9 {
                let calls = calls.load(Ordering::Relaxed);
                println!(
                    "epoch {epoch}: error {error:.5}, {clipped} of {step} clipped, {calls} calls"
                );
            }
        }

        let hashes = group.all_gather_object(&ddp.parameters_hash()?)?;
        ensure!(hashes[0] == hashes[1], "the replicas must hold the same bits");
        ensure!(error < 0.01, "the model has not learned the sine");
        Ok(())
    })?;
    Ok(())
}
