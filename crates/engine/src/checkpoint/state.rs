//! `trainer.json`: the progress of a run, and the lengths and hashes of a checkpoint's files.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use super::layout::TRAINER;
use crate::error::{Error, Result, Shown};
use crate::files::{SAFETENSORS, mistaken, read_regular};
use crate::optim::GradScalerState;
use crate::records::{DataFile, ValidationMetrics};

/// The progress of a run, without its tensors. All counts are for the whole run, however often it was resumed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// The epoch of the next step.
    pub epoch: u64,
    /// The number of completed steps, which is also the number of the next step.
    pub step: u64,
    /// The number of completed steps in this epoch.
    pub epoch_steps: u64,
    /// The number of samples that all ranks together have had in this epoch, from the beginning of its order.
    pub samples_seen: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The number of samples that the run trains on, all ranks together. 0 if not known.
    pub num_samples: usize,
    /// The number of samples in a rank's batch. 0 if not known.
    pub batch_size: usize,
    /// The number of epochs after which the run would have ended. 0 if not known.
    pub max_epochs: u64,
    /// The number of steps after which the run would have ended. 0 if not known.
    pub total_steps: u64,
    /// The data files. Empty without data files, and if not known.
    pub data_files: Vec<DataFile>,
    /// The number of steps skipped because gradients were not finite.
    pub skipped_steps: u64,
    /// The number of samples of this epoch in skipped steps, on all ranks together. They count for no loss.
    pub skipped_samples: usize,
    /// The validation with the smallest loss so far. `None` before the first validation.
    pub best: Option<ValidationMetrics>,
    /// The number of validations since the best one.
    pub validations_since_best: usize,
    /// The mean losses of the first epoch and of the last completed epoch. Empty before any is completed.
    #[serde(deserialize_with = "null_as_nan")]
    pub epoch_losses: Vec<f64>,
    /// For each rank, the sum of the losses of this epoch's samples so far.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss_sums: Vec<f64>,
    /// For each rank, what this epoch's batches so far count as. Empty unless the criterion counts something else than
    /// samples.
    pub counts: Vec<u64>,
    /// The rank that has saved this after another rank had failed; `None` for a checkpoint of a run that went on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_failure: Option<usize>,
    /// The state of the gradient scaler, if there is one.
    pub scaler: Option<GradScalerState>,
    /// The configuration of the run, by key. A resumed run is compared with it.
    pub options: Map<String, Value>,
}

impl TrainerState {
    /// Reads the progress of the checkpoint in `folder`.
    ///
    /// # Errors
    /// [`Error::Input`] that names the file.
    #[doc(hidden)]
    pub fn read(folder: &Path) -> Result<Self> {
        Manifest::read(folder).map(|manifest| manifest.state)
    }

    /// Checks that all counts can belong to one run, which trains on `num_samples` samples. A forged file may have
    /// others, and a right hash.
    ///
    /// # Errors
    /// The file, and the field with its value and what it contradicts, as text.
    #[doc(hidden)]
    pub fn check(&self, num_samples: usize) -> Result<(), String> {
        let Self { epoch, step, epoch_steps, world_size, .. } = *self;
        let (num_samples, seen) = (num_samples as u64, self.samples_seen as u64);
        let (best_step, best_epoch) = self.best.as_ref().map_or((0, 0), |it| (it.step, it.epoch));
        let or_unlimited = |limit: u64| if limit == 0 { u64::MAX } else { limit };
        // Every step takes a sample, and an epoch ends with its last sample. A rank that survives a failure may save
        // before all have ended the epoch, in which all ranks get equally many samples.
        let most_seen = match self.after_failure {
            None => num_samples.saturating_sub(1),
            Some(_) => num_samples.saturating_add(world_size as u64),
        };
        let most_steps = num_samples.saturating_mul(epoch);
        let earlier = step.saturating_sub(epoch_steps);
        for (field, value, what, limit) in [
            ("epoch_steps", epoch_steps, "step", step),
            ("epoch", epoch, "the number of steps in completed epochs", earlier),
            ("epoch", epoch, "max_epochs", or_unlimited(self.max_epochs)),
            ("step", step, "total_steps", or_unlimited(self.total_steps)),
            ("step minus epoch_steps", earlier, "the samples in completed epochs", most_steps),
            ("samples_seen", seen, "the samples before the last of an epoch", most_seen),
            ("epoch_steps", epoch_steps, "samples_seen", seen),
            ("skipped_steps", self.skipped_steps, "step", step),
            ("skipped_samples", self.skipped_samples as u64, "samples_seen", seen),
            ("best.step", best_step, "step", step),
            ("best.epoch", best_epoch, "epoch", epoch),
            ("validations_since_best", self.validations_since_best as u64, "epoch", epoch),
            ("the length of epoch_losses", self.epoch_losses.len() as u64, "epoch", epoch),
        ] {
            if value > limit {
                return Err(format!(
                    "{TRAINER}: {field} is {value}, which is more than {what} ({limit})"
                ));
            }
        }
        let sums = self.loss_sums.len();
        if world_size == 0 || (sums > 0 && sums != world_size) {
            return Err(format!(
                "{TRAINER}: loss_sums has {sums} numbers for a world_size of {world_size}"
            ));
        }
        Ok(())
    }
}

/// The contents of `trainer.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u64,
    #[serde(flatten)]
    pub state: TrainerState,
    pub files: BTreeMap<String, FileMark>,
    /// The hash of state and files, in hex.
    xxh3: String,
}

impl Manifest {
    pub(super) fn new(state: TrainerState, files: BTreeMap<String, FileMark>) -> io::Result<Self> {
        let mut manifest = Self { format: FORMAT, state, files, xxh3: String::new() };
        manifest.xxh3 = manifest.digest()?;
        Ok(manifest)
    }

    /// Reads the `trainer.json` of the checkpoint in `folder`, and verifies that it is unchanged.
    ///
    /// # Errors
    /// [`Error::Input`] that names the file.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = &folder.join(TRAINER);
        let wrong = |problem: String| Error::data(format!("{} {problem}", path.shown()));
        let text = read_regular(path, MAX_MANIFEST_BYTES)
            .map_err(|error| wrong(format!("cannot be read: {error}")))?;
        let damaged = |problem: &str| damaged(path, "a file of a checkpoint", &text, problem);
        let unparsed = |error: serde_json::Error| damaged(&error.to_string());
        let value: Value = serde_json::from_slice(&text).map_err(unparsed)?;
        if value["format"] != FORMAT {
            return Err(wrong(format!(
                "has format {}, but this version of ddp-mp reads format {FORMAT}",
                value["format"]
            )));
        }
        let manifest: Self = serde_json::from_value(value).map_err(unparsed)?;
        let is_intact = manifest.digest().is_ok_and(|digest| digest == manifest.xxh3);
        if is_intact { Ok(manifest) } else { Err(damaged("it was changed after it was written")) }
    }

    fn digest(&self) -> serde_json::Result<String> {
        Ok(FileMark::of(&serde_json::to_vec(&(&self.state, &self.files))?).xxh3)
    }
}

/// The format number that this version writes and reads.
const FORMAT: u64 = 1;

/// The size limit for `trainer.json`, in bytes. It holds the options, and a number for each rank.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// Returns the error of a file of a checkpoint that is not as it was written. Says what it is if its kind is known and
/// not `expected`.
fn damaged(path: &Path, expected: &str, bytes: &[u8], problem: &str) -> Error {
    let path = path.shown();
    Error::data(match mistaken(bytes, expected, "copy the checkpoint again") {
        Some(mistake) => format!("{path}: {mistake}"),
        None => format!("{path} is damaged: {problem}"),
    })
}

/// The length and hash of a file, to detect changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileMark {
    bytes: u64,
    /// The hash, in hex.
    xxh3: String,
}

impl FileMark {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, xxh3: format!("{:016x}", xxh3_64(bytes)) }
    }

    /// Checks that `file` at `path` is unchanged. One of another length is not read as a whole.
    pub(super) fn check(&self, path: &Path, file: &[u8]) -> Result<()> {
        let len = file.len() as u64;
        let problem = match (len == self.bytes).then(|| Self::of(file).xxh3) {
            None => format!("it has {len} bytes instead of {}", self.bytes),
            Some(found) if found == self.xxh3 => return Ok(()),
            Some(found) => format!("its xxh3 is {found} instead of {}", self.xxh3),
        };
        Err(damaged(path, SAFETENSORS, file, &problem))
    }
}

/// Reads `null` as NaN. JSON has neither that nor infinity.
fn null_as_nan<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let numbers = Vec::<Option<f64>>::deserialize(from)?;
    Ok(numbers.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_intact(manifest: &Manifest) -> bool {
        manifest.digest().unwrap() == manifest.xxh3
    }

    #[test]
    fn manifest_round_trip_keeps_every_bit() {
        let scaler = GradScalerState {
            scale: f64::from(2f32.powi(-13)),
            growth_factor: 2.0,
            backoff_factor: 0.3,
            growth_interval: 2000,
            growth_tracker: 7,
        };
        let state = TrainerState {
            step: u64::MAX,
            epoch_losses: vec![f64::MAX, 0.1 + 0.2],
            loss_sums: vec![f64::MIN_POSITIVE, -0.0, 1e300 / 3.0],
            scaler: Some(scaler),
            best: Some(ValidationMetrics {
                bits_per_token: None,
                step: 3,
                epoch: 1,
                loss: 0.1 + 0.7,
                accuracy: Some(1.0 / 3.0),
                metrics: [("f1".into(), 0.1 + 0.2)].into(),
                best: true,
            }),
            validations_since_best: 2,
            num_samples: 100,
            batch_size: 7,
            options: Map::from_iter([("lr".into(), 0.1f64.into()), ("model".into(), "mlp".into())]),
            ..TrainerState::default()
        };
        let files = BTreeMap::from([("a".into(), FileMark::of(b"abc"))]);
        let written = Manifest::new(state.clone(), files).unwrap();
        let text = serde_json::to_string_pretty(&written).unwrap();
        let read: Manifest = serde_json::from_str(&text).unwrap();
        assert_eq!(read.state, state);
        assert!(is_intact(&read));
        let changed = text.replace("mlp", "cnn");
        assert!(!is_intact(&serde_json::from_str(&changed).unwrap()));
        assert_eq!(read.files["a"], FileMark::of(b"abc"));
        // A metric that is no number stays one.
        let mut without_number = state.clone();
        let best = without_number.best.as_mut().unwrap();
        best.metrics.insert("none".into(), f64::NAN);
        let written = Manifest::new(without_number, BTreeMap::new()).unwrap();
        let value = serde_json::to_value(&written).unwrap();
        let read: Manifest = serde_json::from_value(value).unwrap();
        assert!(is_intact(&read));
        let metrics = read.state.best.unwrap().metrics;
        assert!(metrics["none"].is_nan() && metrics["f1"] == 0.1 + 0.2);
        let not_numbers = vec![f64::NAN, f64::INFINITY];
        let not_numbers = TrainerState { loss_sums: not_numbers, ..TrainerState::default() };
        let text = serde_json::to_string(&not_numbers).unwrap();
        let read: TrainerState = serde_json::from_str(&text).unwrap();
        assert!(read.loss_sums.len() == 2 && read.loss_sums.iter().all(|sum| sum.is_nan()));
    }
}
