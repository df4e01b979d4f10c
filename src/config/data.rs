//! The data keys: opens the data, takes the sizes of a file, and checks the given ones.

use std::sync::Arc;

use super::{Config, Invalid, flag_name};
use crate::data::{
    Dataset, DatasetSpec, DistributedSampler, FileDataset, Subset, TargetKind, Targets,
    TensorDataset, random_split,
};
use crate::error::{Error, Result};
use crate::trainer::Loss;

/// The training and validation data of a run.
#[derive(Debug)]
pub struct Data {
    /// The training samples.
    pub training: Arc<dyn Dataset>,
    /// The validation samples, held back or from files beside the training files. `None` if there are none.
    pub validation: Option<Arc<dyn Dataset>>,
    /// Notes for the user about the data.
    pub notes: Vec<String>,
}

/// The keys that a data file makes unnecessary.
pub(super) const SIZES: [&str; 3] = ["num_samples", "in_features", "out_features"];

impl Config {
    /// Returns the sampler that deals `rank` of `world_size` ranks its part of `len` samples.
    pub(crate) fn sampler(
        &self,
        len: usize,
        world_size: usize,
        rank: usize,
    ) -> Result<DistributedSampler> {
        let sampler = DistributedSampler::new(len, world_size, rank)?
            .shuffle(!self.no_shuffle)
            .seed(self.seed)
            .drop_last(self.drop_last)?;
        Ok(if self.exact_mean && !self.drop_last { sampler.without_padding() } else { sampler })
    }

    /// Clears the default sizes that were not given, where a file determines them.
    pub(super) fn leave_sizes_to_the_file(&mut self, given: [bool; 3]) {
        if self.dataset == DatasetSpec::RANDOM {
            return;
        }
        let sizes = [&mut self.num_samples, &mut self.in_features, &mut self.out_features];
        for (size, given) in sizes.into_iter().zip(given) {
            *size = size.filter(|_| given);
        }
    }

    /// Opens the data. Returns it, and this configuration with the sizes of the data. `seed` is the seed of random
    /// data and of the choice of validation samples.
    ///
    /// # Errors
    /// [`Error::Input`] when a data file is invalid, or when given sizes differ from those of the file.
    pub fn open_data(mut self, seed: u64) -> Result<(Self, Data)> {
        let named = |error| Error::Input(format!("--val-fraction: {error}"));
        if self.dataset == DatasetSpec::RANDOM {
            let [samples, inputs, outputs] = self.sizes_of_random()?;
            let targets = match self.loss {
                Loss::Mse => Targets::Values(outputs),
                Loss::CrossEntropy => Targets::Classes(outputs),
            };
            let dataset: Arc<dyn Dataset> =
                Arc::new(TensorDataset::random(samples, inputs, targets, seed)?);
            let Some(fraction) = self.held_back() else {
                return Ok((self, Data { training: dataset, validation: None, notes: Vec::new() }));
            };
            let parts = random_split(dataset.len(), fraction, seed);
            let (training, validation) = parts.map_err(named)?;
            self.num_samples = Some(training.len() as i64);
            let training = Arc::new(Subset::new(dataset.clone(), training));
            let validation: Arc<dyn Dataset> = Arc::new(Subset::new(dataset, validation));
            return Ok((self, Data { training, validation: Some(validation), notes: Vec::new() }));
        }
        let mut notes = Vec::new();
        if self.loss == Loss::Mse && self.dataset.has_classes() {
            notes.push(format!(
                "{} has classes, and --loss mse treats their numbers as values; --loss cross-entropy treats them as \
                 classes",
                self.dataset
            ));
        }
        let mut data = FileDataset::open(&self.dataset, self.target_kind())?;
        if self.out_features.is_none() {
            data.check_number_of_classes()?;
        }
        if let Some(samples) = self.num_samples {
            let named = |error| Error::Input(format!("--num-samples: {error}"));
            data = data.first(samples as usize).map_err(named)?;
        }
        self.take_sizes_of(&data)?;
        let Some(fraction) = self.held_back() else {
            let beside = self.validation_beside(&data)?;
            notes.extend(beside.as_ref().map(|beside| {
                let samples = beside.len();
                format!(
                    "validation on the {samples} samples of {}; --val-fraction 0 turns it off",
                    beside.name()
                )
            }));
            let validation = beside.map(FileDataset::into_dataset).transpose()?;
            return Ok((self, Data { training: data.into_dataset()?, validation, notes }));
        };
        let (training, validation) = data.split(fraction, seed).map_err(named)?;
        self.num_samples = Some(training.len() as i64);
        let validation = Some(validation.into_dataset()?);
        Ok((self, Data { training: training.into_dataset()?, validation, notes }))
    }

    /// Returns whether there may be validation samples. For files that are not open yet, this is not certain.
    pub(super) fn may_validate(&self) -> bool {
        let beside = self.dataset.may_have_validation() && self.val_fraction.is_none();
        beside || self.held_back().is_some()
    }

    /// Returns the fraction of the samples that is held back for validation, if any.
    fn held_back(&self) -> Option<f64> {
        self.val_fraction.filter(|&fraction| fraction > 0.0)
    }

    /// Returns the validation samples in files beside `data`, unless `val_fraction` is given. Their sizes must match.
    fn validation_beside(&self, data: &FileDataset) -> Result<Option<FileDataset>> {
        if self.val_fraction.is_some() {
            return Ok(None);
        }
        let Some(beside) = FileDataset::open_validation(&self.dataset, self.target_kind())? else {
            return Ok(None);
        };
        let (here, there) = (data.in_features(), beside.in_features());
        if here != there {
            return Err(Error::Input(format!(
                "{} has {there} numbers a sample, and {} has {here}; use --val-fraction 0 to train without it",
                beside.name(),
                self.dataset
            )));
        }
        if let (Targets::Classes(_), Some(classes)) = (beside.targets(), self.out_features) {
            let named = |error| Error::Input(format!("--out-features: {error}"));
            beside.check_classes(classes).map_err(named)?;
        }
        Ok(Some(beside))
    }

    fn target_kind(&self) -> TargetKind {
        match self.loss {
            Loss::Mse => TargetKind::Values,
            Loss::CrossEntropy => TargetKind::Classes,
        }
    }

    fn sizes_of_random(&self) -> Result<[i64; 3]> {
        match [self.num_samples, self.in_features, self.out_features] {
            [Some(samples), Some(inputs), Some(outputs)] => Ok([samples, inputs, outputs]),
            _ => Err(Error::Input(format!("random data needs all of {}", SIZES.join(", ")))),
        }
    }

    fn take_sizes_of(&mut self, data: &FileDataset) -> Result<()> {
        let name = &self.dataset;
        let same = |key, given: Option<i64>, found: i64| match given.filter(|&given| given != found)
        {
            None => Ok(Some(found)),
            Some(given) => Err(Error::Input(format!(
                "{}: {name} has {found}, not {given}; leave this out",
                flag_name(key)
            ))),
        };
        self.num_samples = Some(data.len() as i64);
        self.in_features = same("in_features", self.in_features, data.in_features())?;
        self.out_features = match (data.targets(), self.out_features) {
            (Targets::Values(values), given) => same("out_features", given, values)?,
            (Targets::Classes(classes), None) => Some(classes),
            (Targets::Classes(_), Some(given)) => {
                let named = |error| Error::Input(format!("--out-features: {error}"));
                data.check_classes(given).map_err(named)?;
                Some(given)
            }
        };
        let named = |Invalid { key, problem }| {
            Error::Input(format!("{}: {problem} ({name})", flag_name(key)))
        };
        self.validate().map_err(named)
    }
}
