//! CSV files of numbers.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use csv::{ByteRecord, ReaderBuilder, Terminator};
use flate2::bufread::MultiGzDecoder;
use tch::Tensor;

use super::TargetKind;
use super::array::Array;
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

/// The end that is added to each text. The zero byte, which no text has, is in a field if a quote is still open.
const END: &[u8] = b"\n\0\n";

/// The columns of the table.
struct Columns {
    /// The names in the header. Empty without a header.
    names: Vec<String>,
    count: usize,
    target: usize,
}

/// The names in a line, and the number of the line.
type Header = (u64, Vec<String>);

/// Parses one sample per line. The target is in the column `target` or `label`, or else in the last column. Lines that
/// begin with a comment mark are skipped; a header may be such a line.
pub(super) fn parse(name: &str, text: impl Read, kind: TargetKind) -> Result<(Array, Array)> {
    let wrong = |problem: String| Error::data(format!("{name}: {problem}"));
    // With the terminator `\n`, a carriage return is white space, which is trimmed.
    let text = Text(text).chain(END);
    let mut builder = ReaderBuilder::new();
    builder.has_headers(false).flexible(true).terminator(Terminator::Any(b'\n'));
    let mut lines = builder.from_reader(text);
    let mut columns: Option<Columns> = None;
    let mut comments: Vec<Header> = Vec::new();
    let (mut inputs, mut values, mut classes) = (Vec::new(), Vec::new(), Vec::new());
    let mut samples = 0i64;
    let mut line = ByteRecord::new();
    while lines.read_byte_record(&mut line).map_err(|error| wrong(error.to_string()))? {
        if line.as_slice() == END.trim_ascii() {
            break;
        }
        // A record's own position begins before the empty lines ahead of it. A line break ends each record but an open one.
        let breaks = line.as_slice().iter().filter(|&&byte| byte == b'\n').count() as u64;
        let is_open = line.as_slice().contains(&0);
        let number = lines.position().line() - breaks - u64::from(!is_open);
        if is_open || breaks > 0 && columns.is_some() {
            let (end, to) =
                if is_open { (0, "the end of the file") } else { (b'\n', "another line") };
            let column = line.iter().position(|field| field.contains(&end)).unwrap_or(0) + 1;
            return Err(wrong(format!(
                "line {number}, column {column}: a quote begins here that is not closed before {to}; close it, or remove it"
            )));
        }
        if line.len() == 1 && line[0].trim_ascii().is_empty() {
            continue;
        }
        if let Some(names) = comment(&line) {
            comments.push((number, names));
            continue;
        }
        let Columns { names, count, target } = match &columns {
            Some(columns) => columns,
            None => {
                let read = Columns::read(&line, number, &comments).map_err(wrong)?;
                let is_header = line.iter().any(|field| parsed(field).is_none());
                let found = columns.insert(read);
                if is_header {
                    continue;
                }
                found
            }
        };
        if line.len() != *count {
            let found = counted(line.len(), "column");
            return Err(wrong(format!(
                "line {number} has {found}, and the first line has {count}"
            )));
        }
        samples += 1;
        for (column, field) in line.iter().enumerate() {
            let wrong = |problem| {
                let title = names.get(column).map_or(String::new(), |name| format!(" ({name})"));
                let field = shown(field);
                wrong(format!("line {number}, column {}{title}: {field} {problem}", column + 1))
            };
            let value = parsed(field).ok_or_else(|| wrong("is not a number"))?;
            // A missing value may be written as nan. Training then names its sample.
            if !(value as f32).is_finite() && field.iter().any(u8::is_ascii_digit) {
                return Err(wrong("is not a finite number that float32 can hold"));
            }
            match kind {
                _ if column != *target => inputs.push(value as f32),
                TargetKind::Values => values.push(value as f32),
                TargetKind::Classes
                    if (0.0..=HIGHEST_CLASS).contains(&value) && value.fract() == 0.0 =>
                {
                    classes.push(value as i64);
                }
                TargetKind::Classes => {
                    return Err(wrong(
                        "is not a class: classes are whole numbers from 0; use --loss mse for other numbers",
                    ));
                }
            }
        }
    }
    if samples == 0 {
        return Err(wrong("it has no line with numbers".into()));
    }
    let tensors = || {
        let targets = match kind {
            TargetKind::Values => Tensor::f_from_slice(&values)?,
            TargetKind::Classes => Tensor::f_from_slice(&classes)?,
        };
        Ok((Tensor::f_from_slice(&inputs)?.f_view([samples, -1])?, targets))
    };
    let (inputs, targets) = tensors().doing("making a tensor of a data file")?;
    Ok((Array::plain(inputs), Array::plain(targets)))
}

/// The highest class number.
const HIGHEST_CLASS: f64 = i32::MAX as f64;

impl Columns {
    /// Reads the columns from the first line that is not empty and no comment, line `number` of the file, and from the
    /// `comments` ahead of it.
    fn read(first: &ByteRecord, number: u64, comments: &[Header]) -> Result<Self, String> {
        let count = first.len();
        if count < 2 {
            return Err("the first line has one column, but a sample needs at least two, separated by commas: its \
                        numbers and its target"
                .into());
        }
        let is_number = |field: &[u8]| parsed(field).is_some();
        let fits = |header: &&Header| header.1.len() == count;
        let names = if first.iter().all(is_number) {
            comments.iter().rfind(fits).map(|(_, names)| names.clone()).unwrap_or_default()
        } else {
            names(first)
        };
        check_pandas(first, number, !comments.is_empty())?;
        let is_target = |name: &String| {
            let letters = name.to_lowercase().replace(|c: char| !c.is_alphanumeric(), "");
            ["target", "targets", "label", "labels"].contains(&&*letters)
        };
        let named: Vec<usize> = (0..names.len()).filter(|&i| is_target(&names[i])).collect();
        if let Some(column) = first.iter().position(|field| !is_number(field))
            && named.is_empty()
            && first.iter().any(is_number)
        {
            return Err(format!(
                "line {number}, column {}: {} is not a number, but others in this line are; correct it, or, if the \
                 line is a header, name the column of the targets target or label",
                column + 1,
                shown(&first[column])
            ));
        }
        match named[..] {
            [] => {
                check_no_target(&names, number, count, comments)?;
                Ok(Self { names, count, target: count - 1 })
            }
            [target] => Ok(Self { names, count, target }),
            _ => Err("several columns are called target or label; rename all but one".into()),
        }
    }
}

/// Refuses two headers of pandas, because the program would train on what they show: a column without a name, which is the
/// index of the rows, and the numbers of the columns in place of names. pandas writes no comments.
fn check_pandas(first: &ByteRecord, number: u64, has_comments: bool) -> Result<(), String> {
    let counts_up_after = |skipped: usize| {
        let mut fields = first.iter().skip(skipped).enumerate();
        fields.all(|(column, field)| field == column.to_string().as_bytes())
    };
    let has_no_name = |name: &String| name.is_empty() || name.starts_with("Unnamed: ");
    let is_header = !first.iter().any(|field| parsed(field).is_some()) || counts_up_after(1);
    if let Some(column) = names(first).iter().position(has_no_name).filter(|_| is_header) {
        return Err(format!(
            "line {number}, column {}: this column has no name, as an index of the rows that pandas writes; write the \
             file with index=False, or, if its numbers are to be trained on, name the column",
            column + 1
        ));
    }
    if counts_up_after(0) && first.len() > 2 && !has_comments {
        return Err(format!(
            "line {number} is 0,1,2 and so on, as pandas writes for columns without names; name the columns, or, if the \
             line is a sample, put a line with names ahead of it"
        ));
    }
    Ok(())
}

/// Refuses a header, or a comment ahead of line `number`, that seems to say that another column than the last one of
/// `count` is the target.
fn check_no_target(
    names: &[String],
    number: u64,
    count: usize,
    comments: &[Header],
) -> Result<(), String> {
    let mentions = |name: &String| {
        let name = name.to_lowercase();
        name.contains("target") || name.contains("label")
    };
    let has_x = names.iter().any(|name| name.eq_ignore_ascii_case("x"));
    let seems = |name: &String| {
        let mut words = name.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
        mentions(name) || words.any(|word| word.starts_with("class") || (word == "y" && !has_x))
    };
    if let Some(column) = names.iter().rev().skip(1).rev().position(seems) {
        return Err(format!(
            "column {} is called {:?}, and the last one {:?}; rename the column of the targets to target or label",
            column + 1,
            names[column],
            names[count - 1]
        ));
    }
    let unclear = |(_, names): &&Header| names.len() != count && names.iter().any(mentions);
    match comments.iter().find(unclear) {
        Some((comment, _)) => Err(format!(
            "line {comment} is a comment about the target, and does not name each of the {count} columns of line \
             {number}; begin the file with a line that does, or remove the comment"
        )),
        None => Ok(()),
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
            "\"la\nbel\",a",
        ] {
            assert_eq!(
                read(&format!("{header}\n0,5\n# 7,7\n2,6\n")).unwrap(),
                (vec![5.0], vec![0, 2]),
                "{header}"
            );
        }
        for header in ["a,b", "# a,b", "x,y", "a,label", "a,my_label", "a,class", "# a comment"] {
            assert_eq!(
                read(&format!("{header}\n5,0\n")).unwrap(),
                (vec![5.0], vec![0]),
                "{header}"
            );
        }
        for (header, problem) in [
            ("label_id,a", "column 1 is called \"label_id\", and the last one \"a\"; rename"),
            ("# class,a", "column 1 is called \"class\""),
            ("Y,a", "column 1 is called \"Y\""),
            (
                "# label,a,b",
                "line 1 is a comment about the target, and does not name each of the 2 columns of line 2",
            ),
            ("# label a", "line 1 is a comment about the target, and does not"),
            ("label,Target", "several columns are called target or label"),
        ] {
            let error = read(&format!("{header}\n0,5\n")).unwrap_err();
            assert!(error.contains(problem), "{header}: {error}");
        }
    }

    #[test]
    fn index_and_column_numbers_of_pandas_are_refused() {
        for (text, problem) in [
            (",a,label\n0,5,1\n", "line 1, column 1: this column has no name, as an index of"),
            ("\"\",\"a\",\"label\"\n\"1\",5,1\n", "line 1, column 1: this column has no name"),
            ("\nUnnamed: 0,a,label\n0,5,1\n", "line 2, column 1: this column has no name"),
            ("a,,label\n0,5,1\n", "line 1, column 2: this column has no name"),
            (",0,1,2\n0,5,6,1\n", "line 1, column 1: this column has no name"),
            ("0,1,2\n5.5,6.5,1\n", "line 1 is 0,1,2 and so on, as pandas writes"),
            (
                "5,,1\n5,6,1\n",
                "line 1, column 2: \"\" is not a number, but others in this line are",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        for (text, first) in [
            ("0,1\n2,3\n", vec![0.0]),
            ("a,b,c\n0,1,2\n", vec![0.0, 1.0]),
            ("# a,b,c\n0,1,2\n", vec![0.0, 1.0]),
            ("0,1,2.0\n", vec![0.0, 1.0]),
        ] {
            assert_eq!(read(text).unwrap().0, first, "{text}");
        }
    }

    #[test]
    fn open_quote_is_refused_where_its_line_begins() {
        for (text, problem) in [
            ("a,b,label\n1,2,0\n3,\"4,1\n5,6,0\n7,8,1\n", "line 3, column 2: a quote begins here"),
            (
                "1,2\n\n\n\"3,4",
                "line 4, column 1: a quote begins here that is not closed before the end",
            ),
            ("1,2\n3,\"", "line 2, column 2"),
            ("\"a,b\n1,2\n", "line 1, column 1"),
            ("# it is 5\" long\n# \n#,\"a\n1,2\n", "line 3, column 2"),
            (
                "1,2\n\"3,4\n5\",6\n7,8\n",
                "line 2, column 1: a quote begins here that is not closed before another",
            ),
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
