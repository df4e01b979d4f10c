//! One file for each command of the program.

mod bench;
mod bisect;
mod comm;
mod comm_op;
mod completions;
mod diff;
mod env;
mod lesson;
mod new;
mod ranks_flags;
mod sample;
mod sampler;
mod train;
mod verify;
mod version;

pub use bench::{BenchFlags, bench, bench_scaling, bench_step};
pub use bisect::{BisectFlags, bisect};
pub use comm::{CommFlags, comm};
pub use comm_op::CommOp;
pub use completions::{CompletionsFlags, completions};
pub use diff::{DiffFlags, diff};
pub use env::{check_gpus, env};
pub use lesson::{Lesson, LessonFlags, lesson};
pub use new::{NewFlags, new};
pub use ranks_flags::RanksFlags;
pub use sample::SampleFlags;
pub(crate) use sample::sample;
pub use sampler::{SamplerFlags, sampler};
pub use train::train;
pub use verify::verify;
pub use version::Versions;

pub use crate::session::AlreadyReported;

/// The most steps that `bench step` measures and `verify` makes.
pub const MOST_STEPS: u64 = 1_000_000;
