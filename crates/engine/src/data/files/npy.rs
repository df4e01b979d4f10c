//! `.npy` files, as `numpy.save` writes them: C or Fortran order, either byte order.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tch::{Kind, TchError, Tensor};

use super::array::Array;
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
    let (mut header, start) = header(&file).map_err(wrong)?;
    let dtype = dtype(&header).map_err(wrong)?;
    let is_swapped = header.descr.as_str().is_some_and(|dtype| dtype.starts_with(OTHER_BYTE_ORDER));
    // Numbers in Fortran order are, in C order, the array with its dimensions reversed.
    if header.fortran_order {
        header.shape.reverse();
    }
    let array = Array::mapped(&file, start, dtype, &header.shape)?;
    let convert = || {
        let mut tensor = array.tensor.shallow_clone();
        if is_swapped {
            tensor = swapped(&tensor)?;
        }
        if header.fortran_order {
            let dims: Vec<i64> = (0..header.shape.len() as i64).rev().collect();
            tensor = tensor.f_permute(&dims[..])?.f_contiguous()?;
        }
        Ok(tensor)
    };
    let tensor = convert().doing("making a tensor of a data file")?;
    Ok(Array { tensor, ..array })
}

/// Returns a copy of the contiguous `tensor` with the bytes of each number reversed.
fn swapped(tensor: &Tensor) -> Result<Tensor, TchError> {
    let size = tensor.kind().elt_size_in_bytes() as i64;
    let bytes = tensor.f_view(-1)?.f_view_dtype(Kind::Uint8)?.f_view([-1, size])?;
    bytes.f_flip([1])?.f_view_dtype(tensor.kind())?.f_view(&tensor.size()[..])
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
    let descr = header.descr.as_str().unwrap_or_default();
    Ok(match descr.trim_start_matches(['<', '>', '|', '=']) {
        "f4" => Kind::Float,
        "f8" => Kind::Double,
        "f2" => Kind::Half,
        "i1" => Kind::Int8,
        "i2" => Kind::Int16,
        "i4" => Kind::Int,
        "i8" => Kind::Int64,
        "u1" => Kind::Uint8,
        "b1" => Kind::Bool,
        _ => {
            return Err(format!(
                "an array of the dtype {} cannot be read; save x.astype(\"float32\") or x.astype(\"int64\") instead",
                header.descr
            ));
        }
    })
}
