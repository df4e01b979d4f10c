//! The module of `local`, and the `ReduceOp` that `element.rs` uses.

pub(crate) mod local;

/// Follows `crates/engine/src/process_group/reduce_op.rs`, which needs libtorch.
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
