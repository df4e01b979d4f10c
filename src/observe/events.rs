//! What a run reports: the fields are the contract of `--log-format json`.

use serde::{Deserialize, Serialize};

use super::{HeldBack, ValidationMetrics};

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
    /// How many usable GPUs are visible; in text only.
    #[serde(skip)]
    pub gpu_count: usize,
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
    pub held_back: Option<HeldBack>,
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
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed first; `None` where ranks differ and nothing tells which is wrong.
    pub rank: Option<usize>,
    /// These ranks then; else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<usize>,
    /// Its device; those of all such ranks.
    pub device: String,
    /// What it was doing.
    pub operation: String,
    /// The number of that operation, from 0.
    pub sequence: u64,
    /// Why.
    pub error: String,
    /// Why each restart of `--max-restarts` before was needed, the first one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<String>,
}
