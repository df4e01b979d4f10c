//! Rows of texts, aligned in columns. A Chinese character takes two columns of a terminal.

use textwrap::core::display_width;

/// Returns a line for each row, with `separator` between its cells. They end at the same place in the columns that `is_right`
/// names, and begin at the same place in the others.
pub fn in_columns<R: AsRef<[String]>>(
    rows: &[R],
    separator: &str,
    is_right: impl Fn(usize) -> bool,
) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.as_ref().get(column));
        cells.map(|cell| display_width(cell)).max().unwrap_or(0)
    };
    let padded = |(column, text): (usize, &String)| {
        let gap = " ".repeat(width(column) - display_width(text));
        if is_right(column) { gap + text } else { format!("{text}{gap}") }
    };
    let line = |row: &R| row.as_ref().iter().enumerate().map(padded).collect::<Vec<_>>();
    rows.iter().map(|row| line(row).join(separator).trim_end().to_string()).collect()
}
