//! `ddp-mp comm`: shows each collective on tensors that are small enough to read.

mod drawing;
mod operations;
mod shorten;
mod table;
mod values;

use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::comm_op::{CommOp, OpTensors, op_parser};
use super::ranks_flags::RanksFlags;
use crate::config::{check_fits, name, whole};
use engine::error::{Error, Result};
use engine::ffi::cuda::Cuda;
use engine::launch::{Placement, Rank};
use engine::operation::Operation;
use engine::process_group::{
    Backend, DTYPES, ProcessGroup, ReduceOp, dtype_name, num_bytes, parse_dtype,
};
use operations::{OPS, ShownOp};
use values::{Value, fill};
use views::{LogFormat, Printer};

/// The most elements of a tensor, which people are to read.
const MOST_NUMEL: u64 = 1_000_000;

/// The flags of `comm`.
#[derive(Debug, Clone, Args)]
pub struct CommFlags {
    /// Show only this operation; without it, show all
    #[arg(value_name = "OP", value_parser = op())]
    pub op: Option<CommOp>,
    /// Give each tensor N elements
    #[arg(long, value_name = "N", value_parser = whole::<i64>(0..=MOST_NUMEL), default_value_t = 2)]
    pub numel: i64,
    /// Choose the data type of the elements
    #[arg(long, value_name = "DTYPE", value_parser = dtype(), default_value = "float32")]
    pub dtype: Kind,
    /// Choose the reduction of the elements
    #[arg(long, value_name = "OP", value_parser = reduce_op(), default_value = "sum")]
    pub reduce_op: ReduceOp,
    /// The ranks.
    #[command(flatten)]
    pub ranks: RanksFlags,
    /// Choose the output format
    ///
    /// text: for people. json: one object per operation and rank
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    pub log_format: LogFormat,
}

fn op() -> impl TypedValueParser<Value = CommOp> {
    op_parser(OPS.iter().map(|shown| (shown.op.name(), shown.op)).collect(), "_")
}

fn dtype() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(DTYPES.map(dtype_name)).try_map(|name| parse_dtype(&name))
}

fn reduce_op() -> impl TypedValueParser<Value = ReduceOp> {
    let names = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"];
    PossibleValuesParser::new(names).try_map(|name| name.parse::<ReduceOp>())
}

/// One rank's tensors before and after an operation, and the bytes that it sent and received in it.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    before: Option<Value>,
    after: Option<Value>,
    sent: u64,
    received: u64,
}

/// An object of `--log-format json`.
#[derive(Debug, Serialize)]
struct Line {
    op: &'static str,
    rank: usize,
    /// The numbers of a tensor, or of a list of them.
    before: Option<serde_json::Value>,
    after: Option<serde_json::Value>,
    sent: u64,
    received: u64,
}

/// Runs the operations, and prints the result of each.
///
/// # Errors
/// [`Error::Input`] when these operations can't run here, and [`SpawnError`](crate::SpawnError) when a rank failed.
pub fn comm(flags: &CommFlags, cuda: &Cuda, printer: &Arc<Printer>) -> anyhow::Result<()> {
    flags.ranks.run(flags, cuda, printer, CommFlags::check, CommFlags::show)
}

impl CommFlags {
    /// Returns the operations to show.
    fn ops(&self) -> impl Iterator<Item = ShownOp> {
        OPS.into_iter().filter(move |shown| self.op.is_none_or(|op| op == shown.op))
    }

    /// Refuses tensors that this machine's memory cannot hold.
    fn check_tensors(&self, world_size: usize) -> Result<()> {
        // An empty tensor takes 600 bytes, measured with lists of tensors on each of 1000 ranks.
        let bytes_each = 600.0 + num_bytes(self.dtype, self.numel as usize) as f64;
        self.ops().try_for_each(|ShownOp { op, .. }| {
            let (numel, name) = (self.numel, op.name());
            let what = format!("--numel {numel}: the tensors of {name} on {world_size} ranks take");
            let remedy =
                "use fewer elements, another operation, or fewer ranks with --nproc-per-node";
            check_fits(&what, op.tensors(world_size) * bytes_each, remedy)
        })
    }

    /// Refuses arguments that an operation would refuse, before anything is printed.
    fn check(&self, placement: &Placement) -> Result<()> {
        let Self { op, dtype, reduce_op, .. } = *self;
        if let Some(op) = op.filter(|op| reduce_op != ReduceOp::Sum && op.reduction().is_none()) {
            return Err(Error::usage(format!(
                "--reduce-op {reduce_op}: {} does not reduce elements; remove it",
                op.name()
            )));
        }
        for operation in self.ops().filter_map(|shown| shown.op.reduction()) {
            placement.backend.check_reduction(operation, reduce_op, dtype).map_err(|error| {
                error.named(format_args!("--reduce-op {reduce_op} --dtype {}", dtype_name(dtype)))
            })?;
        }
        let devices = &placement.devices;
        if devices[0] == Device::Cpu { self.check_tensors(devices.len()) } else { Ok(()) }
    }

    /// Runs every operation on one rank, and sends its row to rank 0, which prints.
    fn show(&self, rank: &Rank, backend: Backend, printer: &Printer) -> anyhow::Result<()> {
        let group = rank.init_process_group(backend)?;
        for shown in self.ops() {
            let row = self.run(shown.op, &group)?;
            if let Some(rows) = group.gather_object(&row, 0)? {
                self.print(shown, &rows, printer)?;
            }
        }
        Ok(())
    }

    /// Runs the operation on this rank. Returns the rank's tensors before and after.
    fn run(&self, op: CommOp, group: &ProcessGroup) -> Result<Row> {
        let Self { numel, dtype, reduce_op, .. } = *self;
        let (rank, world_size) = (group.rank(), group.world_size());
        let moves = op.moves();
        let mut tensors = OpTensors::new(op, reduce_op, numel, dtype, group)?;
        fill(&tensors.input, rank)?;
        group.synchronize()?;
        let read = |is_there: bool, tensor: &Tensor, list: &Option<Vec<Tensor>>| {
            is_there.then(|| Value::of(tensor, list.as_deref())).transpose()
        };
        let has_input = op.has(moves.inputs, rank == 0);
        let before = read(has_input, &tensors.input, &tensors.input_list)?;
        let is_barrier = op == CommOp::Collective(Operation::Barrier);
        let earlier = group.traffic();
        let arrived = SystemTime::now();
        tensors.run()?;
        let left = SystemTime::now();
        let later = group.traffic();
        group.synchronize()?;
        let has_result = match op {
            CommOp::SendRecv => rank > 0,
            CommOp::IsendIrecv => world_size > 1,
            CommOp::Collective(_) => op.has(moves.outputs, rank == 0),
        };
        let after = if is_barrier {
            // The order of arrival varies, but all ranks have arrived before this one leaves.
            let arrivals = group.all_gather_object(&arrived)?;
            let arrived = (0..).zip(arrivals).filter(|(_, arrival)| *arrival <= left);
            Some(Value::whole(&arrived.map(|(rank, _)| rank).collect::<Vec<_>>()))
        } else {
            read(has_result, &tensors.output, &tensors.output_list)?
        };
        let (sent, received) = (later.sent - earlier.sent, later.received - earlier.received);
        Ok(Row { before, after, sent, received })
    }

    fn print(&self, shown: ShownOp, rows: &[Row], printer: &Printer) -> io::Result<()> {
        if printer.format() == LogFormat::Json {
            return rows.iter().enumerate().try_for_each(|(rank, row)| {
                printer.object(&Line {
                    op: shown.op.name(),
                    rank,
                    before: row.before.as_ref().map(Value::json),
                    after: row.after.as_ref().map(Value::json),
                    sent: row.sent,
                    received: row.received,
                })
            });
        }
        let (world_size, reduce_op) = (rows.len(), self.reduce_op);
        let ShownOp { op, pytorch_call, rust_call, .. } = shown;
        let parts = [
            shown.about(reduce_op),
            drawing::draw(op, world_size, reduce_op),
            vec![format!("PyTorch  {pytorch_call}"), format!("Rust     {rust_call}")],
            table::table(rows),
        ];
        printer.lines(|out| {
            if self.ops().next().is_some_and(|first| first.op == op) {
                writeln!(out, "{}", drawing::LEGEND)?;
                writeln!(out, "sent and recv are in bytes.")?;
            }
            writeln!(out, "\n{}", op.name())?;
            for line in parts.join(&String::new()) {
                writeln!(out, "{}", format!("  {line}").trim_end())?;
            }
            Ok(())
        })
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
    fn tensors_that_never_fit_are_refused() {
        let error = flags(1_000_000).check_tensors(1 << 20).unwrap_err().to_string();
        assert!(error.starts_with("--numel 1000000: the tensors of "), "{error}");
        // A list of tensors for each pair of ranks, though they are small.
        let op = Some(CommOp::Collective(Operation::AllToAll));
        let error = CommFlags { op, ..flags(2) }.check_tensors(1 << 20).unwrap_err();
        assert!(error.to_string().contains("all_to_all on 1048576 ranks take "), "{error}");
        assert!(flags(1000).check_tensors(100).is_ok());
    }
}
