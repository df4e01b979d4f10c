//! One file for each command of the program.

mod bench;
mod checkpoints;
mod comm;
mod env;
mod explain;
mod processes;
mod run_artifacts;
mod sampler;
mod session;
mod train;
mod unsupported_flags;
mod verify;

pub use bench::{
    BenchOp, BenchRequest, SimulatedCluster, bench, bench_scaling, bench_step, check_scaling_flags,
    check_step_flags,
};
pub use comm::{CommOp, CommRequest, comm};
pub use env::env;
pub use processes::AlreadyReported;
pub use sampler::{SamplerRequest, sampler};
pub use train::train;
pub use verify::{check_verify_flags, verify};

use std::thread;

use tch::Device;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::ffi::cuda::Cuda;
use crate::launch::{BackendChoice, Launch, LaunchOptions, Nproc, Placement};

/// The most steps that `bench step` measures and `verify` makes.
pub const MOST_STEPS: u64 = 1_000_000;

/// Returns the number of CPU cores that this process may use.
fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns where the ranks of `config` run on this machine, after checking that `config` can run there.
fn plan(config: &Config, cuda: &Cuda) -> Result<Placement> {
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    let placement = if processes::starts_processes(config, &launch) {
        processes::place_processes(config, &launch, cuda)?
    } else {
        place_launched(config, &launch, cuda)?
    };
    // The ranks of other processes are not known before the rendezvous.
    config.validate_for(placement.devices.len())?;
    Ok(placement)
}

/// Returns where the ranks of this process of a launch run.
fn place_launched(config: &Config, launch: &Launch, cuda: &Cuda) -> Result<Placement> {
    let placement = launch.place(config.backend, cuda)?;
    if placement.devices[0] == Device::Cpu {
        config.check_memory_for(placement.devices.len(), 1)?;
    }
    Ok(placement)
}

/// Returns where the ranks of `nproc` run, for a command of one process.
fn place_ranks(nproc: Nproc, backend: BackendChoice, cuda: &Cuda) -> Result<Placement> {
    let launch = Launch::from_env(&LaunchOptions { nproc, ..LaunchOptions::default() }, cuda)?;
    if launch.processes.count > 1 {
        return Err(Error::Input(format!(
            "this command runs in one process, and this is process {} of {} ({}: {}); start only one, or unset the \
             launcher's variables",
            launch.processes.index,
            launch.processes.count,
            launch.kind.name(),
            launch.reason
        )));
    }
    launch.place(backend, cuda)
}
