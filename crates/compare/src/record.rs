//! The lines of a record: fingerprints of what each rank had in each step.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use serde_with::{DeserializeFromStr, SerializeDisplay};

/// The version of [`Fingerprint`] as JSON. It grows when an older program can no longer read it.
pub const FINGERPRINT_FORMAT: u32 = 2;

/// Sums in the sketch of a tensor.
pub const SKETCH: usize = 4;

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

/// The fingerprint of a tensor, or of the part of it that is due in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorFingerprint {
    /// The hash of the elements.
    pub hash: TensorHash,
    /// The index of the part, of a tensor that is larger than one; see [`part_of_step`](crate::part_of_step).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u64>,
    /// What tells how far the elements are from others; `None` for dtypes without numbers.
    #[serde(flatten)]
    pub numbers: Option<TensorNumbers>,
}

/// Numbers of the finite elements of a tensor, each to ten digits. The sums are in float64.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorNumbers {
    /// The square root of the sum of their squares.
    pub norm: f64,
    /// The largest magnitude.
    pub largest: f64,
    /// The mean, over all elements.
    pub mean: f64,
    /// Sums of the elements, each with a random sign: a count sketch. The difference of two sketches has the size of the
    /// difference of the tensors.
    pub sketch: [f64; SKETCH],
    /// How many elements are infinite or NaN.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nonfinite: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl TensorNumbers {
    /// Estimates the norm of the difference of two tensors.
    pub fn distance(&self, other: &Self) -> f64 {
        let differences = self.sketch.iter().zip(&other.sketch).map(|(a, b)| (a - b).powi(2));
        let estimate = differences.sum::<f64>().sqrt();
        // No estimates: it is at least that.
        let at_least = (self.norm - other.norm).abs().max((self.largest - other.largest).abs());
        estimate.max(at_least)
    }
}

/// A tensor that a module has returned, or the gradient of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModuleTensor {
    /// The name of the module, as `named_modules` has it.
    pub module: String,
    /// The dtype.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<i64>,
    /// The tensor.
    #[serde(flatten)]
    pub tensor: TensorFingerprint,
}

/// Fingerprints of a rank at one point of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Fingerprint {
    /// What all others are of. Each rank tells it at each start of a run.
    Header(FingerprintedRun),
    /// The tensors of one rank before its first step, whose number is `step`.
    Start {
        /// The number of that step.
        step: u64,
        /// The rank.
        rank: usize,
        /// The parameters.
        parameters: Vec<Option<TensorFingerprint>>,
        /// The buffers.
        buffers: Vec<Option<TensorFingerprint>>,
    },
    /// A step of one rank.
    Step(StepFingerprint),
    /// The rank failed there before its process had told anything of the step; of a killed process as others saw it.
    Failed(StepOfRank),
}

/// A run, and the tensors of which fingerprints are told.
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
    /// Only steps whose index is divisible by this are recorded.
    pub every: u64,
    /// Whether each step has whole tensors, not one part of those that are larger than [`PART`](crate::PART).
    #[serde(default)]
    pub whole: bool,
    /// The options that may change what is trained.
    pub options: Map<String, Value>,
    /// The trained parameters, in the order of the fingerprints.
    pub parameters: Vec<TensorShape>,
    /// The other tensors, in the order of the fingerprints.
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

/// A step of one rank. A fingerprint is `None` where the rank has no such tensor.
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
    /// The dtype that the forward pass computes in, if it is not that of the parameters, as with autocast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computes_in: Option<String>,
    /// The indices of the rank's samples; `None` if the program does not know them.
    pub samples: Option<Vec<usize>>,
    /// The inputs and targets of each batch; `None` if the program does not know them.
    pub batch: Option<Vec<TensorFingerprint>>,
    /// What modules have returned in the forward pass, in the order of execution.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<ModuleTensor>,
    /// The loss of each batch; `None` where it is not finite.
    pub loss: Vec<Option<f64>>,
    /// The gradients of those outputs, in the order in which backward has come to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub output_gradients: Vec<ModuleTensor>,
    /// The rank's own gradients as backward has left them, before the average.
    pub gradients: Vec<Option<TensorFingerprint>>,
    /// The averaged gradients as the optimizer gets them: unscaled and clipped.
    pub averages: Vec<Option<TensorFingerprint>>,
    /// The parameters after the step.
    pub parameters: Vec<Option<TensorFingerprint>>,
    /// The buffers after the step.
    pub buffers: Vec<Option<TensorFingerprint>>,
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
