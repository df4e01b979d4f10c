//! The options of `DistributedDataParallel`.

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
    /// Skip buckets in which a step uses no parameter. Every rank must leave out the same parameters in the same steps,
    /// otherwise their collectives differ. Requires `find_unused_parameters` or `static_graph`, and makes buckets be
    /// reduced after backward. PyTorch's `skip_all_reduce_unused_params`.
    pub skip_all_reduce_unused_params: bool,
    /// The loss depends on the same parameters in every step. Parameters that the first step does not use may stay
    /// unused in all steps, at no further cost.
    pub static_graph: bool,
    /// Reduce buckets during backward. `None` enables it where it is faster (with `nccl` and between processes) and all
    /// ranks are sure to use the same parameters. Apex called the opposite `delay_allreduce`. Must be the same on all
    /// ranks.
    pub overlap: Option<bool>,
    /// Names of parameters and buffers to ignore: they are not compared, copied or averaged, and are not in
    /// [`flat_buffers`](super::DistributedDataParallel::flat_buffers). Each rank keeps its own values and gradients.
    /// Follows `_set_params_and_buffers_to_ignore_for_model`.
    pub ignore: Vec<String>,
    /// Keep one copy of the parameters and of the optimizer's state for all ranks of a process. These ranks must be on
    /// the CPU or on one GPU. The optimizer's step becomes a collective: each rank updates one part of the parameters,
    /// for all ranks. Each rank keeps its own buffers and gradients. Results are the same to the bit.
    ///
    /// A write to a parameter changes it for all ranks. In a run of one process, gradients are averaged only during the
    /// optimizer's step: call [`average_gradients`](crate::optim::average_gradients) before you read them.
    ///
    /// Step with the optimizers of this crate only. tch's do not know of the other ranks: each rank would update the one
    /// copy with its own gradients.
    pub share_model: bool,
    /// Partition the optimizer's state among all ranks. Each bucket has an equal partition for each rank. A rank keeps
    /// the state of its partitions of the parameters, and updates only these. Buckets are reduce-scattered. The
    /// optimizer's step is a collective: at its end every rank gathers the partitions that the other ranks have
    /// updated. Results are the same to the bit, except with `nccl` and three ranks or more: NCCL's reduce_scatter may
    /// add in another order than its all_reduce.
    ///
    /// After [`backward`](super::DistributedDataParallel::backward) a rank has the averages of its partitions only.
    /// Call [`average_gradients`](crate::optim::average_gradients) on all ranks before you read gradients. Buckets are
    /// still all-reduced in the first step, and with a communication hook.
    ///
    /// Step with the optimizers of this crate only. tch's would update all parameters, also those without averages.
    ///
    /// This is stage 1 of ZeRO. PyTorch has it as `torch.distributed.optim.ZeroRedundancyOptimizer`. Ranks that share
    /// memory (threads on the CPU or on one GPU) save more with `share_model`.
    #[doc(alias = "ZeroRedundancyOptimizer")]
    pub zero: bool,
}

impl DdpOptions {
    /// Returns whether this many ranks partition the optimizer.
    pub(super) fn partitions(&self, ranks: usize) -> bool {
        self.zero && ranks > 1
    }

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
            skip_all_reduce_unused_params: false,
            static_graph: false,
            overlap: None,
            ignore: Vec::new(),
            share_model: false,
            zero: false,
        }
    }
}

/// Converts a capacity from MiB to bytes.
fn mib(cap: f64) -> usize {
    (cap * f64::from(1 << 20)) as usize
}
