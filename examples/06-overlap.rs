//! 06. Overlap: a bucket is on its way while backward still computes the gradients of other layers.
//!
//!     cargo run --release --example 06-overlap
//!
//! Backward goes from the last layer to the first: the last one's gradients are complete when most of the work is yet to
//! come. So `DistributedDataParallel` has hooks on the gradients: with the last one of a bucket, the bucket goes out.
//! With NCCL, and between processes, something else than the rank carries it, and backward goes on meanwhile: that is
//! where time is won. Ranks that are threads on the CPU carry it themselves and win nothing, so that there it is off
//! unless asked for; as here, to be watched.

#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::ensure;
use ddp_mp::ddp::DdpStatistics;
use ddp_mp::prelude::*;
use tch::nn::{self, VarStore};

const LAYERS: usize = 6;

/// What was seen of a run.
struct Seen {
    /// For each bucket of the last step, how many of the parameters had a gradient when it went out.
    gradients: Vec<usize>,
    statistics: DdpStatistics,
    /// 64 bits over the parameters in the end.
    hash: u64,
}

fn train(rank: &Rank, group: &Rc<ddp_mp::ProcessGroup>, overlap: bool) -> anyhow::Result<Seen> {
    let vs = VarStore::new(rank.device());
    let model = fork_rng(7, || {
        (0..LAYERS).fold(nn::seq(), |model, layer| {
            let linear = nn::linear(vs.root() / layer, 512, 512, Default::default());
            model.add(linear).add_fn(|x| x.tanh())
        })
    })?;
    // A layer is 1 MiB and a little, so a bucket is full with one.
    let options = DdpOptions { overlap: Some(overlap), bucket_cap_mb: 1.0, ..Default::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;

    // A communication hook is what averages a bucket. This one does what DDP's own does, and looks about.
    let (seen, parameters) = (Rc::new(RefCell::new(Vec::new())), vs.trainable_variables());
    let notes = seen.clone();
    ddp.register_comm_hook(hook_fn("watching", move |bucket, group| {
        notes.borrow_mut().push(parameters.iter().filter(|it| it.grad().defined()).count());
        group.all_reduce(bucket.gradients, ReduceOp::PremulSum(1.0 / group.world_size() as f64))
    }))?;

    let inputs = fork_rng(rank.rank() as u64, || Tensor::rand([64, 512], tch::kind::FLOAT_CPU))?;
    for _ in 0..20 {
        seen.borrow_mut().clear();
        ddp.zero_grad()?; // there are no gradients until backward has made them
        let loss = ddp.forward(&inputs).square().mean(Kind::Float);
        ddp.backward(&loss)?;
        optimizer.step(0.1)?;
    }
    let (statistics, hash) = (ddp.statistics(), ddp.parameters_hash()?);
    Ok(Seen { gradients: seen.take(), statistics, hash })
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
            for (way, seen) in [("after backward", &after), ("overlapped", &during)] {
                let DdpStatistics { backward_us, communication_us, overlapped, .. } =
                    seen.statistics;
                let percent = 100.0 * overlapped;
                println!(
                    "{way:14}  {:2?}   {backward_us:5.0} us   {communication_us:10.0} us   {percent:13.0} %",
                    seen.gradients
                );
            }
            println!("parameters in the end: {:016x} either way", after.hash);
        }
        ensure!(after.gradients == [12; LAYERS], "all are there when backward is through");
        ensure!(during.gradients == [2, 4, 6, 8, 10, 12], "a layer's go out when they are there");
        ensure!(after.hash == during.hash, "and that does not change a bit of what is learned");
        Ok(())
    })?;
    Ok(())
}
