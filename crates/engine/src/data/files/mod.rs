//! Data sets in files, of any supported format: `--dataset`.

mod array;
mod built_in;
mod csv;
mod file_dataset;
mod format;
mod idx;
mod npy;
mod safetensors;
mod spec;

pub use file_dataset::FileDataset;
pub use spec::DatasetSpec;

use crate::error::Error;
use format::Format;

/// A text, of which [`TextDataset`](crate::TextDataset) makes contexts: its bytes are tokens.
const TEXT: Format = Format {
    remark: "for --model gpt",
    endings: &[".txt"],
    has_classes: true,
    ..Format::new("text:FILE", |_, _| {
        Err(Error::usage("a text has no samples of numbers; use TextDataset::open".into()))
    })
};

/// All formats, in the order in which messages list them.
const FORMATS: [&Format; 7] = [
    &built_in::RANDOM,
    &built_in::DIGITS,
    &safetensors::SAFETENSORS,
    &npy::NPY,
    &idx::IDX,
    &csv::CSV,
    &TEXT,
];

/// The meaning of a file's targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetKind {
    /// Numbers, for example for the mean squared error.
    Values,
    /// Class numbers, for example for cross-entropy.
    Classes,
}
