//! What can go wrong between ranks: each error names who, where, and what to do.

#[path = "error/suspects.rs"] // tests/model has this file, too
mod suspects;

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::operation::{OpId, Operation};
pub(crate) use suspects::{Blame, list_ranks, runs};
pub use suspects::{Compared, Suspects};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the library. A rank function returns `anyhow::Error`, into which this converts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another rank failed first, and this one left what it waited in. Never a root cause.
    #[error("stopped, because rank {by} failed: {cause}")]
    Cancelled {
        /// The rank that failed first.
        by: usize,
        /// Why it failed.
        cause: String,
    },

    /// Ranks that the others wait for did not come in time.
    #[error(
        "rank {waiting} waited {waited:?} in {at} for {}; find out what delays it, or raise --timeout{}",
        waited_for(*at, late),
        if late.is_empty() { where_to_look(*at) } else { "" }
    )]
    Timeout {
        /// What the waiting rank was doing.
        at: OpId,
        /// The rank that waited and reports.
        waiting: usize,
        /// For how long it waited.
        waited: Duration,
        /// Who did not come, and what each was last seen doing.
        late: Vec<MissingRank>,
    },

    /// A rank has ended its function while the others still wait for it.
    #[error(
        "rank {left} returned while rank {waiting} was still waiting in {at}; every rank must make the same \
         collective calls"
    )]
    PeerExited {
        /// What the waiting rank was doing.
        at: OpId,
        /// The rank that waited and reports.
        waiting: usize,
        /// The rank that is gone.
        left: usize,
    },

    /// The thread that carried out an operation for a rank ended without a result.
    #[error(
        "rank {rank}: the thread of its asynchronous operation ended without a result; this is a mistake in ddp-mp, please \
         report it"
    )]
    Abandoned {
        /// The rank that started the operation.
        rank: usize,
    },

    /// Processes that are part of the run did not come.
    #[error(
        "processes {missing} of {count} did not connect within {waited:?}; connected: {there}; check that the \
         missing ones were started, or raise --timeout"
    )]
    PeersMissing {
        /// The numbers of those that are missing.
        missing: String,
        /// How many there should be.
        count: usize,
        /// For how long they were waited for.
        waited: Duration,
        /// Those that came, and from where.
        there: String,
    },

    /// The connection to another process broke.
    #[error(
        "{at}{}: the connection to {} is lost: {reason}; look at that process's output for why it ended",
        step.map_or(String::new(), |step| format!(" of step #{step}")),
        list_late(lost)
    )]
    ConnectionLost {
        /// What the rank that noticed was doing.
        at: OpId,
        /// In which step of training, if in one. The lost ranks have been in whatever came before, so it is theirs too.
        step: Option<u64>,
        /// The ranks of the processes that do not answer; if all do, those of all others.
        lost: Vec<MissingRank>,
        /// What the system says.
        reason: String,
    },

    /// The ranks called different things at the same point.
    #[error(
        "collective #{sequence} differs between ranks: {calls}; \
         every rank must make the same calls, in the same order, with the same kinds and shapes{}",
        suspects.without_majority()
    )]
    Mismatch {
        /// The number of the collective in the order of every rank's calls, from 0.
        sequence: u64,
        /// Who called what.
        calls: String,
        /// The ranks whose calls may be wrong.
        suspects: Suspects,
        /// The rank to look at first: one of them.
        odd: usize,
        /// The operation that this one called.
        called: Operation,
    },

    /// A tensor was sent that is not the one that the other rank expects.
    #[error(
        "rank {destination} expects {expected} from rank {source_rank}, which sends {sent}; send and receive \
         the same kinds and shapes in the same order"
    )]
    SendMismatch {
        /// The rank that sends.
        source_rank: usize,
        /// The rank that receives.
        destination: usize,
        /// The kind and shape that are sent.
        sent: String,
        /// The kind and shape that are expected.
        expected: String,
    },

    /// Memory that was passed overlaps, where one rank would write what another reads or writes.
    #[error(
        "{} passed overlapping memory to one collective, which writes to it; give every result memory of its own",
        if first == second { format!("rank {first}") } else { format!("ranks {first} and {second}") }
    )]
    OverlappingTensors {
        /// One of them.
        first: usize,
        /// The other; the same one if its own tensors overlap.
        second: usize,
    },

    /// The model of one rank is not the model of rank 0.
    #[error("the model differs between ranks: {0}; build the same model on every rank")]
    ModelMismatch(String),

    /// Parameters had no gradient, without `find_unused_parameters`.
    #[error(
        "these parameters had no gradient on rank {rank}, because the loss does not depend on them: {names}; use \
         them, freeze them, or set find_unused_parameters"
    )]
    UnusedParameters {
        /// The rank that found them.
        rank: usize,
        /// Their names.
        names: String,
    },

    /// Gradients are not finite, and the loss can't be scaled down any further.
    #[error(
        "the gradients are not finite even with a loss scale of {scale:e}: the loss or the parameters themselves are \
         infinite or not a number; use a smaller --lr, --max-grad-norm, or --amp bf16"
    )]
    LossScale {
        /// What the scale has come down to.
        scale: f32,
    },

    /// A loss or a gradient is infinite or not a number.
    #[error(
        "in step {step} on rank {rank} {what}{samples}; check the data, or use a smaller --lr or --max-grad-norm{}",
        if *.in_training { ", or skip such steps with --skip-nonfinite" } else { "" }
    )]
    NonFinite {
        /// What is not finite: a loss, or whose gradient.
        what: String,
        /// Whether such a step can be passed over: a validation cannot.
        in_training: bool,
        /// On which rank.
        rank: usize,
        /// In which step of the run, from 0.
        step: u64,
        /// From which samples, by their numbers in the data: " for samples 3, 17"; empty if that is not known.
        samples: String,
    },

    /// The ranks do not hold the same parameters any more.
    #[error(
        "{} {}{}; look for what changes it on {} alone: outside of the optimizer, or from gradients \
         that were not averaged{}",
        compared.after(*step),
        suspects.hold_another(parameter),
        if *.others == 0 { String::new() } else { format!(", and {others} more parameters differ") },
        if suspects.is_one() { "that rank" } else { "one rank" },
        if *compared == Compared::BeforeSave { "; --check-replicas-every 1 finds the step" } else { "" }
    )]
    ReplicasDiverged {
        /// The first parameter that differs.
        parameter: String,
        /// How many others differ.
        others: usize,
        /// The ranks whose values may be wrong.
        suspects: Suspects,
        /// After which step of the run, from 0.
        step: u64,
        /// What the comparison was for.
        compared: Compared,
    },

    /// A checkpoint cannot be written.
    #[error("{doing} failed: {reason}; earlier checkpoints are intact")]
    Save {
        /// What was being done, with which file.
        doing: String,
        /// The system's own words.
        reason: String,
    },

    /// NCCL reported an error.
    #[error("{call} failed: {reason}")]
    Nccl {
        /// The NCCL function.
        call: &'static str,
        /// NCCL's own words.
        reason: String,
    },

    /// The store where ranks of several processes meet did not do what it was asked for.
    #[error("the store at {address} failed in {doing}: {reason}")]
    Store {
        /// Its host and port.
        address: String,
        /// What it was asked for.
        doing: String,
        /// Why, and what to do.
        reason: String,
    },

    /// Gloo, which connects CPU ranks of several processes, reported an error.
    #[error("gloo failed in {doing}: {reason}")]
    Gloo {
        /// What was being done.
        doing: &'static str,
        /// Gloo's own words.
        reason: String,
    },

    /// libtorch reported an error.
    #[error("libtorch failed in {doing}: {reason}")]
    Torch {
        /// What was being done.
        doing: &'static str,
        /// The first line of libtorch's message.
        reason: String,
    },

    /// The operation exists, but not for these arguments.
    #[error("{0}")]
    Unsupported(String),

    /// What a run tells cannot be written.
    #[error("writing {what}: {reason}")]
    Write {
        /// What is written, as the flag says it.
        what: String,
        /// The system's own words.
        reason: String,
    },

    /// A data set did not give its samples.
    #[error("loading data ({samples}): {reason}")]
    Data {
        /// Which samples.
        samples: String,
        /// Why.
        reason: String,
    },

    /// What was asked for is wrong: a flag, a key, an argument.
    #[error("{0}")]
    Input(String),

    /// An error that the user asked for with a fault plan.
    #[error("injected by --inject-fault {0}")]
    Fault(String),
}

/// A rank that others wait for.
#[derive(Debug, Clone, Copy)]
pub struct MissingRank {
    /// Its rank.
    pub rank: usize,
    /// What it was last seen doing.
    pub last_seen: OpId,
    /// Whether its process does not answer any more.
    pub silent: bool,
}

impl fmt::Display for MissingRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, last_seen, silent } = self;
        let silent = if *silent { "; its process does not answer" } else { "" };
        write!(f, "rank {rank} (last seen: {last_seen}{silent})")
    }
}

fn waited_for(at: OpId, late: &[MissingRank]) -> String {
    match at.operation {
        _ if !late.is_empty() => list_late(late),
        Operation::Init => "NCCL to connect all ranks".into(),
        _ => "its device".into(),
    }
}

fn list_late(late: &[MissingRank]) -> String {
    let names: Vec<String> = late.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Returns what may show whom a rank has waited for, where that is not known.
fn where_to_look(at: OpId) -> &'static str {
    match at.operation {
        Operation::Init => "; NCCL_DEBUG=INFO shows which ranks have connected",
        _ => "; --check-collectives shows whether all ranks make the same calls",
    }
}

impl Error {
    /// Returns whom this error blames, if not the rank that reports it.
    pub(crate) fn blames(&self) -> Option<Blame> {
        match self {
            Error::Timeout { late, .. } => {
                late.first().map(|it| Blame::one(it.rank, Some(it.last_seen)))
            }
            Error::PeerExited { left, .. } => Some(Blame::one(*left, None)),
            Error::ConnectionLost { lost, step, .. } => {
                let step = step.map(|sequence| OpId { operation: Operation::Step, sequence });
                lost.first().map(|it| Blame::one(it.rank, step.or(Some(it.last_seen))))
            }
            Error::Mismatch { suspects, odd, called, sequence, .. } => {
                let at = OpId { operation: *called, sequence: *sequence };
                Some(Blame::of(suspects, *odd, Some(at)))
            }
            Error::SendMismatch { source_rank, destination, .. } => {
                let suspects = Suspects::tied(vec![*source_rank, *destination]);
                Some(Blame::of(&suspects, *destination, None))
            }
            Error::OverlappingTensors { first, second } => {
                Some(Blame::of(&Suspects::tied(vec![*first, *second]), *second, None))
            }
            Error::ReplicasDiverged { suspects, step, compared, .. } => {
                let at = OpId { operation: compared.operation(), sequence: *step };
                suspects.ranks.first().map(|&rank| Blame::of(suspects, rank, Some(at)))
            }
            _ => None,
        }
    }
}

/// Returns `text` with control characters, and characters that change the direction of text, written as `\u001b`: what
/// comes from outside the process must not command a terminal. Line breaks and tabs stay. JSON means the same
/// afterwards.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    escape_all_but(text, &['\n', '\t'])
}

/// As [`escaped`], for text that is to stay on one line.
pub(crate) fn escaped_line(text: &str) -> Cow<'_, str> {
    escape_all_but(text, &[])
}

fn escape_all_but<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let directs = |c: char| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let harms = |c: char| (c.is_control() || directs(c)) && !kept.contains(&c);
    if !text.contains(harms) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match harms(c) {
            true => escaped.push_str(&format!("\\u{:04x}", c as u32)),
            false => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
}

/// libtorch appends a C++ stack trace to its messages; the first line is the message.
pub(crate) fn first_line(message: &str) -> String {
    let line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
    line.trim_start_matches("Internal torch error: ").trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_commands_a_terminal_is_escaped_and_nothing_else() {
        let plain = "rank 1 (CPU:1) \u{4e2d}\u{6587}\tä\n  \"next\" line";
        assert!(matches!(escaped(plain), Cow::Borrowed(it) if it == plain));
        assert_eq!(escaped("\u{1b}[2Jx\r\u{7f}\u{9b}31m"), "\\u001b[2Jx\\u000d\\u007f\\u009b31m");
        assert_eq!(escaped("a\u{202e}b\u{2066}c"), "a\\u202eb\\u2066c");
        assert_eq!(escaped_line("a\nddp-mp: b\t"), "a\\u000addp-mp: b\\u0009");
    }
}
