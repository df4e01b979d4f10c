//! The operations that combine the ranks' elements, and the dtypes that each takes.

use std::str::FromStr;

use strum::{Display, EnumIter, IntoEnumIterator};
use tch::Kind;

use super::dtype::dtype_name;
use crate::error::{Error, Result};
use crate::operation::Operation;

/// How a reduction combines the elements of the ranks' tensors.
#[derive(Debug, Clone, Copy, PartialEq, Display, EnumIter)]
#[strum(serialize_all = "snake_case")]
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
    #[strum(to_string = "sum of {0} * each")]
    PremulSum(f64),
}

impl ReduceOp {
    /// Returns the factor that multiplies each tensor.
    pub(super) fn factor(self) -> f64 {
        if let ReduceOp::PremulSum(factor) = self { factor } else { 1.0 }
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    /// Parses the name that `Display` writes. [`ReduceOp::PremulSum`] cannot be parsed: it has a number.
    fn from_str(text: &str) -> Result<Self> {
        let known = || Self::iter().filter(|op| !matches!(op, Self::PremulSum(_)));
        known().find(|op| op.to_string() == text).ok_or_else(|| {
            let names: Vec<String> = known().map(|op| op.to_string()).collect();
            Error::usage(format!("{text:?} is not a reduce op; use one of {}", names.join(", ")))
        })
    }
}

impl ReduceOp {
    /// Checks that `operation` can reduce tensors of `kind` with this op.
    #[doc(hidden)]
    pub fn check_kind(self, operation: Operation, kind: Kind) -> Result<()> {
        use Kind::{BFloat16, Bool, Double, Float, Half, Int, Int8, Int16, Int64, Uint8};
        let is_bitwise = matches!(self, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
        let is_fraction = matches!(self, ReduceOp::Avg | ReduceOp::PremulSum(_));
        let advice = match kind {
            Double | Float | Half | BFloat16 if is_bitwise => "it is for integers and bool",
            Double | Float | Half | BFloat16 => return Ok(()),
            Int64 | Int | Int16 | Int8 | Uint8 if is_fraction => {
                "the result would not be whole numbers; use sum, or convert to a float dtype"
            }
            Int64 | Int | Int16 | Int8 | Uint8 => return Ok(()),
            Bool if is_bitwise || matches!(self, ReduceOp::Min | ReduceOp::Max) => return Ok(()),
            Bool => "use band or bor, or convert to an integer dtype to count",
            _ => "convert to a float or integer dtype",
        };
        let kind = dtype_name(kind);
        Err(Error::unsupported(format!(
            "{operation}({self}) does not take {kind} tensors: {advice}"
        )))
    }
}
