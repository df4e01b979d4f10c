//! The operations of a rank, and the table of collectives: what each moves between the ranks.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::{Display, EnumCount, EnumIter, EnumString, FromRepr, IntoStaticStr};

/// An operation of a rank, as failure reports name it.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Display,
    EnumCount,
    EnumIter,
    EnumString,
    FromRepr,
    IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
#[allow(missing_docs)] // the names are the documentation
pub enum Operation {
    #[strum(to_string = "rank function")]
    UserCode,
    Start,
    Rendezvous,
    Init,
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAll,
    Send,
    Recv,
    NewGroup,
    Barrier,
    Synchronize,
    Step,
    Data,
    Forward,
    Backward,
    Gradient,
    Optimizer,
    Validation,
    Save,
    #[strum(to_string = "comparison of replicas")]
    Compare,
    #[strum(to_string = "shutting down")]
    ShutDown,
    Done,
}

impl Operation {
    /// Returns what the operation moves, if it is a collective that any rank can call; `None` for others.
    ///
    /// This is the table of collectives. The checks of arguments, the traffic, the comparison of calls, the sizes on
    /// the network, `comm` with its drawings, and `bench` take what they need from it.
    pub fn collective(self) -> Option<CollectiveType> {
        use Holders::{All, OthersThanRoot, Root};
        let one = |holders| Operand { tensors: Tensors::One, holders };
        let list = |holders| Operand { tensors: Tensors::OneForEachRank, holders };
        let nothing = Operand { tensors: Tensors::Nothing, holders: All };
        let (inputs, outputs) = match self {
            Operation::AllReduce => (one(All), one(All)),
            Operation::Reduce => (one(All), one(Root)),
            Operation::Broadcast => (one(Root), one(OthersThanRoot)),
            Operation::AllGather => (one(All), list(All)),
            Operation::Gather => (one(All), list(Root)),
            Operation::Scatter => (list(Root), one(All)),
            Operation::ReduceScatter => (list(All), one(All)),
            Operation::AllToAll => (list(All), list(All)),
            Operation::Barrier => (nothing, nothing),
            _ => return None,
        };
        Some(CollectiveType {
            inputs,
            outputs,
            reduces: matches!(
                self,
                Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter
            ),
        })
    }

    /// Returns the name of a collective's argument for the root.
    pub(crate) fn root_argument(self) -> &'static str {
        let sends = |collective: CollectiveType| collective.inputs.holders == Holders::Root;
        if self.collective().is_some_and(sends) { "src" } else { "dst" }
    }

    /// Returns whether this is a collective in which each pair of ranks may have a size of its own. In others, all tensors of
    /// all ranks have one shape.
    pub(crate) fn has_own_sizes(self) -> bool {
        self == Operation::AllToAll
    }

    /// Returns whether the rank computes in this operation and waits for no other rank, as far as is known.
    pub fn is_compute(self) -> bool {
        use Operation::{
            Backward, Compare, Data, Forward, Gradient, Optimizer, Save, Step, UserCode, Validation,
        };
        let in_step = matches!(self, Step | Data | Forward | Backward | Gradient | Optimizer);
        in_step || matches!(self, UserCode | Validation | Save | Compare)
    }

    /// Returns whether the rank may be waiting for other ranks in this operation.
    pub fn may_wait(self) -> bool {
        use Operation::{Done, Init, Rendezvous, ShutDown, Start};
        !self.is_compute() && !matches!(self, Start | Rendezvous | Init | ShutDown | Done)
    }
}

/// What a collective moves between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveType {
    /// The tensors that it reads.
    pub inputs: Operand,
    /// The tensors that it writes.
    pub outputs: Operand,
    /// Whether it combines the ranks' elements, with a reduce op.
    pub reduces: bool,
}

/// The tensors of each rank on one side of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    pub tensors: Tensors,
    pub holders: Holders,
}

/// How many tensors a rank has on one side of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tensors {
    Nothing,
    One,
    /// A list with a tensor for each rank, or from each rank.
    OneForEachRank,
}

impl Tensors {
    /// Returns how many tensors these are in a group of `ranks` ranks.
    pub fn count(self, ranks: usize) -> usize {
        match self {
            Tensors::Nothing => 0,
            Tensors::One => 1,
            Tensors::OneForEachRank => ranks,
        }
    }
}

/// The ranks that have tensors on one side of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holders {
    All,
    /// The rank that the caller names.
    Root,
    /// All but the root, which has the result already.
    OthersThanRoot,
}

impl Operand {
    /// Returns whether a rank has these tensors.
    pub fn is_held_by(self, is_root: bool) -> bool {
        match self.holders {
            Holders::All => true,
            Holders::Root => is_root,
            Holders::OthersThanRoot => !is_root,
        }
    }

    /// Returns the tensor of `tensors`, this rank's, that `peer` sends or gets. `None` if this rank has none.
    pub(crate) fn tensor_for<T>(self, peer: usize, tensors: &[T]) -> Option<&T> {
        tensors.get(if self.is_list() { peer } else { 0 })
    }

    /// Returns whether this is a list with a tensor for each rank.
    pub fn is_list(self) -> bool {
        self.tensors == Tensors::OneForEachRank
    }
}

impl CollectiveType {
    /// Returns whether one tensor of each rank is both input and output.
    pub fn is_in_place(self) -> bool {
        self.inputs.tensors == Tensors::One && self.outputs.tensors == Tensors::One
    }

    /// Returns whether a rank has a list with a part for each rank.
    pub fn has_parts(self) -> bool {
        self.inputs.is_list() || self.outputs.is_list()
    }

    /// Returns the output of `rank` that may be the same memory as its `input`: the part that the rank keeps. `None` if
    /// the input must have memory of its own.
    pub(crate) fn kept_output(self, input: usize, rank: usize) -> Option<usize> {
        if self.is_in_place() {
            return Some(input);
        }
        let kept = |operand: Operand| if operand.is_list() { rank } else { 0 };
        (input == kept(self.inputs)).then(|| kept(self.outputs))
    }
}

/// An operation with its number among operations of its sort: `all_reduce #3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u64", try_from = "u64")]
pub struct OpId {
    /// The operation.
    pub operation: Operation,
    /// The operation's number, from 0. A collective counts among the group's collectives, a send or recv among those of
    /// the rank. A step has the step's number. For `synchronize`: the number of collectives before it.
    pub sequence: u64,
}

impl OpId {
    const SEQUENCE_BITS: u32 = 56;
}

impl From<OpId> for u64 {
    /// Packs both fields into one number. Keeps the lower 56 bits of the sequence.
    fn from(at: OpId) -> Self {
        let sequence = at.sequence & ((1 << OpId::SEQUENCE_BITS) - 1);
        (at.operation as u64) << OpId::SEQUENCE_BITS | sequence
    }
}

impl TryFrom<u64> for OpId {
    type Error = &'static str;

    fn try_from(packed: u64) -> Result<Self, Self::Error> {
        let operation = Operation::from_repr((packed >> Self::SEQUENCE_BITS) as u8);
        let operation = operation.ok_or("no operation has this number")?;
        Ok(Self { operation, sequence: packed & ((1 << Self::SEQUENCE_BITS) - 1) })
    }
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpId { operation, sequence } = self;
        match operation {
            // These happen once and have no number.
            Operation::UserCode
            | Operation::Start
            | Operation::Rendezvous
            | Operation::Init
            | Operation::ShutDown
            | Operation::Done => write!(f, "{operation}"),
            _ => write!(f, "{operation} #{sequence}"),
        }
    }
}
