//! The options of the data.

use clap::Args;
use clap::builder::ArgPredicate;
use serde::Serialize;
use serde_with::skip_serializing_none;

use super::Config;
use super::option_rules::{Conflict, DefaultInWords, InShortHelp, MayDiffer, OnlyIf, RefusedBy};
use super::values::{number, whole};
use engine::data::DatasetSpec;
use engine::models::ModelKind;

/// The samples, and how they are dealt to the ranks.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Data")]
#[group(skip)]
pub struct DataSection {
    /// Choose the data set
    #[arg(long, value_name = "DATA", default_value_t = DatasetSpec::RANDOM, add = InShortHelp, add = Conflict(needs_gpt))]
    #[arg(long_help = format!("Choose the data set\n\n{}", DatasetSpec::forms()))]
    pub dataset: DatasetSpec,
    /// Use N random samples, or a file's first N
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..))]
    #[arg(default_value = "4096", default_value_ifs = unless_a_file_says("4096"))]
    pub num_samples: Option<i64>,
    /// Set the inputs per sample, where no file does
    ///
    /// For a cnn: the pixels of a square image
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..))]
    #[arg(default_value = "20", default_value_ifs = unless_a_file_says("20"))]
    pub in_features: Option<i64>,
    /// Set the model's outputs, where no file does
    ///
    /// For cross-entropy: the number of classes
    #[arg(long, value_name = "N", value_parser = whole::<i64>(1..))]
    #[arg(default_value = "1", default_value_ifs = unless_a_file_says("1"))]
    pub out_features: Option<i64>,
    /// Hold back this fraction of the samples for validation
    ///
    /// Random samples, or the end of a text. idx uses the t10k files instead, if present
    #[arg(long, value_name = "F", value_parser = number(0.0..1.0), add = RefusedBy::TOOLS)]
    #[arg(add = DefaultInWords("none"))]
    pub val_fraction: Option<f64>,
    /// Validate every N epochs, and after the last
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..), default_value_t = 1)]
    #[arg(add = VALIDATION, add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub val_every: u64,
    /// Keep the samples in order; do not shuffle them
    #[arg(long)]
    pub no_shuffle: bool,
    /// Drop samples that cannot be divided equally; add no padding
    #[arg(long)]
    pub drop_last: bool,
    /// Drop a smaller batch at the end of an epoch
    #[arg(long)]
    pub drop_last_batch: bool,
    /// Load batches ahead with N threads per rank
    ///
    /// With 0 the rank itself loads them
    #[arg(long, value_name = "N", value_parser = whole::<usize>(0..=MOST_WORKERS))]
    #[arg(default_value_t = 0, add = MayDiffer::BetweenProcesses)]
    pub num_workers: usize,
    /// Load N batches ahead in each worker
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=MOST_PREFETCHED))]
    #[arg(default_value_t = 2, add = WORKERS, add = MayDiffer::BetweenProcesses)]
    pub prefetch_factor: usize,
}

/// Refuses a text for a model that does not read tokens.
fn needs_gpt(config: &Config) -> Option<String> {
    let is_text = config.data.dataset.text_file().is_some();
    let remedy = match config.program.model {
        Some(_) => "this program brings its own model; open the text as its data set",
        None => "use --model gpt",
    };
    (is_text && config.model.kind != ModelKind::Gpt)
        .then(|| format!("a text is for a gpt; {remedy}"))
}

impl Config {
    /// Returns the name of the data, for reports.
    pub(crate) fn data_name(&self) -> String {
        match self.program.dataset {
            Some(_) => format!("of {}", self.program.name),
            None => self.data.dataset.to_string(),
        }
    }
}

const VALIDATION: OnlyIf = OnlyIf(
    |config| config.may_validate(),
    "there are no validation samples; hold some back with --val-fraction",
);
const WORKERS: OnlyIf = OnlyIf(
    |config| config.data.num_workers > 0,
    "needs --num-workers: no batch is loaded ahead without it",
);

/// The most workers of a rank. Each takes a thread, and more would be a mistake.
const MOST_WORKERS: u64 = 256;

/// The most batches that a worker loads ahead. Room for all of them is allocated before the first is loaded.
const MOST_PREFETCHED: u64 = 1024;

/// Returns the default of a size that data files determine: `size` for random data only.
fn unless_a_file_says(
    size: &'static str,
) -> [(&'static str, ArgPredicate, Option<&'static str>); 2] {
    [
        ("dataset", ArgPredicate::Equals("random".into()), Some(size)),
        ("dataset", ArgPredicate::IsPresent, None),
    ]
}
