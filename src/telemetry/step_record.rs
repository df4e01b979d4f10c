//! The file of `--record`: lines of JSON with hashes of what each rank had in each step. A run that starts again appends
//! to it.

use std::io;
use std::path::Path;

use parking_lot::{Mutex, Once};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::json_lines::JsonLines;
use crate::error::{Result, Shown};
use crate::files::LinesBefore;

/// The version of the format. It grows when an older program can no longer read a record.
pub(crate) const RECORD_FORMAT: u32 = 1;

/// The first bytes of a record of any version.
const BEGINS: &[u8] = b"{\"event\":\"header\",\"format\":";

/// The 64-bit XXH3 hash of the values of a tensor, written as 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SerializeDisplay, DeserializeFromStr)]
pub(crate) struct TensorHash(pub u64);

impl std::fmt::Display for TensorHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl std::str::FromStr for TensorHash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = Some(text).filter(|text| text.len() == 16);
        let hash = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        hash.map(Self).ok_or_else(|| format!("{text:?} is not a hash of 16 hexadecimal digits"))
    }
}

/// A line of a record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum RecordLine {
    Header(RecordHeader),
    /// The tensors of one rank before its first step, whose number is `step`.
    Start {
        step: u64,
        rank: usize,
        parameters: Vec<Option<TensorHash>>,
        buffers: Vec<Option<TensorHash>>,
    },
    Step(RecordedStep),
    /// The rank failed there before its process had written anything of the step; of a killed process as others saw it.
    Failed(StepOfRank),
}

/// What a record is about. Each start of a run writes one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordHeader {
    pub format: u32,
    /// The program and its version.
    pub program: String,
    pub libtorch: String,
    pub processor: String,
    pub world_size: usize,
    /// Only steps whose number is divisible by this are recorded.
    pub every: u64,
    /// The options that may change what is trained.
    pub options: Map<String, Value>,
    /// The trained parameters, in the order of the hashes.
    pub parameters: Vec<RecordedTensor>,
    /// The other tensors, in the order of the hashes.
    pub buffers: Vec<RecordedTensor>,
}

/// A tensor of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordedTensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<i64>,
}

impl std::fmt::Display for RecordedTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}`, {} {:?}", self.name, self.dtype, self.shape)
    }
}

/// A step of one rank. A hash is `None` where the rank has no such tensor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecordedStep {
    /// The index of the step in the run, from 0.
    pub step: u64,
    pub rank: usize,
    pub epoch: u64,
    pub lr: f64,
    /// The numbers of the rank's samples; `None` if the program does not know them.
    pub samples: Option<Vec<usize>>,
    /// The inputs and targets of each batch; `None` if the program does not know them.
    pub batch: Option<Vec<TensorHash>>,
    /// The loss of each batch; `None` where it is not finite.
    pub loss: Vec<Option<f64>>,
    /// The rank's own gradients as backward has left them, before the average.
    pub gradients: Vec<Option<TensorHash>>,
    /// The averaged gradients as the optimizer gets them: unscaled and clipped.
    pub averages: Vec<Option<TensorHash>>,
    /// The parameters after the step.
    pub parameters: Vec<Option<TensorHash>>,
    /// The buffers after the step.
    pub buffers: Vec<Option<TensorHash>>,
    /// Whether this rank failed in this step, so that the line has only what came before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Whether this rank stopped in this step because another rank failed. That rank may have been a step further.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
}

impl RecordedStep {
    /// Returns whether the rank came to the end of the step.
    pub(crate) fn is_whole(&self) -> bool {
        !self.failed && !self.stopped
    }
}

/// A step of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepOfRank {
    pub step: u64,
    pub rank: usize,
}

/// The file of a process, whose ranks write to it.
#[derive(Debug)]
pub struct RecordFile {
    lines: Mutex<JsonLines>,
    header: Once,
}

impl RecordFile {
    /// Opens the file at `path`, and creates its folder if needed. A run that `continues` an earlier one appends to its
    /// record.
    ///
    /// # Errors
    /// If the file cannot be opened, is not a record, or exists without an earlier run to continue.
    pub fn open(path: &Path, continues: bool) -> io::Result<Self> {
        let check = |before: Option<&LinesBefore>| match before {
            Some(before) if !before.first.starts_with(BEGINS) => {
                Err(io::Error::other("this file exists and is not a record; use another name"))
            }
            Some(_) if !continues => Err(io::Error::other(
                "this record exists; remove it, or use another name (only a run with --resume appends to a record)",
            )),
            _ => Ok(()),
        };
        let (lines, ()) = JsonLines::open(format!("--record {}", path.shown()), path, check)?;
        Ok(Self { lines: Mutex::new(lines), header: Once::new() })
    }

    /// Writes the header, unless another rank of this process has written it.
    ///
    /// # Errors
    /// [`Error::Write`](crate::Error::Write).
    pub(crate) fn begin(&self, header: RecordHeader) -> Result<()> {
        let mut written = Ok(());
        self.header.call_once(|| written = self.line(&RecordLine::Header(header)));
        written
    }

    /// Writes a line as a whole.
    ///
    /// # Errors
    /// [`Error::Write`](crate::Error::Write).
    pub(crate) fn line(&self, line: &RecordLine) -> Result<()> {
        self.lines.lock().line(line)
    }
}
