//! PyTorch's names for dtypes, and the sizes of their elements.

use safetensors::Dtype;
use tch::Kind;

use crate::error::{Error, Result};

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
        Error::usage(format!("{name:?} is not a dtype that can be reduced; use one of {names}"))
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

/// The dtypes of libtorch and those of safetensors files, as PyTorch's safetensors maps them.
pub(crate) const SAFETENSORS_DTYPES: [(Kind, Dtype); 10] = [
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
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

/// Returns the size of `numel` elements of `kind`, in bytes.
#[doc(hidden)]
pub fn num_bytes(kind: Kind, numel: usize) -> usize {
    kind.elt_size_in_bytes() * numel
}
