//! `--report`: one HTML page that shows a run, made of the same records as the trace.

mod advice;
mod tracks;

use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use super::{Marks, Output, Straggler};
use crate::records::{Parameter, PhaseSeconds, TrainMetrics, ValidationMetrics};
pub(crate) use advice::{Cores, Measured, advice, outside_collectives};
pub(crate) use tracks::Tracks;

/// The page, and the parts that are inserted into it.
const PAGE: &str = include_str!("page.html");
const PARTS: [(&str, &str); 2] =
    [("__REPORT_CSS__", include_str!("page.css")), ("__REPORT_JS__", SCRIPT)];
/// The page's script, in reading order.
const SCRIPT: &str = concat!(
    include_str!("helpers.js"),
    include_str!("verdict.js"),
    include_str!("curves.js"),
    include_str!("timeline.js"),
    include_str!("samples.js"),
    include_str!("page.js"),
);
const DATA: &str = "__REPORT_DATA__";

/// The contents of a page; `None` for what the run did not reach.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub version: u32,
    pub program: String,
    /// The command line as typed.
    pub command: String,
    /// Start of the run, in UTC.
    pub began: String,
    pub libtorch: String,
    pub outcome: Outcome,
    pub seconds: Option<f64>,
    pub steps: Option<u64>,
    pub us_per_step: Option<f64>,
    pub loss: Option<f64>,
    pub parameters_hash: Option<String>,
    /// All options; those that differ from the defaults come first.
    pub options: Vec<(String, String)>,
    pub world: Ranks,
    pub model: Parameters,
    #[serde(flatten)]
    pub curves: Curves,
    pub samples: Samples,
    pub timeline: Tracks,
    pub traffic: Moved,
    pub replicas: Option<Replicas>,
    pub verdict: Verdict,
}

/// The outcome of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// `done`, `stopped` or `failed`.
    pub kind: &'static str,
    pub text: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Ranks {
    pub size: usize,
    pub nnodes: usize,
    pub backend: &'static str,
    /// Devices of the ranks of this process.
    pub devices: Vec<String>,
}

#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Parameters {
    pub name: String,
    pub parameters: Vec<Parameter>,
    /// Bytes of each bucket.
    pub buckets: Vec<usize>,
}

/// Training and validation metrics over the run.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Curves {
    pub train: Vec<TrainMetrics>,
    pub validation: Vec<ValidationMetrics>,
}

/// Maximum number of points of a curve. At this number, every other point is dropped.
const MAX_CURVE_POINTS: usize = 4000;

impl Curves {
    pub(super) fn train(&mut self, metrics: &TrainMetrics) {
        if self.train.len() == MAX_CURVE_POINTS {
            let mut number = 0;
            self.train.retain(|_| {
                number += 1;
                number % 2 == 0
            });
        }
        self.train.push(metrics.clone());
    }

    /// Returns the mean loss of the first quarter of the points, and of the last. `None` with fewer than four.
    pub(crate) fn losses(&self) -> Option<[f64; 2]> {
        let quarter = self.train.len() / 4;
        let mean = |points: &[TrainMetrics]| {
            points.iter().map(|point| point.loss).sum::<f64>() / quarter as f64
        };
        let first = self.train.get(..quarter).filter(|points| !points.is_empty())?;
        Some([mean(first), mean(&self.train[self.train.len() - quarter..])])
    }
}

/// The samples of each rank.
#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    /// Number of samples in the data set.
    pub dataset: usize,
    pub batch_size: usize,
    /// `true` if all samples that ranks used are listed.
    pub complete: bool,
    pub epochs: Vec<OfEpoch>,
}

#[derive(Debug, Serialize)]
pub(crate) struct OfEpoch {
    pub epoch: u64,
    /// The samples of each rank, in order.
    pub ranks: Vec<Vec<usize>>,
}

/// Bytes transferred.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Moved {
    /// Bytes sent by each rank.
    pub sent: Vec<u64>,
    pub received: Vec<u64>,
    /// Collectives that the ranks of this process called.
    pub collectives: Vec<CollectiveTotals>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct CollectiveTotals {
    pub operation: String,
    pub calls: Vec<u64>,
    pub bytes: Vec<u64>,
}

/// The hash of each rank's parameters at the end.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Replicas {
    pub hashes: Vec<String>,
    pub equal: bool,
    pub checked_every: Option<u64>,
}

/// Conclusions from the run's times.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Verdict {
    /// Fraction of its steps that a rank spends outside collectives, on average, from 0 to 1.
    pub outside_collectives: Option<f64>,
    pub overlapped: Option<f64>,
    pub phases: Vec<PhaseSeconds>,
    pub straggler: Option<Straggler>,
    pub advice: Vec<String>,
}

impl Report {
    /// Returns the file of a page at `path`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn output(path: &Path) -> io::Result<Output> {
        let (first_lines, _) = PAGE.split_once("\n<html").unwrap_or((PAGE, ""));
        Output::new(path, Marks { begins: first_lines, before: "<!-- xxh3 ", after: " -->\n" })
    }

    /// Writes the page.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        // Escaped: no text in the data can end the script.
        let data = serde_json::to_string(self)?.replace('<', "\\u003c");
        let page =
            PARTS.iter().fold(PAGE.to_owned(), |page, (place, part)| page.replace(place, part));
        // Inserted last, so that its text is not taken for a placeholder.
        out.write_all(page.replacen(DATA, &data, 1).as_bytes())
    }
}
