//! What a run reports: the fields are the contract of `--log-format json`.

use serde::{Deserialize, Serialize};

use super::{Straggler, ValidationMetrics};
use crate::error::list_ranks;
use crate::operation::{OpId, Operation};

/// One line of `--log-format json`; its `event` field comes first.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The ranks have met.
    Start(Start),
    /// One rank is through with one epoch.
    Epoch(Epoch),
    /// The model has been tried on data that it is not trained on.
    Validation(ValidationMetrics),
    /// The run is done.
    End(Box<End>),
    /// The run failed.
    Failure(Failure),
}

/// The ranks have met and hold the same model.
#[derive(Debug, Clone, Serialize)]
pub struct Start {
    /// How many ranks there are.
    pub world_size: usize,
    /// On how many machines.
    pub nnodes: usize,
    /// What carries the tensors.
    pub backend: &'static str,
    /// `GPU` or `CPU`.
    pub device: &'static str,
    /// The model's name.
    pub model: &'static str,
    /// How many numbers are trained.
    pub parameters: usize,
    /// How often the ranks were started before this start, by `--max-restarts` or by torchrun, if they were.
    #[serde(skip_serializing_if = "is_first")]
    pub restart: usize,
    /// How many usable GPUs are visible; in text only.
    #[serde(skip)]
    pub gpu_count: usize,
}

fn is_first(restart: &usize) -> bool {
    *restart == 0
}

/// One rank is through with one epoch.
#[derive(Debug, Clone, Serialize)]
pub struct Epoch {
    /// The rank.
    pub rank: usize,
    /// Its number on its machine.
    pub local_rank: usize,
    /// `GPU:n` or `CPU:n`, n being the local rank.
    pub device: String,
    /// The epoch, from 0.
    pub epoch: u64,
    /// How many samples a step takes on each rank.
    pub batch_size: usize,
    /// How many steps this rank made.
    pub steps: u64,
    /// The mean loss over the samples of all ranks.
    pub loss: f64,
    /// How many samples this rank took a second.
    pub samples_per_second: f64,
    /// How the model did after it on data that it is not trained on: an event of its own.
    #[serde(skip)]
    pub validation: Option<ValidationMetrics>,
}

/// The run is done.
#[derive(Debug, Clone, Serialize)]
pub struct End {
    /// How long the training took.
    pub seconds: f64,
    /// How many steps each rank made, in the whole run if it was resumed.
    pub steps: u64,
    /// The mean loss of the last epoch.
    pub loss: f64,
    /// The training time, divided by the steps that were made now, in microseconds.
    pub us_per_step: f64,
    /// 64 bits in hex over names, shapes and bytes of the parameters.
    pub parameters_hash: String,
    /// Whether all ranks hold the same parameters; with DataParallel rank 0 alone has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas_equal: Option<bool>,
    /// How many bytes of gradients each bucket holds.
    pub bucket_bytes: Vec<usize>,
    /// Of a step, on rank 0: backward and everything that was reduced, in microseconds.
    pub backward_us: f64,
    /// That part of it in which rank 0 reduced, or waited for the others to.
    pub communication_us: f64,
    /// How much of that had passed when autograd was through, from 0 to 1.
    pub overlapped: f64,
    /// How many bytes each rank has sent in the whole run, rank 0 first.
    pub bytes_sent_by_rank: Vec<u64>,
    /// How many each has received.
    pub bytes_received_by_rank: Vec<u64>,
    /// How long each rank has waited for data: for workers, or while it gathered samples itself.
    pub data_wait_seconds_by_rank: Vec<f64>,
    /// How long each rank was in collectives within its steps, in its own part of them and waiting for others.
    pub collective_seconds_by_rank: Vec<f64>,
    /// On CPUs: the rank that the others waited for, if it was for long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub straggler: Option<Straggler>,
    /// The most memory that the process took, of all ranks together; not known on every system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// With a gradient scaler or `--skip-nonfinite`: how many steps were skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<u64>,
    /// By what it scales the loss in the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
    /// The validation with the smallest loss, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<ValidationMetrics>,
    /// Why the run has ended before its last epoch, if it has: `SIGINT`, `SIGTERM`, `SIGUSR1`, `max-seconds`,
    /// `max-steps`, `patience`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<&'static str>,
    /// Why each restart of `--max-restarts` was needed, the first one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<String>,
    /// How many steps were made now; in text only.
    #[serde(skip)]
    pub steps_now: u64,
    /// The mean loss of the first epoch; in text only.
    #[serde(skip)]
    pub first_loss: f64,
}

/// The run failed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed first; `None` where ranks differ and nothing tells which is wrong, and where the process of
    /// all ranks was killed.
    pub rank: Option<usize>,
    /// These ranks then; else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<usize>,
    /// Its device; those of all such ranks. `None` where the process of all ranks was killed.
    pub device: Option<String>,
    /// What it was doing. `None` where its process was killed and left nothing that tells.
    pub operation: Option<String>,
    /// The number of that operation, from 0.
    pub sequence: Option<u64>,
    /// Why.
    pub error: String,
    /// With `--max-restarts`: how many failures in a row were in the same training step, if more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeated: Option<usize>,
    /// Why each restart of `--max-restarts` before was needed, the first one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<String>,
}

impl Failure {
    /// Returns where the run was, if that is the same place in each start that comes to it: `step #12` for all phases of
    /// a step. Collectives have numbers that each start counts from 0.
    pub(crate) fn place(&self) -> Option<String> {
        use Operation::{Backward, Data, Forward, Init, Optimizer, Rendezvous, Start, Step};
        let at = OpId::named(self.operation.as_deref()?, self.sequence?);
        match at.operation {
            Step | Data | Forward | Backward | Optimizer => {
                Some(OpId { operation: Step, ..at }.to_string())
            }
            Start | Rendezvous | Init | Operation::Validation | Operation::Save => {
                Some(at.to_string())
            }
            _ => None,
        }
    }

    /// Returns `rank 1 failed again in step #12`, if the failure before was there as well.
    pub(crate) fn again(&self) -> Option<String> {
        self.repeated?;
        let ranks = self.rank.map_or_else(|| self.ranks.clone(), |rank| vec![rank]);
        Some(format!("{} failed again in {}", list_ranks(&ranks), self.place()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_each_start_comes_to_again_are_known() {
        let failure = |rank, ranks: &[usize], operation: &str| Failure {
            rank,
            ranks: ranks.into(),
            operation: Some(operation.into()),
            sequence: Some(12),
            repeated: Some(2),
            ..Failure::default()
        };
        let again = |it: Failure| it.again();
        for phase in ["step", "data", "forward", "backward", "optimizer"] {
            let told = "rank 1 failed again in step #12";
            assert_eq!(again(failure(Some(1), &[], phase)).as_deref(), Some(told));
        }
        let told = "ranks 0 and 1 failed again in rendezvous";
        assert_eq!(again(failure(None, &[0, 1], "rendezvous")).as_deref(), Some(told));
        assert_eq!(again(failure(Some(1), &[], "all_reduce")), None);
        assert_eq!(again(Failure { repeated: None, ..failure(Some(1), &[], "step") }), None);
        assert_eq!(again(Failure { repeated: Some(2), ..Failure::default() }), None);
    }
}
