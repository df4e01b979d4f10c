//! A rank function of your own: every rank has a number, and all learn the sum.
//!
//!     cargo run --release --example 01-rank-function
//!
//! In Python this is `torch.multiprocessing.spawn(main, nprocs=4)` with
//! `dist.init_process_group("gloo")` and `dist.all_reduce(tensor)` in `main`.

#![allow(clippy::print_stdout)]

use ddp_mp::{Backend, ReduceOp, spawn};
use tch::Tensor;

fn main() -> anyhow::Result<()> {
    // Four threads, each of which runs this function. What it captures is shared, not copied.
    spawn(4, |rank| {
        // The ranks meet. On one machine there is no address, no port and no file involved.
        let group = rank.init_process_group(Backend::Threaded)?;

        let mine = (rank.rank() + 1) as f32;
        let mut tensor = Tensor::from_slice(&[mine]);
        // Every rank must make this call. If one fails instead, the others return an error at once.
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;

        println!(
            "rank {} of {} had {mine} and has {}",
            rank.rank(),
            rank.world_size(),
            tensor.double_value(&[0])
        );
        Ok(())
    })?;
    Ok(())
}
