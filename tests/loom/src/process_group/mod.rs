//! Where `element.rs` looks for what it reduces by.

pub(crate) mod threaded;

/// As in `src/process_group/call.rs`, which needs libtorch.
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
