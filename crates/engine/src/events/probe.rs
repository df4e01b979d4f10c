//! The numbers of one weight on all ranks in the first steps of a run.

use serde::{Deserialize, Serialize};

/// What is told of a probed run, by rank 0 for all ranks.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Probe {
    /// The ranks begin to train.
    Begin {
        /// Two 64-bit hashes for each rank: of the parameters that it built, and of those that it begins with.
        hashes: Vec<(u64, u64)>,
        /// The first epoch.
        epoch: u64,
        /// The step of the checkpoint; `None` without one.
        resumed: Option<u64>,
    },
    /// The ranks have made one of the first steps.
    Step(ProbedStep),
    /// The ranks have trained.
    End {
        /// Steps of the whole run.
        steps: u64,
        /// A 64-bit hash of each rank's parameters.
        hashes: Vec<u64>,
    },
}

/// A step of all ranks, at one weight of the model.
#[derive(Debug, Clone, Serialize)]
pub struct ProbedStep {
    /// The index of the step in the whole run, from 0.
    pub step: u64,
    /// The index of the step among those that are probed.
    pub index: u32,
    /// The learning rate.
    pub lr: f64,
    /// The name of the probed parameter.
    pub parameter: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The flat index of the weight in it.
    pub weight: usize,
    /// Number of gradient buckets.
    pub buckets: usize,
    /// The numbers of each rank.
    pub ranks: Vec<RankStep>,
}

/// One rank's numbers of a step, at one weight of the model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankStep {
    /// The first of the rank's samples, by their indices in the data.
    pub samples: Vec<usize>,
    /// Number of the rank's samples.
    pub num_samples: usize,
    /// What the rank's batches count as: its number of samples, unless the criterion says otherwise.
    pub count: usize,
    /// The mean loss over what the rank's batches count as.
    pub loss: f64,
    /// The gradient that the rank computed, of the loss that it multiplied.
    pub local: f64,
    /// The gradient after the all-reduce.
    pub averaged: f64,
    /// The gradient that the optimizer used.
    pub stepped_by: f64,
    /// The weight before the step.
    pub before: f64,
    /// The weight after it.
    pub after: f64,
}
