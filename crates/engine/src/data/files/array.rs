//! The numbers of a file, in the file's dtype.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi::{MappedFile, TorchResult};

/// The contents of a file. Batches of it are converted later.
pub(super) struct Array {
    pub tensor: Tensor,
    /// Whether the numbers are divided by 255 when used as inputs, as unsigned bytes are.
    pub is_pixels: bool,
}

impl Array {
    /// Wraps numbers that are used unchanged.
    pub(super) fn plain(tensor: Tensor) -> Self {
        Self { tensor, is_pixels: false }
    }

    /// Returns the numbers of `file` from byte `start` on: a view of the file, or a copy if they are not aligned.
    pub(super) fn mapped(
        file: &MappedFile,
        start: usize,
        dtype: Kind,
        shape: &[u64],
    ) -> Result<Self> {
        let size = dtype.elt_size_in_bytes();
        let wrong = |problem: String| Error::data(format!("{}: {problem}", file.name()));
        let (shape, num_bytes) = sizes(shape, size).map_err(wrong)?;
        let available = file.len().saturating_sub(start);
        if num_bytes > available {
            return Err(wrong(format!(
                "the file is cut off: numbers of the shape {shape:?} take {num_bytes} bytes, and {available} are there; \
                 write or copy it again"
            )));
        }
        let range = start..start + num_bytes;
        // A map starts at a page boundary.
        let bytes = if start.is_multiple_of(size) {
            Ok(file.bytes(range)?)
        } else {
            Tensor::f_from_slice(&file[range])
        };
        // A byte that is neither 0 nor 1 is not a valid bool for libtorch.
        let stored = if dtype == Kind::Bool { Kind::Uint8 } else { dtype };
        let view = bytes.and_then(|bytes| bytes.f_view_dtype(stored)?.f_view(&shape[..]));
        let tensor = view.doing("making a tensor of a data file")?;
        Ok(Self { tensor, is_pixels: dtype == Kind::Uint8 })
    }
}

/// Returns the shape for libtorch and the total size in bytes. `element` is the size of one number. An error if there
/// are no numbers, or too many.
pub(super) fn sizes(shape: &[u64], element: usize) -> Result<(Vec<i64>, usize), String> {
    let numel = shape.iter().try_fold(1u64, |numel, &size| numel.checked_mul(size));
    let num_bytes = numel.and_then(|numel| numel.checked_mul(element as u64));
    match num_bytes {
        _ if shape.contains(&0) => Err(format!(
            "an array of the shape {shape:?} has no numbers; write at least one sample"
        )),
        // Each factor is at most the product, so it fits as well.
        Some(num_bytes) if num_bytes <= isize::MAX as u64 => {
            Ok((shape.iter().map(|&size| size as i64).collect(), num_bytes as usize))
        }
        _ => Err(format!(
            "an array of the shape {shape:?} is larger than any memory; write or copy the file again"
        )),
    }
}
