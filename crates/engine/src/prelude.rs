//! The names that a training program needs: `use ddp_mp::prelude::*;`.
//!
//! Exports ranks and process groups, the DDP wrapper, optimizers, data, models, checkpoints, and the training loop.
//! Also exports the types of `tch` that these take and return. `Error` and `Result` are left out, because programs
//! have their own; use [`ddp_mp::Error`](crate::Error) for this crate's.

pub use tch::{Device, Kind, Reduction, Tensor};

pub use crate::events::{Event, Observer};
pub use crate::models::{Forward, Model, ModelConfig, ModelKind};
pub use crate::trainer::{
    Callback, Criterion, Epoch, Loss, LossParts, SaveEvery, Step, TrainContext, Trainer,
    TrainerOptions,
};
pub use crate::{
    AdamW, AdamWOptions, Autocast, Backend, Batch, Checkpoint, CheckpointDir, DataLoader, Dataset,
    DatasetSpec, DdpOptions, DistributedDataParallel, DistributedSampler, Dropout, FileDataset,
    Generator, GradBucket, GradScaler, GradScalerOptions, JoinOptions, Optimizer, OptimizerLayout,
    P2POp, ProcessGroup, Rank, ReduceOp, Schedule, Sgd, SgdOptions, Spawn, SpawnError, Subset,
    SyncBatchNorm, TargetKind, Targets, TensorDataset, TextDataset, Unit, Work, fork_rng, hook_fn,
    parameters_hash, random_split, spawn,
};
