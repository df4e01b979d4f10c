//! The memory between a process's ranks and the network, kept from call to call.

use std::cell::UnsafeCell;

use tch::{Device, Kind, Tensor};

use super::header::HEADER_BYTES;
use crate::error::{Error, Result};

/// What goes out and what comes in: a note for each process, and room for as much as calls have needed.
pub(super) struct StagingBuffers {
    notes: [Tensor; 2],
    parts: UnsafeCell<[Tensor; 2]>,
}

// SAFETY: notes and parts are written, and made larger, by the first rank of the process only (`Room::make`,
// `Network::exchange`), which is one thread at a time; the others ask where the parts are between a meeting of the
// process's ranks that follows and the one by which the collective ends, and what they write and read there
// `super::Hierarchical` keeps apart.
unsafe impl Sync for StagingBuffers {}
// SAFETY: tensors may be dropped on any thread.
unsafe impl Send for StagingBuffers {}

impl StagingBuffers {
    /// For notes of so many processes, and for nothing else yet.
    pub(super) fn new(processes: usize) -> Result<Self> {
        let notes = [bytes(HEADER_BYTES * processes)?, bytes(HEADER_BYTES * processes)?];
        Ok(Self { notes, parts: UnsafeCell::new([bytes(0)?, bytes(0)?]) })
    }

    /// The notes that go out, and those that come in.
    pub(super) fn notes(&self) -> &[Tensor; 2] {
        &self.notes
    }

    /// Makes room for so many bytes in each direction. By the process's first rank, before the others meet it.
    pub(super) fn make(&self, send: usize, receive: usize) -> Result<()> {
        // SAFETY: as said where `Sync` is.
        let parts = unsafe { &mut *self.parts.get() };
        for (tensor, size) in parts.iter_mut().zip([send, receive]) {
            if tensor.numel() < size {
                *tensor = bytes(size)?;
            }
        }
        Ok(())
    }

    /// What goes out, and what comes in. By the process's first rank.
    pub(super) fn parts(&self) -> &[Tensor; 2] {
        // SAFETY: as said where `Sync` is.
        unsafe { &*self.parts.get() }
    }
}

fn bytes(size: usize) -> Result<Tensor> {
    Tensor::f_zeros([size as i64], (Kind::Uint8, Device::Cpu)).map_err(Error::torch("making room"))
}
