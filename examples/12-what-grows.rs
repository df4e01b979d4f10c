//! 12. What grows with a model: its traffic and its memory, and what one can do about each.
//!
//!     cargo run --release --example 12-what-grows
//!
//! The gpt of lesson 11 in three widths. The bytes that a rank sends depend on the number of gradients, not on the
//! batch. *Accumulation* sends them once for several batches. Each rank also has memory for parameters, for gradients,
//! and for the two numbers per parameter that AdamW keeps. With a *shared model* the ranks have one copy of the parameters
//! and of AdamW's numbers together, and the result is the same to the bit.

#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;

use anyhow::ensure;
use ddp_mp::prelude::*;

const RANKS: usize = 4; // exercise
const BATCHES: usize = 8;
const BLOCK_SIZE: i64 = 32;

/// What one rank measured.
struct Measured {
    parameters: usize,
    bucket_bytes: Vec<usize>,
    /// The bytes that the rank sent for each batch.
    sent: u64,
    /// Where the parameters are in memory.
    addresses: BTreeSet<usize>,
    hash: u64,
}

/// Trains for some batches, of which `accumulate` make a step. Returns what each rank measured.
fn train(n_embd: i64, options: DdpOptions, accumulate: usize) -> anyhow::Result<Vec<Measured>> {
    Ok(spawn(RANKS, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let (kind, in_features) = (ModelKind::Gpt, BLOCK_SIZE);
        let sizes = ModelConfig { n_layer: 2, n_head: 2, n_embd, ..ModelConfig::default() };
        let config = ModelConfig { kind, in_features, out_features: 256, ..sizes };
        let (vs, model) = config.build(rank.device(), 0)?;
        let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options.clone())?;
        let mut optimizer = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        let before = group.traffic().sent;
        for batch in 1..=BATCHES {
            let seed = (batch * RANKS + rank.rank()) as u64;
            let tokens = || Tensor::randint(256, [4, BLOCK_SIZE], (Kind::Int64, rank.device()));
            let (inputs, targets) = fork_rng(seed, || (tokens(), tokens()))?;
            let steps = batch % accumulate == 0;
            let _no_sync = (!steps).then(|| ddp.no_sync());
            let loss = Loss::CrossEntropy.of(&ddp.forward(&inputs), &targets)?;
            ddp.backward(&(loss / accumulate as f64))?;
            if steps {
                optimizer.step(1e-3)?;
                ddp.zero_grad()?;
            }
        }
        let sent = (group.traffic().sent - before) / BATCHES as u64;
        let parameters = vs.trainable_variables();
        Ok(Measured {
            parameters: parameters.iter().map(Tensor::numel).sum(),
            bucket_bytes: ddp.statistics().bucket_bytes,
            sent,
            addresses: parameters.iter().map(|parameter| parameter.data_ptr() as usize).collect(),
            hash: ddp.parameters_hash()?,
        })
    })?)
}

fn main() -> anyhow::Result<()> {
    println!("       width  parameters  buckets  KiB sent for a batch  copies of the model");
    for width in [32, 64, 128] {
        let replicas = train(width, DdpOptions::default(), 1)?;
        let accumulated = train(width, DdpOptions::default(), BATCHES)?;
        let shared = train(
            width,
            DdpOptions { optimizer_layout: OptimizerLayout::SharedModel, ..Default::default() },
            1,
        )?;
        for (name, ranks) in
            [("replicas", &replicas), ("accumulate", &accumulated), ("shared", &shared)]
        {
            let Measured { parameters, bucket_bytes, sent, addresses, .. } = &ranks[0];
            let distinct: BTreeSet<_> = ranks.iter().flat_map(|rank| &rank.addresses).collect();
            let (buckets, kib) = (bucket_bytes.len(), sent >> 10);
            let copies = distinct.len() / addresses.len();
            println!("{name:10} {width:3}  {parameters:10}  {buckets:7}  {kib:20}  {copies:19}");
            ensure!(bucket_bytes.iter().sum::<usize>() == 4 * parameters, "4 bytes per gradient");
            ensure!(copies == if name == "shared" { 1 } else { RANKS }, "{copies} copies");
        }
        let [replica, accumulated, shared] = [&replicas[0], &accumulated[0], &shared[0]];
        // The ranks also agree once on the order of the buckets, which takes a few bytes.
        let steps = replica.sent as f64 / accumulated.sent as f64;
        ensure!((steps / BATCHES as f64 - 1.0).abs() < 0.05, "one step instead of {BATCHES}");
        ensure!(shared.hash == replica.hash, "one copy must give the bits of replicas");
    }
    Ok(())
}
