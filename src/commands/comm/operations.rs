//! The operations that `comm` shows: the purpose of each, and its calls in PyTorch and in Rust.

use crate::commands::CommOp;
use engine::operation::Operation;
use engine::process_group::ReduceOp;

/// An operation with what `comm` says about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShownOp {
    pub op: CommOp,
    /// What it does. RESULT stands for the reduced elements.
    does: &'static str,
    /// Its use, or what else to know.
    usage: &'static str,
    pub pytorch_call: &'static str,
    pub rust_call: &'static str,
}

/// All operations: first the simple ones, which others are made of.
pub(super) const OPS: [ShownOp; 11] = [
    ShownOp {
        op: CommOp::SendRecv,
        does: "One rank sends a tensor, one other receives it; the rest take no part.",
        usage: "Here each receives from the one before it, then sends to the next.",
        pytorch_call: "dist.send(tensor, dst); dist.recv(tensor, src)",
        rust_call: "group.send(&tensor, dst, 0); group.recv(&mut tensor, Some(src), 0)",
    },
    ShownOp {
        op: CommOp::IsendIrecv,
        does: "As send and recv, but both return at once; wait() returns when it is done.",
        usage: "All can send at once, in a ring. With send, each would wait for the next.",
        pytorch_call: "dist.batch_isend_irecv([P2POp(dist.isend, tensor, dst), ...])",
        rust_call: "group.batch_isend_irecv(&[P2POp::isend(&tensor, dst, 0), ...])",
    },
    ShownOp {
        op: CommOp::Collective(Operation::Broadcast),
        does: "Every rank gets a copy of rank 0's tensor.",
        usage: "DDP: all ranks begin with the same parameters.",
        pytorch_call: "dist.broadcast(tensor, src=0)",
        rust_call: "group.broadcast(&mut tensor, 0)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::Scatter),
        does: "Rank 0 has a list with a tensor for each rank, and sends each rank its own.",
        usage: "Use: one rank has all the data and gives each rank its part.",
        pytorch_call: "dist.scatter(tensor, scatter_list, src=0)",
        rust_call: "group.scatter(&mut tensor, Some(&scatter_list), 0)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::Gather),
        does: "Rank 0 gets the list of all ranks' tensors: the opposite of scatter.",
        usage: "Use: one rank writes down the results of all.",
        pytorch_call: "dist.gather(tensor, gather_list, dst=0)",
        rust_call: "group.gather(&tensor, Some(&mut gather_list), 0)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::AllGather),
        does: "Every rank gets the list of all ranks' tensors.",
        usage: "FSDP: each rank keeps a part of the parameters; this makes them whole.",
        pytorch_call: "dist.all_gather(tensor_list, tensor)",
        rust_call: "group.all_gather(&mut tensor_list, &tensor)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::Reduce),
        does: "Rank 0 gets RESULT of all ranks' tensors; the others keep theirs.",
        usage: "Use: one rank prints the loss over all ranks.",
        pytorch_call: "dist.reduce(tensor, dst=0, op=op)",
        rust_call: "group.reduce(&mut tensor, 0, op)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::AllReduce),
        does: "Every rank gets RESULT of all ranks' tensors.",
        usage: "DDP: the ranks average their gradients, in every step.",
        pytorch_call: "dist.all_reduce(tensor, op)",
        rust_call: "group.all_reduce(&mut tensor, op)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::ReduceScatter),
        does: "Every rank gets RESULT of the parts that all ranks have for it.",
        usage: "Followed by an all_gather it is an all_reduce. FSDP: for the gradients.",
        pytorch_call: "dist.reduce_scatter(output, input_list, op)",
        rust_call: "group.reduce_scatter(&mut output, &input_list, op)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::AllToAll),
        does: "Every rank has a tensor for each rank, and sends it there.",
        usage: "Rows become columns. Mixture of experts: tokens go to their experts.",
        pytorch_call: "dist.all_to_all(output_list, input_list)",
        rust_call: "group.all_to_all(&mut output_list, &input_list)",
    },
    ShownOp {
        op: CommOp::Collective(Operation::Barrier),
        does: "No rank continues before all have arrived. No tensor moves.",
        usage: "After: the ranks that had arrived when this one continued.",
        pytorch_call: "dist.barrier()",
        rust_call: "group.barrier()",
    },
];

impl ShownOp {
    /// Returns two lines: what the operation does, and its use.
    pub(super) fn about(&self, op: ReduceOp) -> Vec<String> {
        vec![self.does.replace("RESULT", words(op).0), self.usage.into()]
    }
}

/// Returns the result of a reduction as a noun, and what stands between the terms of its formula.
pub(super) fn words(op: ReduceOp) -> (&'static str, &'static str) {
    match op {
        ReduceOp::Sum | ReduceOp::PremulSum(_) => ("the sum", "+"),
        ReduceOp::Avg => ("the average", "+"),
        ReduceOp::Product => ("the product", "*"),
        ReduceOp::Min => ("the minimum", ","),
        ReduceOp::Max => ("the maximum", ","),
        ReduceOp::Band => ("the bitwise and", "&"),
        ReduceOp::Bor => ("the bitwise or", "|"),
        ReduceOp::Bxor => ("the bitwise xor", "^"),
    }
}
