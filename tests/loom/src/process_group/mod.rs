//! Where `element.rs` looks for what it reduces by.

pub(crate) mod local;

/// As in `src/process_group/reduce_op.rs`, which needs libtorch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ReduceOp {
    Sum,
    Avg,
    Product,
    Min,
    Max,
    Band,
    Bor,
    Bxor,
    PremulSum(f64),
}
