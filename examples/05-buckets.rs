//! 05. Buckets: one all-reduce for many gradients, without copying them.
//!
//!     cargo run --release --example 05-buckets
//!
//! Every all-reduce has a latency, because all ranks must synchronize, and models have many small parameters. So each
//! gradient is a view of a flat buffer ("bucket"), and whole buckets are reduced. In PyTorch this is
//! `gradient_as_bucket_view=True`; here it is always on.

#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use anyhow::ensure;
use ddp_mp::prelude::*;
use tch::nn::{self, Module, VarStore};

/// The number of parameters in a bucket. (The library counts bytes: 1 MiB for the first bucket, then 25 MiB.)
const PARAMETERS_PER_BUCKET: usize = 20; // exercise

/// Makes each parameter's gradient a view of a bucket. The last parameters come first, as in a backward pass.
fn into_buckets(parameters: &[Tensor]) -> Vec<Tensor> {
    let last_first: Vec<&Tensor> = parameters.iter().rev().collect();
    let into_bucket = |parameters: &[&Tensor]| {
        let sizes: Vec<i64> = parameters.iter().map(|parameter| parameter.numel() as i64).collect();
        let bucket = Tensor::zeros([sizes.iter().sum::<i64>()], tch::kind::FLOAT_CPU);
        for (view, parameter) in bucket.split_with_sizes(&sizes, 0).iter().zip(parameters) {
            // Backward adds to an existing gradient: from now on it adds to the bucket.
            parameter.grad().set_data(&view.view_as(parameter));
        }
        bucket
    };
    last_first.chunks(PARAMETERS_PER_BUCKET).map(into_bucket).collect()
}

/// Runs steps that average `tensors`: the gradients, or buckets of them. Returns the bytes that this rank sends per
/// step, and the shortest time of the all-reduces, which other load on the machine affects least.
fn measure(
    group: &ProcessGroup,
    tensors: &mut [Tensor],
    backward: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<(u64, Duration)> {
    let (mut best, mut bytes) = (Duration::MAX, 0);
    for _ in 0..200 {
        tensors.iter_mut().for_each(|tensor| drop(tensor.zero_())); // zero_grad
        backward()?;
        group.barrier()?; // so that the time does not include waiting for a straggler
        let (began, before) = (Instant::now(), group.traffic().sent);
        for tensor in &mut *tensors {
            group.all_reduce(tensor, ReduceOp::Avg)?;
        }
        best = best.min(began.elapsed());
        bytes = group.traffic().sent - before;
    }
    Ok((bytes, best))
}

fn main() -> anyhow::Result<()> {
    spawn(2, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let vs = VarStore::new(rank.device());
        let model = fork_rng(7, || {
            (0..20).fold(nn::seq(), |model, layer| {
                let linear = nn::linear(vs.root() / layer, 32, 32, Default::default());
                model.add(linear).add_fn(|x| x.tanh())
            })
        })?;
        let inputs = fork_rng(rank.rank() as u64, || Tensor::rand([8, 32], tch::kind::FLOAT_CPU))?;
        let backward = || Ok(model.forward(&inputs).square().mean(Kind::Float).f_backward()?);
        let parameters = vs.trainable_variables();
        backward()?; // from here on every parameter has a gradient, in its own memory

        let mut tensors: Vec<Tensor> = parameters.iter().map(Tensor::grad).collect();
        let mut results = Vec::new();
        for method in ["one by one", "in buckets"] {
            if method == "in buckets" {
                tensors = into_buckets(&parameters);
            }
            let (bytes, time) = measure(&group, &mut tensors, backward)?;
            let (count, us) = (tensors.len(), time.as_secs_f64() * 1e6);
            if rank.rank() == 0 {
                println!(
                    "{method}: {count:2} all_reduces a step, {bytes} bytes sent, {us:5.1} us at best"
                );
            }
            let flat = parameters.iter().map(|parameter| parameter.grad().flatten(0, -1));
            results.push((count, bytes, us, Tensor::cat(&flat.collect::<Vec<_>>(), 0)));
        }
        let [one_by_one, in_buckets] = [&results[0], &results[1]];
        if rank.rank() == 0 {
            println!("one by one takes {:.1} times as long", one_by_one.2 / in_buckets.2);
        }
        let buckets = 40usize.div_ceil(PARAMETERS_PER_BUCKET);
        ensure!((one_by_one.0, in_buckets.0) == (40, buckets), "20 weights and 20 biases");
        ensure!(one_by_one.1 == in_buckets.1, "both methods must send the same bytes");
        ensure!(one_by_one.3 == in_buckets.3, "the averages must have the same bits");
        Ok(())
    })?;
    Ok(())
}
