//! Copies batches to a GPU through pinned memory, so that the rank does not wait for the copy.

use std::cell::Cell;
use std::rc::Rc;

use tch::{Device, TchError, Tensor};

use super::Batch;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::ffi::cuda::CudaEvent;
use crate::process_group::ProcessGroup;

/// Pinned buffers, filled in turn. They are allocated once, because allocating or freeing pinned memory waits for
/// the GPU, and therefore for the other ranks.
#[derive(Debug)]
pub(super) struct Staging {
    group: Rc<ProcessGroup>,
    gpu: usize,
    buffers: Vec<Buffer>,
    next: Cell<usize>,
}

/// A pinned buffer for one batch.
#[derive(Debug)]
struct Buffer {
    room: Batch,
    /// Done when the GPU has copied the buffer's last batch. Also done if the buffer was never used.
    copied: CudaEvent,
}

impl Staging {
    /// Allocates `count` buffers for batches of up to `batch_size` samples like `sample`, a batch of one.
    pub(super) fn new(
        sample: &Batch,
        batch_size: usize,
        count: usize,
        gpu: usize,
        group: &Rc<ProcessGroup>,
    ) -> Result<Self> {
        let room = |sample: &Tensor| {
            let shape = [&[batch_size as i64], &sample.size()[1..]].concat();
            // `pin_memory` warns that the device argument is deprecated, but tch always passes it.
            Tensor::f_empty(shape, (sample.kind(), Device::Cpu))?
                .f_internal_pin_memory(Device::Cuda(gpu))
        };
        let buffer = |_| {
            let doing = "allocating pinned memory for batches";
            let room = sample.map(batch_size as i64, room).doing(doing)?;
            Ok(Buffer { room, copied: CudaEvent::new()? })
        };
        let buffers = (0..count).map(buffer).collect::<Result<_>>()?;
        Ok(Self { group: group.clone(), gpu, buffers, next: Cell::new(0) })
    }

    /// Launches the copy of a batch to the GPU. Work that this rank launches later may use the result. Waits only if
    /// all buffers are in use, because the GPU is behind.
    pub(super) fn send(&self, batch: &Batch) -> Result<Batch> {
        let index = self.next.get();
        let buffer = &self.buffers[index];
        self.next.set((index + 1) % self.buffers.len());
        self.group.wait_for_device(&buffer.copied)?;
        let Batch { inputs, targets, more_inputs, .. } = &buffer.room;
        let mut rooms = [inputs, targets].into_iter().chain(more_inputs);
        let copies = batch.map(batch.len, |tensor| match rooms.next() {
            Some(room) if fits(tensor, room) => {
                self.through(room, tensor).doing("copying a batch to the device")
            }
            // The host waits for the GPU here, but a failure of another rank ends the wait.
            _ => self.group.to_device(tensor),
        });
        // Recorded after an error too: one of the copies may be in flight.
        buffer.copied.record(self.gpu)?;
        copies
    }

    /// Copies `tensor` to the GPU through `pinned`, in which it fits.
    fn through(&self, pinned: &Tensor, tensor: &Tensor) -> Result<Tensor, TchError> {
        let mut pinned = pinned.f_narrow(0, 0, tensor.size()[0])?;
        pinned.f_copy_(tensor)?;
        let non_blocking = true;
        pinned.f_to_device_(Device::Cuda(self.gpu), pinned.kind(), non_blocking, false)
    }
}

/// Returns whether the samples in `tensor` have the dtype and shape of those in `room`, and are not more.
fn fits(tensor: &Tensor, room: &Tensor) -> bool {
    let (size, room_size) = (tensor.size(), room.size());
    tensor.kind() == room.kind()
        && size.len() == room_size.len()
        && size[0] <= room_size[0]
        && size[1..] == room_size[1..]
}
