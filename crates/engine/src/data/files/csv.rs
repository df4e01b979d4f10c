//! CSV files of numbers.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use csv::{ByteRecord, ReaderBuilder, Terminator};
use flate2::bufread::MultiGzDecoder;
use tch::{Kind, Tensor};

use super::TargetKind;
use super::array::Array;
use super::file_dataset::count_classes;
use super::format::Format;
use crate::error::{Error, Result, Shown, counted};
use crate::ffi::{TorchResult, open_file};
use crate::files::{GZIP, mistaken};

/// A CSV file of numbers, with a sample in each line.
pub(super) const CSV: Format =
    Format { endings: &[".csv", ".csv.gz"], ..Format::new("csv:FILE", read) };

/// Reads the file into memory, and decompresses it if it is a gzip file.
fn read(location: &str, kind: TargetKind) -> Result<(Array, Array)> {
    let (file, _) = open_file(location.as_ref())?;
    let mut name = Path::new(location).shown().into_owned();
    let wrong = |name: &str, problem| Error::data(format!("{name}: {problem}"));
    let mut file = BufReader::new(file);
    let begin = file.fill_buf().map_err(|error| wrong(&name, error.to_string()))?;
    // Checks the contents: a file may keep its name when it is compressed or decompressed.
    let is_packed = begin.starts_with(&GZIP);
    let mut text: Box<dyn BufRead> = if is_packed {
        Box::new(BufReader::new(MultiGzDecoder::new(file)))
    } else {
        Box::new(file)
    };
    name += if is_packed { " (gzip)" } else { "" };
    let begin = text.fill_buf().map_err(|error| wrong(&name, error.to_string()))?;
    let instead = "save the numbers as text, with commas between them";
    match mistaken(begin, "a CSV file", instead) {
        Some(problem) => Err(wrong(&name, problem)),
        None => parse(&name, text, kind),
    }
}

/// Rejects zero bytes, which are not text. A file of zeros, maybe larger than any disk, would be one endless line.
struct Text<R>(R);

impl<R: Read> Read for Text<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(bytes)?;
        if bytes[..read].contains(&0) {
            return Err(io::Error::other("it contains a zero byte, so it is not text"));
        }
        Ok(read)
    }
}

/// The columns of the table.
struct Columns {
    /// The names in the header. Empty without a header.
    names: Vec<String>,
    count: usize,
    target: usize,
}

/// Parses one sample per line. The target is in the column `target` or `label`, or else in the last column. Lines that
/// begin with a comment mark are skipped; a header may be such a line.
pub(super) fn parse(name: &str, text: impl Read, kind: TargetKind) -> Result<(Array, Array)> {
    let wrong = |problem: String| Error::data(format!("{name}: {problem}"));
    // With the terminator `\n`, a carriage return is white space, which is trimmed. The last line gets one, too.
    let mut builder = ReaderBuilder::new();
    builder.has_headers(false).flexible(true).terminator(Terminator::Any(b'\n'));
    let mut lines = builder.from_reader(Text(text).chain(&b"\n"[..]));
    let mut columns: Option<Columns> = None;
    let mut comments = Vec::new();
    let (mut inputs, mut targets): (Vec<f32>, Vec<f64>) = (Vec::new(), Vec::new());
    let mut number = 0;
    let mut line = ByteRecord::new();
    while lines.read_byte_record(&mut line).map_err(|error| wrong(error.to_string()))? {
        if line.as_slice().contains(&b'\n') {
            return Err(wrong(format!(
                "a quote after line {number} is not closed on its line; close it, or remove it"
            )));
        }
        // A record's own position begins before the empty lines ahead of it.
        number = lines.position().line() - 1;
        if line.len() == 1 && line[0].trim_ascii().is_empty() {
            continue;
        }
        if let Some(names) = comment(&line) {
            comments.push(names);
            continue;
        }
        let known: &Columns = match &columns {
            Some(columns) => columns,
            None => {
                let (read, is_header) = Columns::read(&line, &comments).map_err(wrong)?;
                let found = columns.insert(read);
                if is_header {
                    continue;
                }
                found
            }
        };
        known.read_sample(&line, number, &mut inputs, &mut targets).map_err(wrong)?;
    }
    if targets.is_empty() {
        return Err(wrong("it has no line with numbers".into()));
    }
    to_arrays(name, &inputs, &targets, kind)
}

/// Returns the samples of the file `name` as arrays: a row of inputs for each of the targets.
fn to_arrays(
    name: &str,
    inputs: &[f32],
    targets: &[f64],
    kind: TargetKind,
) -> Result<(Array, Array)> {
    let doing = "making a tensor of a data file";
    let rows = [targets.len() as i64, -1];
    let inputs =
        Tensor::f_from_slice(inputs).and_then(|inputs| inputs.f_view(rows)).doing(doing)?;
    let targets = Tensor::f_from_slice(targets).doing(doing)?;
    let kind = match kind {
        TargetKind::Values => Kind::Float,
        TargetKind::Classes => count_classes(name, &targets).map(|_| Kind::Int64)?,
    };
    Ok((Array::plain(inputs), Array::plain(targets.f_to_kind(kind).doing(doing)?)))
}

impl Columns {
    /// Reads the columns from the first line that is not empty and no comment, and from the `comments` ahead of it. Returns
    /// also whether that line is a header.
    fn read(first: &ByteRecord, comments: &[Vec<String>]) -> Result<(Self, bool), String> {
        let count = first.len();
        if count < 2 {
            return Err("the first line has one column, but a sample needs at least two, separated by commas: its \
                        numbers and its target"
                .into());
        }
        let is_target = |name: &String| {
            let letters = name.to_lowercase().replace(|c: char| !c.is_alphanumeric(), "");
            ["target", "targets", "label", "labels"].contains(&&*letters)
        };
        let mut names = names(first);
        let has_numbers = first.iter().any(|field| parsed(field).is_some());
        let is_header = !has_numbers || names.iter().any(is_target);
        if !is_header {
            let header = comments.iter().rfind(|names| names.len() == count);
            names = header.cloned().unwrap_or_default();
        }
        // The index of the rows, on which the program would train.
        if is_header && names.iter().any(String::is_empty) {
            return Err("the header has a column without a name, as the index that pandas writes; write the file with \
                        index=False, or name the column"
                .into());
        }
        let mut named = (0..count).filter(|&column| names.get(column).is_some_and(is_target));
        let target = named.next().unwrap_or(count - 1);
        if named.next().is_some() {
            return Err("several columns are called target or label; rename all but one".into());
        }
        Ok((Self { names, count, target }, is_header))
    }

    /// Reads a sample from a line, which has this `number`. Appends it to `inputs` and `targets`.
    fn read_sample(
        &self,
        line: &ByteRecord,
        number: u64,
        inputs: &mut Vec<f32>,
        targets: &mut Vec<f64>,
    ) -> Result<(), String> {
        let Self { names, count, target } = self;
        if line.len() != *count {
            let found = counted(line.len(), "column");
            return Err(format!("line {number} has {found}, and the first line has {count}"));
        }
        for (column, field) in line.iter().enumerate() {
            let wrong = |problem: &str| {
                let title = names.get(column).map_or(String::new(), |name| format!(" ({name})"));
                let field = shown(field);
                format!("line {number}, column {}{title}: {field} {problem}", column + 1)
            };
            let value = parsed(field).ok_or_else(|| wrong("is not a number"))?;
            // A missing value may be written as nan. Training then names its sample.
            if !(value as f32).is_finite() && field.iter().any(u8::is_ascii_digit) {
                return Err(wrong("is not a finite number that float32 can hold"));
            }
            if column == *target {
                targets.push(value);
            } else {
                inputs.push(value as f32);
            }
        }
        Ok(())
    }
}

/// What comments begin with in files of numpy, R, MATLAB and C.
const COMMENT_MARKS: [&str; 3] = ["#", "%", "//"];

/// Returns the fields of a comment as names of columns, without the mark. `None` for another line.
fn comment(line: &ByteRecord) -> Option<Vec<String>> {
    let first = line[0].trim_ascii_start();
    let mark = COMMENT_MARKS.into_iter().find(|mark| first.starts_with(mark.as_bytes()))?;
    let mut names = names(line);
    names[0] = names[0].trim_start_matches(mark).trim_start().to_owned();
    Some(names)
}

/// Returns the fields of a line as names of columns.
fn names(line: &ByteRecord) -> Vec<String> {
    line.iter().map(|field| String::from_utf8_lossy(field).trim().to_owned()).collect()
}

fn parsed(field: &[u8]) -> Option<f64> {
    str::from_utf8(field).ok()?.trim().parse().ok()
}

/// Returns the first 40 characters of a field, quoted, for a message.
fn shown(field: &[u8]) -> String {
    let field: String = String::from_utf8_lossy(field).trim().chars().take(40).collect();
    format!("{field:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a table of classes, and returns the first row and the targets, or the error.
    fn read(text: &str) -> Result<(Vec<f32>, Vec<i64>), String> {
        let (inputs, targets) =
            parse("a.csv", text.as_bytes(), TargetKind::Classes).map_err(|e| e.to_string())?;
        let inputs = Vec::try_from(inputs.tensor.get(0)).unwrap();
        Ok((inputs, Vec::try_from(targets.tensor).unwrap()))
    }

    #[test]
    fn header_names_the_target_in_any_spelling() {
        for header in [
            "label,a",
            "# label,a",
            "#label,a",
            "## Label , a",
            "% LABEL,a",
            "// 'label',a",
            "# made by me\n\n#target,a\n# the 2nd of 3 files",
            "\u{feff}\"Label\",\"a\"",
            "\u{feff}# label,a",
            "# a comment, too, of three\n# labels,a",
            " \"Target\" , a\r",
            "\u{a0}label\u{a0},a",
            "[targets],a",
        ] {
            assert_eq!(
                read(&format!("{header}\n0,5\n# 7,7\n2,6\n")).unwrap(),
                (vec![5.0], vec![0, 2]),
                "{header}"
            );
        }
        for header in ["a,b", "# a,b", "x,y", "a,label", "a,my_label", "label_id,a", "# a comment"]
        {
            assert_eq!(
                read(&format!("{header}\n5,0\n")).unwrap(),
                (vec![5.0], vec![0]),
                "{header}"
            );
        }
        let error = read("label,Target\n0,5\n").unwrap_err();
        assert!(error.contains("several columns are called target or label"), "{error}");
    }

    #[test]
    fn header_without_a_name_and_first_line_with_a_mistake_are_refused() {
        for (text, problem) in [
            (
                ",a,label\n0,5,1\n",
                "a.csv: the header has a column without a name, as the index that",
            ),
            ("\"\",\"a\",\"label\"\n\"1\",5,1\n", "a column without a name"),
            (",0,1,2\n0,5,6,1\n", "line 1, column 1: \"\" is not a number"),
            ("\n5,,1\n5,6,1\n", "line 2, column 2: \"\" is not a number"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        for (text, first) in [
            ("0,1\n2,3\n", vec![0.0]),
            ("a,b,c\n0,1,2\n", vec![0.0, 1.0]),
            ("# a,b,c\n0,1,2\n", vec![0.0, 1.0]),
        ] {
            assert_eq!(read(text).unwrap().0, first, "{text}");
        }
    }

    #[test]
    fn open_quote_is_refused_with_the_line_before_it() {
        for (text, problem) in [
            ("a,b,label\n1,2,0\n3,\"4,1\n5,6,0\n7,8,1\n", "a quote after line 2 is not closed"),
            ("1,2\n\n\n\"3,4", "a quote after line 1 is not closed on its line"),
            ("1,2\n3,\"", "a quote after line 1"),
            ("\"a,b\n1,2\n", "a quote after line 0"),
            ("# it is 5\" long\n# \n#,\"a\n1,2\n", "a quote after line 2"),
            ("1,2\n\"3,4\n5\",6\n7,8\n", "a quote after line 1"),
            ("a,b\n\n1,2\n3,\"x\"\n", "line 4, column 2 (b): \"x\" is not a number"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        assert_eq!(read("\"1\",\"0\"\n\"2\",\"1\"").unwrap(), (vec![1.0], vec![0, 1]));
    }

    #[test]
    fn number_beyond_float32_is_refused_with_line_and_column() {
        let parse = |text: &str, kind| parse("a.csv", text.as_bytes(), kind).map(drop);
        for number in ["1e39", "-1e39", "1e400"] {
            let problem = format!("{number:?} is not a finite number that float32 can hold");
            for (text, place) in [
                (format!("1,2\n{number},3\n"), "line 2, column 1"),
                (format!("x,target\n\n1,{number}\n"), "line 3, column 2 (target)"),
                (format!("{number},1\n"), "line 1, column 1"),
            ] {
                let error = parse(&text, TargetKind::Values).unwrap_err().to_string();
                assert_eq!(error, format!("a.csv: {place}: {problem}"));
            }
            assert!(parse(&format!("1,{number}\n"), TargetKind::Classes).is_err());
        }
        for number in ["3.4e38", "-3.4e38", "1e-50", "-0"] {
            parse(&format!("{number},{number}\n"), TargetKind::Values).unwrap();
        }
    }
}
