//! The engine of `ddp-mp`: ranks and their process groups, DDP, optimizers, data, the trainer and checkpoints. The crate
//! `ddp-mp` has all of it, with an introduction; this one alone needs no command line and no terminal.
//!
//! It tells what happens in a run as [`events`], and does not know who looks.
//!
//! What the documentation hides is for the crates `ddp-mp-views` and `ddp-mp`, and may change.

pub mod checkpoint;
pub mod data;
pub mod ddp;
#[doc(hidden)]
pub mod error;
pub mod events;
pub mod ffi;
#[doc(hidden)]
pub mod files;
pub mod launch;
pub mod models;
#[doc(hidden)]
pub mod operation;
pub mod optim;
pub mod os;
pub mod prelude;
pub mod process_group;
pub mod records;
#[doc(hidden)]
pub mod runtime;
pub mod trainer;

pub use checkpoint::{Checkpoint, CheckpointDir};
pub use data::{
    Batch, DataLoader, Dataset, DatasetSpec, DistributedSampler, FileDataset, Subset, TargetKind,
    Targets, TensorDataset, TextDataset, random_split,
};
pub use ddp::{CommHook, DdpOptions, DistributedDataParallel, GradBucket, JoinOptions, hook_fn};
pub use error::{Compared, Error, InputKind, MissingRank, Result, Suspects};
pub use ffi::{Autocast, Generator, fork_rng};
pub use launch::{Rank, RankFailure, Spawn, SpawnError, StopReason, StopRequest, spawn};
pub use models::{Dropout, SyncBatchNorm, parameters_hash, state_dict};
pub use operation::{OpId, Operation};
pub use optim::{
    AdamW, AdamWOptions, FlatBuffer, GradScaler, GradScalerOptions, Optimizer, OptimizerLayout,
    Schedule, Sgd, SgdOptions, Unit,
};
pub use process_group::{Backend, P2POp, ProcessGroup, ReduceOp, Traffic, Work};
