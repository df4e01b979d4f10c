//! The checks of the exercises: each runs what its exercise is about, now, on ranks that are threads on the CPU.

pub(super) mod bad_core;
pub(super) mod by_hand;
pub(super) mod gpt;
pub(super) mod own_model;
pub(super) mod program;
pub(super) mod several_machines;

use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use tch::nn::{self, Module, VarStore};
use tch::{Kind, Tensor};

use super::lessons::Found;
use crate::data::TensorDataset;
use crate::ddp::{CommHook, hook_fn};
use crate::launch::{Rank, Spawn, SpawnError};
use crate::process_group::{Backend, ProcessGroup, ReduceOp};

/// How long a rank of a check waits for the others.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the ranks of a check.
fn ranks(count: usize) -> Spawn {
    tch::set_num_threads(1); // threads that libtorch starts here would be idle: the ranks have their own
    Spawn::new(count).threads_per_rank(1).timeout(TIMEOUT)
}

/// Runs `f` on each of `count` ranks, and returns their results in rank order.
fn on_ranks<T: Send + 'static>(
    count: usize,
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Result<Vec<T>, Box<SpawnError>> {
    ranks(count).run(move |rank| f(rank, rank.init_process_group(Backend::Threaded)?))
}

/// Runs `f` on each of `count` ranks, and returns the result of rank 0.
fn on_rank_0<T: Send + 'static>(
    count: usize,
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> anyhow::Result<T> {
    first(on_ranks(count, f)?)
}

/// Returns the result of rank 0.
fn first<T>(results: Vec<T>) -> anyhow::Result<T> {
    results.into_iter().next().context("there is no rank 0")
}

/// Returns a hook that averages as DDP does by default, and calls `watch` first.
fn watching_hook(watch: impl Fn() + 'static) -> Box<dyn CommHook> {
    hook_fn("watching", move |bucket, group| {
        watch();
        group.all_reduce(bucket.gradients, ReduceOp::PremulSum(1.0 / group.world_size() as f64))
    })
}

/// The model of lessons 1 and 4: one input, 64 hidden numbers, one output.
fn sine_model(vs: &VarStore) -> impl Module + use<> {
    nn::seq()
        .add(nn::linear(vs.root() / "in", 1, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(vs.root() / "out", 64, 1, Default::default()))
}

/// The data of these lessons: 1024 points of the sine.
fn sine() -> crate::error::Result<TensorDataset> {
    let x = Tensor::linspace(-1.0, 1.0, 1024, (Kind::Float, tch::Device::Cpu)).unsqueeze(1);
    TensorDataset::new(x.shallow_clone(), (x * 3.0).sin())
}
