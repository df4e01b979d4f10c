//! Tables in the style of nccl-tests: columns of fixed width, so that a row can be printed before the next is measured.

use std::io;

use serde::Serialize;

use views::{LogFormat, Printer};

/// A column of a table of `R`s: the title, the unit, the least number of characters, and the cell of a row. All are aligned
/// on the right.
pub(super) type Column<R> = (&'static str, &'static str, usize, fn(&R) -> String);

/// Returns the titles and the units, each in a line that begins with `#`. The first column must be wider than its title.
pub(super) fn head<R>(columns: &[Column<R>]) -> String {
    let titles: String =
        columns.iter().map(|&(title, _, width, _)| format!("{title:>width$}")).collect();
    let units: String =
        columns.iter().map(|&(_, unit, width, _)| format!("{unit:>width$}")).collect();
    format!("#{}\n#{}", &titles[1..], &units[1..])
}

/// Prints lines above or below a table, unless its rows are printed as JSON.
pub(super) fn print_lines(printer: &Printer, lines: &str) -> io::Result<()> {
    if printer.format() == LogFormat::Text { printer.line(lines) } else { Ok(()) }
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
    for &(_, _, width, cell) in columns {
        let cell = format!("{:>width$}", cell(row));
        if !line.is_empty() && !cell.starts_with(' ') {
            line.push(' ');
        }
        line.push_str(&cell);
    }
    line
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
        let columns: [Column<Row>; 3] = [
            ("size", "(B)", 6, |row| row.size.to_string()),
            ("op  ", "", 6, |row| format!("  {:<4}", row.op)),
            ("time", "(us)", 5, |_| "1.5".into()),
        ];
        assert_eq!(head(&columns), "# size  op   time\n#  (B)       (us)");
        assert_eq!(line(&columns, &Row { size: 1024, op: "sum" }), "  1024  sum   1.5");
        assert_eq!(line(&columns, &Row { size: 1, op: "average" }), "     1  average  1.5");
        let sizes = [columns[0]; 2];
        assert_eq!(line(&sizes, &Row { size: 123456, op: "" }), "123456 123456");
    }
}
