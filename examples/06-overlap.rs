//! 06. Overlap: a bucket is reduced while backward still computes the gradients of other layers.
//!
//!     cargo run --release --example 06-overlap
//!
//! Backward runs from the last layer to the first. The gradients of the last layer are ready first, while most of the
//! work is still ahead. `DistributedDataParallel` has a hook on each gradient. When the last gradient of a bucket is
//! ready, the bucket is reduced. With NCCL a GPU stream does this, and between processes a thread, so backward
//! continues meanwhile. Ranks that are threads on the CPU reduce the bucket themselves and save no time. For them
//! overlap is off by default; this lesson turns it on to show the order.

#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::ensure;
use ddp_mp::ddp::DdpStatistics;
use ddp_mp::prelude::*;
use tch::nn::{self, VarStore};

const LAYERS: usize = 6;

/// The measurements of a run.
struct Measured {
    /// For each bucket of the last step, the number of gradients that were ready when it was reduced.
    gradients: Vec<usize>,
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
    let bucket_cap_mb = 1.0; // exercise. A layer is slightly larger, so each bucket holds one layer.
    let options = DdpOptions { overlap: Some(overlap), bucket_cap_mb, ..Default::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;

    // A communication hook averages a bucket. This one does the same as DDP's default, and counts the ready gradients.
    let (ready, parameters) = (Rc::new(RefCell::new(Vec::new())), vs.trainable_variables());
    let counts = ready.clone();
    ddp.register_comm_hook(hook_fn("watching", move |bucket, group| {
        counts
            .borrow_mut()
            .push(parameters.iter().filter(|parameter| parameter.grad().defined()).count());
        group.all_reduce(bucket.gradients, ReduceOp::PremulSum(1.0 / group.world_size() as f64))
    }))?;

    let inputs = fork_rng(rank.rank() as u64, || Tensor::rand([64, 512], tch::kind::FLOAT_CPU))?;
    for _ in 0..20 {
        ready.borrow_mut().clear();
        ddp.zero_grad()?; // removes all gradients until backward computes them
        let loss = ddp.forward(&inputs).square().mean(Kind::Float);
        ddp.backward(&loss)?;
        optimizer.step(0.1)?;
    }
    let (statistics, hash) = (ddp.statistics(), ddp.parameters_hash()?);
    Ok(Measured { gradients: ready.take(), statistics, hash })
}

fn main() -> anyhow::Result<()> {
    spawn(2, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let after = train(rank, &group, false)?;
        let during = train(rank, &group, true)?;
        if rank.rank() == 0 {
            println!(
                "                gradients that are there   time of    of which in    of which before"
            );
            println!(
                "                when a bucket goes out     backward   communication  it was through"
            );
            for (mode, run) in [("after backward", &after), ("overlapped", &during)] {
                let DdpStatistics { backward_us, communication_us, overlapped, .. } =
                    run.statistics;
                let percent = 100.0 * overlapped;
                println!(
                    "{mode:14}  {:2?}   {backward_us:5.0} us   {communication_us:10.0} us   {percent:13.0} %",
                    run.gradients
                );
            }
            println!("parameters in the end: {:016x} either way", after.hash);
        }
        ensure!(after.gradients == [12; LAYERS], "after backward all gradients are ready");
        ensure!(
            during.gradients == [2, 4, 6, 8, 10, 12],
            "each layer's bucket must be reduced as soon as it is ready"
        );
        ensure!(after.hash == during.hash, "overlap must not change the result");
        Ok(())
    })?;
    Ok(())
}
