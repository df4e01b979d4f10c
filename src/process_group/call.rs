//! What one rank asks for in one collective.

use std::fmt;

use tch::Kind;

use crate::error::{Error, Result};
use crate::operation::Operation;

/// How `all_reduce` combines the tensors of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their sum, divided by the number of ranks. Float kinds only. (NCCL divides each before it adds.)
    Avg,
    /// The sum of each multiplied by this factor, as `torch.distributed`'s `PREMUL_SUM`. Float kinds
    /// only. With `1 / world_size` this is how DDP averages gradients: dividing *before* the sum keeps
    /// half-precision gradients in range, and differs from [`ReduceOp::Avg`] in the last bit.
    PremulSum(f64),
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReduceOp::Sum => f.write_str("sum"),
            ReduceOp::Avg => f.write_str("avg"),
            ReduceOp::PremulSum(factor) => write!(f, "premul_sum {factor}"),
        }
    }
}

impl ReduceOp {
    /// Whether tensors of `kind` can be reduced this way.
    pub(super) fn check_kind(self, kind: Kind) -> Result<()> {
        use Kind::{BFloat16, Double, Float, Half, Int, Int8, Int16, Int64, Uint8};
        match (kind, self) {
            (Double | Float | Half | BFloat16, _) => Ok(()),
            (Int64 | Int | Int16 | Int8 | Uint8, ReduceOp::Sum) => Ok(()),
            (Int64 | Int | Int16 | Int8 | Uint8, _) => Err(Error::Unsupported(format!(
                "all_reduce({self}) does not take {} tensors, because the result would not be whole \
                 numbers; use sum, or convert to a float kind",
                kind_name(kind)
            ))),
            _ => Err(Error::Unsupported(format!(
                "all_reduce({self}) does not take {} tensors; convert to a float or integer kind",
                kind_name(kind)
            ))),
        }
    }
}

/// One call of one rank.
#[derive(Debug)]
pub(crate) struct Call {
    pub operation: Operation,
    /// Its number in the order of this rank's collectives.
    pub sequence: u64,
}

/// A kind by PyTorch's name for it.
pub(crate) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Uint8 => "uint8",
        Kind::Int8 => "int8",
        Kind::Int16 => "int16",
        Kind::Int => "int32",
        Kind::Int64 => "int64",
        Kind::Half => "float16",
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::ComplexHalf => "complex32",
        Kind::ComplexFloat => "complex64",
        Kind::ComplexDouble => "complex128",
        Kind::Bool => "bool",
        Kind::QInt8 => "qint8",
        Kind::QUInt8 => "quint8",
        Kind::QInt32 => "qint32",
        Kind::BFloat16 => "bfloat16",
        Kind::Float8e5m2 => "float8_e5m2",
        Kind::Float8e4m3fn => "float8_e4m3fn",
        Kind::Float8e5m2fnuz => "float8_e5m2fnuz",
        Kind::Float8e4m3fnuz => "float8_e4m3fnuz",
        #[allow(unreachable_patterns)] // kinds that a later tch may add
        _ => "unknown",
    }
}
