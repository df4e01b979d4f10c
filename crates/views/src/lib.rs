//! What a person sees of a run. Each [`View`] is a folder with a type that is opened before any rank starts, is told the
//! events of the run as an [`Observer`], and is finished after the ranks have ended.
//!
//! [`Printer`] observes a run, too, and prints for all: stdout carries results, text for people or one JSON object per line,
//! and stderr the rest. The live view draws on the terminal, and lends it back to the printer.

mod curve;
mod explain;
mod json_lines;
mod language;
mod live;
mod metrics;
mod printer;
mod prometheus;
mod record;
mod report;
mod slices;
mod tensorboard;
mod trace;
mod whole_file;

use serde::Serialize;
use strum::{EnumIter, IntoStaticStr};

use engine::error::Result;
use engine::events::Observer;

pub use explain::{Explain, RunInfo};
pub use language::Language;
pub use live::Live;
pub use metrics::Metrics;
pub use printer::{LogFormat, Printer};
pub use prometheus::{Prometheus, RunFacts};
pub use record::Record;
pub use report::{Dealing, Report, ReportFacts};
pub use tensorboard::{SummaryWriter, TensorBoard};
pub use trace::Trace;

// For the commands of the program.
#[doc(hidden)]
pub use compare::{in_columns, paragraph};
#[doc(hidden)]
pub use language::filled;
#[doc(hidden)]
pub use printer::{Utf8Stream, train_texts, unwritable_stdout, validation_text};

/// A view of a run.
pub trait View: Observer {
    /// Writes what appears at the end of a run, and that the run has ended with `outcome`. Called once, after the ranks have
    /// ended, also if they have failed.
    ///
    /// # Errors
    /// [`Error::Write`](engine::Error::Write).
    #[allow(unused_variables)]
    fn finish(&self, outcome: &Outcome) -> Result<()> {
        Ok(())
    }
}

/// How a run ended.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// `Done`, `Stopped` or `Failed`.
    pub kind: RunState,
    /// The same in a sentence, with the reasons for restarts.
    pub text: String,
}

/// The state of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, IntoStaticStr, Serialize)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum RunState {
    /// The ranks train.
    #[default]
    Running,
    /// The run has reached its end.
    Done,
    /// The run was ended before its last epoch, by a signal or a limit.
    Stopped,
    /// The run has failed.
    Failed,
}
