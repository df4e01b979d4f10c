//! Data-parallel training in Rust the way `torch.multiprocessing.spawn` and `DistributedDataParallel` do
//! it in Python: one rank per GPU, here a thread each.
//!
//! ```
//! use std::sync::Arc;
//!
//! use ddp_mp::{
//!     Backend, DataLoader, DdpOptions, DistributedDataParallel, DistributedSampler, Optimizer, Sgd,
//!     SgdOptions, Targets, TensorDataset, spawn,
//! };
//! use ddp_mp::models::ModelConfig;
//! use tch::Reduction;
//!
//! # fn main() -> anyhow::Result<()> {
//! let dataset = Arc::new(TensorDataset::random(256, 20, Targets::Values(1), 1)?);
//! spawn(2, move |rank| {
//!     let group = rank.init_process_group(Backend::Threaded)?;
//!     let (vs, model) = ModelConfig::default().build(rank.device(), 0)?; // Linear(20, 1)
//!     let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
//!     let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
//!     let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
//!     let loader = DataLoader::new(dataset.clone(), sampler, 32, rank.device())?;
//!     for epoch in 0..2 {
//!         for batch in loader.epoch(epoch)? {
//!             let batch = batch?;
//!             ddp.zero_grad()?;
//!             let loss = ddp.forward(&batch.inputs).mse_loss(&batch.targets, Reduction::Mean);
//!             ddp.backward(&loss)?;
//!             optimizer.step(0.1)?;
//!         }
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Reading order
//!
//! To learn how data parallelism works, follow one run from the top to the bottom; a file uses those
//! below it in this list, and not those above.
//!
//! | module | what happens there |
//! |---|---|
//! | `main` | parse, resolve, load CUDA, run, exit code |
//! | [`config`] | what can be said: defaults, then a file, then flags |
//! | [`commands`] | `train` puts the pieces together; `comm`, `bench`, `verify`, `sampler`, `env` |
//! | [`launch`] | a thread for each rank; how they meet and how they fail, in one process or several |
//! | [`trainer`] | the loop: epochs, batches, steps |
//! | [`checkpoint`] | saved completely, resumed exactly |
//! | [`ddp`] | same start, averaged gradients: same model on all ranks |
//! | [`optim`] | steps the flat buffers; learning rates; clipping; loss scales |
//! | [`data`] | which sample goes to which rank; data files |
//! | [`models`] | models by name |
//! | [`process_group`] | all_reduce, broadcast and all other collectives, over threads, NCCL or Gloo |
//! | [`observe`] | the only place that prints |
//! | [`torch`] | what `tch` lacks |
//! | `sync` | who does what, who failed first, and the cancellable barrier |
//!
//! # Invariants
//!
//! * Every blocking wait ends: done, cancelled, or past its deadline.
//! * The earliest failure is the root cause, and what the user sees.
//! * Buckets are reduced in the order of their index on every rank, never in the order of readiness.
//! * Sums run in the order of the ranks, so the same flags give the same bits, on all ranks.
//! * Every NCCL launch stands between two meetings of the ranks of the process.
//! * No global state: the group, the configuration and the printer are passed on.

pub mod checkpoint;
pub mod commands;
pub mod config;
pub mod data;
pub mod ddp;
mod error;
pub mod launch;
pub mod models;
pub mod observe;
mod operation;
pub mod optim;
pub mod process_group;
mod sync;
pub mod torch;
pub mod trainer;

pub use checkpoint::{Checkpoint, CheckpointDir};
pub use data::{
    Batch, DataLoader, Dataset, DatasetSpec, DistributedSampler, FileDataset, ScatterLoader,
    Subset, TargetKind, Targets, TensorDataset, random_split,
};
pub use ddp::{
    CommHook, DataParallel, DdpOptions, DistributedDataParallel, GradBucket, JoinOptions, hook_fn,
    parameters_hash,
};
pub use error::{Error, LateRank, Result, Suspects};
pub use launch::{Backend, Rank, RankFailure, Spawn, SpawnError, Stop, StopReason, spawn};
pub use models::{Dropout, SyncBatchNorm};
pub use operation::{At, Operation};
pub use optim::{
    AdamW, AdamWOptions, FlatBuffer, GradScaler, GradScalerOptions, Optimizer, Schedule, Sgd,
    SgdOptions, Unit,
};
pub use process_group::{P2POp, ProcessGroup, ReduceOp, Traffic, Work};
pub use torch::{Autocast, Generator, fork_rng};
