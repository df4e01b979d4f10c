//! The operations: the purpose of each, its calls in PyTorch and in Rust, and the call itself.

use std::sync::atomic::{AtomicBool, Ordering};

use strum::{EnumIter, EnumString, IntoStaticStr, VariantNames};
use tch::Tensor;

use super::values::{Data, Numbers, Value};
use crate::error::Result;
use crate::operation::Operation;
use crate::process_group::{P2POp, ReduceOp};

/// The operations that `ddp-mp comm` can show: first the simple ones, which others are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum CommOp {
    SendRecv,
    IsendIrecv,
    Broadcast,
    Scatter,
    Gather,
    AllGather,
    Reduce,
    AllReduce,
    ReduceScatter,
    AllToAll,
    Barrier,
}

impl CommOp {
    /// Returns PyTorch's name for the operation.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the process group's operation. `None` if it takes no reduce op.
    pub(super) fn reduction(self) -> Option<Operation> {
        match self {
            CommOp::Reduce => Some(Operation::Reduce),
            CommOp::AllReduce => Some(Operation::AllReduce),
            CommOp::ReduceScatter => Some(Operation::ReduceScatter),
            _ => None,
        }
    }

    /// Returns how many tensors all ranks together hold at the same time.
    pub(super) fn tensors(self, world_size: usize) -> f64 {
        let ranks = world_size as f64;
        match self {
            CommOp::AllToAll => 2.0 * ranks * ranks,
            CommOp::AllGather | CommOp::ReduceScatter => ranks + ranks * ranks,
            CommOp::SendRecv | CommOp::IsendIrecv | CommOp::Scatter | CommOp::Gather => 2.0 * ranks,
            CommOp::Broadcast | CommOp::Reduce | CommOp::AllReduce => ranks,
            CommOp::Barrier => 0.0,
        }
    }

    /// Returns two lines: what the operation does, and its use.
    pub(super) fn about(self, world_size: usize, op: ReduceOp) -> Vec<String> {
        let alone = "There is only one rank here, so it has no other to send to.";
        let (does, more) = match self {
            CommOp::SendRecv => (
                "One rank sends a tensor, one other receives it; the rest take no part.",
                match world_size {
                    1 => alone,
                    _ => "Here each receives from the one before it, then sends to the next.",
                },
            ),
            CommOp::IsendIrecv => (
                "As send and recv, but both return at once; wait() returns when it is done.",
                match world_size {
                    1 => alone,
                    _ => {
                        "All can send at once, in a ring. With send, each would wait for the next."
                    }
                },
            ),
            CommOp::Broadcast => (
                "Every rank gets a copy of rank 0's tensor.",
                "DDP: all ranks begin with the same parameters.",
            ),
            CommOp::Scatter => (
                "Rank 0 has a list with a tensor for each rank, and sends each rank its own.",
                "Use: one rank has all the data and gives each rank its part.",
            ),
            CommOp::Gather => (
                "Rank 0 gets the list of all ranks' tensors: the opposite of scatter.",
                "Use: one rank writes down the results of all.",
            ),
            CommOp::AllGather => (
                "Every rank gets the list of all ranks' tensors.",
                "FSDP: each rank keeps a part of the parameters; this makes them whole.",
            ),
            CommOp::Reduce => (
                "Rank 0 gets RESULT of all ranks' tensors; the others keep theirs.",
                "Use: one rank prints the loss over all ranks.",
            ),
            CommOp::AllReduce => (
                "Every rank gets RESULT of all ranks' tensors.",
                "DDP: the ranks average their gradients, in every step.",
            ),
            CommOp::ReduceScatter => (
                "Every rank gets RESULT of the parts that all ranks have for it.",
                "Followed by an all_gather it is an all_reduce. FSDP: for the gradients.",
            ),
            CommOp::AllToAll => (
                "Every rank has a tensor for each rank, and sends it there.",
                "Rows become columns. Mixture of experts: tokens go to their experts.",
            ),
            CommOp::Barrier => (
                "No rank continues before all have arrived. No tensor moves.",
                "After: the ranks that had arrived when this one continued.",
            ),
        };
        vec![does.replace("RESULT", noun(op)), more.into()]
    }

    /// Returns the call in PyTorch, and the call here.
    pub(super) fn calls(self) -> [&'static str; 2] {
        match self {
            CommOp::SendRecv => [
                "dist.send(tensor, dst); dist.recv(tensor, src)",
                "group.send(&tensor, dst, 0); group.recv(&mut tensor, Some(src), 0)",
            ],
            CommOp::IsendIrecv => [
                "dist.batch_isend_irecv([P2POp(dist.isend, tensor, dst), ...])",
                "group.batch_isend_irecv(&[P2POp::isend(&tensor, dst, 0), ...])",
            ],
            CommOp::Broadcast => {
                ["dist.broadcast(tensor, src=0)", "group.broadcast(&mut tensor, 0)"]
            }
            CommOp::Scatter => [
                "dist.scatter(tensor, scatter_list, src=0)",
                "group.scatter(&mut tensor, Some(&scatter_list), 0)",
            ],
            CommOp::Gather => [
                "dist.gather(tensor, gather_list, dst=0)",
                "group.gather(&tensor, Some(&mut gather_list), 0)",
            ],
            CommOp::AllGather => [
                "dist.all_gather(tensor_list, tensor)",
                "group.all_gather(&mut tensor_list, &tensor)",
            ],
            CommOp::Reduce => {
                ["dist.reduce(tensor, dst=0, op=op)", "group.reduce(&mut tensor, 0, op)"]
            }
            CommOp::AllReduce => {
                ["dist.all_reduce(tensor, op)", "group.all_reduce(&mut tensor, op)"]
            }
            CommOp::ReduceScatter => [
                "dist.reduce_scatter(output, input_list, op)",
                "group.reduce_scatter(&mut output, &input_list, op)",
            ],
            CommOp::AllToAll => [
                "dist.all_to_all(output_list, input_list)",
                "group.all_to_all(&mut output_list, &input_list)",
            ],
            CommOp::Barrier => ["dist.barrier()", "group.barrier()"],
        }
    }

    /// Runs the operation on this rank. Returns the rank's tensors before and after.
    pub(super) fn run(
        self,
        data: &Data,
        op: ReduceOp,
        arrived: &[AtomicBool],
    ) -> Result<[Option<Value>; 2]> {
        let group = data.group;
        let (rank, world_size) = (group.rank(), group.world_size());
        let is_root = rank == 0;
        let in_place = |call: &dyn Fn(&mut Tensor) -> Result<()>| {
            let mut tensor = data.tensor()?;
            let before = data.read(&tensor)?;
            call(&mut tensor)?;
            Ok([before, data.read(&tensor)?])
        };
        match self {
            CommOp::SendRecv => {
                let (mine, mut received) = (data.tensor()?, data.empty()?);
                let before = data.read(&mine)?;
                let receives = rank > 0;
                if receives {
                    group.recv(&mut received, Some(rank - 1), 0)?;
                }
                if rank + 1 < world_size {
                    group.send(&mine, rank + 1, 0)?;
                }
                Ok([before, if receives { data.read(&received)? } else { None }])
            }
            CommOp::IsendIrecv => {
                let (mine, mut received) = (data.tensor()?, data.empty()?);
                let before = data.read(&mine)?;
                if world_size == 1 {
                    return Ok([before, None]);
                }
                let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
                let ops =
                    [P2POp::isend(&mine, next, 0), P2POp::irecv(&mut received, Some(last), 0)];
                for work in group.batch_isend_irecv(&ops)? {
                    work.wait()?;
                }
                Ok([before, data.read(&received)?])
            }
            CommOp::Broadcast => in_place(&|tensor| group.broadcast(tensor, 0)),
            CommOp::Scatter => {
                let mut mine = data.empty()?;
                let list = if is_root { Some(data.parts()?) } else { None };
                let before = data.read_list(list.as_deref())?;
                group.scatter(&mut mine, list.as_deref(), 0)?;
                Ok([before, data.read(&mine)?])
            }
            CommOp::Gather => {
                let mine = data.tensor()?;
                let before = data.read(&mine)?;
                let mut list = if is_root { Some(data.empties()?) } else { None };
                group.gather(&mine, list.as_deref_mut(), 0)?;
                Ok([before, data.read_list(list.as_deref())?])
            }
            CommOp::AllGather => {
                let (mine, mut list) = (data.tensor()?, data.empties()?);
                let before = data.read(&mine)?;
                group.all_gather(&mut list, &mine)?;
                Ok([before, data.read_list(Some(&list))?])
            }
            CommOp::Reduce => in_place(&|tensor| group.reduce(tensor, 0, op)),
            CommOp::AllReduce => in_place(&|tensor| group.all_reduce(tensor, op)),
            CommOp::ReduceScatter => {
                let (mut mine, list) = (data.empty()?, data.parts()?);
                let before = data.read_list(Some(&list))?;
                group.reduce_scatter(&mut mine, &list, op)?;
                Ok([before, data.read(&mine)?])
            }
            CommOp::AllToAll => {
                let (mut outputs, inputs) = (data.empties()?, data.parts()?);
                let before = data.read_list(Some(&inputs))?;
                group.all_to_all(&mut outputs, &inputs)?;
                Ok([before, data.read_list(Some(&outputs))?])
            }
            CommOp::Barrier => {
                // The order of arrival varies, but all ranks have arrived after the barrier.
                arrived[rank].store(true, Ordering::Release);
                group.barrier()?;
                let has_come = |rank: &usize| arrived[*rank].load(Ordering::Acquire);
                let come = (0..world_size).filter(has_come).map(|rank| rank as i64);
                Ok([None, Some(Value::Tensor(Numbers::Integer(come.collect())))])
            }
        }
    }
}

/// Returns the result of a reduction as a noun.
fn noun(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum | ReduceOp::PremulSum(_) => "the sum",
        ReduceOp::Avg => "the average",
        ReduceOp::Product => "the product",
        ReduceOp::Min => "the minimum",
        ReduceOp::Max => "the maximum",
        ReduceOp::Band => "the bitwise and",
        ReduceOp::Bor => "the bitwise or",
        ReduceOp::Bxor => "the bitwise xor",
    }
}
