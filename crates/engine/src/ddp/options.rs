//! The options of `DistributedDataParallel`.

use crate::optim::OptimizerLayout;

/// The options of [`DistributedDataParallel`](super::DistributedDataParallel), with PyTorch's names and defaults.
///
/// Gradients are views of their buckets, as with PyTorch's `gradient_as_bucket_view`. Large gradients of CPU ranks in
/// one process are not: the ranks average them where autograd has put them.
#[derive(Debug, Clone, PartialEq)]
pub struct DdpOptions {
    /// Capacity of a bucket, in MiB. PyTorch's `bucket_cap_mb`.
    pub bucket_cap_mb: f64,
    /// Capacity of the first bucket, in MiB. Its gradients are the first that backward completes, and a small bucket
    /// can be reduced early.
    pub first_bucket_mb: f64,
    /// Copy rank 0's parameters and buffers to all ranks at construction. If false, the caller guarantees that they are
    /// identical.
    pub init_sync: bool,
    /// Copy rank 0's buffers, such as a batch norm's running statistics, to all ranks with every backward that
    /// averages. PyTorch does it before the next forward; only the state after the last step differs. Within
    /// [`join`](super::DistributedDataParallel::join) the buffers are copied at its end instead.
    pub broadcast_buffers: bool,
    /// The capacity of each bucket in order, in MiB; the last value applies to all further buckets. Replaces
    /// `bucket_cap_mb` and `first_bucket_mb` unless it is empty. PyTorch's `bucket_cap_mb_list`.
    pub bucket_cap_mb_list: Vec<f64>,
    /// Allow a loss that does not depend on some parameters; these contribute zeros. A parameter that no rank has used
    /// since [`zero_grad`](super::DistributedDataParallel::zero_grad) has no gradient, and optimizers skip it. Costs a
    /// small collective per step. Without this option unused parameters are
    /// [`Error::UnusedParameters`](crate::Error::UnusedParameters).
    pub find_unused_parameters: bool,
    /// The loss depends on the same parameters in every step. Parameters that the first step does not use may stay
    /// unused in all steps, at no further cost.
    pub static_graph: bool,
    /// Reduce buckets during backward. `None` enables it where it is faster (with `nccl` and over a network) and all
    /// ranks are sure to use the same parameters. Apex called the opposite `delay_allreduce`. Must be the same on all
    /// ranks.
    pub overlap: Option<bool>,
    /// Names of parameters and buffers to ignore: they are not compared, copied or averaged, and are not in
    /// [`flat_buffers`](super::DistributedDataParallel::flat_buffers). Each rank keeps its own values and gradients.
    /// Follows `_set_params_and_buffers_to_ignore_for_model`.
    pub ignore: Vec<String>,
    /// How the ranks keep the parameters and the optimizer's state.
    pub optimizer_layout: OptimizerLayout,
}

impl DdpOptions {
    /// Returns the capacities of the buckets in order, in bytes.
    pub(super) fn bucket_caps(&self) -> Vec<usize> {
        match &self.bucket_cap_mb_list[..] {
            [] => vec![mib(self.first_bucket_mb), mib(self.bucket_cap_mb)],
            caps => caps.iter().copied().map(mib).collect(),
        }
    }
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            init_sync: true,
            broadcast_buffers: true,
            bucket_cap_mb_list: Vec::new(),
            find_unused_parameters: false,
            static_graph: false,
            overlap: None,
            ignore: Vec::new(),
            optimizer_layout: OptimizerLayout::Replicated,
        }
    }
}

/// Converts a capacity from MiB to bytes.
fn mib(cap: f64) -> usize {
    (cap * f64::from(1 << 20)) as usize
}
