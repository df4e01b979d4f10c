//! Records of training runs, and the first number in which two of them differ.
//!
//! | module | what happens there |
//! |---|---|
//! | `diff` | the command `diff`: two records, or two files of tensors |
//! | `texts` | what it says of two records |
//! | `causes` | known mistakes that two records show |
//! | `comparison` | the first step, rank and tensor that differ: in their bits, and beyond rounding |
//! | `distance` | how far the tensors are from each other, and whether that is rounding |
//! | `read` | reads the files of a run |
//! | `tensors` | compares the values of two files of tensors |
//! | `measure` | makes the fingerprint of a tensor |
//! | `record` | the lines of a record |
//! | `columns`, `files`, `layout`, `mistaken`, `text` | what all programs of `ddp-mp` share: files of users, and text |
//!
//! It needs no libtorch, so the Python package has it as it is.

mod causes;
mod columns;
mod comparison;
mod diff;
mod distance;
mod files;
mod layout;
mod measure;
mod mistaken;
mod read;
mod record;
mod tensors;
mod text;
mod texts;

#[cfg(feature = "command-line")]
pub use diff::DiffFlags;
pub use diff::{Diff, Refused, compare_records, diff};
pub use measure::{PART, fingerprint, part_of_step};
pub use record::{
    FINGERPRINT_FORMAT, Fingerprint, FingerprintedRun, ModuleTensor, SKETCH, StepFingerprint,
    StepOfRank, TensorFingerprint, TensorHash, TensorNumbers, TensorShape,
};
pub use tensors::compare_tensors;

// What all programs of ddp-mp share.
#[doc(hidden)]
pub use columns::in_columns;
#[doc(hidden)]
pub use files::{
    explain_path, name_of_kind, not_regular, numbered_path, open_regular, open_without_waiting,
    remedy_of_path,
};
#[doc(hidden)]
pub use layout::{indices, paragraph, table};
#[doc(hidden)]
pub use mistaken::{GZIP, HTML, RECOGNIZED_BY, SAFETENSORS, kind_of, mistaken};
#[doc(hidden)]
pub use text::{Shown, counted, escaped, escaped_line, list_ranks, runs};
