//! `.npy` files, as `numpy.save` writes them: C or Fortran order, either byte order.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tch::Kind;

use super::array::{Array, Layout};
use super::format::Format;
use crate::error::{Error, Result};
use crate::ffi::{MappedFile, TorchResult};
use crate::files::mistaken;

/// Two `.npy` files: the inputs and the targets.
pub(super) const NPY: Format = Format {
    endings: &[".npy"],
    ..Format::new("npy:INPUTS,TARGETS", |location, _| {
        let (inputs, targets) = location.split_once(',').unwrap_or((location, location));
        Ok((read(inputs.as_ref())?, read(targets.as_ref())?))
    })
};

/// Maps the file. Numbers in Fortran order or in the other byte order are copied into memory.
fn read(path: &Path) -> Result<Array> {
    let file = MappedFile::open(path)?;
    let wrong = |problem: String| Error::data(format!("{}: {problem}", file.name()));
    let (header, start) = header(&file).map_err(wrong)?;
    let dtype = dtype(&header).map_err(wrong)?;
    let is_swapped = header.descr.as_str().is_some_and(|dtype| dtype.starts_with(OTHER_BYTE_ORDER));
    let layout = Layout { start, dtype, is_swapped };
    if !header.fortran_order {
        return Array::mapped(&file, layout, &header.shape);
    }
    // In C order, the same bytes are the array with its dimensions reversed.
    let reversed: Vec<u64> = header.shape.iter().rev().copied().collect();
    let array = Array::mapped(&file, layout, &reversed)?;
    let dims: Vec<i64> = (0..reversed.len() as i64).rev().collect();
    let tensor = array.tensor.f_permute(&dims[..]).and_then(|tensor| tensor.f_contiguous());
    let tensor = tensor.doing("making a tensor of a data file")?;
    Ok(Array { tensor, ..array })
}

/// The first character of a dtype in the byte order that is not this machine's.
const OTHER_BYTE_ORDER: char = if cfg!(target_endian = "little") { '>' } else { '<' };

/// The file's header, a literal of a Python dict.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    /// A text for plain numbers.
    descr: Value,
    fortran_order: bool,
    shape: Vec<u64>,
}

/// The longest header that is read, in bytes. By default numpy has the same limit.
const LONGEST_HEADER: usize = 10_000;

/// Returns the header, and the offset of the numbers in bytes.
fn header(file: &[u8]) -> Result<(Header, usize), String> {
    let (len, start) = match file.strip_prefix(b"\x93NUMPY").unwrap_or_default() {
        [1, _, a, b, ..] => (u16::from_le_bytes([*a, *b]) as usize, 10),
        [2 | 3, _, a, b, c, d, ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 12),
        [1..=3, ..] => return Err(CUT_OFF.into()),
        [version, ..] => {
            return Err(format!(
                "version {version} of the format cannot be read here; write it again with numpy.save"
            ));
        }
        [] => {
            let instead = "write one with numpy.save";
            let unknown = || format!("this is not a .npy file; {instead}");
            return Err(mistaken(file, "a .npy file", instead).unwrap_or_else(unknown));
        }
    };
    if len > LONGEST_HEADER {
        return Err(format!(
            "a header of {len} bytes is too long for an array of numbers; write or copy it again"
        ));
    }
    let text = file.get(start..start + len).ok_or(CUT_OFF)?;
    let text =
        str::from_utf8(text).map_err(|_| "the header is not text; write or copy it again")?;
    let mut json: String = text.split_whitespace().collect();
    for (python, other) in [
        ("'", "\""),
        ("(", "["),
        (")", "]"),
        // As Python 2 wrote long integers.
        ("L,", ","),
        ("L]", "]"),
        ("False", "false"),
        ("True", "true"),
        (",]", "]"),
        (",}", "}"),
    ] {
        json = json.replace(python, other);
    }
    let header = serde_json::from_str(&json).map_err(|_| {
        let text = text.trim_end();
        format!("the header does not describe an array of numbers: {text}; write it again with numpy.save")
    })?;
    Ok((header, start + len))
}

const CUT_OFF: &str = "the file is cut off in its header; write or copy it again";

/// Returns the dtype of the numbers.
fn dtype(header: &Header) -> Result<Kind, String> {
    let Value::String(descr) = &header.descr else {
        return Err("a structured array, with columns of their own names and dtypes, cannot be read; save the columns as \
                    one array: numpy.lib.recfunctions.structured_to_unstructured(x, \"float32\")"
            .into());
    };
    let kind = descr.trim_start_matches(['<', '>', '|', '=']);
    let (what, instead) = match kind {
        "f4" => return Ok(Kind::Float),
        "f8" => return Ok(Kind::Double),
        "f2" => return Ok(Kind::Half),
        "i1" => return Ok(Kind::Int8),
        "i2" => return Ok(Kind::Int16),
        "i4" => return Ok(Kind::Int),
        "i8" => return Ok(Kind::Int64),
        "u1" => return Ok(Kind::Uint8),
        "b1" => return Ok(Kind::Bool),
        _ if kind.starts_with('O') => (
            "Python objects",
            "make all rows equally long, and save numpy.stack(x).astype(\"float32\")",
        ),
        _ if kind.starts_with(['U', 'S', 'a']) => (
            "texts",
            "save numbers: x.astype(\"float32\"), or for classes numpy.unique(x, return_inverse=True)[1]",
        ),
        _ if kind.starts_with('c') => {
            ("complex numbers", "save numpy.stack([x.real, x.imag], -1).astype(\"float32\")")
        }
        _ if kind.starts_with(['M', 'm']) => ("times", "save x.astype(\"int64\")"),
        _ if kind.starts_with('V') => ("bytes without a dtype", "save x.astype(\"float32\")"),
        _ => ("numbers", "save x.astype(\"float32\") or x.astype(\"int64\")"),
    };
    Err(format!("{what} of the dtype {descr} cannot be read; {instead} instead"))
}
