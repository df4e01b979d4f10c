//! How the ranks keep a model's parameters and the state of its optimizer.

/// How the ranks keep a model's parameters and the state of its optimizer. The results are the same to the bit, except where
/// [`Partitioned`](Self::Partitioned) says so.
///
/// Step with the optimizers of this crate only, unless the layout is [`Replicated`](Self::Replicated). tch's do not know of
/// the other ranks: each rank would update all parameters with gradients that are its own, or incomplete.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OptimizerLayout {
    /// Each rank has all parameters and the whole state, and makes each step alone.
    #[default]
    Replicated,
    /// One copy of the parameters and of the state for all ranks of a process. These ranks must be on the CPU or on one GPU.
    /// The optimizer's step becomes a collective: each rank updates one part of the parameters, for all ranks. Each rank
    /// keeps its own buffers and gradients.
    ///
    /// A write to a parameter changes it for all ranks. In a run of one process, gradients may be averaged only during the
    /// optimizer's step: call [`average_gradients`](super::average_gradients) before you read them.
    SharedModel,
    /// The state is partitioned among all ranks. Each bucket has an equal partition for each rank. A rank keeps the state of
    /// its partitions of the parameters, and updates only these. Buckets are reduce-scattered. The optimizer's step is a
    /// collective: at its end every rank gathers the partitions that the other ranks have updated. With `nccl` and three
    /// ranks or more the last bits may differ: NCCL's reduce_scatter may add in another order than its all_reduce.
    ///
    /// After a backward a rank has the averages of its partitions only. Call
    /// [`average_gradients`](super::average_gradients) on all ranks before you read gradients. Buckets are still all-reduced
    /// in the first step, and with a communication hook.
    ///
    /// This is stage 1 of ZeRO. PyTorch has it as `torch.distributed.optim.ZeroRedundancyOptimizer`. Ranks that share
    /// memory (threads on the CPU or on one GPU) save more with [`SharedModel`](Self::SharedModel).
    #[doc(alias = "ZeroRedundancyOptimizer")]
    Partitioned,
}

impl OptimizerLayout {
    /// Returns whether this many ranks partition the optimizer.
    pub(crate) fn partitions(self, ranks: usize) -> bool {
        self == Self::Partitioned && ranks > 1
    }
}
