//! One check of a GPU, or of two, in a process of its own. The process prints on stdout what it does and what it finds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, TchError, Tensor};

use crate::commands::bench::{bus_factor, round};
use crate::commands::comm_op::{CommOp, OpTensors};
use engine::ffi::{TorchResult, cuda};
use engine::launch::Spawn;
use engine::operation::Operation;
use engine::process_group::{Backend, ReduceOp};
use views::Printer;

/// A check that a process makes, with its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event", content = "gpus")]
pub(super) enum Check {
    /// Which GPUs there are, and whether NCCL is.
    Machine,
    /// A product of matrices on a GPU.
    Product([usize; 1]),
    /// A copy from one GPU to another.
    Copy([usize; 2]),
    /// An all_reduce of two GPUs over NCCL.
    AllReduce([usize; 2]),
}

/// A line on the stdout of a check's process.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// This part begins, of so many seconds at most.
    Begins(String, u64),
    /// The check has ended.
    Ends(Found),
}

/// A part of a check that has a limit of its own: what to say after "hangs" or "dies", and how many seconds it may take.
pub(super) type Part = (&'static str, u64);

/// CUDA loads, and each GPU gets a context.
pub(super) const LOAD: Part = (" while loading CUDA", 60);

/// The ranks of an all_reduce join a communicator: NCCL looks at all network cards, and loads its kernels.
const CONNECT: Part = (" while connecting with NCCL", 10);

/// The product, the copy or the all_reduce.
const WORK: Part = ("", 5);

/// What a check has found: a part of a line of `--log-format json`.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Found {
    pub result: Verdict,
    /// What is wrong, to follow the name of the check. `None` if nothing is.
    pub problem: Option<String>,
    /// Floating-point operations, in 10^12 per second.
    pub tflops: Option<f64>,
    /// The bandwidth of a copy, or that of an all_reduce as `bench` calculates its `busbw`, in 10^9 bytes per second.
    pub gb_per_s: Option<f64>,
    /// The time of an all_reduce of one element.
    pub latency_us: Option<f64>,
    /// The result of [`Check::Machine`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    #[default]
    Right,
    Wrong,
    Fails,
    Hangs,
    Dies,
}

/// The GPUs that are visible, and why they or NCCL cannot be used.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    pub gpus: Vec<String>,
    pub gpu_problem: Option<String>,
    pub nccl_problem: Option<String>,
}

impl Found {
    /// Returns the result of a check that did not pass.
    pub(super) fn problem(result: Verdict, problem: String) -> Self {
        Self { result, problem: Some(problem), ..Self::default() }
    }

    /// Returns the result of a check with so many wrong values.
    fn wrong(wrong: i64, all: i64) -> Self {
        Self::problem(Verdict::Wrong, format!("has wrong values ({wrong} of {all})"))
    }
}

/// Makes the check, and prints what it does and what it found.
///
/// # Errors
/// When stdout cannot be written.
pub(super) fn make(check: Check, printer: &Arc<Printer>) -> anyhow::Result<()> {
    let cuda = cuda::load();
    let to = printer.clone();
    // If nobody reads it any more, the process is about to be killed.
    let begins = move |(what, seconds): Part| {
        drop(say(&to, &Message::Begins(what.into(), seconds)));
    };
    let found = match check {
        Check::Product([gpu]) => {
            product(Device::Cuda(gpu), begins).doing("a product").map_err(Into::into)
        }
        Check::Copy(gpus) => {
            copy(gpus.map(Device::Cuda), begins).doing("a copy").map_err(Into::into)
        }
        Check::AllReduce(gpus) => all_reduce(gpus, begins),
        Check::Machine => {
            let nccl_problem = Backend::Nccl.check_library().err().map(|error| error.to_string());
            let machine = Machine { gpus: cuda.gpus, gpu_problem: cuda.problem, nccl_problem };
            Ok(Found { machine: Some(machine), ..Found::default() })
        }
    };
    let failed = |error: anyhow::Error| Found::problem(Verdict::Fails, format!("fails: {error}"));
    Ok(say(printer, &Message::Ends(found.unwrap_or_else(failed)))?)
}

/// Prints a message in a line of its own, also if a library has printed a part of a line before.
fn say(printer: &Printer, message: &Message) -> io::Result<()> {
    let text = serde_json::to_string(message)?;
    printer.lines(|out| write!(out, "\n{text}\n"))
}

/// The time for which work is measured, in seconds.
const MEASURED: f64 = 0.05;

/// The rows and columns of the smallest and of the largest matrix.
const SMALLEST: i64 = 256;
const LARGEST: i64 = 4096;

/// Squares matrices on a GPU. Each has twice as many rows as the one before, as long as a product is fast enough.
fn product(gpu: Device, begins: impl Fn(Part)) -> Result<Found, TchError> {
    // The host makes a context and loads kernels. What the GPU itself does is waited for below.
    let ones = Tensor::f_ones([16, 16], (Kind::Float, gpu))?;
    let product = ones.f_matmul(&ones)?;
    begins(WORK);
    wait_for(&product)?;
    let mut n = SMALLEST;
    loop {
        let (matrix, square) = matrix(n)?;
        let matrix = matrix.f_to_device(gpu)?;
        let wrong = differing(&matrix.f_matmul(&matrix)?, &square)?;
        if wrong > 0 {
            return Ok(Found::wrong(wrong, n * n));
        }
        let seconds = seconds_of(|| matrix.f_matmul(&matrix))?;
        if n == LARGEST || 8.0 * seconds > MEASURED {
            let tflops = Some(2.0 * (n as f64).powi(3) / seconds / 1e12);
            return Ok(Found { tflops, ..Found::default() });
        }
        n *= 2;
    }
}

/// Returns a matrix of `n` rows and columns, and its square. All sums on the way are whole numbers that float32 holds, so
/// the square is exact in any order of addition.
fn matrix(n: i64) -> Result<(Tensor, Tensor), TchError> {
    let numbers = Tensor::f_arange(n, (Kind::Float, Device::Cpu))?;
    let ones = numbers.f_ones_like()?;
    // Element (i, k) is i % 5 + k % 3: the product of two columns and two rows.
    let columns = Tensor::f_stack(&[&numbers.f_remainder(5)?, &ones], 1)?;
    let rows = Tensor::f_stack(&[&ones, &numbers.f_remainder(3)?], 0)?;
    let square = columns.f_matmul(&rows.f_matmul(&columns)?)?.f_matmul(&rows)?;
    Ok((columns.f_matmul(&rows)?, square))
}

/// The elements of a copy, of 4 bytes each.
const COPIED: i64 = 16 << 20;

/// Copies numbers that all differ, so that a byte in the wrong place is noticed.
fn copy([from, to]: [Device; 2], begins: impl Fn(Part)) -> Result<Found, TchError> {
    let numbers = Tensor::f_arange(COPIED, (Kind::Int, Device::Cpu))?;
    let source = numbers.f_to_device(from)?;
    let mut copy = Tensor::f_zeros([COPIED], (Kind::Int, to))?;
    wait_for(&copy)?;
    begins(WORK);
    copy.f_copy_(&source)?;
    let wrong = differing(&copy, &numbers)?;
    if wrong > 0 {
        return Ok(Found::wrong(wrong, COPIED));
    }
    let gb_per_s = Some(4.0 * COPIED as f64 / seconds_of(|| source.f_to_device(to))? / 1e9);
    Ok(Found { gb_per_s, ..Found::default() })
}

/// Returns how many elements of `found`, on a GPU, differ from those of `expected`.
fn differing(found: &Tensor, expected: &Tensor) -> Result<i64, TchError> {
    let differs = found.f_to_device(Device::Cpu)?.f_ne_tensor(expected)?;
    differs.f_sum(Kind::Int64)?.f_int64_value(&[])
}

/// Returns the seconds of one call of `work`, whose result is on a GPU.
fn seconds_of(work: impl Fn() -> Result<Tensor, TchError>) -> Result<f64, TchError> {
    let mut calls = 1;
    loop {
        let began = Instant::now();
        for _ in 1..calls {
            drop(work()?);
        }
        wait_for(&work()?)?;
        let seconds = began.elapsed().as_secs_f64();
        if seconds >= MEASURED {
            return Ok(seconds / f64::from(calls));
        }
        calls *= 2;
    }
}

/// Waits until the GPU has computed `tensor`.
fn wait_for(tensor: &Tensor) -> Result<(), TchError> {
    tensor.f_flatten(0, -1)?.f_double_value(&[0]).map(drop)
}

/// The elements of the largest all_reduce, and how many times as many as the one before each has.
const MOST_REDUCED: i64 = 16 << 20;
const REDUCED_FACTOR: i64 = 16;

/// Has two ranks, threads of this process, reduce more and more elements over NCCL, as long as that is fast enough.
fn all_reduce(
    gpus: [usize; 2],
    begins: impl Fn(Part) + Send + Sync + 'static,
) -> anyhow::Result<Found> {
    let devices = gpus.map(Device::Cuda);
    for device in devices {
        Tensor::f_zeros([1], (Kind::Float, device)).doing("making a context").map(drop)?;
    }
    begins(CONNECT);
    let wrong_of_both = AtomicI64::new(0);
    let spawn = Spawn::on(devices.to_vec()).grace_period(Duration::from_secs(1));
    let found = spawn.run(move |rank| {
        let group = rank.init_process_group(Backend::Nccl)?;
        if rank.is_main() {
            begins(WORK);
        }
        let op = CommOp::Collective(Operation::AllReduce);
        let (mut latency_us, mut numel) = (None, 1);
        loop {
            let mut case = OpTensors::new(op, ReduceOp::Sum, numel, Kind::Float, &group)?;
            wrong_of_both.fetch_add(case.check()?, Ordering::SeqCst);
            group.barrier()?; // the other rank has added its own
            let wrong = wrong_of_both.load(Ordering::SeqCst);
            if wrong > 0 {
                return Ok(Found::wrong(wrong, 2 * numel));
            }
            let once = round(&group, &mut case, 1)?;
            let seconds = round(&group, &mut case, (MEASURED / once).clamp(1.0, 1000.0) as u64)?;
            latency_us = latency_us.or(Some(1e6 * seconds));
            if numel == MOST_REDUCED || REDUCED_FACTOR as f64 * seconds > MEASURED {
                let gb_per_s = Some(case.bytes() as f64 / seconds / 1e9 * bus_factor(op, 2));
                return Ok(Found { gb_per_s, latency_us, ..Found::default() });
            }
            numel *= REDUCED_FACTOR;
        }
    })?;
    found.into_iter().next().context("no rank has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn square_of_the_matrix_is_exact() {
        let (matrix, square) = matrix(SMALLEST).unwrap();
        let product = matrix.to_kind(Kind::Int64).matmul(&matrix.to_kind(Kind::Int64));
        assert_eq!(product, square.to_kind(Kind::Int64));
        // The square of the largest is at most this.
        assert!(36 * LARGEST < 1 << 24 && matrix.max().double_value(&[]) == 6.0);
    }
}
