//! `trainer.json`: the progress of a run, and the lengths and hashes of a checkpoint's files.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use super::layout::TRAINER;
use crate::files::{mistaken, read_regular};
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
    #[serde(default, skip_serializing_if = "is_zero")]
    pub num_samples: usize,
    /// The number of samples in a rank's batch. 0 if not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub batch_size: usize,
    /// The number of epochs after which the run would have ended. 0 if not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_epochs: u64,
    /// The number of steps after which the run would have ended. 0 if not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub total_steps: u64,
    /// The data files. Empty without data files, and if not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_files: Vec<DataFile>,
    /// The number of steps skipped because gradients were not finite.
    pub skipped_steps: u64,
    /// The number of samples of this epoch in skipped steps, on all ranks together. They count for no loss.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_samples: usize,
    /// The validation with the smallest loss so far. `None` before the first validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<ValidationMetrics>,
    /// The number of validations since the best one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub validations_since_best: usize,
    /// The mean losses of the first epoch and of the last completed epoch. Empty before any is completed.
    #[serde(with = "exact")]
    pub epoch_losses: Vec<f64>,
    /// For each rank, the sum of the losses of this epoch's samples so far.
    #[serde(with = "exact")]
    pub loss_sums: Vec<f64>,
    /// For each rank, what this epoch's batches so far count as. Empty unless the criterion counts something else than
    /// samples.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<u64>,
    /// The state of the gradient scaler, if there is one.
    pub scaler: Option<GradScalerState>,
    /// The configuration of the run, by key. A resumed run is compared with it.
    pub options: Map<String, Value>,
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

impl TrainerState {
    /// Checks that all counts can belong to one run, which trains on `num_samples` samples. A forged file may have
    /// others, and a right hash.
    ///
    /// # Errors
    /// The file, and the field with its value and what it contradicts, as text.
    pub(crate) fn check(&self, num_samples: usize) -> Result<(), String> {
        let Self { epoch, step, epoch_steps, samples_seen, world_size, .. } = *self;
        let best = self.best.as_ref();
        let or_unlimited = |limit: u64| if limit == 0 { u64::MAX } else { limit };
        // Every step takes a sample, and an epoch ends with its last sample.
        let most_seen = (num_samples as u64).saturating_sub(1);
        let most_steps = (num_samples as u64).saturating_mul(epoch);
        let earlier_steps = step.saturating_sub(epoch_steps);
        for (field, value, what, limit) in [
            ("epoch_steps", epoch_steps, "step", step),
            ("epoch", epoch, "the number of steps in completed epochs", earlier_steps),
            ("epoch", epoch, "max_epochs", or_unlimited(self.max_epochs)),
            ("step", step, "total_steps", or_unlimited(self.total_steps)),
            (
                "step minus epoch_steps",
                earlier_steps,
                "the samples in completed epochs",
                most_steps,
            ),
            (
                "samples_seen",
                samples_seen as u64,
                "the samples before the last of an epoch",
                most_seen,
            ),
            ("epoch_steps", epoch_steps, "samples_seen", samples_seen as u64),
            ("skipped_steps", self.skipped_steps, "step", step),
            ("skipped_samples", self.skipped_samples as u64, "samples_seen", samples_seen as u64),
            ("best.step", best.map_or(0, |best| best.step), "step", step),
            ("best.epoch", best.map_or(0, |best| best.epoch), "epoch", epoch),
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
    pub(super) fn new(
        state: TrainerState,
        files: BTreeMap<String, FileMark>,
    ) -> serde_json::Result<Self> {
        let mut manifest = Self { format: FORMAT, state, files, xxh3: String::new() };
        manifest.xxh3 = manifest.digest()?;
        Ok(manifest)
    }

    /// Reads the `trainer.json` of the checkpoint in `folder`, and verifies that it is unchanged.
    ///
    /// # Errors
    /// The problem as text that begins with the file's name.
    pub(super) fn read(folder: &Path) -> Result<Self, String> {
        let text = read_regular(&folder.join(TRAINER), MAX_MANIFEST_BYTES)
            .map_err(|error| format!("{TRAINER} cannot be read: {error}"))?;
        let damaged = |error: serde_json::Error| match mistaken(&text, PART, COPY_AGAIN) {
            Some(problem) => format!("{TRAINER}: {problem}"),
            None => format!("{TRAINER} is damaged: {error}"),
        };
        let value: Value = serde_json::from_slice(&text).map_err(damaged)?;
        if value["format"] != FORMAT {
            return Err(format!(
                "{TRAINER} has format {}, but this version of ddp-mp reads format {FORMAT}",
                value["format"]
            ));
        }
        let manifest: Self = serde_json::from_value(value).map_err(damaged)?;
        if !manifest.is_intact() {
            return Err(format!("{TRAINER} is damaged: it was changed after it was written"));
        }
        Ok(manifest)
    }

    /// Returns whether the file is unchanged since it was written.
    fn is_intact(&self) -> bool {
        self.digest().is_ok_and(|digest| digest == self.xxh3)
    }

    fn digest(&self) -> serde_json::Result<String> {
        Ok(FileMark::of(&serde_json::to_vec(&(&self.state, &self.files))?).xxh3)
    }
}

/// A file of a checkpoint, as messages call it, and what to do if it is another file.
pub(super) const PART: &str = "a file of a checkpoint";
pub(super) const COPY_AGAIN: &str = "copy the checkpoint again";

/// The format number that this version writes and reads.
const FORMAT: u64 = 1;

/// The size limit for `trainer.json`, in bytes. It holds the options, and a number for each rank.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// The length and hash of a file, to detect changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileMark {
    pub bytes: u64,
    /// The hash, in hex.
    pub xxh3: String,
}

impl FileMark {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, xxh3: format!("{:016x}", xxh3_64(bytes)) }
    }
}

/// Stores numbers as text, because JSON has no infinity and no NaN.
mod exact {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(numbers: &[f64], to: S) -> Result<S::Ok, S::Error> {
        let texts: Vec<String> = numbers.iter().map(f64::to_string).collect();
        texts.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
        let texts = Vec::<String>::deserialize(from)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            epoch_losses: vec![f64::INFINITY, 0.1 + 0.2],
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
        assert!(read.is_intact());
        let changed = text.replace("mlp", "cnn");
        assert!(!serde_json::from_str::<Manifest>(&changed).unwrap().is_intact());
        assert_eq!(read.files["a"], FileMark::of(b"abc"));
        // A metric that is no number stays one.
        let mut without_number = state.clone();
        let best = without_number.best.as_mut().unwrap();
        best.metrics.insert("none".into(), f64::NAN);
        let written = Manifest::new(without_number, BTreeMap::new()).unwrap();
        let value = serde_json::to_value(&written).unwrap();
        let read: Manifest = serde_json::from_value(value).unwrap();
        assert!(read.is_intact());
        let metrics = read.state.best.unwrap().metrics;
        assert!(metrics["none"].is_nan() && metrics["f1"] == 0.1 + 0.2);
        // Older files do not have these keys, and are still intact.
        let unknown = serde_json::to_value(TrainerState::default()).unwrap();
        assert!(unknown.get("num_samples").is_none() && unknown.get("batch_size").is_none());
        let unknown: TrainerState = serde_json::from_value(unknown).unwrap();
        assert_eq!((unknown.num_samples, unknown.batch_size), (0, 0));
        let not_a_number = TrainerState { loss_sums: vec![f64::NAN], ..TrainerState::default() };
        let text = serde_json::to_string(&not_a_number).unwrap();
        assert!(serde_json::from_str::<TrainerState>(&text).unwrap().loss_sums[0].is_nan());
    }
}
