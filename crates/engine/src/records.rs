//! Plain records of a run: measured by one module, printed or saved by another.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::operation::Operation;

/// A data file of a run.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// The path, as the run named it.
    pub path: String,
    /// The xxh3 hash of its contents, in hex.
    pub xxh3: String,
}

/// Time that a rank spent in each phase of its training steps without collectives, and in collectives. The latter
/// include the rank's own work and its waiting for others. In seconds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PhaseSeconds {
    /// The part of a step before it requests data.
    pub step: f64,
    /// Getting a batch.
    pub data: f64,
    /// The model and the loss.
    pub forward: f64,
    /// Autograd.
    pub backward: f64,
    /// The optimizer.
    pub optimizer: f64,
    /// Copying and writing a checkpoint, between steps.
    pub save: f64,
    /// Collectives of all phases.
    pub collectives: f64,
}

impl PhaseSeconds {
    /// Returns the time of the rank's own work in its steps.
    pub fn own(&self) -> f64 {
        self.step + self.data + self.forward + self.backward + self.optimizer
    }

    /// Returns the time of `phase`; `None` for operations that are not counted.
    pub(crate) fn phase_mut(&mut self, phase: Operation) -> Option<&mut f64> {
        match phase {
            Operation::Step => Some(&mut self.step),
            Operation::Data => Some(&mut self.data),
            Operation::Forward => Some(&mut self.forward),
            Operation::Backward => Some(&mut self.backward),
            Operation::Optimizer => Some(&mut self.optimizer),
            Operation::Save => Some(&mut self.save),
            _ => None,
        }
    }
}

/// Training metrics over the last few steps, of all ranks together.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainMetrics {
    /// Steps made so far.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The mean loss over the samples of all ranks.
    pub loss: f64,
    /// The last step's learning rate.
    pub lr: f64,
    /// The norm of all gradients before they were clipped; `None` if they were not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Steps of the whole run that were skipped because a value was not finite; `None` if steps may not be skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// Mean duration of a step, in microseconds.
    pub step_us: f64,
    /// Samples that all ranks together processed per second.
    pub samples_per_second: f64,
    /// Tokens that all ranks together processed per second; `None` unless samples are sequences of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
}

/// Metrics of the model on data that it is not trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidationMetrics {
    /// Steps made before it ran.
    pub step: u64,
    /// The epoch after which it ran, from 0.
    pub epoch: u64,
    /// The mean loss over all samples.
    pub loss: f64,
    /// The loss in bits: cross-entropy for each token of sequences. `None` unless the model predicts tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_token: Option<f64>,
    /// Fraction of samples, or of tokens, whose class is predicted correctly, from 0 to 1; `None` unless the model
    /// classifies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The further parts of the loss and the metrics of the program's own criterion, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_nan")]
    pub metrics: BTreeMap<String, f64>,
    /// `true` if the loss is smaller than that of every earlier validation of the run.
    pub best: bool,
}

/// A parameter, and the bucket that its gradient is in.
#[derive(Debug, Clone, Serialize)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its size.
    pub bytes: usize,
    /// The index of the bucket; `None` if the parameter is not trained.
    pub bucket: Option<usize>,
}

/// Reads `null` as NaN, which JSON cannot have.
fn null_as_nan<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(numbers.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}
