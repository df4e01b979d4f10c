//! One check of a GPU, or of two, in a process of its own. The process prints on stdout what it does and what it finds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, TchError, Tensor};

use crate::commands::bench::{BenchCase, bus_factor, round};
use crate::commands::comm_op::CommOp;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::ffi::cuda;
use crate::launch::Spawn;
use crate::operation::Operation;
use crate::process_group::{Backend, ProcessGroup, ReduceOp};
use crate::telemetry::Printer;

/// A check that a process makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Check {
    /// Which GPUs there are, and whether NCCL is.
    Machine,
    /// A product of matrices on this GPU.
    Product(usize),
    /// A copy from the first GPU to the second.
    Copy(usize, usize),
    /// An all_reduce of two GPUs over NCCL.
    AllReduce(usize, usize),
}

/// A line on the stdout of a check's process.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// This part begins.
    Begins(Part),
    /// The result of [`Check::Machine`].
    Found(Machine),
    /// All values are right. The GPUs are this fast.
    Right(Speed),
    /// The number of wrong values, and of all values that were checked.
    Wrong(i64, i64),
    /// An error.
    Fails(String),
}

/// A part of a check that has a limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Part {
    /// CUDA loads, and each GPU gets a context.
    Load,
    /// The ranks of an all_reduce join a communicator.
    Connect,
    /// The product, the copy or the all_reduce.
    Work,
}

impl Part {
    /// Returns how long the part may take.
    pub(super) fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Part::Load => 60,
            Part::Connect => 10, // NCCL looks at all network cards, and loads its kernels
            Part::Work => 5,
        })
    }
}

/// The GPUs that are visible, and why they or NCCL cannot be used.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    pub gpus: Vec<String>,
    pub gpu_problem: Option<String>,
    pub nccl_problem: Option<String>,
}

/// The measurements of a check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Speed {
    /// Floating-point operations, in 10^12 per second.
    pub tflops: Option<f64>,
    /// The bandwidth of a copy, or that of an all_reduce as `bench` calculates its `busbw`, in 10^9 bytes per second.
    pub gb_per_s: Option<f64>,
    /// The time of an all_reduce of one element.
    pub latency_us: Option<f64>,
}

/// Makes the check, and prints what it does and what it found.
///
/// # Errors
/// When stdout cannot be written.
pub(super) fn make(check: Check, printer: &Arc<Printer>) -> anyhow::Result<()> {
    let cuda = cuda::load();
    let to = printer.clone();
    // If nobody reads it any more, the process is about to be killed.
    let begins = move |part| drop(say(&to, &Message::Begins(part)));
    let found = match check {
        Check::Machine => Ok(Message::Found(Machine {
            gpus: cuda.gpus,
            gpu_problem: cuda.problem,
            nccl_problem: Backend::Nccl.check_library().err().map(|error| error.to_string()),
        })),
        Check::Product(gpu) => product(gpu, begins).doing("a product").map_err(Into::into),
        Check::Copy(from, to) => copy(from, to, begins).doing("a copy").map_err(Into::into),
        Check::AllReduce(first, second) => all_reduce([first, second], begins),
    };
    let last = found.unwrap_or_else(|error| Message::Fails(error.to_string()));
    Ok(say(printer, &last)?)
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

/// Squares matrices on `gpu`. Each has twice as many rows as the one before, as long as a product is fast enough.
fn product(gpu: usize, begins: impl Fn(Part)) -> Result<Message, TchError> {
    let device = Device::Cuda(gpu);
    // The host makes a context and loads kernels. What the GPU itself does is waited for below.
    let ones = Tensor::f_ones([16, 16], (Kind::Float, device))?;
    let product = ones.f_matmul(&ones)?;
    begins(Part::Work);
    wait_for(&product)?;
    let mut n = SMALLEST;
    loop {
        let (matrix, square) = matrix(n)?;
        let matrix = matrix.f_to_device(device)?;
        let wrong = differing(&matrix.f_matmul(&matrix)?, &square)?;
        if wrong > 0 {
            return Ok(Message::Wrong(wrong, n * n));
        }
        let seconds = seconds_of(|| matrix.f_matmul(&matrix))?;
        if n == LARGEST || 8.0 * seconds > MEASURED {
            let tflops = 2.0 * (n as f64).powi(3) / seconds / 1e12;
            return Ok(Message::Right(Speed { tflops: Some(tflops), ..Speed::default() }));
        }
        n *= 2;
    }
}

/// Returns a matrix of `n` rows and columns, and its square. All sums on the way are whole numbers that float32 holds, so
/// the square is exact in any order of addition.
fn matrix(n: i64) -> Result<(Tensor, Tensor), TchError> {
    let numbers = Tensor::f_arange(n, (Kind::Float, Device::Cpu))?;
    // Element (i, k) is rows[i] + columns[k].
    let (rows, columns) = (numbers.f_remainder(5)?, numbers.f_remainder(3)?);
    let (rows, columns) = (rows.f_unsqueeze(1)?, columns.f_unsqueeze(0)?);
    let dot = columns.f_matmul(&rows)?;
    let square = rows.f_mul(&columns)?.f_mul_scalar(n)?.f_add(&dot)?;
    let square = square.f_add(&rows.f_mul(&rows.f_sum(Kind::Float)?)?)?;
    let square = square.f_add(&columns.f_mul(&columns.f_sum(Kind::Float)?)?)?;
    Ok((rows.f_add(&columns)?, square))
}

/// The elements of a copy, of 4 bytes each.
const COPIED: i64 = 16 << 20;

/// Copies numbers that all differ, so that a byte in the wrong place is noticed.
fn copy(from: usize, to: usize, begins: impl Fn(Part)) -> Result<Message, TchError> {
    let numbers = Tensor::f_arange(COPIED, (Kind::Int, Device::Cpu))?;
    let source = numbers.f_to_device(Device::Cuda(from))?;
    let mut copy = Tensor::f_zeros([COPIED], (Kind::Int, Device::Cuda(to)))?;
    wait_for(&copy)?;
    begins(Part::Work);
    copy.f_copy_(&source)?;
    let wrong = differing(&copy, &numbers)?;
    if wrong > 0 {
        return Ok(Message::Wrong(wrong, COPIED));
    }
    let seconds = seconds_of(|| source.f_to_device(Device::Cuda(to)))?;
    let gb_per_s = 4.0 * COPIED as f64 / seconds / 1e9;
    Ok(Message::Right(Speed { gb_per_s: Some(gb_per_s), ..Speed::default() }))
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
        let mut last = work()?;
        for _ in 1..calls {
            last = work()?;
        }
        wait_for(&last)?;
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
const MOST_REDUCED: u64 = 16 << 20;
const REDUCED_FACTOR: u64 = 16;

/// Has two ranks, threads of this process, reduce tensors over NCCL.
fn all_reduce(
    gpus: [usize; 2],
    begins: impl Fn(Part) + Send + Sync + 'static,
) -> anyhow::Result<Message> {
    let devices = gpus.map(Device::Cuda);
    for device in devices {
        Tensor::f_zeros([1], (Kind::Float, device)).doing("making a context").map(drop)?;
    }
    begins(Part::Connect);
    let wrong = AtomicI64::new(0);
    let spawn = Spawn::on(devices.to_vec()).grace_period(Duration::from_secs(1));
    let found = spawn.run(move |rank| {
        let group = rank.init_process_group(Backend::Nccl)?;
        if rank.is_main() {
            begins(Part::Work);
        }
        Ok(all_reduce_on(&group, &wrong)?)
    })?;
    found.into_iter().next().context("no rank has ended")
}

/// Reduces tensors of more and more elements, as long as that is fast enough. The ranks share `wrong`, the number of wrong
/// elements.
fn all_reduce_on(group: &ProcessGroup, wrong: &AtomicI64) -> Result<Message> {
    let all_reduce = CommOp::Collective(Operation::AllReduce);
    let mut latency_us = None;
    let mut numel = 1;
    loop {
        let mut case = BenchCase::new(all_reduce, ReduceOp::Sum, Kind::Float, numel, group)?;
        wrong.fetch_add(case.check()?, Ordering::SeqCst);
        group.barrier()?; // the other rank has added its own
        let wrong = wrong.load(Ordering::SeqCst);
        if wrong > 0 {
            return Ok(Message::Wrong(wrong, 2 * numel as i64));
        }
        let once = round(group, &mut case, 1)?;
        let seconds = round(group, &mut case, (MEASURED / once).clamp(1.0, 1000.0) as u64)?;
        let latency_us = *latency_us.get_or_insert(1e6 * seconds);
        if numel == MOST_REDUCED || REDUCED_FACTOR as f64 * seconds > MEASURED {
            let gb_per_s = case.bytes() as f64 / seconds / 1e9 * bus_factor(all_reduce, 2);
            let (gb_per_s, latency_us) = (Some(gb_per_s), Some(latency_us));
            return Ok(Message::Right(Speed { gb_per_s, latency_us, ..Speed::default() }));
        }
        numel *= REDUCED_FACTOR;
    }
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
