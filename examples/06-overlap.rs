//! 06. Overlap: a bucket is reduced while backward still computes the gradients of other layers.
//!
//!     cargo run --release --example 06-overlap
//!
//! Backward runs from the last layer to the first. The gradients of the last layer are ready first, while most of the
//! work is still ahead. `DistributedDataParallel` has a hook on each gradient. When the last gradient of a bucket is
//! ready, the bucket is reduced. With NCCL a GPU stream does this, and over a network a thread, so backward continues
//! meanwhile. Ranks that are threads reduce in memory, which takes no time to speak of. So this lesson simulates a
//! network: each all-reduce takes as long as between two machines, and the communication thread waits for it.

#![allow(clippy::print_stdout)]

use std::rc::Rc;
use std::time::Instant;

use anyhow::ensure;
use ddp_mp::ddp::DdpStatistics;
use ddp_mp::prelude::*;
use tch::nn::{self, VarStore};

const LAYERS: usize = 6;
const STEPS: u32 = 10;
const NETWORK: &str = "bandwidth=2Gbit/s,latency=20us"; // exercise, with `bucket_cap_mb` below

/// The measurements of a run.
struct Measured {
    step_us: f64,
    statistics: DdpStatistics,
    /// The hash of the final parameters.
    hash: u64,
}

fn train(rank: &Rank, group: &Rc<ddp_mp::ProcessGroup>, overlap: bool) -> anyhow::Result<Measured> {
    let vs = VarStore::new(rank.device());
    let model = fork_rng(7, || {
        (0..LAYERS).fold(nn::seq(), |model, layer| {
            let linear = nn::linear(vs.root() / layer, 512, 512, Default::default());
            model.add(linear).add_fn(|x| x.tanh())
        })
    })?;
    let bucket_cap_mb = 1.0; // each bucket holds one layer
    let options = DdpOptions { overlap: Some(overlap), bucket_cap_mb, ..Default::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    let inputs = fork_rng(rank.rank() as u64, || Tensor::rand([512, 512], tch::kind::FLOAT_CPU))?;
    let began = Instant::now();
    for _ in 0..STEPS {
        ddp.zero_grad()?;
        let loss = ddp.forward(&inputs).square().mean(Kind::Float);
        ddp.backward(&loss)?; // reduces the buckets, during or after it
        optimizer.step(0.1)?;
    }
    let step_us = 1e6 * began.elapsed().as_secs_f64() / f64::from(STEPS);
    Ok(Measured { step_us, statistics: ddp.statistics(), hash: ddp.parameters_hash()? })
}

fn main() -> anyhow::Result<()> {
    let ranks = Spawn::new(2).simulate_cluster(NETWORK.parse()?);
    ranks.run(|rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let after = train(rank, &group, false)?;
        let during = train(rank, &group, true)?;
        if rank.rank() == 0 {
            println!(
                "all-reduces     buckets   a step      of which communication   hidden by backward"
            );
            for (mode, run) in [("after backward", &after), ("during backward", &during)] {
                let DdpStatistics { bucket_bytes, communication_us, hidden, .. } = &run.statistics;
                println!(
                    "{mode:15}{:8}  {:7.0} us  {communication_us:17.0} us     {:15.0} %",
                    bucket_bytes.len(),
                    run.step_us,
                    100.0 * hidden
                );
            }
            println!("parameters in the end: {:016x} either way", after.hash);
        }
        ensure!(after.statistics.hidden == 0.0, "after backward nothing is hidden");
        ensure!(during.statistics.hidden > 0.0, "during backward a part is hidden");
        ensure!(after.hash == during.hash, "overlap must not change the result");
        Ok(())
    })?;
    Ok(())
}
