//! Files in the IDX format, which MNIST and similar data sets use.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use tch::{Kind, Tensor};

use super::array::{Array, Layout, sizes};
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

/// All files: the beginning of its name, and its contents.
const FILES: [(&str, Holds); 4] = [
    (TRAINING, Holds::Images),
    (TRAINING, Holds::Labels),
    (VALIDATION, Holds::Images),
    (VALIDATION, Holds::Labels),
];

/// Returns the files that may be read. Also where some are missing: no output may replace the others.
fn files(location: &str) -> Vec<PathBuf> {
    let folder = folder(location.as_ref()).unwrap_or_else(|_| location.into());
    FILES.into_iter().filter_map(|(part, holds)| find(&folder, part, holds)).collect()
}

/// Reads the validation samples. `None` if there are none.
fn read_validation(location: &str) -> Result<Option<(Array, Array)>> {
    let folder = folder(location.as_ref()).unwrap_or_else(|_| location.into());
    let images = find(&folder, VALIDATION, Holds::Images);
    images.map(|_| read(&folder, VALIDATION)).transpose()
}

/// The folders below the given one in which torchvision puts MNIST's files and those of data sets like it.
const OF_TORCHVISION: [&str; 4] = ["raw", "MNIST/raw", "FashionMNIST/raw", "KMNIST/raw"];

/// Returns the folder with the training images: `given`, or one of torchvision's below it.
fn folder(given: &Path) -> Result<PathBuf> {
    let has_images = |folder: &PathBuf| find(folder, TRAINING, Holds::Images).is_some();
    let below = OF_TORCHVISION.map(|below| given.join(below));
    let mut found = [given.to_owned()].into_iter().chain(below).filter(has_images);
    let Some(folder) = found.next() else { return Err(missing(given, TRAINING, Holds::Images)) };
    match found.next().filter(|_| folder != given) {
        Some(other) => Err(Error::usage(format!(
            "{}: there are several data sets, in {} and {}; name the folder of one",
            given.shown(),
            folder.shown(),
            other.shown()
        ))),
        None => Ok(folder),
    }
}

/// Reads the images and labels of `part`.
fn read(folder: &Path, part: &str) -> Result<(Array, Array)> {
    let read = |holds: Holds| {
        let file = find(folder, part, holds).ok_or_else(|| missing(folder, part, holds))?;
        array(&file, holds)
    };
    Ok((read(Holds::Images)?, read(Holds::Labels)?))
}

/// Returns the error for a file that is not there. It names files that it may be.
fn missing(folder: &Path, part: &str, holds: Holds) -> Error {
    let [name, other] = holds.file_names(part);
    let there = fs::read_dir(folder).map(|entries| {
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let is_known = |name: &str| {
            let mut known = FILES.into_iter().flat_map(|(part, holds)| holds.file_names(part));
            known.any(|known| name.trim_end_matches(".gz") == known)
        };
        let may_be = |name: &String| name.to_lowercase().contains("ubyte") && !is_known(name);
        let mut names: Vec<String> = names.filter(may_be).take(6).collect();
        names.sort();
        names
    });
    let problem = match there {
        Err(error) if folder.is_file() => {
            format!("{error}; name the folder that has {name}")
        }
        Err(error) => error.to_string(),
        Ok(names) => {
            let below = OF_TORCHVISION.join(", ");
            let there = match &names[..] {
                [] => String::new(),
                names => format!("; here are {}: rename them", names.join(", ")),
            };
            format!("there is no {name} here, also not as {other}, with .gz, or in {below}{there}")
        }
    };
    Error::data(format!("{}: {problem}", folder.shown()))
}

/// Returns the file of `part`, if it is there: under one of its names, as it is or compressed, perhaps in a folder of
/// that name, as Kaggle packs it.
fn find(folder: &Path, part: &str, holds: Holds) -> Option<PathBuf> {
    let names = holds.file_names(part);
    let inside = |outer| names.iter().map(move |inner| format!("{outer}/{inner}"));
    let paths = names.iter().cloned().chain(names.iter().flat_map(inside));
    let paths = paths.collect::<Vec<String>>();
    let packed = paths.iter().map(|path| format!("{path}.gz"));
    let mut files = paths.iter().cloned().chain(packed).map(|path| folder.join(path));
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
        let bytes = unpack(unpacked, file.len() as u64, num_bytes).map_err(wrong)?;
        let tensor = Tensor::f_from_slice(&bytes).and_then(|bytes| bytes.f_view(&sizes[..]));
        return Ok(Array::bytes(tensor.doing("making a tensor of a data file")?));
    }
    let (start, shape) = header(&mut &file[..], holds).map_err(wrong)?;
    let array = Array::mapped(&file, Layout::native(start, Kind::Uint8), &shape)?;
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
