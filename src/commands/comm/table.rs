//! The table of the ranks' tensors before and after an operation.

use super::Row;
use super::shorten::{GAP, items, ranks};
use super::values::Value;
use views::in_columns;

/// The largest width of a table: that of a terminal, less the indentation.
const WIDTH: usize = 78;

/// Returns the lines of a table with a line for each rank, and as much of each tensor as there is room for.
pub(super) fn table(rows: &[Row]) -> Vec<String> {
    let fits = |lines: &Vec<String>| lines.iter().all(|line| line.len() <= WIDTH);
    // No line has room for more.
    let mut all = (2..=WIDTH / 2).rev().map(|most| lines(rows, most));
    all.find(fits).unwrap_or_else(|| lines(rows, 1))
}

/// Returns the lines with at most `most` tensors of each list, and numbers of each tensor.
fn lines(rows: &[Row], most: usize) -> Vec<String> {
    let shown = ranks(rows.len());
    let column = |value: fn(&Row) -> &Option<Value>| {
        let tensors = shown.iter().map(|rank| match rank {
            Some(rank) => tensors(value(&rows[*rank]).as_ref(), most),
            None => vec![],
        });
        in_columns(&tensors.collect::<Vec<_>>(), " ", |_| false)
    };
    let (befores, afters) = (column(|row| &row.before), column(|row| &row.after));
    let mut cells = vec![["rank", "before", "after", "sent", "recv"].map(String::from)];
    for ((rank, before), after) in shown.iter().zip(befores).zip(afters) {
        let [rank, sent, recv] = match rank.map(|rank| (rank, &rows[rank])) {
            Some((rank, row)) => [rank as u64, row.sent, row.received].map(|n| n.to_string()),
            None => [GAP.into(), String::new(), String::new()],
        };
        cells.push([rank, before, after, sent, recv]);
    }
    in_columns(&cells, "  ", |column| [0, 3, 4].contains(&column))
}

/// Returns the tensors of a value, each as `[1 2 3]`; `-` for no value.
fn tensors(value: Option<&Value>, most: usize) -> Vec<String> {
    let tensor = |numbers: &Vec<String>| {
        format!("[{}]", items(numbers.len(), most, |i| numbers[i].clone()).join(" "))
    };
    value.map_or(vec!["-".into()], |Value { tensors, .. }| {
        items(tensors.len(), most, |i| tensor(&tensors[i]))
    })
}
