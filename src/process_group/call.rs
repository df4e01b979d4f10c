//! One rank's call of a collective: its arguments and its tensors.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
use crate::runtime::CallSite;

/// How a reduction combines the elements of the ranks' tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReduceOp {
    /// The sum. Integers wrap on overflow.
    Sum,
    /// The sum divided by the number of ranks. Float dtypes only. (NCCL divides each element before it adds.) For
    /// float16 and bfloat16, the sum and the quotient are float32, and only the quotient is rounded.
    Avg,
    /// The product. Integers wrap on overflow.
    Product,
    /// The minimum. A NaN wins.
    Min,
    /// The maximum. A NaN wins.
    Max,
    /// Bitwise and. Integers and bool; not with NCCL.
    Band,
    /// Bitwise or. Integers and bool; not with NCCL.
    Bor,
    /// Bitwise exclusive or. Integers and bool; not with NCCL.
    Bxor,
    /// The sum of the tensors, each multiplied by this factor, as `torch.distributed`'s `PREMUL_SUM`. Float dtypes
    /// only, and with NCCL in all_reduce only. DDP averages gradients with the factor `1 / world_size`. Dividing
    /// *before* the sum keeps half-precision gradients in range, and differs from [`ReduceOp::Avg`] in the last
    /// bit.
    PremulSum(f64),
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Product => "product",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Band => "band",
            ReduceOp::Bor => "bor",
            ReduceOp::Bxor => "bxor",
            ReduceOp::PremulSum(factor) => return write!(f, "premul_sum {factor}"),
        })
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    /// Parses the name that `Display` writes. [`ReduceOp::PremulSum`] cannot be parsed: it has a number.
    fn from_str(text: &str) -> Result<Self> {
        use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, Product, Sum};
        let known = [Sum, Avg, Product, Min, Max, Band, Bor, Bxor];
        known.into_iter().find(|op| op.to_string() == text).ok_or_else(|| {
            let names: Vec<String> = known.iter().map(ToString::to_string).collect();
            Error::Input(format!("{text:?} is not a reduce op; use one of {}", names.join(", ")))
        })
    }
}

impl ReduceOp {
    /// Checks that `operation` can reduce tensors of `kind` with this op.
    pub(crate) fn check_kind(self, operation: Operation, kind: Kind) -> Result<()> {
        use Kind::{BFloat16, Bool, Double, Float, Half, Int, Int8, Int16, Int64, Uint8};
        let is_bitwise = matches!(self, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
        let is_fraction = matches!(self, ReduceOp::Avg | ReduceOp::PremulSum(_));
        let advice = match kind {
            Double | Float | Half | BFloat16 if is_bitwise => "it is for integers and bool",
            Double | Float | Half | BFloat16 => return Ok(()),
            Int64 | Int | Int16 | Int8 | Uint8 if is_fraction => {
                "the result would not be whole numbers; use sum, or convert to a float kind"
            }
            Int64 | Int | Int16 | Int8 | Uint8 => return Ok(()),
            Bool if is_bitwise || matches!(self, ReduceOp::Min | ReduceOp::Max) => return Ok(()),
            Bool => "use band or bor, or convert to an integer kind to count",
            _ => "convert to a float or integer kind",
        };
        let kind = dtype_name(kind);
        Err(Error::Unsupported(format!(
            "{operation}({self}) does not take {kind} tensors: {advice}"
        )))
    }
}

/// One rank's call of a collective: its arguments and its contiguous tensors.
///
/// The operation determines which tensors there are. A list has one tensor for each rank, in rank order.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub operation: Operation,
    /// The call's number in the order of this rank's collectives, from 0.
    pub sequence: u64,
    /// Set for reductions.
    pub reduce_op: Option<ReduceOp>,
    /// The source or the destination rank, for operations that have one.
    pub root: Option<usize>,
    /// The dtype of all tensors; `Uint8` if there are none.
    pub kind: Kind,
    /// The shape that must be the same on all ranks.
    pub shape: &'a [i64],
    pub inputs: &'a [Tensor],
    pub outputs: &'a [Tensor],
    /// This rank's weight in a sum. All ranks have one, or none has.
    pub weight: Option<f64>,
    /// The timeout; `None` for the run's timeout.
    pub timeout: Option<Duration>,
    /// The call site in the program, for errors.
    pub place: Option<CallSite>,
}

impl Call<'_> {
    /// Returns a call without tensors.
    pub(super) fn bare(operation: Operation) -> Self {
        Self {
            operation,
            sequence: 0,
            reduce_op: None,
            root: None,
            kind: Kind::Uint8,
            shape: &[],
            inputs: &[],
            outputs: &[],
            weight: None,
            timeout: None,
            place: None,
        }
    }

    /// Returns the operation and the number of the call, for errors.
    pub(super) fn at(&self) -> OpId {
        OpId { operation: self.operation, sequence: self.sequence }
    }

    /// Returns the reduction of an operation that always reduces.
    pub(super) fn op(&self) -> ReduceOp {
        self.reduce_op.unwrap_or(ReduceOp::Sum)
    }

    /// Returns the root rank of an operation that has one.
    pub(super) fn root(&self) -> usize {
        self.root.unwrap_or(0)
    }
}

/// The dtypes that can be reduced. [`dtype_name`] returns PyTorch's names for them.
pub const DTYPES: [Kind; 10] = [
    Kind::Double,
    Kind::Float,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
];

/// Returns the dtype in [`DTYPES`] with this PyTorch name, such as `float32`.
///
/// # Errors
/// [`Error::Input`] for other names; the message lists the valid ones.
pub fn parse_dtype(name: &str) -> Result<Kind> {
    DTYPES.into_iter().find(|&kind| dtype_name(kind) == name).ok_or_else(|| {
        let names = DTYPES.map(dtype_name).join(", ");
        Error::Input(format!(
            "{name:?} is not a kind of tensor that can be reduced; use one of {names}"
        ))
    })
}

/// All dtypes, with PyTorch's names for them.
const NAMES: [(Kind, &str); 20] = [
    (Kind::Uint8, "uint8"),
    (Kind::Int8, "int8"),
    (Kind::Int16, "int16"),
    (Kind::Int, "int32"),
    (Kind::Int64, "int64"),
    (Kind::Half, "float16"),
    (Kind::Float, "float32"),
    (Kind::Double, "float64"),
    (Kind::ComplexHalf, "complex32"),
    (Kind::ComplexFloat, "complex64"),
    (Kind::ComplexDouble, "complex128"),
    (Kind::Bool, "bool"),
    (Kind::QInt8, "qint8"),
    (Kind::QUInt8, "quint8"),
    (Kind::QInt32, "qint32"),
    (Kind::BFloat16, "bfloat16"),
    (Kind::Float8e5m2, "float8_e5m2"),
    (Kind::Float8e4m3fn, "float8_e4m3fn"),
    (Kind::Float8e5m2fnuz, "float8_e5m2fnuz"),
    (Kind::Float8e4m3fnuz, "float8_e4m3fnuz"),
];

/// Returns PyTorch's name of `kind`.
pub fn dtype_name(kind: Kind) -> &'static str {
    // A later tch may add kinds.
    NAMES.iter().find(|(known, _)| *known == kind).map_or("unknown", |(_, name)| name)
}

/// Returns the dtype with this PyTorch name. `None` for unknown names and for quantized dtypes, whose tensors have
/// a scale in addition to their bytes.
pub(super) fn plain_kind(name: &str) -> Option<Kind> {
    let kind = NAMES.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind);
    kind.filter(|kind| !matches!(kind, Kind::QInt8 | Kind::QUInt8 | Kind::QInt32))
}
