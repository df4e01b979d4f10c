//! Everything the program prints, and the only module that prints.
//!
//! stdout carries results: text for people, or one JSON object per line. stderr carries the rest.

mod columns;
mod events;
mod explain;
mod feed;
mod held_output;
mod json_lines;
mod language;
#[cfg(feature = "cli")]
mod live;
mod memory;
mod metrics;
mod metrics_logger;
mod output;
mod printer;
#[cfg_attr(not(feature = "cli"), path = "no_progress.rs")]
mod progress;
mod prometheus;
pub(crate) mod report;
mod slices;
mod step_record;
mod straggler;
mod tensorboard;
mod trace;
mod utf8_stream;

pub(crate) use columns::in_columns;
pub use events::{End, Epoch, Event, RankEnd, Start};
pub use explain::{ExplainedStep, Explainer, RankStep, RunInfo};
pub(crate) use explain::{indices, paragraph, table};
pub(crate) use held_output::{HeldOutput, Stream};
pub use language::Language;
pub(crate) use language::filled;
#[cfg(feature = "cli")]
pub(crate) use live::{LiveView, RankSnapshot, RunSnapshot, Source};
pub(crate) use memory::gigabytes;
pub use memory::{peak_memory, total_memory};
pub(crate) use metrics::MetricsFile;
pub use metrics_logger::MetricsLogger;
pub(crate) use output::{Marks, Output};
pub use printer::{LogFormat, Printer, unwritable_stdout};
pub(crate) use printer::{train_texts, validation_text};
pub(crate) use prometheus::{PrometheusFile, RunFacts, RunState};
pub use step_record::RecordFile;
pub(crate) use step_record::{
    RECORD_FORMAT, RecordHeader, RecordLine, RecordedStep, RecordedTensor, StepOfRank, TensorHash,
};
pub use straggler::{Straggler, find_straggler};
pub use tensorboard::TensorBoard;
pub(crate) use trace::{TRACED, process_path, trace_output, write_trace};
pub(crate) use utf8_stream::Utf8Stream;
