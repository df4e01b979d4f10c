//! `ddp-mp bench OP`: the time of a collective at each size. `ddp-mp bench step`: the time of a training step, here and
//! on a simulated cluster. `ddp-mp bench scaling`: the gain from more ranks on this machine.
//!
//! The columns are those of NVIDIA's nccl-tests, so that tools for those work here, too.

mod bench_case;
mod forecast;
mod scaling;
mod sorted;
mod step;
mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::TypedValueParser;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::comm_op::{CommOp, OpTensors, op_parser};
use super::ranks_flags::RanksFlags;
use crate::config::{check_fits, name, whole};
pub(super) use bench_case::bus_factor;
use engine::error::{Error, Result, counted};
use engine::ffi::cuda::Cuda;
use engine::launch::{Placement, Rank};
use engine::process_group::{Backend, ProcessGroup, ReduceOp, dtype_name, num_bytes, parse_dtype};
pub use scaling::bench_scaling;
use sorted::Sorted;
pub use step::bench_step;
use table::Column;
use views::{LogFormat, Printer};

/// The most iterations of one size.
const MOST_ITERS: u64 = 1_000_000;

/// The flags of `bench OP`.
#[derive(Debug, Clone, Args)]
pub struct BenchFlags {
    /// Choose the collective
    // With a subcommand the operation may be left out, and its default counts.
    #[arg(value_name = "OP", value_parser = op(), required = true)]
    #[arg(default_value = "all-reduce", hide_default_value = true)]
    pub op: CommOp,
    /// Start at this size, as 4, 16K or 128M
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4")]
    pub min_bytes: u64,
    /// End at this size
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "128M")]
    pub max_bytes: u64,
    /// Multiply each size by N for the next one
    #[arg(long, value_name = "N", value_parser = whole::<u64>(2..), default_value_t = 2)]
    pub step_factor: u64,
    /// Measure each size N times [default: for a quarter of a second]
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..=MOST_ITERS))]
    pub iters: Option<u64>,
    /// Warm up with N iterations before measuring
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0..=MOST_ITERS), default_value_t = 5)]
    pub warmup: u64,
    /// Choose the data type of the elements
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype, default_value = "float32")]
    pub dtype: Kind,
    /// Reduce with sum, avg, product, min, max, band, bor, bxor
    #[arg(long, value_name = "OP", default_value = "sum")]
    pub reduce_op: ReduceOp,
    /// The ranks.
    #[command(flatten)]
    pub ranks: RanksFlags,
    /// Choose the output format
    ///
    /// text: a table. json: one object per size
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    pub log_format: LogFormat,
}

fn op() -> impl TypedValueParser<Value = CommOp> {
    op_parser(bench_case::ops().map(|op| (bench_case::name(op), op)).collect(), "-")
}

/// Parses a size in bytes, as nccl-tests reads it: K is 1024.
fn size(text: &str) -> Result<u64, &'static str> {
    let size = parse_size::Config::new().with_binary().parse_size(text);
    size.map_err(|_| "expected a size in bytes, as 4, 16K or 128M")
}

/// One size: a row of the table.
#[derive(Debug, Serialize)]
struct Row {
    op: &'static str,
    bytes: u64,
    /// Elements as nccl-tests counts them: of one rank's part where the size is that of all parts.
    count: u64,
    dtype: &'static str,
    reduce_op: Option<String>,
    /// The median over rounds of the slowest rank's time for one call.
    time_us: f64,
    /// Size divided by time, in 10^9 bytes per second.
    algbw: f64,
    /// The bandwidth on the busiest link of a ring, by nccl-tests' factors, in 10^9 bytes per second.
    busbw: f64,
    /// The number of wrong elements, over all ranks.
    wrong: i64,
}

/// The rounds of one size. Odd, so that the median is one of the times.
const ROUNDS: u64 = 5;
/// The time to measure one size for, if `iters` is not given.
const MIN_MEASURED: Duration = Duration::from_millis(250);

/// Measures all sizes and prints the table.
///
/// # Errors
/// [`Error::Input`] when this operation can't run here, [`SpawnError`](crate::SpawnError) when a rank failed, and an
/// error for wrong results.
pub fn bench(flags: &BenchFlags, cuda: &Cuda, printer: &Arc<Printer>) -> anyhow::Result<()> {
    flags.ranks.run(flags, cuda, printer, BenchFlags::check, BenchFlags::run)
}

impl BenchFlags {
    /// Refuses flags that do not fit each other, and tensors that this machine's memory cannot hold.
    fn check(&self, placement: &Placement) -> Result<()> {
        let world_size = placement.devices.len();
        let refuse = |why: String| Err(Error::usage(why));
        if let Some(operation) = self.op.reduction() {
            self.reduce_op.check_kind(operation, self.dtype)?;
        }
        if self.op == CommOp::IsendIrecv && world_size == 1 {
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
        if placement.devices[0] != Device::Cpu {
            return Ok(());
        }
        let largest = self.max_bytes / self.dtype.elt_size_in_bytes() as u64;
        let numel = bench_case::count(self.op, largest, world_size) as usize;
        let tensors = self.op.tensors(world_size) * num_bytes(self.dtype, numel) as f64;
        let what = format!("--max-bytes {}: {world_size} ranks take", self.max_bytes);
        check_fits(&what, tensors, "use a smaller size, or fewer ranks")
    }

    /// Returns the sizes as counts of whole elements, without repetitions.
    fn sizes(&self, world_size: usize) -> Vec<u64> {
        let sizes = std::iter::successors(Some(self.min_bytes), |size| {
            size.checked_mul(self.step_factor).filter(|&next| next <= self.max_bytes)
        });
        let element = self.dtype.elt_size_in_bytes() as u64;
        let mut counts: Vec<u64> =
            sizes.map(|size| bench_case::count(self.op, size / element, world_size)).collect();
        counts.dedup();
        counts
    }

    /// Measures and checks all sizes on one rank. Rank 0 prints.
    fn run(&self, rank: &Rank, backend: Backend, printer: &Printer) -> anyhow::Result<()> {
        let group = rank.init_process_group(backend)?;
        let leads = rank.rank() == 0;
        let (mut busbw, mut wrong, mut spreads) = (0.0, 0, Vec::new());
        if leads {
            table::print_lines(printer, &head(self, &group))?;
        }
        for count in self.sizes(rank.world_size()) {
            let mut case =
                OpTensors::new(self.op, self.reduce_op, count as i64, self.dtype, &group)?;
            let times = measure(self, &mut case, &group)?;
            let time = times.median();
            spreads.push(times.spread());
            let wrong_here = reduced(&group, &Tensor::from(case.check()?), ReduceOp::Sum)?;
            let bytes = case.bytes();
            let algbw = bytes as f64 / time / 1e9;
            let row = Row {
                op: bench_case::name(self.op),
                bytes,
                count,
                dtype: dtype_name(self.dtype),
                reduce_op: self.op.reduction().map(|_| self.reduce_op.to_string()),
                time_us: time * 1e6,
                algbw,
                busbw: algbw * bus_factor(self.op, rank.world_size()),
                wrong: wrong_here.int64_value(&[]),
            };
            (busbw, wrong) = (busbw + row.busbw, wrong + row.wrong);
            if leads {
                table::print_row(printer, &COLUMNS, &row)?;
            }
        }
        if leads {
            let verdict = if wrong == 0 { "OK" } else { "FAILED" };
            let mean = busbw / spreads.len() as f64;
            let foot =
                format!("# wrong values: {wrong} {verdict}\n# average busbw: {mean:.3} GB/s");
            table::print_lines(printer, &foot)?;
            let spread = Sorted::new(spreads).median();
            note_if_busy("at half of the sizes the slowest round took over", spread, printer);
        }
        anyhow::ensure!(wrong == 0, "{wrong} elements of the results were wrong");
        Ok(())
    }
}

/// The largest ratio of slow to fast measurements of the same work on an otherwise idle machine.
const NOISY_RATIO: f64 = 1.5;

/// Warns that other programs disturb a measurement whose slow times are `spread` times the fast ones. `what` begins
/// the sentence, before that number.
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

/// Returns the time of one call in each of several rounds, in seconds.
fn measure(flags: &BenchFlags, case: &mut OpTensors, group: &ProcessGroup) -> Result<Sorted> {
    let warm_up = round(group, case, flags.warmup.max(1))?;
    let enough = MIN_MEASURED.as_secs_f64() / warm_up.max(1e-9);
    let iters = flags.iters.unwrap_or((enough as u64).clamp(1, MOST_ITERS));
    let rounds = ROUNDS.min(iters);
    let iters = iters.div_ceil(rounds);
    let times: Result<Vec<f64>> = (0..rounds).map(|_| round(group, case, iters)).collect();
    Ok(Sorted::new(times?))
}

/// Calls the operation `iters` times on all ranks. Returns the time of one call on the slowest rank, in seconds, on all
/// ranks.
pub(super) fn round(group: &ProcessGroup, case: &mut OpTensors, iters: u64) -> Result<f64> {
    group.barrier()?;
    let began = Instant::now();
    for _ in 0..iters {
        case.run()?;
    }
    group.synchronize()?;
    let seconds = Tensor::from(began.elapsed().as_secs_f64() / iters as f64);
    let slowest = reduced(group, &seconds.to_kind(Kind::Double), ReduceOp::Max)?;
    Ok(slowest.double_value(&[]))
}

/// Returns a tensor of all ranks, reduced.
fn reduced(group: &ProcessGroup, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    let mut tensor = group.to_device(tensor)?;
    group.all_reduce(&mut tensor, op)?;
    group.to_host(&tensor)
}

/// Returns the lines above the table.
fn head(flags: &BenchFlags, group: &ProcessGroup) -> String {
    let device = if group.device() == Device::Cpu { "CPU" } else { "GPU" };
    let (op, backend) = (bench_case::name(flags.op), group.backend());
    let ranks = counted(group.world_size(), "rank");
    let transport = group.transport().map_or(String::new(), |transport| format!(", {transport}"));
    let columns = table::head(&COLUMNS);
    format!("# {op}: {ranks} on the {device}, backend {backend}{transport}\n#\n{columns}")
}

const COLUMNS: [Column<Row>; 8] = [
    ("size", "(B)", 10, |row| row.bytes.to_string()),
    ("count", "(elem.)", 9, |row| row.count.to_string()),
    ("type", "", 9, |row| row.dtype.into()),
    ("redop", "", 8, |row| row.reduce_op.clone().unwrap_or("none".into())),
    ("time", "(us)", 9, |row| microseconds(row.time_us)),
    ("algbw", "GB/s", 7, |row| format!("{:.2}", row.algbw)),
    ("busbw", "GB/s", 7, |row| format!("{:.2}", row.busbw)),
    ("wrong", "", 6, |row| row.wrong.to_string()),
];

/// Formats a time with at most two decimals, and with fewer if it is long: eight characters hold up to 99 s.
fn microseconds(us: f64) -> String {
    let decimals = if us < 99_999.99 { 2 } else { 0 };
    format!("{us:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_times_leave_room_for_the_next_column() {
        let row = Row {
            op: "all_reduce",
            bytes: 1 << 30,
            count: 1 << 28,
            dtype: "float32",
            reduce_op: Some("sum".into()),
            time_us: 1.2e7,
            algbw: 0.09,
            busbw: 0.09,
            wrong: 0,
        };
        let line = table::line(&COLUMNS, &row);
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            "1073741824 268435456 float32 sum 12000000 0.09 0.09 0".split(' ').collect::<Vec<_>>()
        );
        assert_eq!(microseconds(99_999.98), "99999.98");
        assert_eq!(microseconds(99_999.996), "100000");
    }

    #[test]
    fn busy_machine_is_reported_above_a_median_ratio() {
        assert_eq!(busy("the median step took", 1.4), None);
        let expected = "the machine is busy: the median step took 2.5 times the fastest; measure where nothing else runs";
        assert_eq!(busy("the median step took", 2.5).unwrap(), expected);
    }
}
