//! What becomes of a run's numbers: a bar on the terminal, TensorBoard's files, lines of JSON.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::metrics::{Event, MetricsFile};
use super::report::Curves;
use super::samples::{Sample, picture};
use super::{Printer, TensorBoard};
use crate::error::{Error, Result};
use crate::ffi::limits::explain;

/// How training goes, over the last few steps; of all ranks together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainMetrics {
    /// How many steps have been made.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The mean loss over the samples of all ranks.
    pub loss: f64,
    /// The last step's learning rate.
    pub lr: f64,
    /// How long the gradients were, all together, before they were clipped, if they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Of the whole run, how many steps changed nothing because something was not finite; if they may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// How long a step took, in microseconds.
    pub step_us: f64,
    /// How many samples all ranks took a second.
    pub samples_per_second: f64,
}

/// How well the model does on data that it is not trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidationMetrics {
    /// After how many steps.
    pub step: u64,
    /// After which epoch, from 0.
    pub epoch: u64,
    /// The mean loss over all samples.
    pub loss: f64,
    /// Which share of the samples is put into the right class, from 0 to 1; for classes only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Whether no validation of the run before had a loss as small.
    pub best: bool,
}

/// Writes numbers wherever they are wanted. On rank 0 alone.
#[derive(Debug)]
pub struct MetricsLogger {
    printer: Arc<Printer>,
    tensorboard: Option<TensorBoard>,
    metrics: Option<MetricsFile>,
    /// What a report is to show.
    curves: Option<Arc<Mutex<Curves>>>,
}

impl MetricsLogger {
    /// Writes to a new event file in the folder `tensorboard`, and at the end of the file `metrics`, if they are
    /// given; and what is of use to somebody who waits to the terminal.
    ///
    /// # Errors
    /// [`Error::Input`] when they cannot be opened, and when `metrics` is a file that this program did not write; names
    /// which.
    pub fn new(
        printer: &Arc<Printer>,
        tensorboard: Option<&Path>,
        metrics: Option<&Path>,
    ) -> Result<Self> {
        if let Some(file) = tensorboard.filter(|path| path.exists() && !path.is_dir()) {
            let file = file.display();
            return Err(Error::Input(format!(
                "--tensorboard {file}: that is a file, and TensorBoard reads a folder; use another name"
            )));
        }
        let metrics = metrics.map(MetricsFile::open).transpose()?;
        let tensorboard = tensorboard
            .map(|folder| {
                TensorBoard::create(folder).map_err(|error| {
                    let reason = explain(&error);
                    Error::Input(format!("--tensorboard {}: {reason}", folder.display()))
                })
            })
            .transpose()?;
        Ok(Self { printer: printer.clone(), tensorboard, metrics, curves: None })
    }

    /// Refuses a file for `metrics` that this program did not write. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Input`] that names it.
    pub(crate) fn check(metrics: Option<&Path>) -> Result<()> {
        metrics.map_or(Ok(()), MetricsFile::check)
    }

    /// Leaves the numbers in `curves` too, if somebody wants them there.
    pub(crate) fn curves(self, curves: Option<Arc<Mutex<Curves>>>) -> Self {
        Self { curves, ..self }
    }

    /// Whether there is anybody to tell.
    pub fn is_wanted(&self) -> bool {
        self.tensorboard.is_some()
            || self.metrics.is_some()
            || self.curves.is_some()
            || self.printer.shows_progress()
    }

    /// Whether there is anybody to look at samples.
    pub fn shows_samples(&self) -> bool {
        self.tensorboard.is_some()
    }

    /// Training begins, of so many steps, `done` of which have been made.
    pub fn begin(&self, steps: u64, done: u64) {
        self.printer.start_progress(steps, done);
    }

    /// Tells how training goes.
    ///
    /// # Errors
    /// [`Error::Write`], as all below.
    pub fn train(&mut self, metrics: &TrainMetrics) -> Result<()> {
        let TrainMetrics { step, loss, lr, grad_norm, step_us, samples_per_second, .. } = *metrics;
        let skipped_steps = metrics.skipped_steps.map(|steps| steps as f64);
        let message = format!("loss {loss:.4}, lr {lr:.3e}, {samples_per_second:.0} samples/s");
        self.printer.progress(step, &message);
        let scalars = [
            ("train/loss", Some(loss)),
            ("train/lr", Some(lr)),
            ("train/grad_norm", grad_norm),
            ("train/skipped_steps", skipped_steps),
            ("train/step_us", Some(step_us)),
            ("train/samples_per_second", Some(samples_per_second)),
        ];
        self.scalars(step, &scalars)?;
        self.draw(|curves| curves.train(metrics));
        self.row(Event::Train, metrics)?;
        self.flush() // a run that is killed keeps all that it has told
    }

    /// Tells how well the model does, also on `samples` of which there is a picture, and what the numbers in it are like
    /// by now.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Torch`] when the numbers cannot be read.
    pub fn validation(
        &mut self,
        metrics: &ValidationMetrics,
        samples: &[Sample],
        state_dict: &[(String, Tensor)],
    ) -> Result<()> {
        let ValidationMetrics { step, loss, accuracy, .. } = *metrics;
        self.scalars(step, &[("validation/loss", Some(loss)), ("validation/accuracy", accuracy)])?;
        if let Some(tensorboard) = &mut self.tensorboard {
            if let Some(it) = picture(samples) {
                // The same for all, so that TensorBoard shows how it changes; as what is written under each sample.
                let tag = "validation/class>prediction";
                tensorboard.image(tag, step, it.width, it.height, &it.pixels).map_err(board)?;
            }
            for (name, tensor) in state_dict {
                let values = tensor.f_to_kind(Kind::Float).and_then(|it| it.f_flatten(0, -1));
                let values =
                    values.and_then(Vec::<f32>::try_from).map_err(Error::torch("flatten"))?;
                tensorboard.histogram(&format!("model/{name}"), step, &values).map_err(board)?;
            }
        }
        self.draw(|curves| curves.validation.push(metrics.clone()));
        self.row(Event::Validation, metrics)?;
        self.flush()
    }

    /// Training is over: everything that was told is in its file.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn end(&mut self) -> Result<()> {
        self.printer.end_progress();
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.flush().map_err(board)?;
        }
        self.metrics.as_mut().map_or(Ok(()), MetricsFile::flush)
    }

    fn draw(&self, add: impl FnOnce(&mut Curves)) {
        if let Some(curves) = &self.curves {
            add(&mut curves.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn scalars(&mut self, step: u64, scalars: &[(&str, Option<f64>)]) -> Result<()> {
        let Some(tensorboard) = &mut self.tensorboard else { return Ok(()) };
        for (tag, value) in scalars {
            if let Some(value) = value {
                tensorboard.scalar(tag, step, *value).map_err(board)?;
            }
        }
        Ok(())
    }

    fn row(&mut self, event: Event, metrics: &impl Serialize) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), |file| file.row(event, metrics))
    }
}

fn board(error: io::Error) -> Error {
    Error::Write { what: "--tensorboard".into(), reason: explain(&error) }
}
