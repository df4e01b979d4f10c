//! How a run begins, goes on and ends. As JSON, the fields of `start`, `epoch` and `end` are a contract.

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_with::skip_serializing_none;

use super::Straggler;
use crate::ddp::DdpStatistics;
use crate::records::{Parameter, PhaseSeconds, ValidationMetrics};
use crate::runtime::RankFailure;

/// The ranks have connected and hold the same model.
#[derive(Debug, Clone, Serialize)]
pub struct Start {
    /// Number of ranks.
    pub world_size: usize,
    /// Number of machines.
    pub nnodes: usize,
    /// The communication backend.
    pub backend: &'static str,
    /// `GPU` or `CPU`.
    pub device: &'static str,
    /// The model's name.
    pub model: &'static str,
    /// Number of trained values.
    pub parameters: usize,
    /// Number of restarts before this start, by `--max-restarts` or by torchrun; omitted if 0.
    #[serde(skip_serializing_if = "is_first")]
    pub restart: usize,
    /// Number of usable GPUs that are visible; not in JSON.
    #[serde(skip)]
    pub gpu_count: usize,
    /// Whether an earlier start of this run has told that it starts; not in JSON.
    #[serde(skip)]
    pub is_known: bool,
}

fn is_first(restart: &usize) -> bool {
    *restart == 0
}

/// Rank 0 begins to train, or goes on after a resume. The numbers are of the whole run, with what was before a resume.
#[derive(Debug, Clone, Default, Serialize)]
pub struct TrainingStart {
    /// The first epoch, from 0.
    pub epoch: u64,
    /// Steps that have been made.
    pub step: u64,
    /// Samples of the first epoch that all ranks together have used.
    pub samples_seen: usize,
    /// Steps that the whole run will have, if nothing ends it early.
    pub steps: u64,
    /// The parameters of the model, as they are in buckets.
    pub parameters: Vec<Parameter>,
    /// Size of each bucket, in bytes.
    pub bucket_bytes: Vec<usize>,
}

/// One rank has finished one epoch.
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
    /// Samples per step on each rank.
    pub batch_size: usize,
    /// Steps that this rank made.
    pub steps: u64,
    /// The mean loss over the samples of all ranks.
    pub loss: f64,
    /// Samples that this rank processed per second.
    pub samples_per_second: f64,
    /// Tokens that this rank processed per second; `None` unless samples are sequences of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// The validation after the epoch, which is an event of its own.
    #[serde(skip)]
    pub validation: Option<ValidationMetrics>,
    /// Number of ranks in the process of the rank; not in JSON.
    #[serde(skip)]
    pub local_world_size: usize,
}

/// The run is done: all that rank 0 knows of it.
#[skip_serializing_none]
#[derive(Debug, Clone, Default, Serialize)]
pub struct End {
    /// Duration of the training.
    pub seconds: f64,
    /// Steps that each rank made, in the whole run if it was resumed.
    pub steps: u64,
    /// The mean loss of the last epoch.
    pub loss: f64,
    /// The training time, divided by the steps that were made now, in microseconds.
    pub us_per_step: f64,
    /// 64 bits in hex over names, shapes and bytes of the parameters.
    pub parameters_hash: String,
    /// `true` if all ranks hold the same parameters.
    pub replicas_equal: bool,
    /// The buckets, and the times of backward on rank 0.
    #[serde(flatten)]
    pub statistics: DdpStatistics,
    /// What each rank did, rank 0 first. The event has a list for each number.
    #[serde(flatten, serialize_with = "by_rank")]
    pub ranks: Vec<RankEnd>,
    /// The rank that the others waited for; `None` if they did not wait long.
    pub straggler: Option<Straggler>,
    /// Peak memory of the process, with all its ranks; `None` where the system does not report it.
    pub peak_memory_bytes: Option<u64>,
    /// Number of skipped steps; `None` without a gradient scaler and without `--skip-nonfinite`.
    pub skipped_steps: Option<u64>,
    /// The final loss scale; `None` without a gradient scaler.
    pub scale: Option<f64>,
    /// The validation with the smallest loss; `None` without validation.
    pub best: Option<ValidationMetrics>,
    /// Why the run ended before its last epoch: `SIGINT`, `SIGTERM`, `SIGHUP`, `SIGUSR1`, `max-seconds`, `max-steps`,
    /// `patience`, `key press`, `callback`. `None` if it did not.
    pub stopped: Option<&'static str>,
    /// Reasons for the restarts by `--max-restarts`, the first one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<String>,
    /// Steps made since this start; not in JSON.
    #[serde(skip)]
    pub steps_now: u64,
    /// The mean loss of the first epoch; not in JSON.
    #[serde(skip)]
    pub first_loss: f64,
    /// Whether reductions can run beside backward. Ranks in threads reduce on the same cores that compute. Not in JSON.
    #[serde(skip)]
    pub can_overlap: bool,
    /// The parameters of the model, as they are in buckets now; not in JSON.
    #[serde(skip)]
    pub parameters: Vec<Parameter>,
}

impl End {
    /// Returns the times of each rank.
    pub fn phases(&self) -> Vec<PhaseSeconds> {
        self.ranks.iter().map(|rank| rank.phases).collect()
    }
}

/// What one rank did in the whole run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankEnd {
    /// Bytes that it sent.
    pub bytes_sent: u64,
    /// Bytes that it received.
    pub bytes_received: u64,
    /// Seconds that it waited for data: for workers, or while it gathered samples itself.
    pub data_wait_seconds: f64,
    /// Its times within its steps. Those in collectives include waiting for others.
    pub phases: PhaseSeconds,
    /// A 64-bit hash of what must be equal on all ranks.
    pub replica_hash: u64,
}

/// Serializes a list for each number of the ranks.
fn by_rank<S: Serializer>(ranks: &[RankEnd], to: S) -> Result<S::Ok, S::Error> {
    type OfRank = fn(&RankEnd) -> Value;
    let numbers: [(_, OfRank); 4] = [
        ("bytes_sent_by_rank", |rank| rank.bytes_sent.into()),
        ("bytes_received_by_rank", |rank| rank.bytes_received.into()),
        ("data_wait_seconds_by_rank", |rank| rank.data_wait_seconds.into()),
        ("collective_seconds_by_rank", |rank| rank.phases.collectives.into()),
    ];
    to.collect_map(numbers.map(|(name, of)| (name, ranks.iter().map(of).collect::<Vec<_>>())))
}

/// Serializes who failed, and where. `null` where that is not known, because the process of all ranks was killed. A
/// rank that is one of several to blame has their list.
pub(super) fn by_failure<S: Serializer>(
    failure: &Option<RankFailure>,
    to: S,
) -> Result<S::Ok, S::Error> {
    let tied = failure.as_ref().map_or(&[][..], |failure| &failure.tied);
    let alone = failure.as_ref().filter(|_| tied.is_empty());
    let devices = tied.iter().map(|(_, device)| &device[..]).collect::<Vec<_>>().join(", ");
    let mut map = to.serialize_map(None)?;
    map.serialize_entry("rank", &alone.map(|failure| failure.rank))?;
    if !tied.is_empty() {
        map.serialize_entry("ranks", &tied.iter().map(|(rank, _)| *rank).collect::<Vec<_>>())?;
    }
    let device = failure.as_ref().map(|it| if tied.is_empty() { &it.device } else { &devices });
    map.serialize_entry("device", &device)?;
    map.serialize_entry("operation", &failure.as_ref().map(|it| it.at.operation.to_string()))?;
    map.serialize_entry("sequence", &failure.as_ref().map(|it| it.at.sequence))?;
    map.end()
}
