//! The table of the ranks' tensors before and after an operation.

use super::Row;
use super::shorten::{GAP, items, join, ranks};
use super::values::Value;

/// The largest width of a table: that of a terminal, less the indentation.
const WIDTH: usize = 78;

/// How much of a value is shown: the most tensors of a list, and the most numbers of a tensor.
#[derive(Clone, Copy)]
struct Limits {
    tensors: usize,
    numbers: usize,
}

/// Returns the lines of a table with a line for each rank, and as much of each tensor as there is room for.
pub(super) fn table(rows: &[Row]) -> Vec<String> {
    let lists = rows.iter().flat_map(|row| [&row.before, &row.after]).flatten();
    let lists = lists.map(|value| &value.tensors);
    // No line has room for more.
    let most = |longest: Option<usize>| longest.unwrap_or(0).clamp(2, WIDTH / 2);
    let tensors = most(lists.clone().map(Vec::len).max());
    let numbers = most(lists.flatten().map(Vec::len).max());
    // Leaves out numbers before tensors, but keeps the first and the last number of a tensor if possible.
    let mut all = (1..=tensors)
        .rev()
        .flat_map(|tensors| (2..=numbers).rev().map(move |numbers| Limits { tensors, numbers }));
    let fits = |lines: &Vec<String>| lines.iter().all(|line| line.len() <= WIDTH);
    all.find_map(|limits| Some(lines(rows, limits)).filter(fits))
        .unwrap_or_else(|| lines(rows, Limits { tensors: 1, numbers: 1 }))
}

fn lines(rows: &[Row], limits: Limits) -> Vec<String> {
    let shown = ranks(rows.len());
    let column = |value: fn(&Row) -> &Option<Value>| {
        let tensors = shown.iter().map(|rank| match rank {
            Some(rank) => tensors(value(&rows[*rank]).as_ref(), limits),
            None => vec![],
        });
        in_columns(&tensors.collect::<Vec<_>>())
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
    let width = |column: usize| cells.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let [w0, w1, w2, w3, w4] = [0, 1, 2, 3, 4].map(width);
    let aligned = |[rank, before, after, sent, recv]: &[String; 5]| {
        let line = format!("{rank:>w0$}  {before:w1$}  {after:w2$}  {sent:>w3$}  {recv:>w4$}");
        line.trim_end().to_string()
    };
    cells.iter().map(aligned).collect()
}

/// Returns the tensors of a value, each as `[1 2 3]`; `-` for no value.
fn tensors(value: Option<&Value>, limits: Limits) -> Vec<String> {
    let tensor = |numbers: &Vec<String>| {
        format!("[{}]", join(numbers.len(), limits.numbers, " ", |i| numbers[i].clone()))
    };
    value.map_or(vec!["-".into()], |Value { tensors, .. }| {
        items(tensors.len(), limits.tensors, |i| tensor(&tensors[i]))
    })
}

/// Returns a line for each list of texts, with the texts aligned in columns.
fn in_columns(lines: &[Vec<String>]) -> Vec<String> {
    let width = |i: usize| lines.iter().filter_map(|line| line.get(i)).map(String::len).max();
    let padded = |(i, text): (usize, &String)| format!("{text:w$}", w = width(i).unwrap_or(0));
    let line =
        |line: &Vec<String>| line.iter().enumerate().map(padded).collect::<Vec<_>>().join(" ");
    lines.iter().map(|texts| line(texts).trim_end().to_string()).collect()
}
