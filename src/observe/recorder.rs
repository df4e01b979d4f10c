//! What becomes of a run's numbers: a bar on the terminal, TensorBoard's files, lines of JSON.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use serde::Serialize;

use super::{Printer, TensorBoard};

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
    /// How long a step took, in microseconds.
    pub step_us: f64,
    /// How many samples all ranks took a second.
    pub samples_per_second: f64,
}

/// How well the model does on data that it is not trained on.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Train(&'a TrainMetrics),
    Validation(&'a ValidationMetrics),
}

/// Writes numbers wherever they are wanted. On rank 0 alone.
#[derive(Debug)]
pub struct Recorder {
    printer: Arc<Printer>,
    tensorboard: Option<TensorBoard>,
    /// The file of JSON lines, and its name.
    lines: Option<(BufWriter<File>, String)>,
}

impl Recorder {
    /// Writes to a new event file in the folder `tensorboard`, and at the end of the file `metrics`, if they are
    /// given; and what is of use to somebody who waits to the terminal.
    ///
    /// # Errors
    /// When they cannot be opened; names which.
    pub fn new(
        printer: &Arc<Printer>,
        tensorboard: Option<&Path>,
        metrics: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let tensorboard = tensorboard
            .map(|folder| {
                TensorBoard::create(folder)
                    .with_context(|| format!("--tensorboard {}", folder.display()))
            })
            .transpose()?;
        let lines = metrics
            .map(|path| {
                let file = OpenOptions::new().append(true).create(true).open(path);
                let name = format!("--metrics {}", path.display());
                let file = file.with_context(|| name.clone())?;
                anyhow::Ok((BufWriter::new(file), name))
            })
            .transpose()?;
        Ok(Self { printer: printer.clone(), tensorboard, lines })
    }

    /// Records how training goes.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn train(&mut self, metrics: &TrainMetrics) -> anyhow::Result<()> {
        let TrainMetrics { step, loss, lr, grad_norm, step_us, samples_per_second, .. } = *metrics;
        self.printer.progress(
            step,
            &format!("loss {loss:.4}, lr {lr:.3e}, {samples_per_second:.0} samples/s"),
        );
        let scalars = [
            ("train/loss", Some(loss)),
            ("train/lr", Some(lr)),
            ("train/grad_norm", grad_norm),
            ("train/step_us", Some(step_us)),
            ("train/samples_per_second", Some(samples_per_second)),
        ];
        self.scalars(step, &scalars)?;
        self.line(&Line::Train(metrics))
    }

    /// Records how well the model does.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn validation(&mut self, metrics: &ValidationMetrics) -> anyhow::Result<()> {
        let ValidationMetrics { step, loss, accuracy, .. } = *metrics;
        self.scalars(step, &[("validation/loss", Some(loss)), ("validation/accuracy", accuracy)])?;
        self.line(&Line::Validation(metrics))?;
        self.flush()
    }

    /// Where histograms and pictures go, if they are wanted.
    pub fn tensorboard(&mut self) -> Option<&mut TensorBoard> {
        self.tensorboard.as_mut()
    }

    /// Has all that was recorded in its files.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn flush(&mut self) -> anyhow::Result<()> {
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.flush().context("--tensorboard")?;
        }
        if let Some((file, name)) = &mut self.lines {
            file.flush().with_context(|| name.clone())?;
        }
        Ok(())
    }

    fn scalars(&mut self, step: u64, scalars: &[(&str, Option<f64>)]) -> anyhow::Result<()> {
        let Some(tensorboard) = &mut self.tensorboard else { return Ok(()) };
        for (tag, value) in scalars {
            if let Some(value) = value {
                tensorboard.scalar(tag, step, *value).context("--tensorboard")?;
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &Line<'_>) -> anyhow::Result<()> {
        let Some((file, name)) = &mut self.lines else { return Ok(()) };
        let text = serde_json::to_string(line)?;
        writeln!(file, "{text}").with_context(|| name.clone())
    }
}
