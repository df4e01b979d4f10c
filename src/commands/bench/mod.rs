//! `ddp-mp bench OP`: how long a collective takes at each size, beside the limit of the machine's memory; and
//! `ddp-mp bench step`, how long a training step takes, here and on a cluster that is imagined; `ddp-mp bench scaling`,
//! what more ranks on this machine give.
//!
//! The columns are those of NVIDIA's nccl-tests, so that the tools and habits for those fit.

mod bench_case;
mod cluster;
mod cost;
mod forecast;
mod roofline;
mod scaling;
mod step;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::place_ranks;
use crate::error::{Error, Result};
use crate::ffi::cuda::Cuda;
use crate::launch::{Backend, BackendChoice, Nproc, Rank, Spawn};
use crate::process_group::{ProcessGroup, ReduceOp, dtype_name};
use crate::telemetry::{LogFormat, Printer, gigabytes, total_memory};
use bench_case::BenchCase;
pub use bench_case::BenchOp;
pub use cluster::SimulatedCluster;
use roofline::MemoryRoofline;
pub use scaling::{bench_scaling, check_scaling_flags};
pub use step::{bench_step, check_step_flags};

/// What to measure, and how.
#[derive(Debug, Clone)]
pub struct BenchRequest {
    /// The operation.
    pub op: BenchOp,
    /// The kind of the tensors.
    pub dtype: Kind,
    /// For operations that reduce.
    pub reduce_op: ReduceOp,
    /// The smallest size, in bytes, as nccl-tests counts it: of the larger side of the operation.
    pub min_bytes: u64,
    /// The largest size.
    pub max_bytes: u64,
    /// By what a size is multiplied to get the next.
    pub step_factor: u64,
    /// How often each size is measured; as often as fits in a quarter of a second if not said.
    pub iters: Option<u64>,
    /// How often before that.
    pub warmup: u64,
    /// How many ranks.
    pub nproc_per_node: Nproc,
    /// What carries the tensors.
    pub backend: BackendChoice,
    /// How long a rank waits for the others.
    pub timeout: Duration,
}

/// One size: a row of the table.
#[derive(Debug, Serialize)]
struct Row {
    op: &'static str,
    bytes: u64,
    /// Elements, as nccl-tests counts them: those of one rank's part where the size is of all parts.
    count: u64,
    dtype: &'static str,
    reduce_op: Option<String>,
    /// The median over rounds of the slowest rank's time for one call.
    time_us: f64,
    /// Size by time, in 10^9 bytes a second.
    algbw: f64,
    /// What the busiest link of a ring would carry, by nccl-tests' factors.
    busbw: f64,
    /// What as many threads need to read and write the same bytes, and do nothing else. CPU ranks only.
    limit_us: Option<f64>,
    /// How many elements were wrong, over all ranks.
    wrong: i64,
}

/// How often ours and the limit take turns at one size. The median of an odd number is one of them.
const ROUNDS: u64 = 5;
/// How long one size is measured if nobody says how often.
const MIN_MEASURED: Duration = Duration::from_millis(250);

/// Measures and prints the table.
///
/// # Errors
/// [`Error::Input`] when that can't be done here, [`SpawnError`](crate::SpawnError) when a rank failed, and
/// wrong results.
pub fn bench(request: BenchRequest, cuda: &Cuda, printer: &Arc<Printer>) -> anyhow::Result<()> {
    let placement = place_ranks(request.nproc_per_node, request.backend, cuda)?;
    let world_size = placement.devices.len();
    request.check(world_size)?;
    if placement.devices[0] == Device::Cpu {
        request.check_memory(world_size, total_memory())?;
    }
    if let Some(note) = &placement.note {
        printer.info(note);
    }
    let spawn = Spawn::at(&placement).timeout(request.timeout);
    let (backend, printer) = (placement.backend, printer.clone());
    spawn.run(move |rank| bench_on(rank, backend, &request, &printer))?;
    Ok(())
}

impl BenchRequest {
    /// The most iterations of one size.
    pub const MOST_ITERS: u64 = 1_000_000;

    fn check(&self, world_size: usize) -> Result<()> {
        let refuse = |why: String| Err(Error::Input(why));
        if self.op.reduces() {
            let allowed = self.reduce_op.check_kind(self.op.operation(), self.dtype);
            allowed.or_else(|error| refuse(error.to_string()))?;
        }
        if self.op == BenchOp::SendRecv && world_size == 1 {
            return refuse("send-recv needs 2 ranks; use --nproc-per-node 2 or more".into());
        }
        if self.min_bytes == 0 || self.min_bytes > self.max_bytes {
            return refuse(format!(
                "--min-bytes {} --max-bytes {}: use sizes of at least 1, and the smaller one for --min-bytes",
                self.min_bytes, self.max_bytes
            ));
        }
        if self.max_bytes > 1 << 40 {
            return refuse(format!("--max-bytes {}: use at most 1T", self.max_bytes));
        }
        if self.step_factor < 2 {
            return refuse("--step-factor: use 2 or more; for one row give --min-bytes and --max-bytes the same size".into());
        }
        if self.iters == Some(0) {
            return refuse("--iters: use 1 or more".into());
        }
        Ok(())
    }

    /// Refuses sizes for which `total` bytes of memory are not enough: each rank has one side of the operation at
    /// least, and as much again is there for the limit.
    fn check_memory(&self, world_size: usize, total: Option<u64>) -> Result<()> {
        let needs = 2.0 * self.max_bytes as f64 * world_size as f64;
        match total.map(|total| total as f64).filter(|total| needs > *total) {
            None => Ok(()),
            Some(total) => Err(Error::Input(format!(
                "--max-bytes {}: {world_size} ranks take {} for that, and this machine has {} of memory; use a \
                 smaller size, or fewer ranks",
                self.max_bytes,
                gigabytes(needs),
                gigabytes(total)
            ))),
        }
    }

    /// The sizes that differ when they are made of whole elements.
    fn sizes(&self, world_size: usize) -> Vec<u64> {
        let sizes = std::iter::successors(Some(self.min_bytes), |size| {
            size.checked_mul(self.step_factor).filter(|&next| next <= self.max_bytes)
        });
        let element = self.dtype.elt_size_in_bytes() as u64;
        let mut counts: Vec<u64> =
            sizes.map(|size| self.op.count(size / element, world_size)).collect();
        counts.dedup();
        counts
    }
}

/// What one rank does.
fn bench_on(
    rank: &Rank,
    backend: Backend,
    request: &BenchRequest,
    printer: &Printer,
) -> anyhow::Result<()> {
    let group = rank.init_process_group(backend)?;
    let leads = rank.rank() == 0;
    let mut total = (0, 0.0, 0);
    let mut spreads = Vec::new();
    if leads && printer.format() == LogFormat::Text {
        printer.lines(|out| write_head(out, request, &group)).context("writing to stdout")?;
    }
    for count in request.sizes(rank.world_size()) {
        let mut exercise = BenchCase::new(request, count, &group)?;
        let Measurement { time, limit, spread } = measure(request, &mut exercise, &group)?;
        spreads.push(spread);
        let wrong = sum_over_ranks(&group, exercise.check(&group)?)?;
        let bytes = exercise.bytes();
        let algbw = bytes as f64 / time.as_secs_f64() / 1e9;
        let row = Row {
            op: request.op.name(),
            bytes,
            count,
            dtype: dtype_name(request.dtype),
            reduce_op: request.op.reduces().then(|| request.reduce_op.to_string()),
            time_us: time.as_secs_f64() * 1e6,
            algbw,
            busbw: algbw * request.op.bus_factor(rank.world_size()),
            limit_us: limit.map(|limit| limit.as_secs_f64() * 1e6),
            wrong,
        };
        total = (total.0 + 1, total.1 + row.busbw, total.2 + wrong);
        if leads {
            match printer.format() {
                LogFormat::Json => printer.object(&row),
                LogFormat::Text => printer.line(&text(&row)),
            }
            .context("writing to stdout")?;
        }
    }
    let (rows, busbw, wrong) = total;
    if leads && printer.format() == LogFormat::Text {
        let verdict = if wrong == 0 { "OK" } else { "FAILED" };
        let average = busbw / f64::from(rows);
        printer
            .line(&format!("# wrong values: {wrong} {verdict}\n# average busbw: {average:.3} GB/s"))
            .context("writing to stdout")?;
    }
    if leads {
        spreads.sort_unstable_by(f64::total_cmp);
        let spread = spreads.get(spreads.len() / 2).copied().unwrap_or(1.0);
        note_if_busy("at half of the sizes the slowest round took over", spread, printer);
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements of the results were wrong");
    Ok(())
}

/// What the rounds of one size came to.
struct Measurement {
    /// Of one call: the median.
    time: Duration,
    /// Of the limit: the median.
    limit: Option<Duration>,
    /// The slowest round by the fastest.
    spread: f64,
}

/// The largest ratio of slow to fast measurements of the same work on a machine that does nothing else.
const NOISY_RATIO: f64 = 1.5;

/// Warns that other programs disturb a measurement, whose slow times are `spread` times the fast ones. `what` is the
/// beginning of a sentence that ends with that number.
fn note_if_busy(what: &str, spread: f64, printer: &Printer) {
    if let Some(note) = busy(what, spread) {
        printer.info(&note);
    }
}

fn busy(what: &str, spread: f64) -> Option<String> {
    (spread > NOISY_RATIO).then(|| {
        format!("the machine is busy: {what} {spread:.1} times the fastest; measure where nothing else runs")
    })
}

/// Measures the operation and the limit, in rounds in which they take turns.
fn measure(
    request: &BenchRequest,
    exercise: &mut BenchCase,
    group: &ProcessGroup,
) -> Result<Measurement> {
    let warm_up = round(group, exercise, request.warmup.max(1))?;
    let enough = || {
        (MIN_MEASURED.as_nanos() / warm_up.as_nanos().max(1))
            .clamp(1, u128::from(BenchRequest::MOST_ITERS)) as u64
    };
    let iters = request.iters.unwrap_or_else(enough);
    let rounds = ROUNDS.min(iters);
    let iters = iters.div_ceil(rounds);
    let leads = group.rank() == 0;
    let mut limit = (leads && group.device() == Device::Cpu)
        .then(|| MemoryRoofline::new(request.op, group.world_size(), exercise.bytes()));
    let (mut times, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        times.push(round(group, exercise, iters)?);
        // The other ranks sleep in the next barrier meanwhile.
        limits.extend(limit.as_mut().map(|limit| limit.measure(iters)).transpose()?);
        group.barrier()?;
    }
    let time = median(&mut times).unwrap_or(warm_up);
    // Sorted now.
    let spread = match (times.first(), times.last()) {
        (Some(fastest), Some(slowest)) => slowest.as_secs_f64() / fastest.as_secs_f64().max(1e-9),
        _ => 1.0,
    };
    Ok(Measurement { time, limit: median(&mut limits), spread })
}

/// Calls the operation `iters` times on all ranks, and returns the time of one call on the slowest, the same
/// on all ranks.
fn round(group: &ProcessGroup, exercise: &mut BenchCase, iters: u64) -> Result<Duration> {
    group.barrier()?;
    let began = Instant::now();
    for _ in 0..iters {
        exercise.run(group)?;
    }
    group.synchronize()?;
    let mut seconds = Tensor::from(began.elapsed().as_secs_f64() / iters as f64);
    seconds = seconds.to_kind(Kind::Double).to_device(group.device());
    group.all_reduce(&mut seconds, ReduceOp::Max)?;
    group.synchronize()?;
    Ok(Duration::from_secs_f64(seconds.double_value(&[])))
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

fn sum_over_ranks(group: &ProcessGroup, value: i64) -> Result<i64> {
    let mut sum = Tensor::from(value).to_device(group.device());
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    group.synchronize()?;
    Ok(sum.int64_value(&[]))
}

fn write_head(
    out: &mut dyn std::io::Write,
    request: &BenchRequest,
    group: &ProcessGroup,
) -> std::io::Result<()> {
    let ranks = if group.world_size() == 1 { "rank" } else { "ranks" };
    let place = if group.device() == Device::Cpu { "CPU" } else { "GPU" };
    let (op, backend, n) = (request.op.name(), group.backend(), group.world_size());
    writeln!(out, "# {op}: {n} {ranks} on the {place}, backend {backend}")?;
    if group.device() == Device::Cpu {
        writeln!(
            out,
            "# limit: what {n} threads need to read all inputs and write all outputs only\n\
             # ratio: limit / time; about 1 is as fast as the memory"
        )?;
    }
    writeln!(
        out,
        "#\n#{:>9}{:>9}{:>9}{:>8}{:>9}{:>7}{:>7}{:>6}{:>9}{:>6}\n\
         #{:>9}{:>9}{:>9}{:>8}{:>9}{:>7}{:>7}{:>6}{:>9}{:>6}",
        "size",
        "count",
        "type",
        "redop",
        "time",
        "algbw",
        "busbw",
        "wrong",
        "limit",
        "ratio",
        "(B)",
        "(elem.)",
        "",
        "",
        "(us)",
        "GB/s",
        "GB/s",
        "",
        "(us)",
        ""
    )
}

fn text(row: &Row) -> String {
    let none = || "-".to_string();
    let limit = row.limit_us.map_or_else(none, |limit| format!("{limit:.2}"));
    let ratio = row.limit_us.map_or_else(none, |limit| format!("{:.2}", limit / row.time_us));
    format!(
        "{:>10}{:>9}{:>9}{:>8}{:>9.2}{:>7.2}{:>7.2}{:>6}{limit:>9}{ratio:>6}",
        row.bytes,
        row.count,
        row.dtype,
        row.reduce_op.as_deref().unwrap_or("none"),
        row.time_us,
        row.algbw,
        row.busbw,
        row.wrong,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_told_of() {
        assert_eq!(busy("the median step took", 1.4), None);
        let expected = "the machine is busy: the median step took 2.5 times the fastest; measure where nothing else runs";
        assert_eq!(busy("the median step took", 2.5).unwrap(), expected);
    }
}
