//! CSV files of numbers.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use csv::{ByteRecord, ReaderBuilder, Terminator, Trim};
use flate2::bufread::MultiGzDecoder;
use tch::Tensor;

use super::TargetKind;
use super::array::Array;
use super::format::Format;
use crate::error::{Error, Result, Shown};
use crate::ffi::{TorchResult, open_file};

/// A CSV file of numbers, with a sample in each line.
#[derive(Debug)]
pub(super) struct Csv;

impl Format for Csv {
    fn usage(&self) -> &'static str {
        "csv:FILE"
    }

    fn endings(&self) -> &'static [&'static str] {
        &[".csv", ".csv.gz"]
    }

    /// Reads the file into memory, and decompresses it if it is a gzip file.
    fn read(&self, location: &str, kind: TargetKind) -> Result<(Array, Array)> {
        let (file, _) = open_file(location.as_ref())?;
        let name = Path::new(location).shown();
        let mut file = BufReader::new(file);
        let begin = file.fill_buf();
        let begin = begin.map_err(|error| Error::InvalidInput(format!("{name}: {error}")))?;
        // Checks the contents: a file may keep its name when it is compressed or decompressed.
        if begin.starts_with(&GZIP) {
            return parse(&format!("{name} (gzip)"), MultiGzDecoder::new(file), kind);
        }
        parse(&name, file, kind)
    }
}

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

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

/// The columns of the table, as the first line defines them.
struct Columns {
    /// The names in the header. Empty without a header.
    names: Vec<String>,
    count: usize,
    target: usize,
}

/// Parses one sample per line. The target is in the column `target` or `label`, or else in the last column.
pub(super) fn parse(name: &str, text: impl Read, kind: TargetKind) -> Result<(Array, Array)> {
    let wrong = |problem: String| Error::InvalidInput(format!("{name}: {problem}"));
    // With the terminator `\n`, a carriage return is white space and is trimmed. The added `\n` ends the last line.
    let text = Text(text).chain(&b"\n"[..]);
    let mut builder = ReaderBuilder::new();
    builder.has_headers(false).flexible(true).trim(Trim::All).terminator(Terminator::Any(b'\n'));
    let mut lines = builder.from_reader(text);
    let mut columns: Option<Columns> = None;
    let (mut inputs, mut values, mut classes) = (Vec::new(), Vec::new(), Vec::new());
    let mut samples = 0i64;
    let mut line = ByteRecord::new();
    while lines.read_byte_record(&mut line).map_err(|error| wrong(error.to_string()))? {
        // A record's own position begins before the empty lines ahead of it.
        let number = lines.position().line() - 1;
        if line.iter().all(<[u8]>::is_empty) && line.len() == 1 {
            continue;
        }
        let Columns { names, count, target } = match &columns {
            Some(columns) => columns,
            None => {
                let found = columns.insert(Columns::read(&line, number).map_err(wrong)?);
                if !found.names.is_empty() {
                    continue;
                }
                found
            }
        };
        if line.len() != *count {
            let found = line.len();
            return Err(wrong(format!(
                "line {number} has {found} columns, and the first line has {count}"
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
    /// Reads the columns from the first line that is not empty, line `number` of the file.
    fn read(first: &ByteRecord, number: u64) -> Result<Self, String> {
        let count = first.len();
        if count < 2 {
            return Err("the first line has one column, but a sample needs at least two, separated by commas: its \
                        numbers and its target"
                .into());
        }
        let is_header = first.iter().any(|field| parsed(field).is_none());
        let names: Vec<String> = if is_header {
            first.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
        } else {
            Vec::new()
        };
        let is_target = |name: &String| ["target", "label"].contains(&&*name.to_lowercase());
        let named: Vec<usize> = (0..names.len()).filter(|&i| is_target(&names[i])).collect();
        let is_number = |field: &[u8]| parsed(field).is_some();
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
            [] => Ok(Self { names, count, target: count - 1 }),
            [target] => Ok(Self { names, count, target }),
            _ => Err("several columns are called target or label; rename all but one".into()),
        }
    }
}

fn parsed(field: &[u8]) -> Option<f64> {
    str::from_utf8(field).ok()?.parse().ok()
}

/// Returns the first 40 characters of a field, quoted, for a message.
fn shown(field: &[u8]) -> String {
    let field: String = String::from_utf8_lossy(field).chars().take(40).collect();
    format!("{field:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

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
