//! `.npy` files, as `numpy.save` writes them.

use std::path::Path;

use serde::Deserialize;
use tch::Kind;

use super::array::Array;
use crate::error::{Error, Result};
use crate::torch::MappedFile;

/// Maps the file.
pub(super) fn read(path: &Path) -> Result<Array> {
    let file = MappedFile::open(path)?;
    let (header, start) =
        header(&file).map_err(|problem| Error::Input(format!("{}: {problem}", file.name())))?;
    let kind =
        kind(&header).map_err(|problem| Error::Input(format!("{}: {problem}", file.name())))?;
    Array::mapped(&file, start, &header.shape, kind)
}

/// A literal of a Python dict in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    descr: String,
    fortran_order: bool,
    shape: Vec<u64>,
}

/// numpy reads no longer ones either, unless it is told to.
const LONGEST_HEADER: usize = 10_000;

/// The header, and where the numbers begin.
fn header(file: &[u8]) -> Result<(Header, usize), String> {
    let (len, start) = match file {
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1, _, a, b, ..] => {
            (u16::from_le_bytes([*a, *b]) as usize, 10)
        }
        [0x93, b'N', b'U', b'M', b'P', b'Y', 2 | 3, _, a, b, c, d, ..] => {
            (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 12)
        }
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1..=3, ..] => return Err(CUT_OFF.into()),
        [0x93, b'N', b'U', b'M', b'P', b'Y', version, ..] => {
            return Err(format!("version {version} of the format is not known here"));
        }
        _ => return Err("this is no .npy file; write one with numpy.save".into()),
    };
    if len > LONGEST_HEADER {
        return Err(format!("a header of {len} bytes is too long for numbers; is it damaged?"));
    }
    let text = file.get(start..start + len).ok_or(CUT_OFF)?;
    let text = str::from_utf8(text).map_err(|_| "the header is no text; is it damaged?")?;
    let mut json: String = text.split_whitespace().collect();
    for (python, other) in [
        ("'", "\""),
        ("(", "["),
        (")", "]"),
        ("False", "false"),
        ("True", "true"),
        (",]", "]"),
        (",}", "}"),
    ] {
        json = json.replace(python, other);
    }
    let header = serde_json::from_str(&json).map_err(|error| {
        format!("the header is not that of an array of numbers ({error}): {}", text.trim_end())
    })?;
    Ok((header, start + len))
}

const CUT_OFF: &str = "the file is cut off in its header; write or copy it again";

fn kind(header: &Header) -> Result<Kind, String> {
    let descr = &header.descr[..];
    if header.fortran_order && header.shape.len() > 1 {
        return Err("it is in Fortran's order; save numpy.ascontiguousarray(x) instead".into());
    }
    match descr.strip_prefix(['<', '|', '=']) {
        Some("f4") => Ok(Kind::Float),
        Some("f8") => Ok(Kind::Double),
        Some("f2") => Ok(Kind::Half),
        Some("i1") => Ok(Kind::Int8),
        Some("i2") => Ok(Kind::Int16),
        Some("i4") => Ok(Kind::Int),
        Some("i8") => Ok(Kind::Int64),
        Some("u1") => Ok(Kind::Uint8),
        Some("b1") => Ok(Kind::Bool),
        None if descr.starts_with('>') => Err(format!(
            "{descr} is big-endian; save x.astype(x.dtype.newbyteorder(\"<\")) instead"
        )),
        _ => Err(format!(
            "numbers of the kind {descr} are not read; save x.astype(\"float32\") or x.astype(\"int64\") instead"
        )),
    }
}
