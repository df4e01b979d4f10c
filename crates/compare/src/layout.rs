//! Paragraphs and tables for a terminal of 80 columns. A Chinese character takes two columns.

use std::borrow::Cow;

use textwrap::core::{Word, display_width};
use textwrap::{Options, WordSeparator, WordSplitter, wrap};

use crate::in_columns;

/// The minimum width of a terminal, in columns.
const WIDTH: usize = 80;

/// Returns the lines of a paragraph; none if it is empty.
pub fn paragraph(text: &str) -> Vec<String> {
    let options = Options::new(WIDTH).initial_indent("  ").subsequent_indent("  ");
    let options = options.word_separator(WordSeparator::Custom(words));
    let lines = wrap(text.trim(), options.word_splitter(WordSplitter::NoHyphenation));
    lines.into_iter().map(Cow::into_owned).filter(|line| !line.trim().is_empty()).collect()
}

/// Splits `text` where a line may end: after a space unless a number follows, and beside a Chinese character. No line
/// begins with `，` or ends with `（`.
fn words(text: &str) -> Box<dyn Iterator<Item = Word<'_>> + '_> {
    let is_wide = |c: char| display_width(c.encode_utf8(&mut [0; 4])) > 1;
    let ends = text.char_indices().zip(text.chars().skip(1)).filter(move |&((_, one), next)| {
        let after_wide = is_wide(one) || is_wide(next);
        let after_wide = after_wide && one != '（' && !"，。：；！）、…".contains(next);
        next != ' ' && ((one == ' ' && !next.is_ascii_digit()) || after_wide)
    });
    let ends = ends.map(|((at, one), _)| at + one.len_utf8()).chain([text.len()]);
    let words =
        ends.scan(0, move |start, end| Some(Word::from(&text[std::mem::replace(start, end)..end])));
    Box::new(words)
}

/// Returns the lines of a table. The first two columns are aligned left, those of numbers right.
pub fn table(rows: &[Vec<String>]) -> Vec<String> {
    let lines = in_columns(rows, "  ", |column| column >= 2).into_iter();
    lines.map(|line| format!("  {line}")).collect()
}

/// Formats the flat index `index` of a tensor of this shape as indices, such as `[1][3]`.
pub fn indices(mut index: usize, shape: &[i64]) -> String {
    let mut text = String::new();
    for size in shape.iter().rev().map(|size| *size as usize) {
        text = format!("[{}]{text}", index % size);
        index /= size;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_index_is_shown_as_tensor_indices() {
        assert_eq!(indices(7, &[1, 20]), "[0][7]");
        assert_eq!(indices(23, &[2, 3, 4]), "[1][2][3]");
        assert_eq!(indices(0, &[]), "");
    }

    #[test]
    fn columns_align_with_wide_characters() {
        let row = |cells: [&str; 3]| cells.map(String::from).to_vec();
        let lines = table(&[row(["", "样本", "损失"]), row(["rank 0", "1 2", "0.5"])]);
        assert_eq!(lines, ["          样本  损失", "  rank 0  1 2    0.5"]);
    }

    #[test]
    fn chinese_lines_break_at_permitted_places() {
        let text = "各 rank 的梯度（都在桶里），求平均：rank 0 与 rank 1。".repeat(20);
        for start in 0..40 {
            let lines = paragraph(&text.chars().skip(start).collect::<String>());
            assert!(lines.len() > 10 && lines.iter().all(|line| display_width(line) <= WIDTH));
            for line in lines.iter().skip(1) {
                let first = line.trim().chars().next().unwrap();
                assert!(!"，。：）".contains(first) && !first.is_ascii_digit(), "{line}");
            }
            assert!(lines.iter().all(|line| !line.ends_with('（')), "{lines:?}");
        }
    }
}
