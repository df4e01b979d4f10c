//! Tables in the style of nccl-tests: columns of fixed width, so that a row can be printed before the next is measured.

/// A column of a table.
pub(super) struct Column {
    title: &'static str,
    unit: &'static str,
    /// The least number of characters.
    width: usize,
    is_text: bool,
}

/// Returns a column of numbers, aligned on the right.
pub(super) const fn numbers(title: &'static str, unit: &'static str, width: usize) -> Column {
    Column { title, unit, width, is_text: false }
}

/// Returns a column of text, aligned on the left after two spaces.
pub(super) const fn text(title: &'static str, width: usize) -> Column {
    Column { title, unit: "", width, is_text: true }
}

/// Returns the titles and the units, each in a line that begins with `#`. The first column must be of numbers, and
/// wider than its title.
pub(super) fn head<const N: usize>(columns: &[Column; N]) -> String {
    let [titles, units] = [|column: &Column| column.title, |column: &Column| column.unit]
        .map(|part| row(columns, columns.each_ref().map(part)));
    format!("#{}\n#{}", &titles[1..], &units[1..])
}

/// Returns a line with `cells` in the columns.
pub(super) fn row<const N: usize, T: AsRef<str>>(columns: &[Column; N], cells: [T; N]) -> String {
    let aligned = |(column, cell): (&Column, &T)| {
        let (width, cell) = (column.width, cell.as_ref());
        if column.is_text { format!("  {cell:<width$}") } else { format!("{cell:>width$}") }
    };
    columns.iter().zip(&cells).map(aligned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_keep_their_width_unless_a_cell_is_wider() {
        let columns = [numbers("size", "(B)", 6), text("op", 4), numbers("time", "(us)", 5)];
        assert_eq!(head(&columns), "# size  op   time\n#  (B)       (us)");
        assert_eq!(row(&columns, ["1024", "sum", "1.5"]), "  1024  sum   1.5");
        assert_eq!(row(&columns, ["1", "average", "1.5"]), "     1  average  1.5");
    }
}
