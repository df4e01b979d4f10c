//! A failure, as it happened on a rank, and the same with the devices of its ranks.
//!
//! A failure goes one way, from the rank to the terminal:
//!
//! 1. A rank's thread reports its error to [`RunContext::report`], which records a [`Failure`].
//! 2. `launch::heartbeat_monitor` sends the first one to the other processes, which record it as theirs.
//! 3. `launch::spawn` adds the devices ([`RankFailure`]), tells the observers the first, and returns all as `SpawnError`.
//! 4. `session` finishes the views with it. For a parent process it leaves it in the parent's store.
//! 5. `app` prints it. In a process that another one has started, the parent prints it instead.
//!
//! [`RunContext::report`]: super::RunContext::report

use std::fmt;

use serde::{Deserialize, Serialize};

use super::StopReason;
use crate::error::{list_ranks, runs};
use crate::operation::{OpId, Operation};

/// A failure, as it happened on a rank. This is also the message with which processes report it to each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The rank to blame: the reporter, or a rank that the reporter waited for in vain.
    pub rank: usize,
    /// All ranks that may be at fault if it is unknown which one is; else empty.
    pub tied: Vec<usize>,
    /// The operation of the rank to blame.
    pub at: OpId,
    /// The error's text.
    pub error: String,
    /// Whether the reporter timed out while waiting, or found another rank in a different call. Other processes do
    /// not learn this.
    #[serde(skip)]
    pub waited: bool,
    /// The signal that asked the run to stop, if the failure is that the ranks did not.
    pub stopped: Option<StopReason>,
}

impl Failure {
    /// Creates the failure of `rank` alone.
    pub(crate) fn new(rank: usize, at: OpId, error: String) -> Self {
        Self { rank, tied: Vec::new(), at, error, waited: false, stopped: None }
    }
}

/// How one rank failed, and where it runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankFailure {
    /// The rank to blame. If another rank waited for it in vain, that rank is only the reporter.
    pub rank: usize,
    /// All ranks that may be to blame, with their devices and including `rank`, if the evidence does not single one
    /// out. Otherwise empty.
    pub tied: Vec<(usize, String)>,
    /// Its device, as `CPU:1` or `GPU:0`, with its host and process if that is another process.
    pub device: String,
    /// The operation in which it failed.
    pub at: OpId,
    /// The reason, with all causes on one line.
    pub error: String,
}

impl RankFailure {
    /// Adds to `failure` the devices of its ranks. `device` returns that of a rank.
    pub(crate) fn new(failure: &Failure, device: impl Fn(usize) -> String) -> Self {
        Self {
            rank: failure.rank,
            tied: failure.tied.iter().map(|&rank| (rank, device(rank))).collect(),
            device: device(failure.rank),
            at: failure.at,
            error: failure.error.clone(),
        }
    }

    /// Returns where the run was, if each start reaches the same position: `step #12` for all phases of a step. `None`
    /// for collectives, because each start numbers them from 0.
    pub fn position(&self) -> Option<String> {
        use Operation::{Backward, Data, Forward, Init, Optimizer, Rendezvous, Start, Step};
        match self.at.operation {
            Step | Data | Forward | Backward | Optimizer => {
                Some(OpId { operation: Step, ..self.at }.to_string())
            }
            Start | Rendezvous | Init | Operation::Validation | Operation::Save => {
                Some(self.at.to_string())
            }
            _ => None,
        }
    }

    /// Returns `rank 1 failed again in step #12`, for a failure at the position of the one before.
    pub fn again(&self) -> Option<String> {
        let tied: Vec<usize> = self.tied.iter().map(|(rank, _)| *rank).collect();
        let ranks = if tied.is_empty() { &[self.rank][..] } else { &tied };
        Some(format!("{} failed again in {}", list_ranks(ranks), self.position()?))
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tied[..] {
            [] => write!(f, "rank {} ({}) ", self.rank, self.device)?,
            tied => write!(f, "ranks {} ", list(tied))?,
        }
        match self.at.operation {
            Operation::UserCode => write!(f, "failed in its function")?,
            Operation::ShutDown | Operation::Done => write!(f, "ended too early")?,
            Operation::Compare if self.tied.is_empty() => write!(f, "differs")?,
            Operation::Compare => write!(f, "differ")?,
            _ => write!(f, "failed in {}", self.at)?,
        }
        write!(f, ": {}", self.error)
    }
}

/// Lists ranks as `0 (CPU:0) and 1 (CPU:1)`; leaves out the devices of more than four.
fn list(ranks: &[(usize, String)]) -> String {
    const MAX_LISTED_RANKS: usize = 4;
    if ranks.len() > MAX_LISTED_RANKS {
        return runs(&ranks.iter().map(|(rank, _)| *rank).collect::<Vec<_>>());
    }
    let names: Vec<String> = ranks.iter().map(|(rank, on)| format!("{rank} ({on})")).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failure_is_described_for_training_phases_only() {
        let again = |tied: &[usize], operation| {
            let at = OpId { operation, sequence: 12 };
            let failure = Failure { tied: tied.into(), ..Failure::new(1, at, String::new()) };
            RankFailure::new(&failure, |rank| format!("CPU:{rank}")).again()
        };
        use Operation::{AllReduce, Backward, Data, Forward, Optimizer, Rendezvous, Step};
        for phase in [Step, Data, Forward, Backward, Optimizer] {
            assert_eq!(again(&[], phase).as_deref(), Some("rank 1 failed again in step #12"));
        }
        let expected = "ranks 0 and 1 failed again in rendezvous";
        assert_eq!(again(&[0, 1], Rendezvous).as_deref(), Some(expected));
        assert_eq!(again(&[], AllReduce), None);
    }
}
