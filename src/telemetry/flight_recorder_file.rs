//! `--flight-recorder`: the newest collectives of each rank as PyTorch's flight recorder writes them, for its analysis
//! program `torchfrtrace`.
//!
//! The file is a Python pickle, as that of `torch._C._distributed_c10d._dump_nccl_trace`. The recorder keeps the bytes of
//! a call and not its shapes, so the sizes are numbers of bytes, and the dtype is `Byte`. It does not keep the peers of
//! messages, so the file has no sends and receives.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_pickle::SerOptions;
use strum::IntoEnumIterator;

use super::{Marks, Output};
use crate::operation::{CollectiveType, Holders, Operation};
use crate::runtime::{FlightRecorderDump, OpEntry, RankEntries, SourceLine};

/// The version of PyTorch's format, as `torchfrtrace` reads it.
const VERSION: &str = "2.10";

/// The name of a rank's file, before the rank.
const PREFIX: &str = "rank_";

/// The bytes after the pickle, which Python's `pickle.load` ignores.
const MARKS: Marks = Marks { begins: "", before: "\nddp-mp flight recorder ", after: "\n" };

/// The file of one rank.
#[derive(Debug, Serialize)]
struct RankFile {
    version: &'static str,
    entries: Vec<Collective>,
    /// The groups of the rank, by name.
    pg_config: BTreeMap<String, Group>,
}

/// A group of ranks.
#[derive(Debug, Serialize)]
struct Group {
    name: String,
    desc: String,
    /// A Python list of ranks, as text.
    ranks: String,
}

/// One collective of the rank. The fields are those that `torchfrtrace` reads, and the times.
#[derive(Debug, Serialize)]
struct Collective {
    /// The number among the rank's collectives: files of ranks are aligned by it.
    record_id: u64,
    pg_id: u32,
    /// The group's name and description.
    process_group: (String, String),
    /// The number among the group's collectives, as in this program's messages.
    collective_seq_id: u64,
    p2p_seq_id: u64,
    op_id: u64,
    is_p2p: bool,
    profiling_name: String,
    /// Nanoseconds since 1970.
    time_created_ns: u64,
    time_discovered_started_ns: u64,
    time_discovered_completed_ns: Option<u64>,
    duration_ms: Option<f64>,
    input_sizes: Vec<Vec<u64>>,
    input_dtypes: Vec<&'static str>,
    output_sizes: Vec<Vec<u64>>,
    output_dtypes: Vec<&'static str>,
    state: &'static str,
    retired: bool,
    frames: Vec<Frame>,
}

/// The source line of a call.
#[derive(Debug, Serialize)]
struct Frame {
    name: &'static str,
    filename: &'static str,
    line: u32,
}

/// Returns the file of `rank` in `folder`, which is created if needed. Removes the file of an earlier run: if this one is
/// killed, it must not be taken for the rank's.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn flight_recorder_output(folder: &Path, rank: usize) -> io::Result<Output> {
    let output = Output::new(&folder.join(format!("{PREFIX}{rank}")), MARKS)?;
    output.remove()?;
    Ok(output)
}

/// Removes the files of an earlier run with more ranks than `world_size` from `folder`.
///
/// # Errors
/// When one cannot be removed, or this program did not write it.
pub(crate) fn remove_further_ranks(folder: &Path, world_size: usize) -> io::Result<()> {
    for file in fs::read_dir(folder)? {
        let name = file?.file_name();
        let rank = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<usize>().ok());
        if let Some(rank) = rank.filter(|rank| *rank >= world_size) {
            flight_recorder_output(folder, rank)?;
        }
    }
    Ok(())
}

/// Writes the collectives of `rank`, which is one of `dump`.
///
/// # Errors
/// When they cannot be written.
pub(crate) fn write_flight_recorder(
    dump: &FlightRecorderDump,
    rank: &RankEntries,
    mut out: &mut dyn Write,
) -> io::Result<()> {
    let file = RankFile {
        version: VERSION,
        entries: collectives(dump, rank),
        pg_config: groups(dump, rank.rank),
    };
    serde_pickle::to_writer(&mut out, &file, SerOptions::new()).map_err(io::Error::other)
}

/// Returns PyTorch's name of a collective; `None` for other operations.
fn name(operation: Operation) -> Option<&'static str> {
    operation.collective()?;
    Some(match operation {
        Operation::Barrier => "all_reduce_barrier",
        _ => operation.into(),
    })
}

/// Returns the input's and the output's size of a collective of `world_size` ranks that moves `bytes`. Empty where the
/// recorder does not record them.
fn sizes(operation: Operation, bytes: u64, world_size: u64) -> [Vec<u64>; 2] {
    // The last part may be shorter, but `torchfrtrace` expects equal ones.
    let part = bytes.div_ceil(world_size);
    let whole = [vec![bytes], vec![bytes]];
    let Some(CollectiveType { inputs, outputs, .. }) = operation.collective() else { return whole };
    match (inputs.is_list(), outputs.is_list()) {
        // Only the root's record has the bytes of all ranks.
        (true, _) if inputs.holders == Holders::Root => [vec![], vec![]],
        (_, true) if outputs.holders == Holders::Root => [vec![], vec![]],
        (false, true) => [vec![part], vec![part * world_size]],
        (true, false) => [vec![part * world_size], vec![part]],
        _ => whole,
    }
}

fn groups(dump: &FlightRecorderDump, rank: usize) -> BTreeMap<String, Group> {
    let all = std::iter::once(0).chain(dump.groups.keys().copied());
    let of_rank = all.filter_map(|group| {
        let members = dump.members(group).filter(|members| members.contains(&rank))?;
        let (name, desc) = names(group);
        Some((name.clone(), Group { name, desc, ranks: format!("{members:?}") }))
    });
    of_rank.collect()
}

/// Returns the name and the description of a group, as PyTorch names its first group.
fn names(group: u32) -> (String, String) {
    let desc = if group == 0 { "default_pg" } else { "undefined" };
    (group.to_string(), desc.into())
}

fn collectives(dump: &FlightRecorderDump, rank: &RankEntries) -> Vec<Collective> {
    // `torchfrtrace` has no name for threads.
    let library = if rank.device.starts_with("GPU") { "nccl" } else { "gloo" };
    let start =
        SystemTime::now().checked_sub(dump.began.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
    let start = start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let named = |op: &OpEntry| Some((name(op.at.operation)?, op.group?));
    let kept: Vec<_> = rank.entries.iter().filter_map(|op| Some((op, named(op)?))).collect();
    let named_operations = Operation::iter().filter(|operation| name(*operation).is_some());
    let begun: u64 = named_operations.map(|operation| rank.totals[operation as usize].calls).sum();
    let numbers = begun.saturating_sub(kept.len() as u64)..;
    // Without a list of members for each of thousands of entries.
    let world_size = |group: u32| match group {
        0 => dump.world_size as u64,
        _ => dump.groups.get(&group).map_or(1, |members| members.len() as u64),
    };
    let collective = |(record_id, (op, (name, group))): (u64, (&OpEntry, (&'static str, u32)))| {
        let [input, output] = sizes(op.at.operation, op.amount, world_size(group));
        let at = |time: Duration| (start + time).as_nanos() as u64;
        let took = |end: Duration| end.saturating_sub(op.started_at).as_secs_f64() * 1e3;
        Collective {
            record_id,
            pg_id: group,
            process_group: names(group),
            collective_seq_id: op.at.sequence,
            p2p_seq_id: 0,
            op_id: op.at.sequence,
            is_p2p: false,
            profiling_name: format!("{library}:{name}"),
            time_created_ns: at(op.started_at),
            time_discovered_started_ns: at(op.started_at),
            time_discovered_completed_ns: op.finished_at.map(at),
            duration_ms: op.finished_at.map(took),
            input_sizes: vec![input],
            input_dtypes: vec!["Byte"],
            output_sizes: vec![output],
            output_dtypes: vec!["Byte"],
            state: if !op.is_open() { "completed" } else { "started" },
            retired: !op.is_open(),
            frames: match &op.source_line {
                SourceLine::Here(line) => {
                    vec![Frame { name, filename: line.file(), line: line.line() }]
                }
                SourceLine::Unknown | SourceLine::Text(_) => Vec::new(),
            },
        }
    };
    numbers.zip(kept).map(collective).collect()
}
