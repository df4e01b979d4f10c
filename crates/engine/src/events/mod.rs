//! What happens in a run, as plain data, and who is told of it.
//!
//! The engine tells what a person may want to see of a run as an [`Event`]. It draws and writes none of that, and does not
//! know who looks. Whoever wants events is an [`Observer`], and is given to [`Spawn::observe`](crate::Spawn::observe).

mod activity;
mod observer;
mod operations;
mod probe;
mod run;
mod straggler;

use std::sync::Arc;

use serde::Serialize;

use crate::runtime::RankFailure;
use run::by_failure;

pub use crate::records::{TrainMetrics, ValidationMetrics};
pub use crate::runtime::{OpEntry, OpTotals, SourceLine};
pub use activity::RanksActivity;
pub use activity::{RankSnapshot, RunSnapshot, Source};
pub use compare::{
    FINGERPRINT_FORMAT, Fingerprint, FingerprintedRun, ModuleTensor, StepFingerprint, StepOfRank,
    TensorFingerprint, TensorHash, TensorNumbers, TensorShape,
};
pub use observer::{Observer, Observers, Wants};
pub(crate) use operations::Clock;
pub use operations::FlightRecorderDump;
pub use operations::RankEntries;
#[doc(hidden)] // for views that look for the ranks that are missing
pub use operations::{Collective, collective, has_entered};
pub use probe::{Probe, ProbedStep, RankStep};
pub use run::{End, Epoch, RankEnd, Start, TrainingStart};
pub use straggler::{Straggler, find_straggler};

/// Something that has happened in a run. As JSON, its field `event` comes first.
///
/// The ranks of a process tell it what happens there. What is the same on all ranks is told by rank 0 alone.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The ranks have connected. Only `App` tells this event, and [`Event::End`].
    Start(Start),
    /// Rank 0 begins to train, or goes on after a resume.
    Training(TrainingStart),
    /// Rank 0 has made a step.
    Step {
        /// Steps of the whole run so far.
        step: u64,
        /// Steps that the whole run will have, if nothing ends it early.
        steps: u64,
    },
    /// The metrics of the last steps, reduced over all ranks. Rank 0 tells them if somebody [wants](Wants::metrics) them.
    Metrics(TrainMetrics),
    /// One rank has finished one epoch.
    Epoch(Epoch),
    /// The model was validated on data that it is not trained on.
    Validation(ValidationMetrics),
    /// The values of a tensor of the model at a validation. Told if somebody [wants](Wants::tensors) them.
    Tensor {
        /// Steps of the run so far.
        step: u64,
        /// The tensor's name in the state dict.
        name: String,
        /// All its values.
        values: Vec<f32>,
    },
    /// Rank 0 has copied the state of the run, and writes it as a checkpoint.
    Checkpoint {
        /// Steps of the run so far.
        step: u64,
    },
    /// The numbers of a weight on all ranks, in one of the first steps: [`Trainer::probe`](crate::trainer::Trainer::probe).
    Probe(Probe),
    /// Fingerprints of a rank's tensors: [`Trainer::fingerprint`](crate::trainer::Trainer::fingerprint).
    Fingerprint {
        /// The hashes.
        fingerprint: Fingerprint,
    },
    /// Something that may interest the user.
    Note {
        /// A sentence, or several lines.
        text: String,
    },
    /// Something that the user must see or has asked for: a failure, a warning of one, a table of what the ranks do.
    Warning {
        /// A sentence, or several lines.
        text: String,
    },
    /// The ranks of this process have ended their function, or have failed.
    Ended {
        /// What each of them did. Told if somebody [wants](Wants::operations) it.
        operations: Option<Arc<FlightRecorderDump>>,
    },
    /// The run is done.
    End(Box<End>),
    /// The run failed: ranks of this process, or of another. Told after [`Event::Ended`].
    Failure {
        /// Who failed, and where. `None` where the process of all ranks was killed.
        #[serde(flatten, serialize_with = "by_failure")]
        failure: Option<RankFailure>,
        /// The reason.
        error: String,
        /// Number of failures in a row in the same training step, with `--max-restarts`; `None` if there was only one.
        #[serde(skip_serializing_if = "Option::is_none")]
        repeated: Option<usize>,
        /// Reasons for the earlier restarts by `--max-restarts`, the first one first.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        restarts: Vec<String>,
    },
}

impl Event {
    /// Returns the event of a failure of ranks, for the first and only time.
    pub fn failure(failure: &RankFailure) -> Self {
        let (error, failure) = (failure.error.clone(), Some(failure.clone()));
        Self::Failure { failure, error, repeated: None, restarts: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_objects_that_begin_with_their_kind() {
        let hashes = vec![(1, 2)];
        let step = StepOfRank { step: 3, rank: 1 };
        for (event, json) in [
            (Event::Step { step: 1, steps: 2 }, r#"{"event":"step","step":1,"steps":2}"#),
            (
                Event::Probe(Probe::Begin { hashes, epoch: 0, resumed: None }),
                r#"{"event":"probe","begin":{"hashes":[[1,2]],"epoch":0,"resumed":null}}"#,
            ),
            (
                Event::Fingerprint { fingerprint: Fingerprint::Failed(step) },
                r#"{"event":"fingerprint","fingerprint":{"event":"failed","step":3,"rank":1}}"#,
            ),
            (Event::Ended { operations: None }, r#"{"event":"ended","operations":null}"#),
        ] {
            assert_eq!(serde_json::to_string(&event).unwrap(), json);
        }
    }
}
