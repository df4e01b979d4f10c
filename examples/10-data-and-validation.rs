//! 10. Data and validation: data of your own, loaded by workers while the ranks train, some of it held back.
//!
//!     cargo run --release --example 10-data-and-validation
//!
//! In Python: `__len__` and `__getitem__`, `random_split`, `DataLoader(num_workers=2, sampler=DistributedSampler(..))`,
//! and `dist.all_reduce` of how many were right, where some samples count twice; with `uneven` each counts once.

#![allow(clippy::print_stdout)]

use std::f32::consts::TAU;
use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::prelude::*;

const LEN: usize = 64;

/// Short recordings of a sine, a square wave or a saw tooth, at some pitch and from some moment on.
#[derive(Debug)]
struct Waves;

impl Dataset for Waves {
    fn len(&self) -> usize {
        3005
    }

    /// Made (or read, or unpacked) when asked for, on a worker's thread. An error ends the run, and names the sample.
    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let class = index % 3;
        let (pitch, start) = (2.0 + (index % 11) as f32 / 3.0, (index % 101) as f32 / 101.0);
        let wave = |i: usize| {
            let phase = (pitch * i as f32 / LEN as f32 + start).fract();
            match class {
                0 => (TAU * phase).sin(),
                1 => (TAU * phase).sin().signum(),
                _ => 2.0 * phase - 1.0,
            }
        };
        let wave: Vec<f32> = (0..LEN).map(wave).collect();
        Ok((Tensor::from_slice(&wave), Tensor::from(class as i64)))
    }
}

fn main() -> anyhow::Result<()> {
    let dataset: Arc<dyn Dataset> = Arc::new(Waves);
    let (training, held_back) = random_split(dataset.len(), 0.2, 0)?;
    let training = Arc::new(Subset::new(dataset.clone(), training));
    let held_back = Arc::new(Subset::new(dataset, held_back));
    spawn(2, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let (kind, hidden, in_features, out_features) = (ModelKind::Mlp, vec![32], LEN as i64, 3);
        let config = ModelConfig { kind, hidden, in_features, out_features, ..Default::default() };
        let (vs, model) = config.build(rank.device(), 0)?;
        let mut ddp =
            DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;

        let loader = |data: &Arc<Subset>, sampler| -> ddp_mp::Result<_> {
            let loader = DataLoader::new(data.clone(), sampler, 32, rank.device())?;
            // Two threads for each rank, two batches ahead each; on a GPU through pinned memory.
            loader.num_workers(2, 2, &group).pin_memory(&group)
        };
        let sampler = |len| DistributedSampler::new(len, rank.world_size(), rank.rank());
        let batches = loader(&training, sampler(training.len())?)?;
        let validation = loader(&held_back, sampler(held_back.len())?.uneven())?;
        let mut accuracy = 0.0;
        for epoch in 0..6 {
            for batch in batches.epoch(epoch)? {
                let batch = batch?;
                ddp.zero_grad()?;
                let loss = ddp.forward(&batch.inputs).cross_entropy_for_logits(&batch.targets);
                ddp.backward(&loss)?;
                optimizer.step(0.003)?;
            }
            let mut right = Tensor::zeros([2], (Kind::Double, rank.device()));
            for batch in validation.epoch(0)? {
                let batch = batch?;
                let output = tch::no_grad(|| ddp.forward_t(&batch.inputs, false));
                let hits = output.argmax(1, false).eq_tensor(&batch.targets).sum(Kind::Double);
                right += Tensor::stack(&[hits, Tensor::from(batch.len() as f64)], 0);
            }
            group.all_reduce(&mut right, ReduceOp::Sum)?; // each rank has seen its own
            let [hits, count] = [0, 1].map(|index| right.double_value(&[index]));
            ensure!(count as usize == held_back.len(), "each sample once");
            accuracy = hits / count;
            if rank.rank() == 0 {
                println!("epoch {epoch}: {:.1} % of {count} that were held back", 100.0 * accuracy);
            }
        }
        ensure!(accuracy > 0.95, "it should know the waves by now");
        Ok(())
    })?;
    Ok(())
}
