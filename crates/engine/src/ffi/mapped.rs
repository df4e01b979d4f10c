//! Memory-mapped files as tensors. The kernel loads pages when they are used, and may drop them again.

use std::ffi::{c_char, c_void};
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions};
use tch::Tensor;
use torch_sys::C_tensor;

use super::shim::{Release, new_tensor};
use crate::error::{Error, Result, Shown};
use crate::files::open_regular;
use crate::os::{WatchedMapping, watch_mapping};

unsafe extern "C" {
    fn ddp_from_bytes(
        bytes: *mut c_void,
        len: usize,
        release: Release,
        context: *mut c_void,
        tensor: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// A memory-mapped file. Tensors made from it keep the mapping alive.
///
/// Do not change the file while it is mapped. If it becomes shorter, the process prints a message and exits.
#[derive(Clone)]
pub(crate) struct MappedFile(Arc<Mapping>);

struct Mapping {
    map: MmapMut,
    name: String,
    watched: &'static WatchedMapping,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.watched.forget();
    }
}

/// Opens a regular file that is not empty. Also returns its length in bytes.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64)> {
    let wrong = |error: io::Error| Error::data(format!("{}: {error}", path.shown()));
    let file = open_regular(path).map_err(wrong)?;
    match file.metadata().map_err(wrong)?.len() {
        0 => Err(wrong(io::Error::other("the file is empty"))),
        len => Ok((file, len)),
    }
}

impl MappedFile {
    /// Maps a file that is not empty.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.shown().into_owned();
        let (file, _) = open_file(path)?;
        // A private mapping: writing to such a tensor does not change the file or other mappings of it. Without a
        // reserve, so that a file may be larger than memory.
        let mut options = MmapOptions::new();
        // SAFETY: the memory is ours; the type's documentation forbids changes to the file, and a missing
        // page ends the process.
        let map = unsafe { options.no_reserve_swap().map_copy(&file) };
        let map =
            map.map_err(|error| Error::data(format!("{name}: it can't be mapped: {error}")))?;
        let watched = watch_mapping(map.as_ptr(), map.len(), &name);
        Ok(Self(Arc::new(Mapping { map, name, watched })))
    }

    /// Returns the file's path, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns a range of bytes, which must exist, as a tensor.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Result<Tensor> {
        let bytes = &self[range];
        // SAFETY: the bytes are in the map, a private and writable one.
        unsafe { memory_tensor(bytes.as_ptr().cast_mut(), bytes.len(), self.0.clone()) }
    }
}

/// Returns the `len` bytes at `start` as a tensor, which keeps `memory`. If this fails, the memory stays for good.
///
/// # Safety
/// The bytes exist and may be written for as long as `memory` exists.
pub(crate) unsafe fn memory_tensor<T: Send + Sync>(
    start: *mut u8,
    len: usize,
    memory: Arc<T>,
) -> Result<Tensor> {
    unsafe extern "C" fn release<T>(context: *mut c_void) {
        // SAFETY: the context is the `Arc` below, which is given back once.
        drop(unsafe { Arc::from_raw(context.cast::<T>().cast_const()) });
    }
    let context = Arc::into_raw(memory).cast_mut().cast();
    // SAFETY: as the caller promises, until `release`. On success the shim writes a new C++ tensor.
    unsafe {
        new_tensor("making a tensor of memory", |tensor| {
            ddp_from_bytes(start.cast(), len, release::<T>, context, tensor)
        })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.map
    }
}
