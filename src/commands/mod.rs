//! One file for each command of the program.

mod bench;
mod comm;
mod env;
mod sampler;
mod train;
mod verify;

pub use bench::{BenchOp, BenchRequest, SimulatedCluster, bench, bench_scaling, bench_step};
pub use comm::{CommOp, CommRequest, comm};
pub use env::env;
pub use sampler::{SamplerRequest, sampler};
pub use train::train;
pub use verify::verify;

pub use crate::session::AlreadyReported;

/// The most steps that `bench step` measures and `verify` makes.
pub const MOST_STEPS: u64 = 1_000_000;
