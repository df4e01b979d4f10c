//! `ddp-mp comm`: shows each collective on tensors that are small enough to read.

mod drawing;
mod operations;
mod shorten;
mod table;
mod values;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};
use strum::IntoEnumIterator;
use tch::{Device, Kind};

use super::ranks_flags::{RanksFlags, operation};
use crate::config::{name, whole};
use crate::error::{Error, Result};
use crate::ffi::cuda::Cuda;
use crate::launch::Rank;
use crate::process_group::{Backend, DTYPES, ReduceOp, dtype_name, num_bytes, parse_dtype};
use crate::telemetry::{LogFormat, Printer, gigabytes, total_memory};

pub use operations::CommOp;
use values::{Data, Plain, Value};

/// The most elements of a tensor, which people are to read.
const MOST_NUMEL: u64 = 1_000_000;

/// The flags of `comm`.
#[derive(Debug, Clone, Args)]
pub struct CommFlags {
    /// Operation; without it, all of them
    #[arg(value_name = "OP", value_parser = operation::<CommOp>("_"))]
    pub op: Option<CommOp>,
    /// Elements of each tensor
    #[arg(long, value_name = "N", value_parser = whole::<i64>(0..=MOST_NUMEL), default_value_t = 2)]
    pub numel: i64,
    /// Data type of the elements
    #[arg(long, value_name = "DTYPE", value_parser = dtype(), default_value = "float32")]
    pub dtype: Kind,
    /// Reduction of the elements
    #[arg(long, value_name = "OP", value_parser = reduce_op(), default_value = "sum")]
    pub reduce_op: ReduceOp,
    /// The ranks.
    #[command(flatten)]
    pub ranks: RanksFlags,
    /// Format of the output
    ///
    /// text: for people. json: one object per operation and rank
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    pub log_format: LogFormat,
}

fn dtype() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(DTYPES.map(dtype_name)).try_map(|name| parse_dtype(&name))
}

fn reduce_op() -> impl TypedValueParser<Value = ReduceOp> {
    let names = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"];
    PossibleValuesParser::new(names).try_map(|name| name.parse::<ReduceOp>())
}

/// The state that all ranks share.
struct Job {
    flags: CommFlags,
    ops: Vec<CommOp>,
    backend: Backend,
    printer: Arc<Printer>,
    /// The ranks that have arrived at the barrier.
    arrived: Vec<AtomicBool>,
}

/// One rank's tensors before and after an operation, and the bytes that it sent and received in it.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    before: Option<Value>,
    after: Option<Value>,
    sent: u64,
    received: u64,
}

/// A line of `--log-format json`.
#[derive(Serialize)]
struct Line<'a> {
    op: &'static str,
    rank: usize,
    before: Option<Plain<'a, Value>>,
    after: Option<Plain<'a, Value>>,
    sent: u64,
    received: u64,
}

/// Runs the operations, and prints the result of each.
///
/// # Errors
/// [`Error::InvalidInput`] when these operations can't run here, and [`SpawnError`](crate::SpawnError) when a rank failed.
pub fn comm(flags: CommFlags, cuda: &Cuda, printer: &Arc<Printer>) -> anyhow::Result<()> {
    let placement = flags.ranks.place(cuda)?;
    let ops = flags.op.map_or_else(|| CommOp::iter().collect(), |op| vec![op]);
    let world_size = placement.devices.len();
    check(&flags, &ops, placement.backend, world_size)?;
    if placement.devices[0] == Device::Cpu {
        check_memory(&flags, &ops, world_size, total_memory())?;
    }
    if let Some(note) = &placement.note {
        printer.info(note);
    }
    let spawn = flags.ranks.spawn(&placement);
    let job = Job {
        flags,
        ops,
        backend: placement.backend,
        printer: printer.clone(),
        arrived: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
    };
    spawn.run(move |rank| show_on(rank, &job))?;
    Ok(())
}

/// Refuses arguments that an operation would refuse, before anything is printed.
fn check(flags: &CommFlags, ops: &[CommOp], backend: Backend, world_size: usize) -> Result<()> {
    let CommFlags { numel, dtype, reduce_op, .. } = *flags;
    if numel.checked_mul(world_size as i64).is_none() {
        return Err(Error::InvalidInput(format!(
            "--numel {numel}: {world_size} tensors of that size are too large; use fewer elements"
        )));
    }
    for operation in ops.iter().filter_map(|op| op.reduction()) {
        backend.check_reduction(operation, reduce_op, dtype).map_err(|error| {
            Error::InvalidInput(format!(
                "--reduce-op {reduce_op} --dtype {}: {error}",
                dtype_name(dtype)
            ))
        })?;
    }
    Ok(())
}

/// The bytes that a tensor takes besides its elements, measured with lists of tensors on each of 1000 ranks.
const TENSOR_OVERHEAD_BYTES: f64 = 600.0;

/// Refuses tensors that do not fit into `total` bytes.
///
/// # Errors
/// [`Error::InvalidInput`] that names how many ranks would fit.
fn check_memory(
    flags: &CommFlags,
    ops: &[CommOp],
    world_size: usize,
    total: Option<u64>,
) -> Result<()> {
    let Some(total) = total.map(|total| total as f64) else { return Ok(()) };
    let tensor_bytes = TENSOR_OVERHEAD_BYTES + num_bytes(flags.dtype, flags.numel as usize) as f64;
    let op_bytes = |ranks| ops.iter().map(move |op| (op.tensors(ranks) * tensor_bytes, op.name()));
    let needs = |ranks| op_bytes(ranks).max_by(|a, b| a.0.total_cmp(&b.0));
    let Some((bytes, op)) = needs(world_size).filter(|(bytes, _)| *bytes > total) else {
        return Ok(());
    };
    let (mut most, mut too_many) = (1, world_size);
    while too_many - most > 1 {
        let ranks = most.midpoint(too_many);
        let fits = needs(ranks).is_none_or(|(bytes, _)| bytes <= total);
        *(if fits { &mut most } else { &mut too_many }) = ranks;
    }
    Err(Error::InvalidInput(format!(
        "--numel {}: the tensors of {op} on {world_size} ranks take {}, and this machine has {}; use fewer elements, \
         another operation, or up to {most} ranks with --nproc-per-node",
        flags.numel,
        gigabytes(bytes),
        gigabytes(total)
    )))
}

/// Runs every operation on one rank, and sends its row to rank 0, which prints.
fn show_on(rank: &Rank, job: &Job) -> anyhow::Result<()> {
    let group = rank.init_process_group(job.backend)?;
    let CommFlags { numel, dtype, reduce_op, .. } = job.flags;
    let data = Data { group: &group, numel, dtype };
    for &op in &job.ops {
        let earlier = group.traffic();
        let [before, after] = op.run(&data, reduce_op, &job.arrived)?;
        let later = group.traffic();
        let (sent, received) = (later.sent - earlier.sent, later.received - earlier.received);
        let row = Row { before, after, sent, received };
        if let Some(rows) = group.gather_object(&row, 0)? {
            job.print(op, &rows)?;
        }
    }
    Ok(())
}

impl Job {
    fn print(&self, op: CommOp, rows: &[Row]) -> std::io::Result<()> {
        if self.printer.format() == LogFormat::Json {
            return rows.iter().enumerate().try_for_each(|(rank, row)| {
                let Row { sent, received, .. } = *row;
                let [before, after] = [&row.before, &row.after].map(|v| v.as_ref().map(Plain));
                let op = op.name();
                self.printer.object(&Line { op, rank, before, after, sent, received })
            });
        }
        self.printer.lines(|out| {
            if op == self.ops[0] {
                writeln!(out, "{}", drawing::legend(rows.len()))?;
                writeln!(out, "sent and recv are in bytes.")?;
            }
            self.write_text(op, rows, out)
        })
    }

    fn write_text(&self, op: CommOp, rows: &[Row], out: &mut dyn Write) -> std::io::Result<()> {
        let (world_size, reduce_op) = (rows.len(), self.flags.reduce_op);
        let [pytorch, rust] = op.calls();
        writeln!(out, "\n{}", op.name())?;
        let mut paragraph = |lines: &[String]| {
            lines.iter().try_for_each(|line| writeln!(out, "{}", format!("  {line}").trim_end()))
        };
        paragraph(&op.about(world_size, reduce_op))?;
        paragraph(&[String::new()])?;
        paragraph(&drawing::draw(op, world_size, reduce_op))?;
        paragraph(&[
            String::new(),
            format!("PyTorch  {pytorch}"),
            format!("Rust     {rust}"),
            String::new(),
        ])?;
        paragraph(&table::table(rows))
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn flags(numel: i64) -> CommFlags {
        let command = CommFlags::augment_args(Command::new("comm"));
        let matches = command.get_matches_from(["comm", &format!("--numel={numel}")]);
        CommFlags::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn oversized_tensors_are_refused_before_allocation() {
        let (flags, all) = (flags(1_000_000), CommOp::iter().collect::<Vec<_>>());
        let check = |ops: &[CommOp], total| check_memory(&flags, ops, 100, Some(total));
        let error = check(&[CommOp::AllGather], 40_000_000_000).unwrap_err().to_string();
        assert_eq!(
            error,
            "--numel 1000000: the tensors of all_gather on 100 ranks take 40.4 GB, and this machine has 40.0 GB; use \
             fewer elements, another operation, or up to 99 ranks with --nproc-per-node"
        );
        assert!(check(&[CommOp::AllGather], 41_000_000_000).is_ok());
        assert!(check(&[CommOp::AllReduce, CommOp::Gather], 801_000_000).is_ok());
        let error = check(&all, 41_000_000_000).unwrap_err().to_string();
        assert!(error.contains("the tensors of all_to_all on 100 ranks take 80.0 GB"), "{error}");
    }

    #[test]
    fn oversized_tensor_lists_are_refused_with_the_rank_limit() {
        let (flags, all) = (flags(2), CommOp::iter().collect::<Vec<_>>());
        let total = Some(24_000_000_000);
        let check = |ops: &[CommOp], ranks| check_memory(&flags, ops, ranks, total);
        let error = check(&all, 8192).unwrap_err().to_string();
        assert!(error.contains("the tensors of all_to_all on 8192 ranks take 81.6 GB"), "{error}");
        assert!(error.ends_with("or up to 4442 ranks with --nproc-per-node"), "{error}");
        assert!(check(&all, 4442).is_ok() && check(&all, 4443).is_err());
        assert!(check(&[CommOp::Barrier, CommOp::AllReduce], 8192).is_ok());
    }
}
