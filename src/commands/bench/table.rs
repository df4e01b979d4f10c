//! Tables in the style of nccl-tests: columns of fixed width, so that a row can be printed before the next is measured.

use std::io;

use serde::Serialize;

use crate::telemetry::{LogFormat, Printer};

/// A column of a table of `R`s.
pub(super) struct Column<R> {
    title: &'static str,
    unit: &'static str,
    /// The least number of characters.
    width: usize,
    is_text: bool,
    /// Returns the cell of a row.
    cell: fn(&R) -> String,
}

/// Returns a column of numbers, aligned on the right.
pub(super) const fn numbers<R>(
    title: &'static str,
    unit: &'static str,
    width: usize,
    cell: fn(&R) -> String,
) -> Column<R> {
    Column { title, unit, width, is_text: false, cell }
}

/// Returns a column of text, aligned on the left after two spaces.
pub(super) const fn text<R>(
    title: &'static str,
    width: usize,
    cell: fn(&R) -> String,
) -> Column<R> {
    Column { title, unit: "", width, is_text: true, cell }
}

/// Returns the titles and the units, each in a line that begins with `#`. The first column must be of numbers, and
/// wider than its title.
pub(super) fn head<R>(columns: &[Column<R>]) -> String {
    let titles: String = columns.iter().map(|column| column.aligned(column.title)).collect();
    let units: String = columns.iter().map(|column| column.aligned(column.unit)).collect();
    format!("#{}\n#{}", &titles[1..], &units[1..])
}

/// Prints lines above or below a table, unless its rows are printed as JSON.
pub(super) fn print_lines(printer: &Printer, lines: &str) -> io::Result<()> {
    match printer.format() {
        LogFormat::Json => Ok(()),
        LogFormat::Text => printer.line(lines),
    }
}

/// Prints a row: as a line of the table, or as JSON.
pub(super) fn print_row<R: Serialize>(
    printer: &Printer,
    columns: &[Column<R>],
    row: &R,
) -> io::Result<()> {
    printer.result(row, |out| writeln!(out, "{}", line(columns, row)))
}

/// Returns a line with the cells of `row` in the columns. Cells that fill their columns keep a space between them.
pub(super) fn line<R>(columns: &[Column<R>], row: &R) -> String {
    let mut line = String::new();
    for column in columns {
        let cell = column.aligned(&(column.cell)(row));
        if !line.is_empty() && !cell.starts_with(' ') {
            line.push(' ');
        }
        line.push_str(&cell);
    }
    line
}

impl<R> Column<R> {
    fn aligned(&self, cell: &str) -> String {
        let width = self.width;
        if self.is_text { format!("  {cell:<width$}") } else { format!("{cell:>width$}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_keep_their_width_unless_a_cell_is_wider() {
        struct Row {
            size: usize,
            op: &'static str,
        }
        let columns = [
            numbers("size", "(B)", 6, |row: &Row| row.size.to_string()),
            text("op", 4, |row| row.op.into()),
            numbers("time", "(us)", 5, |_| "1.5".into()),
        ];
        assert_eq!(head(&columns), "# size  op   time\n#  (B)       (us)");
        assert_eq!(line(&columns, &Row { size: 1024, op: "sum" }), "  1024  sum   1.5");
        assert_eq!(line(&columns, &Row { size: 1, op: "average" }), "     1  average  1.5");
        let sizes =
            [6, 6].map(|width| numbers("size", "(B)", width, |row: &Row| row.size.to_string()));
        assert_eq!(line(&sizes, &Row { size: 123456, op: "" }), "123456 123456");
    }
}
