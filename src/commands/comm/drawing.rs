//! Drawings of the operations in letters: A is rank 0's tensor, B is rank 1's, and A1 is the part of A for rank 1.

use super::operations::words;
use super::shorten::{GAP, items, ranks};
use crate::commands::CommOp;
use engine::operation::{CollectiveType, Holders, Operation, Tensors};
use engine::process_group::ReduceOp;
use views::in_columns;

/// The meaning of the letters.
pub(super) const LEGEND: &str =
    "A is rank 0's tensor, B is rank 1's; A1 is the part of A that is for rank 1.";

/// Returns the drawing of `op`: a line for each rank, as far as there is room.
pub(super) fn draw(op: CommOp, world_size: usize, reduce_op: ReduceOp) -> Vec<String> {
    if let CommOp::SendRecv | CommOp::IsendIrecv = op {
        return vec![passed_on(world_size, op == CommOp::IsendIrecv)];
    }
    let cells = |rank| match rank {
        Some(rank) => row(op, rank, world_size, reduce_op),
        None => [GAP, "", "   :    ", GAP, ""].map(String::from),
    };
    let rows: Vec<_> = ranks(world_size).into_iter().map(cells).collect();
    in_columns(&rows, "  ", |_| false)
}

/// Returns the cells of one rank: its name, its tensors before, whether it gives and gets some, its name, and its tensors
/// after.
fn row(op: CommOp, rank: usize, world_size: usize, reduce_op: ReduceOp) -> [String; 5] {
    let CollectiveType { inputs, outputs, reduces, .. } = op.moves();
    let mine = letters(rank);
    let most = if world_size <= 8 { 8 } else { 3 };
    let list = |item: &dyn Fn(usize) -> String| items(world_size, most, item).join(" ");
    // What a rank has for this one: its tensor, or a part of it.
    let from = |other: usize| {
        if inputs.is_list() { format!("{}{rank}", letters(other)) } else { letters(other) }
    };
    let is_root = rank == 0;
    let gives = inputs.is_held_by(is_root);
    // The root of a broadcast gets what it has.
    let gets = is_root || outputs.holders != Holders::Root;
    let name = format!("rank {rank} ");
    let before = match inputs.tensors {
        Tensors::One => mine.clone(),
        Tensors::OneForEachRank if gives => list(&|part| format!("{mine}{part}")),
        _ => String::new(),
    };
    let through = if op == CommOp::Collective(Operation::Barrier) { '|' } else { '+' };
    let (begins, ends) = (if gives { "---" } else { "   " }, if gets { "--->" } else { "    " });
    let after = match outputs.tensors {
        Tensors::One if !gets => mine,
        Tensors::One if reduces => reduced(reduce_op, world_size, &from),
        Tensors::One => from(0),
        Tensors::OneForEachRank if gets => list(&from),
        _ => String::new(),
    };
    [name.clone(), before, format!("{begins}{through}{ends}"), name, after]
}

/// Returns `rank 0 -A-> rank 1 -B-> rank 2`. A ring ends with rank 0 again.
fn passed_on(world_size: usize, ring: bool) -> String {
    let most = if world_size <= 5 { 5 } else { 4 };
    let ends = |rank: usize| rank + 1 == world_size && (!ring || world_size == 1);
    let shown = items(world_size, most, |rank| {
        let sends = if ends(rank) { String::new() } else { format!(" -{}->", letters(rank)) };
        format!("rank {rank}{sends}")
    });
    let mut line = shown.join(" ");
    if ring && world_size > 1 {
        line += " rank 0";
    }
    line
}

/// Returns the formula of a reduction.
fn reduced(op: ReduceOp, world_size: usize, item: &dyn Fn(usize) -> String) -> String {
    let most = if world_size <= 4 { 4 } else { 3 };
    let terms = items(world_size, most, item).join(words(op).1);
    match op {
        ReduceOp::Avg => format!("({terms})/{world_size}"),
        ReduceOp::Min | ReduceOp::Max => format!("{op}({terms})"),
        _ => terms,
    }
}

/// Returns A for rank 0 and B for rank 1. AA follows Z, like the columns of a spreadsheet.
fn letters(rank: usize) -> String {
    let last = char::from(b'A' + (rank % 26) as u8);
    if rank < 26 { last.into() } else { format!("{}{last}", letters(rank / 26 - 1)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::comm::operations::OPS;

    #[test]
    fn rank_letters_are_unique() {
        let named = [0, 1, 25, 26, 27, 701, 702].map(letters);
        assert_eq!(named, ["A", "B", "Z", "AA", "AB", "ZZ", "AAA"]);
    }

    #[test]
    fn drawing_of_every_op_fits_78_columns() {
        let ops = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Bxor];
        for world_size in (1..=20).chain([128]) {
            for (shown, reduce_op) in OPS.iter().flat_map(|op| ops.map(|r| (op, r))) {
                let texts = [draw(shown.op, world_size, reduce_op), shown.about(reduce_op)];
                let calls = [shown.pytorch_call, shown.rust_call];
                let calls = calls.map(|call| format!("PyTorch  {call}"));
                for line in texts.iter().flatten().chain(&calls) {
                    assert!(line.len() <= 78, "{} {world_size}: {line}", shown.op.name());
                }
            }
        }
    }
}
