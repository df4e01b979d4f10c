//! 09. Data and validation: a data set of your own, loaded by worker threads, with a part held back for validation.
//!
//!     cargo run --release --example 09-data-and-validation
//!
//! In Python: `__len__` and `__getitem__`, `random_split`, `DataLoader(num_workers=2, sampler=DistributedSampler(..))`,
//! and `dist.all_reduce` of the number of correct samples. There padding makes some samples count twice; with `uneven`
//! each counts once.

#![allow(clippy::print_stdout)]

use std::f32::consts::TAU;
use std::sync::Arc;

use anyhow::ensure;
use ddp_mp::prelude::*;

const LEN: usize = 64;

/// Short signals: a sine, a square wave or a sawtooth wave, of different frequencies and phases.
#[derive(Debug)]
struct Waves;

impl Dataset for Waves {
    fn len(&self) -> usize {
        3005
    }

    /// Computes (or reads, or decodes) a sample on a worker thread. An error ends the run and names the sample.
    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let class = index % 3;
        let (frequency, phase) = (2.0 + (index % 11) as f32 / 3.0, (index % 101) as f32 / 101.0);
        let wave = |i: usize| {
            let t = (frequency * i as f32 / LEN as f32 + phase).fract();
            match class {
                0 => (TAU * t).sin(),
                1 => (TAU * t).sin().signum(),
                _ => 2.0 * t - 1.0,
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
            // Two threads per rank, each two batches ahead; to a GPU through pinned memory.
            loader.num_workers(2, 2, &group).pin_memory(&group)
        };
        let sampler = |len| DistributedSampler::new(len, rank.world_size(), rank.rank());
        let batches = loader(&training, sampler(training.len())?)?;
        let validation = loader(&held_back, sampler(held_back.len())?.uneven())?; // exercise
        let mut accuracy = 0.0;
        for epoch in 0..6 {
            for batch in batches.epoch(epoch)? {
                let batch = batch?;
                ddp.zero_grad()?;
                let loss = ddp.forward(&batch.inputs).cross_entropy_for_logits(&batch.targets);
                ddp.backward(&loss)?;
                optimizer.step(0.003)?;
            }
            let mut correct = Tensor::zeros([2], (Kind::Double, rank.device()));
            for batch in validation.epoch(0)? {
                let batch = batch?;
                let output = tch::no_grad(|| ddp.forward_t(&batch.inputs, false));
                let hits = output.argmax(1, false).eq_tensor(&batch.targets).sum(Kind::Double);
                correct += Tensor::stack(&[hits, Tensor::from(batch.len() as f64)], 0);
            }
            group.all_reduce(&mut correct, ReduceOp::Sum)?; // each rank has counted its own samples
            let [hits, count] = [0, 1].map(|index| correct.double_value(&[index]));
            ensure!(count as usize == held_back.len(), "{count} counted, of {}", held_back.len());
            accuracy = hits / count;
            if rank.rank() == 0 {
                println!("epoch {epoch}: {:.1} % of {count} that were held back", 100.0 * accuracy);
            }
        }
        ensure!(accuracy > 0.95, "the model has not learned the waves");
        Ok(())
    })?;
    Ok(())
}
