//! Files in the IDX format, which MNIST and similar data sets use.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use tch::{Kind, Tensor};

use super::array::{Array, sizes};
use super::format::{Folder, Format};
use crate::error::{Error, Result, Shown};
use crate::ffi::{MappedFile, TorchResult};
use crate::files::{GZIP, mistaken};

/// A folder with files in MNIST's format.
pub(super) const IDX: Format = Format {
    remark: "as MNIST",
    has_classes: true,
    folder: Some(Folder { files, validation: VALIDATION, read_validation }),
    ..Format::new("idx:FOLDER", |location, _| read(&folder(location.as_ref())?, TRAINING))
};

/// The beginnings of the names of MNIST's files, for training and for validation.
const TRAINING: &str = "train";
const VALIDATION: &str = "t10k";

/// Returns the files that may be read. Also where some are missing: no output may replace the others.
fn files(location: &str) -> Vec<PathBuf> {
    let folder = folder(location.as_ref()).unwrap_or_else(|_| location.into());
    let found = |part| [Holds::Images, Holds::Labels].map(|holds| find(&folder, part, holds));
    [TRAINING, VALIDATION].into_iter().flat_map(found).flatten().collect()
}

/// Reads the validation samples. `None` if there are none.
fn read_validation(location: &str) -> Result<Option<(Array, Array)>> {
    let folder = folder(location.as_ref()).unwrap_or_else(|_| location.into());
    let images = find(&folder, VALIDATION, Holds::Images);
    images.map(|_| read(&folder, VALIDATION)).transpose()
}

/// Returns the folder with the training images: `given`, or `raw` below it, where torchvision puts them.
fn folder(given: &Path) -> Result<PathBuf> {
    let has_images = |folder: &PathBuf| find(folder, TRAINING, Holds::Images).is_some();
    let mut folders = [given.to_owned(), given.join("raw")].into_iter();
    folders.find(has_images).ok_or_else(|| missing(given, TRAINING, Holds::Images))
}

/// Reads the images and labels of `part`.
fn read(folder: &Path, part: &str) -> Result<(Array, Array)> {
    let read = |holds: Holds| {
        let file = find(folder, part, holds).ok_or_else(|| missing(folder, part, holds))?;
        array(&file, holds)
    };
    Ok((read(Holds::Images)?, read(Holds::Labels)?))
}

/// Returns the error for a file that is not there.
fn missing(folder: &Path, part: &str, holds: Holds) -> Error {
    let [name, other] = holds.file_names(part);
    let problem = match fs::read_dir(folder) {
        Err(error) if folder.is_file() => format!("{error}; name the folder that has {name}"),
        Err(error) => error.to_string(),
        Ok(_) => format!("there is no {name} here, also not as {other}, with .gz, or in raw"),
    };
    Error::data(format!("{}: {problem}", folder.shown()))
}

/// Returns the file of `part`, if it is there: under one of its names, as it is or compressed.
fn find(folder: &Path, part: &str, holds: Holds) -> Option<PathBuf> {
    let names = holds.file_names(part);
    let packed = names.each_ref().map(|name| format!("{name}.gz"));
    let mut files = names.into_iter().chain(packed).map(|name| folder.join(name));
    files.find(|file| fs::exists(file).unwrap_or(false) && !file.is_dir())
}

/// The contents of a file.
#[derive(Clone, Copy, PartialEq)]
enum Holds {
    Images,
    Labels,
}

impl Holds {
    /// Returns the name that MNIST's site gives the file, and that of Kaggle.
    fn file_names(self, part: &str) -> [String; 2] {
        let (holds, dims) = match self {
            Holds::Images => ("images", 3),
            Holds::Labels => ("labels", 1),
        };
        ['-', '.'].map(|separator| format!("{part}-{holds}{separator}idx{dims}-ubyte"))
    }
}

/// Returns a view of the file, or its decompressed copy in memory.
fn array(path: &Path, holds: Holds) -> Result<Array> {
    let wrong = |problem: String| Error::data(format!("{}: {problem}", path.shown()));
    let file = MappedFile::open(path)?;
    // Checks the contents: a file may keep its name when it is compressed or decompressed.
    if file.starts_with(&GZIP) {
        let mut unpacked = BufReader::new(MultiGzDecoder::new(&file[..]));
        let (_, shape) = header(&mut unpacked, holds).map_err(wrong)?;
        let (sizes, num_bytes) = sizes(&shape, 1).map_err(wrong)?;
        let bytes = unpack(unpacked, num_bytes).map_err(wrong)?;
        let tensor = Tensor::f_from_slice(&bytes).and_then(|bytes| bytes.f_view(&sizes[..]));
        let tensor = tensor.doing("making a tensor of a data file")?;
        return Ok(Array { tensor, is_pixels: true });
    }
    let (start, shape) = header(&mut &file[..], holds).map_err(wrong)?;
    let array = Array::mapped(&file, start, Kind::Uint8, &shape)?;
    match file.len() - start - array.tensor.numel() {
        0 => Ok(array),
        more => Err(wrong(too_long(more))),
    }
}

/// Returns the offset of the data, in bytes, and its shape.
fn header(file: &mut impl BufRead, holds: Holds) -> Result<(usize, Vec<u64>), String> {
    let unreadable = |error: io::Error| format!("the header can't be read: {error}");
    let begin = file.fill_buf().map_err(unreadable)?;
    let known = mistaken(begin, "an idx file", "use a file of MNIST, or one like it");
    if let Some(known) = known {
        return Err(known);
    }
    let mut word = || {
        let mut word = [0; 4];
        let read = file.read_exact(&mut word);
        read.map_err(unreadable).map(|()| word)
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
    let (have, allowed) = match holds {
        Holds::Labels => ("labels have one dimension", 1..=1),
        Holds::Images => ("images have 2 to 4 dimensions, counting the samples", 2..=4),
    };
    if !allowed.contains(&dims) {
        return Err(format!("{have}, and these have {dims}"));
    }
    let shape: Vec<u64> =
        (0..dims).map(|_| Ok(u32::from_be_bytes(word()?).into())).collect::<Result<_, String>>()?;
    Ok((4 + 4 * shape.len(), shape))
}

/// Decompresses the data after the header: `num_bytes` bytes. Takes memory for what is there, whatever the header announces.
fn unpack(file: impl Read, num_bytes: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    file.take(num_bytes as u64 + 1)
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
