//! The lessons that build data parallelism by hand: gradients of shares, all-reduce, buckets, overlap.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use super::{Found, first, on_rank_0, on_ranks, ranks, sine, sine_model};
use crate::commands::lesson::answer::Answer;
use crate::data::{DataLoader, Dataset, DistributedSampler};
use crate::ddp::{DdpOptions, DistributedDataParallel};
use crate::ffi::fork_rng;
use crate::launch::Rank;
use crate::models::parameters_hash;
use crate::process_group::{Backend, ProcessGroup, ReduceOp, SimulatedCluster};

/// Lesson 1 with 48 and 16 samples: the weight of the first gradient with which the sum is that of all 64.
pub(in super::super) fn one_rank() -> anyhow::Result<Found> {
    const FIRST: i64 = 48;
    const BATCH: i64 = 64;
    let (weight, difference) = on_rank_0(1, |rank, _| {
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7, || sine_model(&vs))?;
        let (x, y) = sine()?.batch(&(0..BATCH as usize).collect::<Vec<_>>())?;
        let gradient = |start, count| {
            let output = model.forward(&x.narrow(0, start, count));
            let loss = output.mse_loss(&y.narrow(0, start, count), Reduction::Mean);
            let gradients =
                Tensor::f_run_backward(&[loss], &vs.trainable_variables(), false, false)?;
            let flat: Vec<Tensor> = gradients.iter().map(|it| it.flatten(0, -1)).collect();
            anyhow::Ok(Tensor::cat(&flat, 0).to_kind(Kind::Double))
        };
        let whole = gradient(0, BATCH)?;
        let (first, second) = (gradient(0, FIRST)?, gradient(FIRST, BATCH - FIRST)?);
        // The w for which w * first + (1 - w) * second is closest to the whole.
        let apart = &first - &second;
        let weight = (&whole - &second).dot(&apart) / apart.dot(&apart);
        let difference = (&whole - (&first + &second) / 2.0).abs().max();
        Ok((weight.double_value(&[]), difference.double_value(&[])))
    })?;
    Ok(Found::new(
        Answer::Decimal(weight),
        &[
            ("first_weight", &format_args!("{weight:.6}")),
            ("second_weight", &format_args!("{:.6}", 1.0 - weight)),
            ("difference", &format_args!("{difference:.1e}")),
        ],
    ))
}

/// Adds up all ranks' tensors on rank 0, which sends the sum to all.
fn through_rank_0(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    if group.rank() > 0 {
        group.send(tensor, 0, 0)?;
        group.recv(tensor, Some(0), 0)?;
        return Ok(());
    }
    let mut received = tensor.zeros_like();
    for src in 1..group.world_size() {
        group.recv(&mut received, Some(src), 0)?;
        *tensor += &received;
    }
    for dst in 1..group.world_size() {
        group.send(tensor, dst, 0)?;
    }
    Ok(())
}

/// Adds up all ranks' tensors in a ring. The number of ranks must divide the length.
fn ring(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    let mut chunks = tensor.chunk(ranks as i64, 0);
    let mut received = chunks[0].zeros_like();
    for turn in 0..2 * (ranks - 1) {
        let (to_right, from_left) = (rank + 2 * ranks - turn, rank + 2 * ranks - turn - 1);
        let work = group.isend(&chunks[to_right % ranks], right, 0)?;
        group.recv(&mut received, Some(left), 0)?;
        work.wait()?;
        let chunk = &mut chunks[from_left % ranks];
        if turn < ranks - 1 { *chunk += &received } else { chunk.copy_(&received) }
    }
    Ok(())
}

/// The KiB that a rank sends through rank 0, and in the ring.
struct Sent {
    central: u64,
    ring: u64,
}

/// Lesson 3 with 8 ranks: the KiB that rank 0 sends through itself, and in the ring.
pub(in super::super) fn all_reduce() -> anyhow::Result<Found> {
    const RANKS: usize = 8;
    const LEN: i64 = 1 << 16;
    let sent = on_ranks(RANKS, |_, group| {
        let sent_by = |algorithm: fn(&ProcessGroup, &mut Tensor) -> anyhow::Result<()>| {
            let mut tensor = Tensor::ones([LEN], (Kind::Float, Device::Cpu));
            let before = group.traffic().sent;
            algorithm(&group, &mut tensor)?;
            anyhow::ensure!(tensor.eq(RANKS as f64).all().int64_value(&[]) == 1, "a wrong sum");
            anyhow::Ok((group.traffic().sent - before) >> 10)
        };
        Ok(Sent { central: sent_by(through_rank_0)?, ring: sent_by(ring)? })
    })?;
    let others = sent.last().map_or(0, |last| last.central);
    let Sent { central, ring } = first(sent)?;
    Ok(Found::new(
        Answer::Whole(vec![central, ring]),
        &[("central", &central), ("ring", &ring), ("others", &others)],
    ))
}

/// Lesson 4 without its broadcast: whether the replicas are equal in the end.
pub(in super::super) fn naive_ddp() -> anyhow::Result<Found> {
    const RANKS: usize = 4;
    let dataset: Arc<dyn Dataset> = Arc::new(sine()?);
    let trained = on_ranks(RANKS, move |rank, group| {
        let sampler = DistributedSampler::new(dataset.len(), RANKS, rank.rank())?;
        let loader = DataLoader::new(dataset.clone(), sampler, 64 / RANKS, rank.device())?;
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7 + rank.rank() as u64, || sine_model(&vs))?;
        let mut optimizer = nn::Sgd::default().build(&vs, 0.03)?;
        let parameters = vs.trainable_variables();
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
                optimizer.step();
                sum += loss.double_value(&[]);
            }
            group.all_reduce(&mut sum, ReduceOp::Avg)?;
            losses.push(sum.double_value(&[0]) / loader.num_batches() as f64);
        }
        Ok((losses, parameters_hash(&vs)?))
    })?;
    let hashes: BTreeSet<u64> = trained.iter().map(|(_, hash)| *hash).collect();
    let (losses, _) = first(trained)?;
    Ok(Found::new(
        Answer::YesNo(hashes.len() == 1),
        &[
            ("hashes", &hashes.len()),
            ("first_loss", &format_args!("{:.6}", losses[0])),
            ("last_loss", &format_args!("{:.6}", losses[losses.len() - 1])),
        ],
    ))
}

/// Returns a model of `layers` layers with `width` inputs and outputs, each followed by a tanh.
fn deep_model(vs: &VarStore, layers: usize, width: i64) -> anyhow::Result<nn::Sequential> {
    let model = fork_rng(7, || {
        (0..layers).fold(nn::seq(), |model, layer| {
            let linear = nn::linear(vs.root() / layer, width, width, Default::default());
            model.add(linear).add_fn(|x| x.tanh())
        })
    })?;
    Ok(model)
}

/// Returns random inputs, different on each rank.
fn inputs(rank: usize, shape: [i64; 2]) -> anyhow::Result<Tensor> {
    Ok(fork_rng(rank as u64, || Tensor::rand(shape, (Kind::Float, Device::Cpu)))?)
}

/// Lesson 5 with 6 parameters in a bucket: the all-reduces of a step.
pub(in super::super) fn buckets() -> anyhow::Result<Found> {
    const PARAMETERS_PER_BUCKET: usize = 6;
    let (calls, parameters, bytes) = on_rank_0(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let model = deep_model(&vs, 20, 32)?;
        let inputs = inputs(rank.rank(), [8, 32])?;
        model.forward(&inputs).square().mean(Kind::Float).f_backward()?;
        let parameters = vs.trainable_variables();
        let last_first: Vec<&Tensor> = parameters.iter().rev().collect();
        let before = group.traffic().sent;
        let mut calls = 0u64;
        for parameters in last_first.chunks(PARAMETERS_PER_BUCKET) {
            let flat: Vec<Tensor> =
                parameters.iter().map(|parameter| parameter.grad().flatten(0, -1)).collect();
            group.all_reduce(&mut Tensor::cat(&flat, 0), ReduceOp::Avg)?;
            calls += 1;
        }
        Ok((calls, parameters.len(), group.traffic().sent - before))
    })?;
    Ok(Found::new(
        Answer::Whole(vec![calls]),
        &[("calls", &calls), ("parameters", &parameters), ("bytes", &bytes)],
    ))
}

/// Lesson 6 with buckets of two sizes, on a fast network and on one with a long latency: the size that hides the larger
/// share of the communication on each.
pub(in super::super) fn overlap() -> anyhow::Result<Found> {
    // A step takes a moment: many of them are less disturbed by other processes.
    let near = hidden_shares("20us", 20)?;
    // 50 ms are longer than backward on a slow or busy machine too.
    let far = hidden_shares("50ms", 3)?;
    let percent = |share: f64| format!("{:.0}", 100.0 * share);
    Ok(Found::new(
        Answer::Whole(vec![near.better_size(), far.better_size()]),
        &[
            ("near_small", &percent(near.small)),
            ("near_large", &percent(near.large)),
            ("far_small", &percent(far.small)),
            ("far_large", &percent(far.large)),
        ],
    ))
}

/// The share of communication that backward hides.
struct HiddenShares {
    /// With buckets of 1 MiB.
    small: f64,
    /// With buckets of 100 MiB.
    large: f64,
}

impl HiddenShares {
    /// Returns the size of the buckets that hide more, in MiB.
    fn better_size(&self) -> u64 {
        if self.small > self.large { 1 } else { 100 }
    }
}

/// Trains for this many steps on a simulated network with this latency.
fn hidden_shares(latency: &str, steps: usize) -> anyhow::Result<HiddenShares> {
    let network: SimulatedCluster = format!("bandwidth=2Gbit/s,latency={latency}").parse()?;
    let results = ranks(2).simulate_cluster(network).run(move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let small = hidden_share(rank, &group, 1.0, steps)?;
        Ok(HiddenShares { small, large: hidden_share(rank, &group, 100.0, steps)? })
    })?;
    first(results)
}

/// Returns the share that backward hides with buckets of this size.
fn hidden_share(
    rank: &Rank,
    group: &Rc<ProcessGroup>,
    bucket_cap_mb: f64,
    steps: usize,
) -> anyhow::Result<f64> {
    let vs = VarStore::new(rank.device());
    let model = deep_model(&vs, 6, 512)?;
    let options = DdpOptions { overlap: Some(true), bucket_cap_mb, ..DdpOptions::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    let inputs = inputs(rank.rank(), [512, 512])?;
    for _step in 0..steps {
        ddp.zero_grad()?;
        let loss = ddp.forward(&inputs).square().mean(Kind::Float);
        ddp.backward(&loss)?;
    }
    Ok(ddp.statistics().hidden)
}
