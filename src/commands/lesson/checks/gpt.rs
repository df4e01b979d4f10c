//! The lessons about a GPT: its predictions, and what grows with the number of ranks.

use std::sync::Arc;

use anyhow::Context;
use tch::{Device, Kind, Tensor};

use super::{Found, on_rank_0};
use crate::commands::lesson::answer::Answer;
use crate::data::{DataLoader, Dataset, DistributedSampler, TextDataset};
use crate::ddp::{DdpOptions, DistributedDataParallel};
use crate::ffi::fork_rng;
use crate::models::{ModelConfig, ModelKind};
use crate::os::TemporaryFolder;
use crate::process_group::ReduceOp;
use crate::trainer::Loss;

/// Returns the model of these lessons, with contexts of `block_size` tokens.
fn model_config(block_size: usize, n_embd: i64) -> ModelConfig {
    ModelConfig {
        kind: ModelKind::Gpt,
        in_features: block_size as i64,
        out_features: TextDataset::VOCAB_SIZE,
        n_layer: 2,
        n_head: 2,
        n_embd,
        ..ModelConfig::default()
    }
}

/// Lesson 11 with contexts of 64 bytes: the predictions of a step on both ranks together.
pub(in super::super) fn predictions() -> anyhow::Result<Found> {
    const RANKS: usize = 2;
    const BATCH: usize = 16;
    const BLOCK_SIZE: usize = 64;
    let folder = TemporaryFolder::new().context("creating a folder for a text")?;
    let path = folder.path().join("text");
    let line = "Ranks that average their gradients train one model.\n";
    let text = line.repeat((RANKS * BATCH * BLOCK_SIZE).div_ceil(line.len()) + 1);
    std::fs::write(&path, text).context("writing a text")?;
    let dataset: Arc<dyn Dataset> = Arc::new(TextDataset::open(&path, BLOCK_SIZE)?);
    let [predictions, contexts, losses] = on_rank_0(RANKS, move |rank, group| {
        let (vs, model) = model_config(BLOCK_SIZE, 64).build(rank.device(), 0)?;
        let ddp = DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        let sampler = DistributedSampler::new(dataset.len(), RANKS, rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, BATCH, rank.device())?;
        let batch = loader.epoch(0)?.next().context("there is no batch")??;
        let logits = ddp.forward(&batch.inputs);
        let loss = Loss::CrossEntropy.of(&logits, &batch.targets)?.double_value(&[]);
        let predictions = logits.numel() as f64 / TextDataset::VOCAB_SIZE as f64;
        let mut sums = Tensor::from_slice(&[predictions, batch.len() as f64, loss]);
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok([0, 1, 2].map(|index| sums.double_value(&[index])))
    })?;
    let bits = losses / RANKS as f64 / std::f64::consts::LN_2;
    Ok(Found::new(
        Answer::Whole(vec![predictions as u64]),
        &[
            ("predictions", &predictions),
            ("contexts", &contexts),
            ("bits", &format_args!("{bits:.1}")),
        ],
    ))
}

/// Lesson 12 with 8 ranks instead of 4: the factor by which the bytes grow that a rank sends for a batch.
pub(in super::super) fn traffic() -> anyhow::Result<Found> {
    let of_four = sent(4)?;
    let of_eight = sent(8)?;
    let factor = of_eight as f64 / of_four as f64;
    Ok(Found::new(
        Answer::Decimal(factor),
        &[
            ("of_four", &(of_four >> 10)),
            ("of_eight", &(of_eight >> 10)),
            ("factor", &format_args!("{factor:.3}")),
        ],
    ))
}

/// Returns the bytes that rank 0 of `ranks` sends in the second step of a small model, after the ranks have agreed on
/// the order of the buckets.
fn sent(ranks: usize) -> anyhow::Result<u64> {
    const BLOCK_SIZE: usize = 32;
    on_rank_0(ranks, |rank, group| {
        let (vs, model) = model_config(BLOCK_SIZE, 32).build(rank.device(), 0)?;
        let mut ddp =
            DistributedDataParallel::new(model, &vs, group.clone(), DdpOptions::default())?;
        let mut sent = 0;
        for _step in 0..2 {
            let tokens =
                || Tensor::randint(256, [4, BLOCK_SIZE as i64], (Kind::Int64, Device::Cpu));
            let (inputs, targets) = fork_rng(rank.rank() as u64, || (tokens(), tokens()))?;
            ddp.zero_grad()?;
            let before = group.traffic().sent;
            let loss = Loss::CrossEntropy.of(&ddp.forward(&inputs), &targets)?;
            ddp.backward(&loss)?;
            sent = group.traffic().sent - before;
        }
        Ok(sent)
    })
}
