//! The lessons about a model of one's own: the sampler, several batches to a step, validation, checkpoints.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::Context;
use tch::nn::VarStore;
use tch::{Device, Reduction, Tensor};

use super::{Found, on_rank_0, on_ranks, sine, watching_hook};
use crate::checkpoint::{Checkpoint, CheckpointDir};
use crate::commands::lesson::answer::Answer;
use crate::data::{
    DataLoader, Dataset, DistributedSampler, Subset, Targets, TensorDataset, random_split,
};
use crate::ddp::{DdpOptions, DistributedDataParallel};
use crate::ffi::fork_rng;
use crate::models::ModelConfig;
use crate::optim::{AdamW, AdamWOptions, Optimizer, Schedule};
use crate::os::TemporaryFolder;
use crate::process_group::{ProcessGroup, ReduceOp};
use crate::trainer::{Loss, SaveEvery, Trainer, TrainerOptions};

/// Lesson 7 with a sampler that deals all samples to each of two ranks: the points that an epoch counts.
pub(in super::super) fn sampler() -> anyhow::Result<Found> {
    const POINTS: i64 = 2000;
    let dataset: Arc<dyn Dataset> =
        Arc::new(TensorDataset::random(POINTS, 2, Targets::Classes(2), 1)?);
    let (counted, expected) = on_rank_0(2, move |rank, group| {
        let count = |ranks, number| {
            let sampler = DistributedSampler::new(dataset.len(), ranks, number)?;
            count_samples(&DataLoader::new(dataset.clone(), sampler, 50, rank.device())?, &group)
        };
        Ok((count(1, 0)?, count(rank.world_size(), rank.rank())?))
    })?;
    Ok(Found::new(Answer::Whole(vec![counted]), &[("counted", &counted), ("expected", &expected)]))
}

/// Returns the samples that all ranks together count in an epoch.
fn count_samples(loader: &DataLoader, group: &ProcessGroup) -> anyhow::Result<u64> {
    let mut count = Tensor::from_slice(&[0i64]);
    for batch in loader.epoch(0)? {
        count += batch?.len() as i64;
    }
    group.all_reduce(&mut count, ReduceOp::Sum)?;
    Ok(count.int64_value(&[0]).unsigned_abs())
}

/// Lesson 8 where every batch is averaged: the calls of the communication hook in a step of two batches.
pub(in super::super) fn no_sync() -> anyhow::Result<Found> {
    const BATCHES: usize = 2;
    let dataset: Arc<dyn Dataset> = Arc::new(sine()?);
    let (calls, calls_with_no_sync) = on_rank_0(2, move |rank, group| {
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7, || super::sine_model(&vs))?;
        let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
        let calls = Rc::new(Cell::new(0u64));
        let counted = calls.clone();
        ddp.register_comm_hook(watching_hook(move || counted.set(counted.get() + 1)))?;
        let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, 32, rank.device())?;
        let mut calls_of_a_step = |averages_each: bool| -> anyhow::Result<u64> {
            let before = calls.get();
            ddp.zero_grad()?;
            for (number, batch) in loader.epoch(0)?.take(BATCHES).enumerate() {
                let batch = batch?;
                let is_last = averages_each || number + 1 == BATCHES;
                let _no_sync = (!is_last).then(|| ddp.no_sync());
                let loss = ddp.forward(&batch.inputs).mse_loss(&batch.targets, Reduction::Mean);
                ddp.backward(&loss)?;
            }
            Ok(calls.get() - before)
        };
        Ok((calls_of_a_step(true)?, calls_of_a_step(false)?))
    })?;
    Ok(Found::new(
        Answer::Whole(vec![calls]),
        &[("calls", &calls), ("calls_with_no_sync", &calls_with_no_sync)],
    ))
}

/// Lesson 9 without `uneven`: the samples that the validation counts.
pub(in super::super) fn validation() -> anyhow::Result<Found> {
    const LEN: i64 = 3005;
    let dataset: Arc<dyn Dataset> = Arc::new(TensorDataset::random(LEN, 2, Targets::Values(1), 1)?);
    let (_, held_back) = random_split(dataset.len(), 0.2, 0)?;
    let held_back = Arc::new(Subset::new(dataset, held_back));
    let expected = held_back.len();
    let counted = on_rank_0(2, move |rank, group| {
        let sampler = DistributedSampler::new(held_back.len(), rank.world_size(), rank.rank())?;
        count_samples(&DataLoader::new(held_back.clone(), sampler, 32, rank.device())?, &group)
    })?;
    Ok(Found::new(Answer::Whole(vec![counted]), &[("counted", &counted), ("expected", &expected)]))
}

/// Lesson 10 with a checkpoint every 7 steps, stopped after step 45: the step from which the run continues.
pub(in super::super) fn checkpoints() -> anyhow::Result<Found> {
    const STOP_AFTER: u64 = 45;
    let folder = TemporaryFolder::new().context("creating a folder for checkpoints")?;
    let path = folder.path().join("run");
    let dir = CheckpointDir::create(&path, 2)?;
    let dataset: Arc<dyn Dataset> =
        Arc::new(TensorDataset::random(1024, 20, Targets::Values(1), 1)?);
    on_ranks(2, move |rank, group| {
        let (vs, model) = ModelConfig::default().build(Device::Cpu, 0)?;
        let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
        let optimizer: Box<dyn Optimizer> =
            Box::new(AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?);
        let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, 16, rank.device())?;
        let every = SaveEvery { steps: Some(7), epochs: None };
        let mut trainer =
            Trainer::new(ddp, optimizer, Schedule::constant(0.01), loader, Loss::Mse)?
                .checkpoints(dir.clone(), every, Default::default())
                .options(TrainerOptions { max_steps: Some(STOP_AFTER), ..Default::default() })?;
        Ok(trainer.train(3)?.steps)
    })?;
    let newest = CheckpointDir::newest_in(&path)?.context("the run has saved no checkpoint")?;
    let step = Checkpoint::read(&newest)?.state().step;
    let name = newest.file_name().unwrap_or_default().to_string_lossy();
    Ok(Found::new(Answer::Whole(vec![step]), &[("step", &step), ("checkpoint", &name)]))
}
