//! The staging buffers between a process's ranks and the network, reused by all calls.

use std::cell::UnsafeCell;

use tch::{Device, Kind, Tensor};

use super::header::HEADER_BYTES;
use crate::error::Result;
use crate::ffi::TorchResult;

/// Send and receive buffers: a header for each process, and room for the largest call so far.
pub(super) struct StagingBuffers {
    headers: [Tensor; 2],
    parts: UnsafeCell<[Tensor; 2]>,
}

// SAFETY: only the process's first rank, one thread at a time, writes headers, exchanges parts and enlarges the buffers
// (`StagingBuffers::reserve`, `Network::exchange`). The other ranks get the addresses of the parts only between a later
// barrier of the process and the one that ends the collective. `process_group::gloo` keeps apart what the ranks write
// and read there.
unsafe impl Sync for StagingBuffers {}
// SAFETY: tensors may be dropped on any thread.
unsafe impl Send for StagingBuffers {}

impl StagingBuffers {
    /// Creates headers for this many processes, and no room for parts yet.
    pub(super) fn new(processes: usize) -> Result<Self> {
        let headers = [bytes(HEADER_BYTES * processes)?, bytes(HEADER_BYTES * processes)?];
        Ok(Self { headers, parts: UnsafeCell::new([bytes(0)?, bytes(0)?]) })
    }

    /// Returns the headers that go out, and those that come in.
    pub(super) fn headers(&self) -> &[Tensor; 2] {
        &self.headers
    }

    /// Makes room for this many bytes per direction. Called by the process's first rank, before the others' barrier.
    pub(super) fn reserve(&self, send: usize, receive: usize) -> Result<()> {
        // SAFETY: see the implementation of `Sync`.
        let parts = unsafe { &mut *self.parts.get() };
        for (tensor, size) in parts.iter_mut().zip([send, receive]) {
            if tensor.numel() < size {
                *tensor = bytes(size)?;
            }
        }
        Ok(())
    }

    /// Returns the send buffer and the receive buffer.
    pub(super) fn parts(&self) -> &[Tensor; 2] {
        // SAFETY: see the implementation of `Sync`.
        unsafe { &*self.parts.get() }
    }
}

fn bytes(size: usize) -> Result<Tensor> {
    Tensor::f_zeros([size as i64], (Kind::Uint8, Device::Cpu)).doing("making room")
}
