//! Files in the IDX format, which MNIST and similar data sets use.

use std::fs;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tch::{Kind, Tensor};

use super::TargetKind;
use super::array::{Array, Layout, sizes};
use super::format::Format;
use crate::error::{Error, Result, Shown};
use crate::ffi::{MappedFile, TorchResult, open_file};

/// A folder with files in MNIST's format.
#[derive(Debug)]
pub(super) struct Idx;

/// The beginnings of the names of MNIST's files, for training and for validation.
const TRAINING: &str = "train";
const VALIDATION: &str = "t10k";

impl Format for Idx {
    fn usage(&self) -> &'static str {
        "idx:FOLDER"
    }

    fn remark(&self) -> &'static str {
        "as MNIST"
    }

    fn guess(&self, prefix: &str, path: &str) -> Option<String> {
        let is_mnist = prefix.eq_ignore_ascii_case("mnist");
        let is_folder = prefix.is_empty() && Path::new(path).is_dir();
        (!path.is_empty() && (is_mnist || is_folder)).then(|| path.into())
    }

    fn files(&self, location: &str) -> Vec<PathBuf> {
        let parts = [TRAINING, VALIDATION].into_iter();
        let both = |part| [Holds::Images, Holds::Labels].map(|holds| holds.file_name(part));
        parts.flat_map(both).flat_map(|name| candidates(location.as_ref(), &name)).collect()
    }

    fn has_classes(&self) -> bool {
        true
    }

    fn read(&self, location: &str, _kind: TargetKind) -> Result<(Array, Array)> {
        read(location.as_ref(), TRAINING)
    }

    fn validation_name(&self) -> Option<&'static str> {
        Some(VALIDATION)
    }

    fn read_validation(&self, location: &str) -> Result<Option<(Array, Array)>> {
        let folder = location.as_ref();
        let images = find(folder, &Holds::Images.file_name(VALIDATION));
        images.map(|_| read(folder, VALIDATION)).transpose()
    }
}

/// Reads the images and labels of `part`.
fn read(folder: &Path, part: &str) -> Result<(Array, Array)> {
    let read = |holds: Holds| {
        let name = holds.file_name(part);
        let file = find(folder, &name).ok_or_else(|| {
            let problem = format!("there is no {name} here, nor {name}.gz");
            Error::InvalidInput(format!("{}: {problem}", folder.shown()))
        })?;
        array(&file, holds)
    };
    Ok((read(Holds::Images)?, read(Holds::Labels)?))
}

/// Returns the paths that the file `name` may have: as it is, and compressed.
fn candidates(folder: &Path, name: &str) -> [PathBuf; 2] {
    [folder.join(name), folder.join(format!("{name}.gz"))]
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    candidates(folder, name).into_iter().find(|file| fs::exists(file).unwrap_or(false))
}

/// The contents of a file.
#[derive(Clone, Copy, PartialEq)]
enum Holds {
    Images,
    Labels,
}

impl Holds {
    fn file_name(self, part: &str) -> String {
        match self {
            Holds::Images => format!("{part}-images-idx3-ubyte"),
            Holds::Labels => format!("{part}-labels-idx1-ubyte"),
        }
    }
}

/// Returns a view of the file, or its decompressed copy in memory.
fn array(path: &Path, holds: Holds) -> Result<Array> {
    let wrong = |problem: String| Error::InvalidInput(format!("{}: {problem}", path.shown()));
    if path.extension().is_some_and(|extension| extension == "gz") {
        let (file, len) = open_file(path)?;
        let mut unpacked = MultiGzDecoder::new(BufReader::new(file));
        let (_, shape) = header(&mut unpacked, holds).map_err(wrong)?;
        let (sizes, num_bytes) = sizes(&shape, 1).map_err(wrong)?;
        let bytes = unpack(unpacked, len, num_bytes).map_err(wrong)?;
        let tensor = Tensor::f_from_slice(&bytes).and_then(|bytes| bytes.f_view(&sizes[..]));
        return Ok(Array::bytes(tensor.doing("making a tensor of a data file")?));
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
            "its numbers have type {kind}, and only type 8, unsigned bytes, can be read here"
        ));
    }
    match holds {
        Holds::Labels if dims != 1 => {
            return Err(format!("labels have one dimension, and these have {dims}"));
        }
        Holds::Images if !(2..=4).contains(&dims) => {
            return Err(format!(
                "images have 2 to 4 dimensions, counting the samples, and these have {dims}"
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
