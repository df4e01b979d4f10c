//! The operations that `comm` shows and `bench OP` measures, each with its tensors on one rank. The root is rank 0.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use tch::{Kind, Tensor};

use engine::error::{Error, Result};
use engine::ffi::TorchResult;
use engine::operation::{CollectiveType, Holders, Operand, Operation, Tensors};
use engine::process_group::{P2POp, ProcessGroup, ReduceOp};

/// An operation between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommOp {
    /// `send` and `recv`: each rank receives from the one before it, then sends to the next.
    SendRecv,
    /// `batch_isend_irecv`: all ranks send to the next at once, in a ring.
    IsendIrecv,
    /// A collective.
    Collective(Operation),
}

/// What a rank has that passes a tensor on to the next.
const MESSAGE: CollectiveType = CollectiveType {
    inputs: Operand { tensors: Tensors::One, holders: Holders::All },
    outputs: Operand { tensors: Tensors::One, holders: Holders::All },
    reduces: false,
};

impl CommOp {
    /// Returns PyTorch's name for the operation.
    pub fn name(self) -> &'static str {
        match self {
            CommOp::SendRecv => "send_recv",
            CommOp::IsendIrecv => "isend_irecv",
            CommOp::Collective(operation) => operation.into(),
        }
    }

    /// Returns what it moves between the ranks.
    pub(super) fn moves(self) -> CollectiveType {
        let CommOp::Collective(operation) = self else { return MESSAGE };
        operation.collective().unwrap_or(MESSAGE)
    }

    /// Returns whether the output is the input.
    pub(super) fn is_in_place(self) -> bool {
        matches!(self, CommOp::Collective(_)) && self.moves().is_in_place()
    }

    /// Returns whether a rank has tensors on this side of the operation.
    pub(super) fn has(self, operand: Operand, is_root: bool) -> bool {
        operand.tensors != Tensors::Nothing && (self.is_in_place() || operand.is_held_by(is_root))
    }

    /// Returns the operation, if it combines elements.
    pub(super) fn reduction(self) -> Option<Operation> {
        let CommOp::Collective(operation) = self else { return None };
        self.moves().reduces.then_some(operation)
    }

    /// Returns how many tensors all ranks together hold at the same time. A list has one for each rank.
    pub(super) fn tensors(self, world_size: usize) -> f64 {
        let ranks = world_size as f64;
        let count = |operand: Operand| {
            let holders = if operand.holders == Holders::Root { 1.0 } else { ranks };
            holders * operand.tensors.count(world_size) as f64
        };
        let CollectiveType { inputs, outputs, .. } = self.moves();
        if self.is_in_place() { ranks } else { count(inputs) + count(outputs) }
    }
}

/// Parses the name of one of `ops`, with `_` or `-`. The help shows it with `separator`.
pub(super) fn op_parser(
    ops: Vec<(&'static str, CommOp)>,
    separator: &str,
) -> impl TypedValueParser<Value = CommOp> {
    let named = |(name, _): &(&'static str, CommOp)| {
        let spellings = [name.to_string(), name.replace('_', "-")];
        PossibleValue::new(name.replace('_', separator)).aliases(spellings)
    };
    PossibleValuesParser::new(ops.iter().map(named)).try_map(move |text: String| {
        let found = ops.iter().find(|(name, _)| *name == text.replace('-', "_"));
        found.map(|(_, op)| *op).ok_or("there is no such operation")
    })
}

/// An operation with its tensors on one rank.
pub(super) struct OpTensors<'a> {
    pub op: CommOp,
    pub group: &'a ProcessGroup,
    pub reduce_op: ReduceOp,
    /// The elements of a tensor, and of each of a list.
    pub numel: i64,
    /// The input, or the inputs one after the other. Empty on a rank that has none.
    pub input: Tensor,
    /// The output, or the outputs one after the other. In place, the input.
    pub output: Tensor,
    /// The parts of `input`, if it is a list with a tensor for each rank.
    pub input_list: Option<Vec<Tensor>>,
    pub output_list: Option<Vec<Tensor>>,
}

impl<'a> OpTensors<'a> {
    /// Allocates tensors of ones, of `numel` elements each.
    pub(super) fn new(
        op: CommOp,
        reduce_op: ReduceOp,
        numel: i64,
        dtype: Kind,
        group: &'a ProcessGroup,
    ) -> Result<Self> {
        let doing = "allocating the tensors of an operation";
        let (world_size, is_root) = (group.world_size() as i64, group.rank() == 0);
        let allocate = |operand: Operand| {
            let tensors = if operand.is_list() { world_size } else { 1 };
            let len = if op.has(operand, is_root) { numel * tensors } else { 0 };
            // Ones, so that the memory is really allocated.
            Tensor::f_ones([len], (dtype, group.device())).doing(doing)
        };
        let list = |operand: Operand, whole: &Tensor| {
            let part = |rank| whole.f_narrow(0, rank * numel, numel).doing(doing);
            let parts = || (0..world_size).map(part).collect::<Result<Vec<_>>>();
            (operand.is_list() && op.has(operand, is_root)).then(parts).transpose()
        };
        let CollectiveType { inputs, outputs, .. } = op.moves();
        let input = allocate(inputs)?;
        let output = if op.is_in_place() { input.shallow_clone() } else { allocate(outputs)? };
        Ok(Self {
            op,
            group,
            reduce_op,
            numel,
            input_list: list(inputs, &input)?,
            output_list: list(outputs, &output)?,
            input,
            output,
        })
    }

    /// Returns the rank whose message this one receives, in a ring.
    pub(super) fn previous(&self) -> usize {
        let world_size = self.group.world_size();
        (self.group.rank() + world_size - 1) % world_size
    }

    /// Runs the operation once.
    pub(super) fn run(&mut self) -> Result<()> {
        let (group, op, previous) = (self.group, self.reduce_op, self.previous());
        let (rank, world_size) = (group.rank(), group.world_size());
        let Self { input, output, .. } = self;
        let (inputs, outputs) = (self.input_list.as_deref(), self.output_list.as_deref_mut());
        let operation = match self.op {
            CommOp::Collective(operation) => operation,
            CommOp::SendRecv => {
                if rank > 0 {
                    group.recv(output, Some(previous), 0)?;
                }
                if rank + 1 < world_size {
                    group.send(input, rank + 1, 0)?;
                }
                return Ok(());
            }
            CommOp::IsendIrecv if world_size == 1 => return Ok(()),
            CommOp::IsendIrecv => {
                let next = (rank + 1) % world_size;
                let ops = [P2POp::isend(input, next, 0), P2POp::irecv(output, Some(previous), 0)];
                return group.batch_isend_irecv(&ops)?.into_iter().try_for_each(|work| work.wait());
            }
        };
        match operation {
            Operation::AllReduce => group.all_reduce(input, op),
            Operation::Reduce => group.reduce(input, 0, op),
            Operation::Broadcast => group.broadcast(input, 0),
            Operation::AllGather => group.all_gather(outputs.unwrap_or_default(), input),
            Operation::Gather => group.gather(input, outputs, 0),
            Operation::Scatter => group.scatter(output, inputs, 0),
            Operation::ReduceScatter => {
                group.reduce_scatter(output, inputs.unwrap_or_default(), op)
            }
            Operation::AllToAll => {
                group.all_to_all(outputs.unwrap_or_default(), inputs.unwrap_or_default())
            }
            Operation::Barrier => group.barrier(),
            other => Err(Error::unsupported(format!("{other} is not an operation between ranks"))),
        }
    }
}
