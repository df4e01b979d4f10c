//! 10. Checkpoints: a run that is stopped within an epoch, and resumed with the same result.
//!
//!     cargo run --release --example 10-checkpoints
//!
//! In Python: `torch.save` of `model.state_dict()`, `optimizer.state_dict()` and more on rank 0, and
//! `sampler.set_epoch`; the position within the epoch is lost. Here `Trainer` saves and restores all of it. PyTorch's
//! `load_state_dict` accepts the tensors of `model.safetensors`.

#![allow(clippy::print_stdout)]

use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::prelude::*;

/// Trains for three epochs, or until step `max_steps`. Returns the hash of the parameters. Resumes from the newest
/// checkpoint in `folder`, if there is one. (A run that resumes from an older one, or from `best`, renames the newer
/// ones to `aside-...`.)
fn train(folder: &Path, max_steps: Option<u64>) -> anyhow::Result<u64> {
    let dataset = Arc::new(TensorDataset::random(1024, 20, Targets::Values(1), 1)?);
    // Before the ranks start, so that a wrong folder or checkpoint is reported at once.
    let newest = CheckpointDir::newest_in(folder)?;
    let (dir, checkpoint) = match &newest {
        Some(newest) => (CheckpointDir::open(folder, 2)?, Some(Checkpoint::read(newest)?)),
        None => (CheckpointDir::create(folder, 2)?, None),
    };
    let hashes = spawn(2, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let model = ModelConfig {
            kind: ModelKind::Mlp,
            hidden: vec![32],
            ..ModelConfig::default() // 20 -> 1
        };
        let (vs, model) = model.build(rank.device(), 0)?;
        if let Some(checkpoint) = &checkpoint {
            checkpoint.load_model(&vs)?;
        }
        let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
        let optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        let optimizer: Box<dyn Optimizer> = Box::new(optimizer);
        let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, 16, rank.device())?;
        let every = SaveEvery { steps: Some(10), epochs: None }; // exercise
        let mut trainer =
            Trainer::new(ddp, optimizer, Schedule::constant(0.01), loader, Loss::Mse)?
                .checkpoints(dir.clone(), every, Default::default())
                .options(TrainerOptions { max_steps, ..Default::default() })?;
        if let Some(checkpoint) = &checkpoint {
            trainer.resume(checkpoint)?; // optimizer, step, and position in the epoch
        }
        let summary = trainer.train(3)?;
        let hash = trainer.ddp().parameters_hash()?;
        if rank.rank() == 0 {
            let (from, to) = (summary.steps - summary.steps_now, summary.steps);
            println!(
                "steps {from:2} to {to}: loss {:.6}, parameters {hash:016x}",
                summary.last_loss
            );
        }
        Ok(hash)
    })?;
    Ok(hashes[0])
}

fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    // 1024 samples, 2 ranks, batches of 16: 32 steps an epoch, 96 in all.
    let whole = train(&folder.path().join("whole"), None)?;

    let stopped = folder.path().join("stopped");
    train(&stopped, Some(45))?;
    println!("... stopped in the second epoch; the newest checkpoint is");
    if let Some(newest) = CheckpointDir::newest_in(&stopped)? {
        println!("    {}", newest.file_name().unwrap_or_default().display());
    }
    let resumed = train(&stopped, None)?;
    ensure!(resumed == whole, "a resumed run must end with the same bits");
    println!("the same bits");
    Ok(())
}
