//! The names that a training program needs: `use ddp_mp::prelude::*;`.
//!
//! Exports ranks and process groups, the DDP wrapper, optimizers, data, models, checkpoints, and the training loop.
//! Also exports the types of `tch` that these take and return. `Error` and `Result` are left out, because programs
//! have their own; use [`ddp_mp::Error`](crate::Error) for this crate's.

pub use tch::{Device, Kind, Reduction, Tensor};

pub use crate::checkpoint::{Checkpoint, CheckpointDir};
pub use crate::data::{
    Batch, DataLoader, Dataset, DatasetSpec, DistributedSampler, FileDataset, Subset, TargetKind,
    Targets, TensorDataset, TextDataset, random_split,
};
pub use crate::ddp::{DdpOptions, DistributedDataParallel, GradBucket, JoinOptions, hook_fn};
pub use crate::ffi::{Autocast, Generator, fork_rng};
pub use crate::launch::{Rank, Spawn, SpawnError, spawn};
pub use crate::models::{
    Dropout, Forward, Model, ModelConfig, ModelKind, SyncBatchNorm, parameters_hash,
};
pub use crate::optim::{
    AdamW, AdamWOptions, GradScaler, GradScalerOptions, Optimizer, OptimizerLayout, Schedule, Sgd,
    SgdOptions, Unit,
};
pub use crate::process_group::{Backend, P2POp, ProcessGroup, ReduceOp, Work};
pub use crate::trainer::{
    Callback, Criterion, Epoch, Loss, LossParts, SaveEvery, Step, TrainContext, Trainer,
    TrainerOptions,
};
