//! The operations that failure reports name.

use std::fmt;
use std::str::FromStr;

use strum::{Display, EnumCount, EnumIter, EnumString, FromRepr};

/// An operation of a rank, as failure reports name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, EnumCount, EnumIter, EnumString, FromRepr)]
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
    /// Returns whether the rank computes in this operation and waits for no other rank, as far as is known.
    pub(crate) fn is_compute(self) -> bool {
        use Operation::{
            Backward, Compare, Data, Forward, Gradient, Optimizer, Save, Step, UserCode, Validation,
        };
        let in_step = matches!(self, Step | Data | Forward | Backward | Gradient | Optimizer);
        in_step || matches!(self, UserCode | Validation | Save | Compare)
    }

    /// Returns whether the rank may be waiting for other ranks in this operation.
    pub(crate) fn may_wait(self) -> bool {
        use Operation::{Done, Init, Rendezvous, ShutDown, Start};
        !self.is_compute() && !matches!(self, Start | Rendezvous | Init | ShutDown | Done)
    }
}

/// An operation with its number among operations of its sort: `all_reduce #3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpId {
    /// The operation.
    pub operation: Operation,
    /// The operation's number, from 0. A collective counts among the group's collectives, a send or recv among those of
    /// the rank. A step has the step's number. For `synchronize`: the number of collectives before it.
    pub sequence: u64,
}

impl OpId {
    const SEQUENCE_BITS: u32 = 56;

    /// Packs both fields into one number. Keeps the lower 56 bits of the sequence.
    pub(crate) fn packed(self) -> u64 {
        let sequence = self.sequence & ((1 << Self::SEQUENCE_BITS) - 1);
        (self.operation as u64) << Self::SEQUENCE_BITS | sequence
    }

    /// Unpacks a number from [`packed`](Self::packed). `None` if it names no operation.
    pub(crate) fn unpacked(packed: u64) -> Option<Self> {
        let operation = Operation::from_repr((packed >> Self::SEQUENCE_BITS) as u8)?;
        Some(Self { operation, sequence: packed & ((1 << Self::SEQUENCE_BITS) - 1) })
    }

    /// Returns the operation with this name, or `UserCode` if there is none.
    pub(crate) fn named(operation: &str, sequence: u64) -> Self {
        let operation = Operation::from_str(operation).unwrap_or(Operation::UserCode);
        Self { operation, sequence }
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
