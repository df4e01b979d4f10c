//! 05. Buckets: one all-reduce for many gradients, which need not even be copied for it.
//!
//!     cargo run --release --example 05-buckets
//!
//! Every all-reduce costs a meeting of all ranks, however little it carries, and models have many small parameters. So
//! the gradients live in flat buffers ("buckets"), in which each is a view, and the buckets are reduced. In PyTorch that
//! is `gradient_as_bucket_view=True`, here it is always so.

#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use anyhow::ensure;
use ddp_mp::prelude::*;
use tch::nn::{self, Module, VarStore};

/// How many parameters share a bucket. (The library counts bytes: 1 MiB for the first one, then 25 MiB.)
const MEMBERS: usize = 20;

/// Makes each parameter's gradient a view of a bucket. The last parameters come first, as in a backward pass.
fn into_buckets(parameters: &[Tensor]) -> Vec<Tensor> {
    let last_first: Vec<&Tensor> = parameters.iter().rev().collect();
    let bucket_of = |members: &[&Tensor]| {
        let sizes: Vec<i64> = members.iter().map(|member| member.numel() as i64).collect();
        let bucket = Tensor::zeros([sizes.iter().sum::<i64>()], tch::kind::FLOAT_CPU);
        for (part, member) in bucket.split_with_sizes(&sizes, 0).iter().zip(members) {
            // Backward adds to a gradient that is there: from now on, that is to the bucket.
            member.grad().set_data(&part.view_as(member));
        }
        bucket
    };
    last_first.chunks(MEMBERS).map(bucket_of).collect()
}

/// Steps in which `tensors`, which are or hold the gradients, are averaged. How many bytes this rank sends in one of them,
/// and how long that takes at best (whatever else the machine does only adds to it).
fn steps(
    group: &ProcessGroup,
    tensors: &mut [Tensor],
    backward: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<(u64, Duration)> {
    let (mut best, mut bytes) = (Duration::MAX, 0);
    for _ in 0..200 {
        tensors.iter_mut().for_each(|tensor| drop(tensor.zero_())); // zero_grad
        backward()?;
        group.barrier()?; // so that nobody's time is that of waiting for a late one
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
        backward()?; // from here on every parameter has a gradient, in memory of its own

        let mut tensors: Vec<Tensor> = parameters.iter().map(Tensor::grad).collect();
        let mut results = Vec::new();
        for way in ["one by one", "in buckets"] {
            if way == "in buckets" {
                tensors = into_buckets(&parameters);
            }
            let (bytes, time) = steps(&group, &mut tensors, backward)?;
            let (count, us) = (tensors.len(), time.as_secs_f64() * 1e6);
            if rank.rank() == 0 {
                println!(
                    "{way}: {count:2} all_reduces a step, {bytes} bytes sent, {us:5.1} us at best"
                );
            }
            let flat = parameters.iter().map(|parameter| parameter.grad().flatten(0, -1));
            results.push((count, bytes, us, Tensor::cat(&flat.collect::<Vec<_>>(), 0)));
        }
        let [one_by_one, in_buckets] = [&results[0], &results[1]];
        if rank.rank() == 0 {
            println!("one by one takes {:.1} times as long", one_by_one.2 / in_buckets.2);
        }
        ensure!((one_by_one.0, in_buckets.0) == (40, 2), "20 weights, 20 biases, in 2 buckets");
        ensure!(one_by_one.1 == in_buckets.1, "the same numbers go from rank to rank");
        ensure!(one_by_one.3 == in_buckets.3, "each number is averaged on its own: same bits");
        Ok(())
    })?;
    Ok(())
}
