//! Writes a run's metrics: to a progress bar or the live view, TensorBoard's files, lines of JSON, the file for
//! Prometheus and the report.

use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use tch::{Kind, Tensor};

use super::metrics::{MetricsFile, TRAIN, VALIDATION};
use super::prometheus::PrometheusFile;
use super::report::Curves;
use super::{Printer, TensorBoard};
use crate::error::{Error, Result, Shown};
use crate::ffi::TorchResult;
use crate::os::limits::{output_failed, output_refused};
use crate::records::{TrainMetrics, ValidationMetrics};

/// Maximum number of points of a curve of the report. At this number, every other point is dropped.
const MAX_CURVE_POINTS: usize = 4000;

/// A writer of metrics to the configured outputs. Used on rank 0 alone.
#[derive(Debug)]
pub struct MetricsLogger {
    printer: Arc<Printer>,
    tensorboard: Option<TensorBoard>,
    metrics: Option<MetricsFile>,
    /// The metrics are written to this file too; `None` without `--prometheus`.
    pub(crate) prometheus: Option<Arc<PrometheusFile>>,
    /// The curves of the report; `None` if there is no report.
    pub(crate) curves: Option<Arc<Mutex<Curves>>>,
    /// Whether the run goes on where an earlier one was.
    continues: bool,
}

impl MetricsLogger {
    /// Creates a logger with a new event file in the folder `tensorboard`, and appends to the file `metrics`, if they
    /// are given. Shows progress on a terminal.
    ///
    /// # Errors
    /// [`Error::Input`] when one of them cannot be opened, or when `metrics` is a file that this program did not
    /// write. The message names it.
    pub fn new(
        printer: &Arc<Printer>,
        tensorboard: Option<&Path>,
        metrics: Option<&Path>,
    ) -> Result<Self> {
        let name = |folder: &Path| format!("--tensorboard {}", folder.shown());
        if let Some(file) = tensorboard.filter(|path| path.exists() && !path.is_dir()) {
            return Err(Error::usage(format!(
                "{}: that is a file, and TensorBoard reads a folder; use another name",
                name(file)
            )));
        }
        let metrics = metrics.map(MetricsFile::open).transpose()?;
        let create = |folder: &Path| {
            TensorBoard::create(folder).map_err(|error| output_refused(&name(folder), &error))
        };
        let tensorboard = tensorboard.map(create).transpose()?;
        let printer = printer.clone();
        Ok(Self { printer, tensorboard, metrics, prometheus: None, curves: None, continues: false })
    }

    /// Returns whether any output is configured.
    pub fn is_wanted(&self) -> bool {
        self.tensorboard.is_some()
            || self.metrics.is_some()
            || self.prometheus.is_some()
            || self.curves.is_some()
            || self.printer.shows_progress()
    }

    /// Says whether the run goes on where an earlier one was. TensorBoard then leaves out the steps that come again.
    #[must_use]
    pub fn continues(self, continues: bool) -> Self {
        Self { continues, ..self }
    }

    /// Starts the progress bar of a run of `steps` steps, of which `done` have been made.
    ///
    /// # Errors
    /// [`Error::Write`], like the functions below.
    pub fn begin(&mut self, steps: u64, done: u64) -> Result<()> {
        self.printer.start_progress(steps, done);
        if self.continues {
            self.board(|board| board.purge_from(done + 1))?;
        }
        match &self.prometheus {
            Some(file) => file.write(|latest| latest.first_step = done),
            None => Ok(()),
        }
    }

    /// Writes training metrics.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn train(&mut self, metrics: &TrainMetrics) -> Result<()> {
        self.printer.progress(metrics);
        let scalars = [
            ("loss", Some(metrics.loss)),
            ("lr", Some(metrics.lr)),
            ("grad_norm", metrics.grad_norm),
            ("skipped_steps", metrics.skipped_steps.map(|steps| steps as f64)),
            ("step_us", Some(metrics.step_us)),
            ("samples_per_second", Some(metrics.samples_per_second)),
            ("tokens_per_second", metrics.tokens_per_second),
        ];
        self.scalars(TRAIN, metrics.step, scalars)?;
        self.draw(|curves| add_point(&mut curves.train, MAX_CURVE_POINTS, metrics.clone()));
        if let Some(file) = &self.prometheus {
            file.write(|latest| latest.train = Some(metrics.clone()))?;
        }
        self.row(TRAIN, metrics)
    }

    /// Writes validation metrics. TensorBoard also receives histograms of `state_dict`.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Torch`] when the numbers cannot be read.
    pub fn validation(
        &mut self,
        metrics: &ValidationMetrics,
        state_dict: &[(String, Tensor)],
    ) -> Result<()> {
        let ValidationMetrics { step, loss, bits_per_token, accuracy, .. } = *metrics;
        let scalars =
            [("loss", Some(loss)), ("bits_per_token", bits_per_token), ("accuracy", accuracy)];
        let others = metrics.metrics.iter().map(|(name, value)| (name.as_str(), Some(*value)));
        self.scalars(VALIDATION, step, scalars.into_iter().chain(others))?;
        if self.tensorboard.is_some() {
            for (name, tensor) in state_dict {
                let values =
                    tensor.f_to_kind(Kind::Float).and_then(|tensor| tensor.f_flatten(0, -1));
                let values = values.and_then(Vec::<f32>::try_from).doing("flatten")?;
                self.board(|board| board.histogram(&format!("model/{name}"), step, &values))?;
            }
        }
        self.draw(|curves| curves.validation.push(metrics.clone()));
        if let Some(file) = &self.prometheus {
            file.write(|latest| latest.validation = Some(metrics.clone()))?;
        }
        self.row(VALIDATION, metrics)
    }

    /// Ends logging: removes the progress bar and writes all metrics to TensorBoard's file.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn end(&mut self) -> Result<()> {
        self.printer.end_progress();
        self.board(TensorBoard::flush)
    }

    /// Writes to TensorBoard's file, if there is one.
    fn board(&mut self, write: impl FnOnce(&mut TensorBoard) -> io::Result<()>) -> Result<()> {
        let Some(board) = &mut self.tensorboard else { return Ok(()) };
        write(board).map_err(|error| output_failed("--tensorboard", &error))
    }

    fn draw(&self, add: impl FnOnce(&mut Curves)) {
        if let Some(curves) = &self.curves {
            add(&mut curves.lock());
        }
    }

    /// Writes the `scalars` that there are to TensorBoard, each as `kind/name`.
    fn scalars<'a>(
        &mut self,
        kind: &str,
        step: u64,
        scalars: impl IntoIterator<Item = (&'a str, Option<f64>)>,
    ) -> Result<()> {
        self.board(|board| {
            let mut known = scalars.into_iter().filter_map(|(name, value)| Some((name, value?)));
            known.try_for_each(|(name, value)| board.scalar(&format!("{kind}/{name}"), step, value))
        })
    }

    /// Writes a row, and all that is pending: a run that is killed keeps every row written so far.
    fn row(&mut self, event: &str, metrics: &impl Serialize) -> Result<()> {
        if let Some(file) = &mut self.metrics {
            file.row(event, metrics)?;
        }
        self.board(TensorBoard::flush)
    }
}

/// Adds a point to a curve. Of one that has `most` points, drops every second before.
pub(super) fn add_point<T>(curve: &mut Vec<T>, most: usize, point: T) {
    if curve.len() >= most {
        let mut number = 0;
        curve.retain(|_| {
            number += 1;
            number % 2 == 1
        });
    }
    curve.push(point);
}
