//! `--tensorboard`: event files for TensorBoard.

mod messages;
mod summary_writer;

use std::fs;
use std::io;
use std::path::Path;

use parking_lot::Mutex;

use super::View;
use engine::error::{Result, Shown};
use engine::events::{Event, Observer, Wants};
use engine::os::limits::output_failed;
use engine::records::{TrainMetrics, ValidationMetrics};

pub use summary_writer::SummaryWriter;

/// The event file of a run in a folder.
#[derive(Debug)]
pub struct TensorBoard {
    file: Mutex<SummaryWriter>,
    /// The flag and the folder, for messages.
    name: String,
    /// Whether the run goes on where an earlier one was. TensorBoard then leaves out the steps that come again.
    continues: bool,
}

impl TensorBoard {
    /// Refuses a file in the place of `folder`. Changes nothing.
    ///
    /// # Errors
    /// If there is one.
    pub fn check(folder: &Path) -> io::Result<()> {
        match fs::metadata(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(found) if !found.is_dir() => Err(io::Error::other(
                "that is a file, and TensorBoard reads a folder; use another name",
            )),
            _ => Ok(()),
        }
    }

    /// Creates a new file in `folder`, and the folder if needed. Files of earlier runs stay unchanged. Says whether the run
    /// `continues` an earlier one.
    ///
    /// # Errors
    /// When the folder or the file cannot be created; also the error of [`check`](Self::check).
    pub fn create(folder: &Path, continues: bool) -> io::Result<Self> {
        Self::check(folder)?;
        let name = format!("--tensorboard {}", folder.shown());
        Ok(Self { file: Mutex::new(SummaryWriter::create(folder)?), name, continues })
    }

    /// Writes to the file.
    fn write(&self, write: impl FnOnce(&mut SummaryWriter) -> io::Result<()>) -> Result<()> {
        write(&mut self.file.lock()).map_err(|error| output_failed(&self.name, &error))
    }
}

impl Observer for TensorBoard {
    fn wants(&self) -> Wants {
        Wants { metrics: true, tensors: true, ..Wants::default() }
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        match event {
            Event::Training(training) if self.continues => {
                self.write(|file| file.purge_from(training.step + 1))?;
            }
            Event::Metrics(metrics) => self.write(|file| write_metrics(file, metrics))?,
            Event::Validation(metrics) => self.write(|file| write_validation(file, metrics))?,
            Event::Tensor { step, name, values } => {
                self.write(|file| file.histogram(&format!("model/{name}"), *step, values))?;
            }
            _ => {}
        }
        Ok(())
    }
}

impl View for TensorBoard {}

/// Writes the metrics of the last steps.
fn write_metrics(file: &mut SummaryWriter, metrics: &TrainMetrics) -> io::Result<()> {
    let scalars = [
        ("loss", Some(metrics.loss)),
        ("lr", Some(metrics.lr)),
        ("grad_norm", metrics.grad_norm),
        ("skipped_steps", metrics.skipped_steps.map(|steps| steps as f64)),
        ("step_us", Some(metrics.step_us)),
        ("samples_per_second", Some(metrics.samples_per_second)),
        ("tokens_per_second", metrics.tokens_per_second),
    ];
    write_scalars(file, "train", metrics.step, scalars)
}

/// Writes the metrics of a validation.
fn write_validation(file: &mut SummaryWriter, metrics: &ValidationMetrics) -> io::Result<()> {
    let ValidationMetrics { step, loss, bits_per_token, accuracy, .. } = *metrics;
    let scalars =
        [("loss", Some(loss)), ("bits_per_token", bits_per_token), ("accuracy", accuracy)];
    let others = metrics.metrics.iter().map(|(name, value)| (name.as_str(), Some(*value)));
    write_scalars(file, "validation", step, scalars.into_iter().chain(others))
}

/// Writes the `scalars` that there are, each as `kind/name`, and all that is pending: a run that is killed keeps what was
/// written so far.
fn write_scalars<'a>(
    file: &mut SummaryWriter,
    kind: &str,
    step: u64,
    scalars: impl IntoIterator<Item = (&'a str, Option<f64>)>,
) -> io::Result<()> {
    for (name, value) in scalars {
        if let Some(value) = value {
            file.scalar(&format!("{kind}/{name}"), step, value)?;
        }
    }
    file.flush()
}
