//! What one rank asks for in one collective.

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
    /// Their sum. Integers wrap on overflow.
    Sum,
    /// Their sum, divided by the number of ranks. Float kinds only. (NCCL divides each before it adds.) For float16 and
    /// bfloat16 sum and quotient are float32, and the quotient alone is rounded.
    Avg,
    /// Their product. Integers wrap on overflow.
    Product,
    /// The smallest. A NaN wins.
    Min,
    /// The largest. A NaN wins.
    Max,
    /// Bitwise and. Integers and bool; not with NCCL.
    Band,
    /// Bitwise or. Integers and bool; not with NCCL.
    Bor,
    /// Bitwise exclusive or. Integers and bool; not with NCCL.
    Bxor,
    /// The sum of each multiplied by this factor, as `torch.distributed`'s `PREMUL_SUM`. Float kinds
    /// only, and with NCCL in all_reduce only. With `1 / world_size` this is how DDP averages gradients: dividing *before* the sum keeps
    /// half-precision gradients in range, and differs from [`ReduceOp::Avg`] in the last bit.
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

    /// Reads what it is written as, but for [`ReduceOp::PremulSum`], which has a number of its own.
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
    /// Whether tensors of `kind` can be reduced this way by `operation`.
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

/// One call of one rank: what it asks for, and its tensors, each in one piece of memory.
///
/// Which tensors there are is up to the operation. A list has one for each rank, in their order.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub operation: Operation,
    /// Its number in the order of this rank's collectives.
    pub sequence: u64,
    /// For reductions.
    pub reduce_op: Option<ReduceOp>,
    /// For operations that have one rank as their source or destination.
    pub root: Option<usize>,
    /// Of all tensors; bytes if there are none.
    pub kind: Kind,
    /// The shape that must be the same on all ranks.
    pub shape: &'a [i64],
    pub inputs: &'a [Tensor],
    pub outputs: &'a [Tensor],
    /// For sums: how much this rank counts; on all ranks or on none.
    pub weight: Option<f64>,
    /// How long to wait for the others, if not as long as usual.
    pub timeout: Option<Duration>,
    /// Which line of the program makes it, for errors.
    pub place: Option<CallSite>,
}

impl Call<'_> {
    /// A call without tensors.
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

    /// What it is called in errors.
    pub(super) fn at(&self) -> OpId {
        OpId { operation: self.operation, sequence: self.sequence }
    }

    /// What an operation that always reduces reduces with.
    pub(super) fn op(&self) -> ReduceOp {
        self.reduce_op.unwrap_or(ReduceOp::Sum)
    }

    /// The rank that an operation with a root has as such.
    pub(super) fn root(&self) -> usize {
        self.root.unwrap_or(0)
    }
}

/// The kinds that can be reduced, by PyTorch's names for them.
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

/// The kind of [`DTYPES`] with this name of PyTorch's, such as `float32`.
///
/// # Errors
/// [`Error::Input`] for other names; it lists them.
pub fn parse_dtype(name: &str) -> Result<Kind> {
    DTYPES.into_iter().find(|&kind| dtype_name(kind) == name).ok_or_else(|| {
        let names = DTYPES.map(dtype_name).join(", ");
        Error::Input(format!(
            "{name:?} is not a kind of tensor that can be reduced; use one of {names}"
        ))
    })
}

/// All kinds, with PyTorch's names for them.
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

/// Returns the kind with this name of PyTorch's, if a tensor of that kind is its bytes: a quantized one also has a scale.
pub(super) fn plain_kind(name: &str) -> Option<Kind> {
    let kind = NAMES.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind);
    kind.filter(|kind| !matches!(kind, Kind::QInt8 | Kind::QUInt8 | Kind::QInt32))
}
