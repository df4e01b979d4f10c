//! The checks of the exercises: each runs what its exercise is about, now, on ranks that are threads on the CPU.

pub(super) mod by_hand;
pub(super) mod gpt;
pub(super) mod own_model;
pub(super) mod program;
pub(super) mod several_machines;

use std::rc::Rc;
use std::time::Duration;

use tch::nn::{self, Module, VarStore};
use tch::{Kind, Tensor};

use super::answer::Answer;
use super::lessons::Found;
use crate::data::TensorDataset;
use crate::launch::{Rank, Spawn, SpawnError};
use crate::process_group::{Backend, ProcessGroup};

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

/// Returns what a run has found: whole numbers as the answer, and the numbers of the texts.
fn whole<const N: usize>(answer: [u64; N], numbers: &[String]) -> Found {
    Found { answer: Answer::Whole(answer.to_vec()), numbers: numbers.to_vec() }
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
