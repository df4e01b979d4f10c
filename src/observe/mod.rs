//! Everything the program prints, and the only place that prints.
//!
//! stdout carries results: text for people, or one JSON object a line. stderr carries the rest.

mod events;
mod explain;
mod held_back;
mod memory;
mod metrics;
mod output;
mod printer;
mod progress;
mod recorder;
pub(crate) mod report;
mod samples;
mod slices;
mod tensorboard;
mod trace;

pub use events::{End, Epoch, Event, Failure, Start};
pub use explain::{Language, Narrator, RankStep, RunInfo, Step};
pub(crate) use held_back::find_straggler_over;
pub use held_back::{PhaseSeconds, Straggler, find_straggler};
pub(crate) use memory::gigabytes;
pub use memory::{peak_memory, total_memory};
pub(crate) use output::{Marks, Output};
pub use printer::{LogFormat, Printer};
pub use recorder::{MetricsLogger, TrainMetrics, ValidationMetrics};
pub use samples::Sample;
pub use tensorboard::TensorBoard;
pub(crate) use trace::{TRACED, trace_output, trace_path, write_trace};
