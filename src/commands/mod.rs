//! One file for each command of the program.

mod env;
mod sampler;
mod train;

pub use env::env;
pub use sampler::{SamplerRequest, sampler};
pub use train::train;

use std::thread;

use crate::config::Config;
use crate::error::Result;
use crate::launch::{Placement, place};
use crate::torch::cuda::Cuda;

/// How many CPU cores this process may use.
fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Where the ranks of `config` run on this machine, and whether they can do what it asks.
fn plan(config: &Config, cuda: &Cuda) -> Result<Placement> {
    let placement = place(config.nproc_per_node, config.backend, cuda, cores())?;
    config.validate_for(placement.devices.len())?;
    Ok(placement)
}
