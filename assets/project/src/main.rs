//! Trains a model of your own on all ranks: one for each visible GPU, or each CPU core.

mod data;
mod model;

use std::process::ExitCode;
use std::sync::Arc;

use ddp_mp::prelude::*;
use tch::nn::VarStore;

/// Samples per batch and rank.
const BATCH_SIZE: usize = 50;
const LEARNING_RATE: f64 = 0.1;

/// What a rank returns.
struct Trained {
    /// The loss of each epoch, averaged over all samples.
    losses: Vec<f64>,
    /// A hash of the parameters, which is the same on every rank.
    parameters_hash: u64,
}

/// The training loop, which every rank runs.
fn train(rank: &Rank, dataset: &Arc<TensorDataset>, epochs: u64) -> anyhow::Result<Trained> {
    let group = rank.init_process_group(rank.backend())?;
    let vs = VarStore::new(rank.device());
    // All threads share libtorch's random number generator. fork_rng makes these draws reproducible.
    let model = fork_rng(0, || model::model(&vs))?;
    // From here on all ranks have rank 0's parameters, and keep them equal.
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
    let loader = DataLoader::new(dataset.clone(), sampler, BATCH_SIZE, rank.device())?;

    let mut losses = Vec::new();
    for epoch in 0..epochs {
        let mut sum = Tensor::zeros([2], (Kind::Double, rank.device())); // of losses, of samples
        for batch in loader.epoch(epoch)? {
            let batch = batch?;
            ddp.zero_grad()?;
            let loss = ddp
                .forward(&batch.inputs)
                .cross_entropy_for_logits(&batch.targets);
            ddp.backward(&loss)?; // averages the gradients over the ranks
            optimizer.step(LEARNING_RATE)?;
            let samples = Tensor::from(batch.len() as f64).to_device(rank.device());
            sum += Tensor::stack(
                &[loss.detach().to_kind(Kind::Double) * &samples, samples],
                0,
            );
        }
        group.all_reduce(&mut sum, ReduceOp::Sum)?; // every rank has added up its own samples
        losses.push(sum.double_value(&[0]) / sum.double_value(&[1]));
        if rank.rank() == 0 {
            println!("epoch {epoch}: loss {:.4}", losses[losses.len() - 1]);
        }
    }
    Ok(Trained {
        losses,
        parameters_hash: ddp.parameters_hash()?,
    })
}

fn main() -> anyhow::Result<ExitCode> {
    if let Some(unknown) = std::env::args_os().nth(1) {
        eprintln!("this program has no arguments, and {unknown:?} was given; leave it out");
        return Ok(ExitCode::from(2));
    }
    let ranks = Spawn::from_env()?; // first of all, because it looks for GPUs
    let dataset = Arc::new(data::spirals(1000)?); // all ranks share one copy
    let trained = ranks.run(move |rank| train(rank, &dataset, 20))?;
    let Trained {
        losses,
        parameters_hash,
    } = &trained[0];
    let (ranks, last) = (trained.len(), losses[losses.len() - 1]);
    println!("ranks here: {ranks}, loss {last:.4}, parameters {parameters_hash:016x}");
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_learn_the_same_parameters() -> anyhow::Result<()> {
        let dataset = Arc::new(data::spirals(200)?);
        let trained = spawn(2, move |rank| train(rank, &dataset, 5))?;
        assert_eq!(trained[0].parameters_hash, trained[1].parameters_hash);
        let losses = &trained[0].losses;
        assert!(losses[4] < losses[0], "{losses:?}");
        Ok(())
    }
}
