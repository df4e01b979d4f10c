//! Files as tensors without reading them first: the kernel brings in what is used, and drops it again.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions};
use tch::Tensor;

use super::bus_error::{Watched, watch};
use super::shim;
use crate::error::{Error, Result};
use crate::files::open_regular;

/// A file in memory. The tensors that are made of it keep it there.
///
/// Do not change the file meanwhile. One that becomes shorter ends the process, which says so.
#[derive(Clone)]
pub(crate) struct MappedFile(Arc<Mapping>);

struct Mapping {
    map: MmapMut,
    name: String,
    watched: &'static Watched,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.watched.forget();
    }
}

/// Opens a regular file that has something in it. Returns its length in bytes, too.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64)> {
    let wrong = |error: io::Error| Error::Input(format!("{}: {error}", path.display()));
    let file = open_regular(path).map_err(wrong)?;
    match file.metadata().map_err(wrong)?.len() {
        0 => Err(wrong(io::Error::other("the file is empty"))),
        len => Ok((file, len)),
    }
}

impl MappedFile {
    /// Maps a file that is not empty.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let (file, _) = open_file(path)?;
        // Private and without a reserve: who writes to such a tensor changes neither the file nor what others
        // see in it, and a file may be larger than the memory.
        let mut options = MmapOptions::new();
        // SAFETY: the memory is ours; that others may change the file is said above, and a page that is gone ends
        // the process.
        let map = unsafe { options.no_reserve_swap().map_copy(&file) };
        let map =
            map.map_err(|error| Error::Input(format!("{name}: it can't be mapped: {error}")))?;
        let watched = watch(map.as_ptr(), map.len(), &name);
        Ok(Self(Arc::new(Mapping { map, name, watched })))
    }

    /// What the file is called.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    /// These bytes, which must be there, as a tensor.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Result<Tensor> {
        unsafe extern "C" fn release(context: *mut c_void) {
            // SAFETY: the context is the `Arc` below, which is given back once.
            drop(unsafe { Arc::from_raw(context.cast::<Mapping>().cast_const()) });
        }
        let bytes = &self[range];
        let start = bytes.as_ptr().cast_mut();
        let context = Arc::into_raw(self.0.clone()).cast_mut().cast();
        // SAFETY: the bytes are in the map, a private and writable one, and that lives until `release`. (If this
        // fails the map stays for good.)
        unsafe { shim::from_bytes(start, bytes.len(), release, context) }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.map
    }
}
