//! One file for each command of the program.

mod bench;
mod checkpoints;
mod comm;
mod env;
mod sampler;
mod train;

pub use bench::{BenchOp, BenchRequest, bench, bench_step, check_step_flags};
pub use comm::{CommOp, CommRequest, comm};
pub use env::env;
pub use sampler::{SamplerRequest, sampler};
pub use train::train;

use std::thread;

use crate::config::Config;
use crate::error::Result;
use crate::launch::{BackendChoice, Nproc, Placement, place};
use crate::torch::cuda::Cuda;

/// How many CPU cores this process may use.
fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Where the ranks of `config` run on this machine, and whether they can do what it asks.
fn plan(config: &Config, cuda: &Cuda) -> Result<Placement> {
    let placement = place_ranks(config.nproc_per_node, config.backend, cuda)?;
    config.validate_for(placement.devices.len())?;
    Ok(placement)
}

/// Where so many ranks run on this machine.
fn place_ranks(nproc: Nproc, backend: BackendChoice, cuda: &Cuda) -> Result<Placement> {
    place(nproc, backend, cuda, cores())
}
