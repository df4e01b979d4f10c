//! Data-parallel training in Rust the way `torch.multiprocessing.spawn` and `DistributedDataParallel` do
//! it in Python. A rank is one of N workers that train one model together: a thread with its own part of the data,
//! usually on a GPU of its own.
//!
//! ```
//! use std::sync::Arc;
//!
//! use ddp_mp::prelude::*;
//! use tch::nn::{self, VarStore};
//!
//! fn main() -> anyhow::Result<()> {
//!     let dataset = Arc::new(TensorDataset::random(256, 20, Targets::Values(1), 1)?);
//!     let hashes = spawn(2, move |rank| {
//!         let group = rank.init_process_group(rank.backend())?;
//!         let vs = VarStore::new(rank.device());
//!         let model = nn::seq().add(nn::linear(vs.root(), 20, 1, Default::default()));
//!         let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
//!         let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
//!         let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
//!         let loader = DataLoader::new(dataset.clone(), sampler, 32, rank.device())?;
//!         for epoch in 0..2 {
//!             for batch in loader.epoch(epoch)? {
//!                 let batch = batch?;
//!                 ddp.zero_grad()?;
//!                 let loss = ddp.forward(&batch.inputs).mse_loss(&batch.targets, Reduction::Mean);
//!                 ddp.backward(&loss)?; // averages the gradients over the ranks
//!                 optimizer.step(0.1)?;
//!             }
//!         }
//!         Ok(ddp.parameters_hash()?)
//!     })?;
//!     assert_eq!(hashes[0], hashes[1]); // every rank has the same bits
//!     Ok(())
//! }
//! ```
//!
//! [`spawn`] starts two ranks and returns what each of them returns, in rank order. `init_process_group` joins the
//! ranks into a [`ProcessGroup`]. [`DistributedDataParallel`] gives all ranks rank 0's parameters, and averages the
//! gradients in `backward`. [`DistributedSampler`] gives each rank its own samples. The data set exists once, for all
//! ranks.
//!
//! The example runs on CPUs. With `Spawn::from_env()?.run(..)` in place of `spawn(2, ..)` it uses all visible GPUs,
//! and runs under torchrun, Slurm, MPI and Kubernetes. (The GPU path is tested on simulated GPUs, and has run on one real
//! GPU. Several GPUs at once have only been simulated.) To write no loop at all, give model, data and loss to [`App`]:
//! then the program has the flags, files and commands of `ddp-mp`.
//!
//! # Where to begin
//!
//! | to | see |
//! |---|---|
//! | start ranks as threads of this process | [`spawn`] |
//! | start them with other settings, or on GPUs | [`Spawn`] |
//! | run under torchrun, Slurm, MPI or Kubernetes | [`Spawn::from_env`] instead of [`spawn`] |
//! | find out which rank this is, and join the others | [`Rank`] |
//! | call collectives | [`ProcessGroup`], and [`process_group::functional`] for those that gradients flow through |
//! | train a model on all ranks | [`DistributedDataParallel`] |
//! | step its parameters | [`Sgd`], [`AdamW`]; [`Schedule`] for the learning rate |
//! | train on your own data | [`Dataset`], [`DataLoader`]; [`FileDataset`] for files |
//! | train in mixed precision | [`Autocast`], [`GradScaler`] |
//! | have the loop, checkpoints and validation as well | [`trainer::Trainer`] |
//! | run code of your own at each step or epoch of that loop | [`trainer::Callback`] |
//! | have all flags, files and commands of `ddp-mp` for your model | [`App`] |
//! | be told what happens in a run | [`events::Observer`], with [`Spawn::observe`] |
//! | find out why a run failed | [`SpawnError`], [`RankFailure`] |
//!
//! [`prelude`] has the names that a program needs. A rank's function returns an `anyhow::Result`, so that `?` takes
//! every error; this crate's own are [`Error`].
//!
//! The folder `examples/` has the lessons of a course, each with fewer than 100 lines: lesson 7 is a model and a data
//! set of your own. `ddp-mp lesson` checks answers to their exercises. The book in `docs/` has the whole course, the
//! names of PyTorch beside those here, and the `Cargo.toml` of a project of your own.
//!
//! # Rules for a rank's function
//!
//! * Every rank makes the same collective calls in the same order, whatever its data. A difference is an error that
//!   names both calls.
//! * Gradients come from `ddp.backward(&loss)`. tch's own `backward` would not average them, and is refused.
//! * Only the optimizer changes parameters. [`parameters_hash`](ddp::DistributedDataParallel::parameters_hash) shows whether the replicas
//!   are equal.
//! * Random numbers come from the rank: [`fork_rng`] for the model, a [`Generator`] for [`Dropout`]. All threads
//!   share libtorch's default generator.
//! * A number that a rank computes, such as a loss, is of its own samples, until an `all_reduce` adds up those of all
//!   ranks.
//!
//! # Threads
//!
//! A rank is a thread, and the compiler keeps on it what belongs to it:
//!
//! | type | Rust | may it leave its thread? |
//! |---|---|---|
//! | `Rank`, `ProcessGroup`, `Work` | neither `Send` nor `Sync` | stays: only the rank's own thread is woken when another rank fails |
//! | `DistributedDataParallel`, `Sgd`, `AdamW`, `DataLoader`, `Trainer` | neither `Send` nor `Sync` | stays with its group |
//! | `Autocast` | neither `Send` nor `Sync` | stays: libtorch has the state in the thread |
//! | `Spawn`, `SpawnError`, `Error`, `Launch`, `JoinedLaunch`, `Placement` | `Send + Sync` | may be shared |
//! | `StopRequest`, `Dataset`, `TensorDataset`, `TextDataset`, `Checkpoint`, `CheckpointDir` | `Send + Sync` | may be shared: what a rank's function captures |
//! | `Schedule`, `ReduceOp`, `Backend` | `Send + Sync` | may be shared: plain values |
//!
//! # Reading order
//!
//! To learn how data parallelism works, follow one run from the top to the bottom. A module uses the modules below it
//! in this table, and none above it. `tests/tidy.rs` reads the table and checks it. `views` and `compare` are crates of their
//! own, and so is the engine: `launch` and all below, down to `operation`.
//!
//! | module | what happens there |
//! |---|---|
//! | `main` | what must run before the library, and the call of `app` |
//! | [`app`] | a program: what it brings itself, its command line with help and mistakes, and its exit code |
//! | [`commands`] | `train` puts the pieces together; `comm`, `bench`, `verify`, `sample`, `sampler`, `diff`, `bisect`, `env`, `lesson`, `new`, `completions` |
//! | `session` | what commands share: joining the launch, where a run starts, its views, its summary |
//! | [`config`] | what can be said: defaults, then a file, then flags |
//! | [`views`] | what a person sees of a run, made of its events: text, JSON, metrics, traces, reports |
//! | [`launch`] | which launcher started what; a thread for each rank; how the ranks meet at a store, and how they fail |
//! | [`trainer`] | the loop: epochs, batches, steps; a callback for each thing besides |
//! | [`events`] | what happens in a run, as plain data, and who is told of it |
//! | [`checkpoint`] | what a checkpoint holds; written completely, resumed exactly |
//! | [`ddp`] | same start, averaged gradients: same model on all ranks |
//! | [`optim`] | steps the flat buffers; learning rates; clipping; loss scales |
//! | [`data`] | which sample goes to which rank; data files |
//! | [`models`] | models by name |
//! | [`process_group`] | all_reduce, broadcast and all other collectives, over threads, NCCL or Gloo; whether all ranks make the same call |
//! | [`ffi`] | what `tch` lacks |
//! | [`os`] | signals, limits and the exit of the process |
//! | `files` | what a user names is opened without waiting, and appended to in whole rows |
//! | `runtime` | the flight recorder; who failed first, and what wakes ranks that wait; agreed stops; injected faults |
//! | [`records`] | plain data that a run measures |
//! | `error` | the errors, and which rank to suspect |
//! | `operation` | the operations that errors and traces name, and what each collective moves |
//! | `compare` | records of runs, and the first number in which two differ; the text and files that all crates share |
//!
//! # Invariants
//!
//! * Every blocking wait ends: done, cancelled, or past its deadline. `runtime/clock.rs` alone turns a duration into a
//!   deadline. Time in which the process is suspended does not count.
//! * The earliest failure is the root cause, and what the user sees.
//! * Buckets are reduced in the order of their index on every rank, never in the order of readiness.
//! * All layouts of CPU ranks add in the order of the ranks: threads, processes, and several hosts, where each goes on from
//!   the partial result of the one before. Several ranks have one thread each, unless the user says otherwise. So on one
//!   kind of processor the same flags and the same number of ranks, two or more, give the same bits, wherever the ranks
//!   run. NCCL adds in an order of its own.
//! * Every NCCL launch stands between two barriers of the ranks of its process.
//! * Decisions are collective. Rank 0 decides when to stop, and every rank stops after that step. A callback that decides
//!   for all decides from what is equal on all ranks, such as an epoch's loss.
//! * Rank 0 writes checkpoints and metrics. stdout carries results, stderr the rest, and only `views` prints. The engine, which
//!   is `launch` and all below it, names no view, and writes only messages that nobody takes, to stderr.
//! * No global state but the handlers of signals and panics, the lock of libtorch's generator, and kept memory. The
//!   group, the configuration and the printer are passed on.
//! * `unsafe` has three places: `ffi`, `os` and the folders of `process_group`. Each block says why it is sound.

pub mod app;
pub mod commands;
pub mod config;
mod session;

pub use app::App;
pub use engine::*;
pub use views;
