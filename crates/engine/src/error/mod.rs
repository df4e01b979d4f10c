//! The library's errors with their messages, which name the rank, the operation and the remedy.

mod suspects;

use std::fmt;
use std::time::Duration;

use crate::operation::{OpId, Operation};
pub(crate) use compare::runs;
pub use compare::{Shown, counted, escaped, escaped_line, list_ranks};
pub use suspects::{Compared, Suspects};

/// Implements `Debug` for a type of which a message needs the name only.
macro_rules! opaque_debug {
    ($name:ty $(, $parameter:ident)?) => {
        impl $(<$parameter>)? std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}
pub(crate) use opaque_debug;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the library. It converts into `anyhow::Error`, which rank functions return.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another rank failed first, and this rank stopped waiting. Never a root cause.
    #[error("stopped, because rank {by} failed: {cause}")]
    Cancelled {
        /// The rank that failed first.
        by: usize,
        /// The reason of that rank's failure.
        cause: String,
    },

    /// A rank waited longer than the timeout.
    #[error(
        "rank {waiting} waited {waited:?} in {at} for {}; find out what delays it, or raise --timeout{}",
        waited_for(*at, missing),
        if missing.is_empty() { where_to_look(*at) } else { "" }
    )]
    Timeout {
        /// The operation in which the rank waited.
        at: OpId,
        /// The rank that waited and reports.
        waiting: usize,
        /// How long the rank waited.
        waited: Duration,
        /// The missing ranks, each with its last known operation. Empty if they are not known.
        missing: Vec<MissingRank>,
    },

    /// A rank returned from its function while another rank was still waiting for it.
    #[error(
        "rank {left} returned while rank {waiting} was still waiting in {at}; every rank must make the same \
         collective calls"
    )]
    PeerExited {
        /// The operation in which the rank waited.
        at: OpId,
        /// The rank that waited and reports.
        waiting: usize,
        /// The rank that returned.
        left: usize,
    },

    /// Processes of the run did not connect in time.
    #[error(
        "{} {missing} of {count} did not connect within {waited:?}; connected: {there}; check that what is missing was \
         started, or raise --timeout",
        if missing.contains(',') { "processes" } else { "process" }
    )]
    PeersMissing {
        /// The numbers of the missing processes.
        missing: String,
        /// The expected number of processes.
        count: usize,
        /// How long the other processes waited.
        waited: Duration,
        /// The processes that connected, with their addresses.
        there: String,
    },

    /// The connection to another process broke.
    #[error(
        "{at}{}: the connection to {} is lost: {reason}; look at that process's output for why it ended",
        step.map_or(String::new(), |step| format!(" of step #{step}")),
        list_missing(lost)
    )]
    ConnectionLost {
        /// The operation in which a rank noticed the loss.
        at: OpId,
        /// The training step, or `None` outside of one. The lost ranks took part in everything before, so they were in
        /// this step too.
        step: Option<u64>,
        /// The ranks of the processes that do not respond. If all respond: the ranks of all other processes.
        lost: Vec<MissingRank>,
        /// The operating system's message.
        reason: String,
    },

    /// The ranks made different collective calls at the same position.
    #[error(
        "collective #{sequence} differs between ranks: {calls}; \
         every rank must make the same calls, in the same order, with the same dtypes and shapes{}",
        suspects.without_majority()
    )]
    Mismatch {
        /// The number of the collective among the calls of every rank, from 0.
        sequence: u64,
        /// The calls, each with its ranks.
        calls: String,
        /// The ranks whose calls may be wrong.
        suspects: Suspects,
        /// The suspect to look at first.
        outlier: usize,
        /// The operation that `outlier` called.
        called: Operation,
    },

    /// The dtype or shape of a sent tensor is not what the receiver expects.
    #[error(
        "rank {destination} expects {expected} from rank {source_rank}, which sends {sent}; send and receive \
         the same dtypes and shapes in the same order"
    )]
    SendMismatch {
        /// The rank that sends.
        source_rank: usize,
        /// The rank that receives.
        destination: usize,
        /// The dtype and shape that are sent.
        sent: String,
        /// The dtype and shape that are expected.
        expected: String,
    },

    /// Tensors of one collective overlap in memory that the collective writes to.
    #[error(
        "{} passed overlapping memory to one collective, which writes to it; give every result its own memory",
        if first == second { format!("rank {first}") } else { format!("ranks {first} and {second}") }
    )]
    OverlappingTensors {
        /// One of the two ranks.
        first: usize,
        /// The other rank. Equal to `first` if one rank's own tensors overlap.
        second: usize,
    },

    /// A rank's model differs from rank 0's.
    #[error("the model differs between ranks: {0}; build the same model on every rank")]
    ModelMismatch(String),

    /// Parameters had no gradient, and `find_unused_parameters` is not set.
    #[error(
        "these parameters had no gradient on rank {rank}, because the loss does not depend on them: {names}; use \
         them, freeze them, or set find_unused_parameters"
    )]
    UnusedParameters {
        /// The rank that reports them.
        rank: usize,
        /// The names of the parameters.
        names: String,
    },

    /// Gradients are not finite, and the loss scale cannot be reduced further.
    #[error(
        "the gradients are not finite even with a loss scale of {scale:e}: the loss or the parameters themselves are \
         infinite or not a number; use a smaller --lr, --max-grad-norm, or --amp bf16"
    )]
    LossScale {
        /// The loss scale at the time of the error.
        scale: f32,
    },

    /// A loss or a gradient is infinite or not a number.
    #[error(
        "in step {step} on rank {rank} {what}{samples}; check the data, or use a smaller --lr or --max-grad-norm{}",
        if *.in_training { ", or skip such steps with --skip-nonfinite" } else { "" }
    )]
    NonFinite {
        /// The value that is not finite: the loss, or the gradient of a named parameter.
        what: String,
        /// Whether the step can be skipped. Validation steps cannot.
        in_training: bool,
        /// The rank on which it occurred.
        rank: usize,
        /// The step of the run, from 0.
        step: u64,
        /// The samples, by their numbers in the data, as text: " for samples 3, 17". Empty if not known.
        samples: String,
    },

    /// The replicas' parameters no longer agree.
    #[error(
        "{} {}{}; look for what changes it on {} alone: outside of the optimizer, or from gradients \
         that were not averaged{}",
        compared.after(*step),
        suspects.hold_another(parameter),
        match *.others {
            0 => String::new(),
            1 => ", and 1 more parameter differs".into(),
            others => format!(", and {others} more parameters differ"),
        },
        if suspects.is_one() { "that rank" } else { "one rank" },
        if *compared == Compared::BeforeSave { "; --check-replicas-every 1 finds the step" } else { "" }
    )]
    ReplicasDiverged {
        /// The first parameter that differs.
        parameter: String,
        /// The number of other parameters that differ.
        others: usize,
        /// The ranks whose values may be wrong.
        suspects: Suspects,
        /// The step of the run after which they differ, from 0.
        step: u64,
        /// The reason for the comparison.
        compared: Compared,
    },

    /// A checkpoint cannot be written.
    #[error("{doing} failed: {reason}")]
    Save {
        /// The failed action, with the file.
        doing: String,
        /// The operating system's message, what is left of the earlier checkpoints, and what to do.
        reason: String,
    },

    /// NCCL reported an error.
    #[error("{call} failed: {reason}")]
    Nccl {
        /// The NCCL function.
        call: &'static str,
        /// NCCL's message.
        reason: String,
    },

    /// A request to the rendezvous store failed.
    #[error("the store at {address}: {doing} failed: {reason}")]
    Store {
        /// The store's host and port.
        address: String,
        /// The request.
        doing: String,
        /// The cause and the remedy.
        reason: String,
    },

    /// Gloo, which connects CPU ranks of several processes, reported an error.
    #[error("gloo failed in {doing}: {reason}")]
    Gloo {
        /// The failed action.
        doing: &'static str,
        /// Gloo's message.
        reason: String,
    },

    /// libtorch reported an error.
    #[error("libtorch failed in {doing}: {reason}")]
    Torch {
        /// The failed action.
        doing: &'static str,
        /// The first line of libtorch's message.
        reason: String,
    },

    /// An output of the run cannot be written.
    #[error("writing {what}: {reason}")]
    Write {
        /// The output, as its flag names it.
        what: String,
        /// The operating system's message.
        reason: String,
    },

    /// A data set failed to load samples.
    #[error("loading data ({samples}): {reason}")]
    Data {
        /// The samples that failed to load.
        samples: String,
        /// Why.
        reason: String,
    },

    /// What the user gave cannot be used.
    #[error("{problem}")]
    Input {
        /// What is wrong with it.
        kind: InputKind,
        /// The problem, where it is, and what to do.
        problem: String,
    },

    /// A mistake in this crate.
    #[error("{0}; this is a mistake in ddp-mp, please report it")]
    Internal(String),

    /// An error that `--inject-fault` requested.
    #[error("injected by --inject-fault {0}")]
    Fault(String),
}

/// What is wrong with an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// A flag, a variable, a path or an argument of a function is wrong in itself.
    Usage,
    /// The contents of a file or of a message are wrong.
    Data,
    /// Two things do not fit each other: processes of a run, a checkpoint and a model, the tensors of a call.
    Mismatch,
    /// This system, device, backend or build cannot do it.
    Unsupported,
}

impl Error {
    /// Returns the error of a wrong flag, variable, path or argument.
    pub fn usage(problem: String) -> Self {
        Self::Input { kind: InputKind::Usage, problem }
    }

    /// Returns whether a rank has waited in vain for others: they have failed, and this rank has not.
    pub(crate) fn waited_in_vain(&self) -> bool {
        use Error::{Cancelled, ConnectionLost, PeerExited, PeersMissing, Timeout};
        matches!(
            self,
            PeersMissing { .. }
                | Cancelled { .. }
                | PeerExited { .. }
                | ConnectionLost { .. }
                | Timeout { .. }
        )
    }

    /// Returns the error of wrong contents of a file or of a message.
    pub fn data(problem: String) -> Self {
        Self::Input { kind: InputKind::Data, problem }
    }

    /// Returns the error of two things that do not fit each other.
    pub fn mismatch(problem: String) -> Self {
        Self::Input { kind: InputKind::Mismatch, problem }
    }

    /// Returns the error of what this system, device, backend or build cannot do.
    pub fn unsupported(problem: String) -> Self {
        Self::Input { kind: InputKind::Unsupported, problem }
    }

    /// Returns the error with `name` before its text: the flag or the file that it is about. An error of another sort
    /// becomes one of usage.
    pub fn named(self, name: impl fmt::Display) -> Self {
        let problem = format!("{name}: {self}");
        match self {
            Self::Input { kind, .. } => Self::Input { kind, problem },
            _ => Self::usage(problem),
        }
    }
}

/// A rank that other ranks wait for.
#[derive(Debug, Clone, Copy)]
pub struct MissingRank {
    /// The rank's number.
    pub rank: usize,
    /// The rank's last known operation.
    pub last_seen: OpId,
    /// Whether the rank's process no longer responds.
    pub silent: bool,
}

impl fmt::Display for MissingRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, last_seen, silent } = self;
        let silent = if *silent { "; its process does not answer" } else { "" };
        write!(f, "rank {rank} (last seen: {last_seen}{silent})")
    }
}

fn waited_for(at: OpId, missing: &[MissingRank]) -> String {
    match at.operation {
        _ if !missing.is_empty() => list_missing(missing),
        Operation::Init => "NCCL to connect all ranks".into(),
        _ => "its device".into(),
    }
}

fn list_missing(missing: &[MissingRank]) -> String {
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Returns a hint for finding the missing ranks, for errors that do not name them.
fn where_to_look(at: OpId) -> &'static str {
    match at.operation {
        Operation::Init => {
            "; NCCL_DEBUG=INFO shows which ranks have connected, and ddp-mp env --check-gpus which GPUs of a machine \
             cannot"
        }
        _ => "; --check-collectives shows whether all ranks make the same calls",
    }
}

/// Returns the first line of an error message. libtorch appends a C++ stack trace to its messages.
pub(crate) fn first_line(message: &str) -> String {
    let line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
    line.trim_start_matches("Internal torch error: ").trim().to_string()
}

/// Lists the first `most` of `items`, for a message: `a, b and 3 more`.
pub(crate) fn first_of<T: ToString>(items: &[T], most: usize) -> String {
    let first: Vec<String> = items.iter().take(most).map(T::to_string).collect();
    let first = first.join(", ");
    match items.len().saturating_sub(most) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_before_an_error_keeps_its_kind() {
        for (error, expected) in [
            (Error::mismatch("x".into()), InputKind::Mismatch),
            (Error::Internal("x".into()), InputKind::Usage),
        ] {
            let named = error.named("--it");
            assert!(named.to_string().starts_with("--it: x"), "{named}");
            assert!(matches!(named, Error::Input { kind, .. } if kind == expected), "{named:?}");
        }
    }
}
