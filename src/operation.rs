//! What a rank can be doing: the words of failure reports.

use std::fmt;

/// What a rank can be seen doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // the names are the documentation
pub enum Operation {
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
    Compare,
    ShutDown,
    Done,
}

impl Operation {
    /// All of them, each at the place of its number.
    pub(crate) const ALL: [Operation; 28] = [
        Operation::UserCode,
        Operation::Start,
        Operation::Rendezvous,
        Operation::Init,
        Operation::AllReduce,
        Operation::Reduce,
        Operation::Broadcast,
        Operation::AllGather,
        Operation::Gather,
        Operation::Scatter,
        Operation::ReduceScatter,
        Operation::AllToAll,
        Operation::Send,
        Operation::Recv,
        Operation::NewGroup,
        Operation::Barrier,
        Operation::Synchronize,
        Operation::Step,
        Operation::Data,
        Operation::Forward,
        Operation::Backward,
        Operation::Gradient,
        Operation::Optimizer,
        Operation::Validation,
        Operation::Save,
        Operation::Compare,
        Operation::ShutDown,
        Operation::Done,
    ];
}

impl Operation {
    /// Whether a rank that does it is in code of its own, and waits for nobody as far as is known.
    pub(crate) fn is_compute(self) -> bool {
        use Operation::{
            Backward, Compare, Data, Forward, Gradient, Optimizer, Save, Step, UserCode, Validation,
        };
        let in_step = matches!(self, Step | Data | Forward | Backward | Gradient | Optimizer);
        in_step || matches!(self, UserCode | Validation | Save | Compare)
    }

    /// Whether a rank that does it may be waiting for others as well as working.
    pub(crate) fn may_wait(self) -> bool {
        use Operation::{Done, Init, Rendezvous, ShutDown, Start};
        !self.is_compute() && !matches!(self, Start | Rendezvous | Init | ShutDown | Done)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Operation::UserCode => "rank function",
            Operation::Start => "start",
            Operation::Rendezvous => "rendezvous",
            Operation::Init => "init",
            Operation::AllReduce => "all_reduce",
            Operation::Reduce => "reduce",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllToAll => "all_to_all",
            Operation::Send => "send",
            Operation::Recv => "recv",
            Operation::NewGroup => "new_group",
            Operation::Barrier => "barrier",
            Operation::Synchronize => "synchronize",
            Operation::Step => "step",
            Operation::Data => "data",
            Operation::Forward => "forward",
            Operation::Backward => "backward",
            Operation::Gradient => "gradient",
            Operation::Optimizer => "optimizer",
            Operation::Validation => "validation",
            Operation::Save => "save",
            Operation::Compare => "comparison of replicas",
            Operation::ShutDown => "shutting down",
            Operation::Done => "done",
        })
    }
}

/// An operation, and which one of its sort: `all_reduce #3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpId {
    /// What.
    pub operation: Operation,
    /// For a collective its number in the order of the group's collectives, for send and recv that among
    /// those of the rank, for a step that of the step, all from 0; for `synchronize` how many collectives came before.
    pub sequence: u64,
}

impl OpId {
    const SEQUENCE_BITS: u32 = 56;

    /// Both in one number; of the sequence the lower 56 bits.
    pub(crate) fn packed(self) -> u64 {
        let sequence = self.sequence & ((1 << Self::SEQUENCE_BITS) - 1);
        (self.operation as u64) << Self::SEQUENCE_BITS | sequence
    }

    /// From one number, if it is such a one.
    pub(crate) fn unpacked(packed: u64) -> Option<Self> {
        let operation = *Operation::ALL.get((packed >> Self::SEQUENCE_BITS) as usize)?;
        Some(Self { operation, sequence: packed & ((1 << Self::SEQUENCE_BITS) - 1) })
    }

    /// From the name of an operation; code of the rank's own, if it is none.
    pub(crate) fn named(operation: &str, sequence: u64) -> Self {
        let known = Operation::ALL.into_iter().find(|it| it.to_string() == operation);
        Self { operation: known.unwrap_or(Operation::UserCode), sequence }
    }
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpId { operation, sequence } = self;
        match operation {
            // These happen once, so they have no number.
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
