//! Hashes of what each rank had in each step.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use serde_with::{DeserializeFromStr, SerializeDisplay};

/// The version of [`Fingerprint`] as JSON. It grows when an older program can no longer read it.
pub const FINGERPRINT_FORMAT: u32 = 1;

/// The 64-bit XXH3 hash of the values of a tensor, written as 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SerializeDisplay, DeserializeFromStr)]
pub struct TensorHash(
    /// The hash.
    pub u64,
);

impl fmt::Display for TensorHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for TensorHash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = Some(text).filter(|text| text.len() == 16);
        let hash = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        hash.map(Self).ok_or_else(|| format!("{text:?} is not a hash of 16 hexadecimal digits"))
    }
}

/// Hashes of a rank at one point of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Fingerprint {
    /// What all other hashes are of. Each rank tells it at each start of a run.
    Header(FingerprintedRun),
    /// The tensors of one rank before its first step, whose number is `step`.
    Start {
        /// The number of that step.
        step: u64,
        /// The rank.
        rank: usize,
        /// The parameters.
        parameters: Vec<Option<TensorHash>>,
        /// The buffers.
        buffers: Vec<Option<TensorHash>>,
    },
    /// A step of one rank.
    Step(StepFingerprint),
    /// The rank failed there before its process had told anything of the step; of a killed process as others saw it.
    Failed(StepOfRank),
}

/// A run, and the tensors of which hashes are told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FingerprintedRun {
    /// [`FINGERPRINT_FORMAT`].
    pub format: u32,
    /// The program and its version.
    pub program: String,
    /// The version of libtorch.
    pub libtorch: String,
    /// The name of the processor.
    pub processor: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Only steps whose number is divisible by this are hashed.
    pub every: u64,
    /// The options that may change what is trained.
    pub options: Map<String, Value>,
    /// The trained parameters, in the order of the hashes.
    pub parameters: Vec<TensorShape>,
    /// The other tensors, in the order of the hashes.
    pub buffers: Vec<TensorShape>,
}

/// A tensor of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorShape {
    /// Its name.
    pub name: String,
    /// Its dtype, as PyTorch names it.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<i64>,
}

impl fmt::Display for TensorShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`, {} {:?}", self.name, self.dtype, self.shape)
    }
}

/// A step of one rank. A hash is `None` where the rank has no such tensor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepFingerprint {
    /// The index of the step in the run, from 0.
    pub step: u64,
    /// The rank.
    pub rank: usize,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The learning rate.
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
    /// Whether this rank failed in this step, so that only what came before is known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Whether this rank stopped in this step because another rank failed. That rank may have been a step further.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
}

impl StepFingerprint {
    /// Returns whether the rank came to the end of the step.
    pub fn is_whole(&self) -> bool {
        !self.failed && !self.stopped
    }
}

/// A step of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepOfRank {
    /// The index of the step in the run, from 0.
    pub step: u64,
    /// The rank.
    pub rank: usize,
}
