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
mod text;

pub use file_dataset::FileDataset;
pub use spec::DatasetSpec;

use format::Format;

/// All formats, in the order in which messages list them.
const FORMATS: [&dyn Format; 7] = [
    &built_in::Random,
    &built_in::Digits,
    &safetensors::SafetensorsFile,
    &npy::Npy,
    &idx::Idx,
    &csv::Csv,
    &text::Text,
];

/// The meaning of a file's targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetKind {
    /// Numbers, for example for the mean squared error.
    Values,
    /// Class numbers, for example for cross-entropy.
    Classes,
}
