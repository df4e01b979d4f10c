//! Files in the IDX format, which MNIST and similar data sets use.

use std::fs;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tch::{Kind, Tensor};

use super::array::{Array, Layout, sizes};
use crate::error::{Error, Result};
use crate::ffi::{MappedFile, open_file};

/// Reads the images and labels of `part`, "train" or "t10k".
pub(super) fn read(folder: &Path, part: &str) -> Result<(Array, Array)> {
    let read = |name: &str, what| {
        let name = format!("{part}-{name}");
        let file = find(folder, &name).ok_or_else(|| {
            let problem = format!("there is no {name} here, nor {name}.gz");
            Error::Input(format!("{}: {problem}", folder.display()))
        })?;
        array(&file, what)
    };
    Ok((read("images-idx3-ubyte", Holds::Images)?, read("labels-idx1-ubyte", Holds::Labels)?))
}

/// Returns whether `folder` has the images of `part`.
pub(super) fn has(folder: &Path, part: &str) -> bool {
    find(folder, &format!("{part}-images-idx3-ubyte")).is_some()
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let files = [folder.join(name), folder.join(format!("{name}.gz"))];
    files.into_iter().find(|file| fs::exists(file).unwrap_or(false))
}

#[derive(Clone, Copy, PartialEq)]
enum Holds {
    Images,
    Labels,
}

/// Returns a view of the file, or its decompressed copy in memory.
fn array(path: &Path, holds: Holds) -> Result<Array> {
    let wrong = |problem: String| Error::Input(format!("{}: {problem}", path.display()));
    if path.extension().is_some_and(|extension| extension == "gz") {
        let (file, len) = open_file(path)?;
        let mut unpacked = MultiGzDecoder::new(BufReader::new(file));
        let (_, shape) = header(&mut unpacked, holds).map_err(wrong)?;
        let (sizes, num_bytes) = sizes(&shape, 1).map_err(wrong)?;
        let bytes = unpack(unpacked, len, num_bytes).map_err(wrong)?;
        let tensor = Tensor::f_from_slice(&bytes).and_then(|bytes| bytes.f_view(&sizes[..]));
        return Ok(Array::bytes(tensor.map_err(Error::torch("making a tensor of a data file"))?));
    }
    let file = MappedFile::open(path)?;
    let (start, shape) = header(&mut &file[..], holds).map_err(wrong)?;
    let array = Array::mapped(&file, Layout::native(start, Kind::Uint8), &shape)?;
    match file.len() - start - array.tensor.numel() {
        0 => Ok(array),
        more => Err(wrong(too_long(more))),
    }
}

/// Returns the offset of the data, in bytes, and its shape.
fn header(file: &mut impl Read, holds: Holds) -> Result<(usize, Vec<u64>), String> {
    let mut word = || {
        let mut word = [0; 4];
        let read = file.read_exact(&mut word);
        read.map_err(|error| format!("the header can't be read: {error}")).map(|()| word)
    };
    let [zero, zero_too, kind, dims] = word()?;
    if (zero, zero_too) != (0, 0) {
        return Err("this is not an idx file: it does not begin with two zeros".into());
    }
    if kind != 8 {
        return Err(format!(
            "its numbers are of kind {kind}, and only unsigned bytes (kind 8) can be read here"
        ));
    }
    match holds {
        Holds::Labels if dims != 1 => {
            return Err(format!("labels have one dimension, and these have {dims}"));
        }
        Holds::Images if !(2..=4).contains(&dims) => {
            return Err(format!(
                "images have 2 to 4 dimensions with that of the samples, and these have {dims}"
            ));
        }
        _ => {}
    }
    let shape: Vec<u64> =
        (0..dims).map(|_| Ok(u32::from_be_bytes(word()?).into())).collect::<Result<_, String>>()?;
    Ok((4 + 4 * shape.len(), shape))
}

/// Decompresses the data after the header: `num_bytes` bytes, from a compressed file of `packed` bytes.
fn unpack(mut file: impl Read, packed: u64, num_bytes: usize) -> Result<Vec<u8>, String> {
    // Deflate compresses by a factor of 1032 at most.
    if num_bytes as u64 / 1032 > packed {
        return Err(format!(
            "the header announces {num_bytes} bytes, more than a packed file of {packed} can hold; copy it again"
        ));
    }
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(num_bytes + 1)
        .map_err(|_| format!("there is not enough memory for {num_bytes} bytes"))?;
    file.by_ref()
        .take(num_bytes as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("it can't be unpacked: {error}; copy it again"))?;
    match bytes.len() {
        len if len < num_bytes => Err(format!(
            "the file is cut off: the header announces {num_bytes} bytes, and {len} are there; copy it again"
        )),
        len if len > num_bytes => Err(too_long(len - num_bytes)),
        _ => Ok(bytes),
    }
}

fn too_long(more: usize) -> String {
    format!("the file is longer than its header says, by {more} bytes or more; copy it again")
}
