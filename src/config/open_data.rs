//! The data of a run: opens it, takes the sizes of a file, and checks the given ones.

use std::sync::Arc;

use tch::Kind;
use toml::Table;

use super::program::OpenDataset;
use super::{Config, DataSection, Origin, OwnArgs, Program};
use engine::data::{
    Dataset, DatasetSpec, DistributedSampler, FileDataset, Subset, TargetKind, Targets,
    TensorDataset, TextDataset,
};
use engine::error::{Error, Result, Shown};
use engine::runtime::panics;
use engine::trainer::Loss;

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
            .shuffle(!self.data.no_shuffle)
            .seed(self.training.seed)
            .drop_last(self.data.drop_last)?;
        Ok(if self.ddp.exact_mean && !self.data.drop_last {
            sampler.without_padding()
        } else {
            sampler
        })
    }

    /// Opens the data. Returns it, and this configuration with the sizes of the data. `seed` is the seed of random
    /// data and of the choice of validation samples.
    ///
    /// # Errors
    /// [`Error::Input`] when a data file is invalid, or when given sizes differ from those of the file.
    pub fn open_data(self, seed: u64) -> Result<(Self, Data)> {
        if let Some(open) = self.program.dataset.clone() {
            return self.open_own(&*open, seed);
        }
        if self.data.dataset == DatasetSpec::RANDOM {
            return self.open_random(seed);
        }
        if let Some(file) = self.data.dataset.text_file() {
            let text = TextDataset::open(file, self.model.block_size as usize)?;
            return self.open_text(text);
        }
        self.open_files(seed)
    }

    /// Returns random data, and this configuration with its number of training samples.
    fn open_random(self, seed: u64) -> Result<(Self, Data)> {
        let Some([samples, inputs, outputs]) = self.sizes() else {
            let keys = SIZES.join(", ");
            return Err(Error::usage(format!("random data needs all of {keys}")));
        };
        let targets = match self.target_kind() {
            TargetKind::Values => Targets::Values(outputs),
            TargetKind::Classes => Targets::Classes(outputs),
        };
        let dataset = Arc::new(TensorDataset::random(samples, inputs, targets, seed)?);
        self.hold_back(dataset, seed)
    }

    /// Returns the data of the files of `--dataset`, and this configuration with their sizes.
    fn open_files(mut self, seed: u64) -> Result<(Self, Data)> {
        let mut notes = Vec::new();
        if self.target_kind() == TargetKind::Values && self.data.dataset.has_classes() {
            notes.push(format!(
                "{} has classes, and --loss mse treats their numbers as values; --loss cross-entropy treats them as \
                 classes",
                self.data.dataset.shown()
            ));
        }
        let mut data = FileDataset::open(&self.data.dataset, self.target_kind())?;
        if self.data.out_features.is_none() {
            data.check_number_of_classes()?;
        }
        if let Some(samples) = self.data.num_samples {
            data = self.named("num_samples", data.first(samples as usize))?;
        }
        let outputs = match (data.targets(), self.data.out_features) {
            (Targets::Classes(_), Some(given)) => {
                self.named("out_features", data.check_classes(given))?;
                given
            }
            (Targets::Classes(outputs) | Targets::Values(outputs), _) => outputs,
        };
        self.take_sizes(data.len(), data.in_features(), outputs)?;
        let files = self.validation_files(&data)?;
        notes.extend(files.as_ref().map(|files| {
            let samples = files.len();
            format!(
                "validation on the {samples} samples of {}; --val-fraction 0 turns it off",
                files.name()
            )
        }));
        let validation = files.map(FileDataset::into_dataset).transpose()?;
        let (config, data) = self.hold_back(data.into_dataset()?, seed)?;
        Ok((config, Data { validation: validation.or(data.validation), notes, ..data }))
    }

    /// Returns `dataset`, and this configuration with its size. A fraction of the samples may be held back.
    fn hold_back(mut self, dataset: Arc<dyn Dataset>, seed: u64) -> Result<(Self, Data)> {
        let (mut training, mut validation) = (dataset, None::<Arc<dyn Dataset>>);
        if let Some(fraction) = self.held_back() {
            let parts = Subset::split(training, fraction, seed);
            let (first, second) = self.named("val_fraction", parts)?;
            training = Arc::new(first);
            validation = Some(Arc::new(second));
        }
        self.data.num_samples = Some(training.len() as i64);
        Ok((self, Data { training, validation, notes: Vec::new() }))
    }

    /// Returns the program's own data, which `open` opens, and this configuration with its sizes.
    fn open_own(mut self, open: &OpenDataset, seed: u64) -> Result<(Self, Data)> {
        let program = self.program.clone();
        let dataset = program.open("data set", open, &*self.own.args)?;
        if program.model.is_none() {
            self.take_sizes_of_samples(&*dataset)?;
        }
        // With a fraction they are held back, or turned off.
        let validation = program.validation.as_ref().filter(|_| self.data.val_fraction.is_none());
        let validation =
            validation.map(|open| program.open("validation data", &**open, &*self.own.args));
        let validation = validation.transpose()?;
        let (config, data) = self.hold_back(dataset, seed)?;
        Ok((config, Data { validation: validation.or(data.validation), ..data }))
    }

    /// Takes the sizes of the first sample of the program's own data, for a model of `--model`.
    fn take_sizes_of_samples(&mut self, dataset: &dyn Dataset) -> Result<()> {
        let (inputs, targets) = dataset.batch(&[0]).map_err(Error::of_samples(&[0]))?;
        let inputs = inputs.numel() as i64;
        if let Some(other) = self.data.in_features.filter(|&given| given != inputs) {
            return Err(Error::mismatch(format!(
                "{}: a sample has {inputs} numbers, not {other}; leave this out",
                self.name_of("in_features")
            )));
        }
        self.data.in_features = Some(inputs);
        if self.origin_of("out_features") == Origin::Default {
            if targets.kind() == Kind::Int64 {
                return Err(Error::usage(
                    "--out-features: the number of classes is not known; give it".into(),
                ));
            }
            self.data.out_features = Some(targets.numel() as i64);
        }
        self.validate_sizes("")
    }

    /// Returns this configuration without the sizes that options give by default, if the program's own data says them.
    /// `given` are the options that the user and the program give.
    pub(super) fn leaving_sizes_to_own_data(mut self, given: &Table) -> Self {
        if self.program.dataset.is_none() {
            return self;
        }
        self.data.num_samples = None;
        if !given.contains_key("in_features") {
            self.data.in_features = None;
        }
        if !given.contains_key("out_features") {
            self.data.out_features = None;
        }
        self
    }

    /// Returns the contexts of `text`, and this configuration with their sizes. The validation samples are the end of
    /// the text.
    fn open_text(mut self, text: TextDataset) -> Result<(Self, Data)> {
        let (mut training, mut validation) = (text, None::<Arc<dyn Dataset>>);
        if let Some(samples) = self.data.num_samples {
            training = self.named("num_samples", training.first(samples as usize))?;
        }
        if let Some(fraction) = self.held_back() {
            let (first, tail) = self.named("val_fraction", training.split_tail(fraction))?;
            training = first;
            validation = Some(Arc::new(tail));
        }
        self.take_sizes(training.len(), self.model.block_size, TextDataset::VOCAB_SIZE)?;
        Ok((self, Data { training: Arc::new(training), validation, notes: Vec::new() }))
    }

    /// Returns whether there may be validation samples. For files that are not open yet, this is not certain.
    pub(super) fn may_validate(&self) -> bool {
        let has_own = self.program.validation.is_some();
        let has_files = has_own || self.data.dataset.may_have_validation();
        has_files && self.data.val_fraction.is_none() || self.held_back().is_some()
    }

    /// Returns the fraction of the samples that is held back for validation, if any.
    fn held_back(&self) -> Option<f64> {
        self.data.val_fraction.filter(|&fraction| fraction > 0.0)
    }

    /// Returns the validation samples in files beside `data`, unless `val_fraction` is given. Their sizes must match.
    fn validation_files(&self, data: &FileDataset) -> Result<Option<FileDataset>> {
        if self.data.val_fraction.is_some() {
            return Ok(None);
        }
        let Some(files) = FileDataset::open_validation(&self.data.dataset, self.target_kind())?
        else {
            return Ok(None);
        };
        let (here, there) = (data.in_features(), files.in_features());
        if here != there {
            return Err(Error::mismatch(format!(
                "{} has {there} numbers a sample, and {} has {here}; use --val-fraction 0 to train without it",
                files.name(),
                self.data.dataset.shown()
            )));
        }
        if let (Targets::Classes(_), Some(classes)) = (files.targets(), self.data.out_features) {
            self.named("out_features", files.check_classes(classes))?;
        }
        Ok(Some(files))
    }

    /// Returns this configuration without validation, for a command of a few steps.
    pub(crate) fn without_validation(mut self) -> Self {
        self.data.val_fraction = Some(0.0);
        self.training.patience = None;
        self
    }

    fn target_kind(&self) -> TargetKind {
        let has_classes = if self.program.criterion.has_own_loss() {
            self.data.dataset.has_classes()
        } else {
            self.training.loss == Loss::CrossEntropy
        };
        if has_classes { TargetKind::Classes } else { TargetKind::Values }
    }

    /// Returns the numbers of [`SIZES`]. `None` unless all are known.
    pub(super) fn sizes(&self) -> Option<[i64; 3]> {
        let DataSection { num_samples, in_features, out_features, .. } = self.data;
        Some([num_samples?, in_features?, out_features?])
    }

    /// Takes the sizes of a file, which must be those that are given.
    fn take_sizes(&mut self, samples: usize, inputs: i64, outputs: i64) -> Result<()> {
        let DataSection { in_features, out_features, .. } = self.data;
        for (key, given, found) in
            [("in_features", in_features, inputs), ("out_features", out_features, outputs)]
        {
            if let Some(given) = given.filter(|given| *given != found) {
                return Err(Error::mismatch(format!(
                    "{}: {} has {found}, not {given}; leave this out",
                    self.name_of(key),
                    self.data.dataset.shown()
                )));
            }
        }
        self.data.num_samples = Some(samples as i64);
        (self.data.in_features, self.data.out_features) = (Some(inputs), Some(outputs));
        self.validate_sizes(&format!(" ({})", self.data.dataset.shown()))
    }

    /// Checks the configuration with the sizes of the data. An error ends with `source`.
    fn validate_sizes(&self, source: &str) -> Result<()> {
        let checked = self.validate(&self.changed(&self.program.command())?);
        checked.map_err(|invalid| Error::mismatch(self.explained(invalid) + source))
    }

    /// Puts the name of the option `key` before an error about its value.
    pub(super) fn named<T>(&self, key: &str, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.named(self.name_of(key)))
    }
}

impl Program {
    /// Opens a part of the program's own data, which errors call `name`.
    ///
    /// # Errors
    /// The error of the program, and [`Error::Input`] for data without samples.
    fn open(&self, name: &str, open: &OpenDataset, args: &OwnArgs) -> Result<Arc<dyn Dataset>> {
        let of_program =
            |problem: String| Error::usage(format!("the {name} of {}: {problem}", self.name));
        let opened = panics::in_closure("its closure", || open(args));
        let opened = opened.map_err(anyhow::Error::from).and_then(|opened| opened);
        let dataset = opened.map_err(|error| of_program(format!("{error:#}")))?;
        if dataset.is_empty() {
            return Err(of_program("it has no samples; give it at least one".into()));
        }
        Ok(dataset)
    }
}
