//! Batches on their way to a GPU: through pinned memory, so that the rank need not wait for the copy.

use std::cell::Cell;
use std::rc::Rc;

use tch::{Device, TchError, Tensor};

use crate::error::{Error, Result};
use crate::ffi::cuda::Event;
use crate::process_group::ProcessGroup;

/// Pinned buffers, which are filled in turn. Allocated once: to allocate or free such memory waits for the GPU, and
/// so for the other ranks.
#[derive(Debug)]
pub(super) struct Staging {
    group: Rc<ProcessGroup>,
    gpu: usize,
    buffers: Vec<Buffer>,
    next: Cell<usize>,
}

/// Room for one batch.
#[derive(Debug)]
struct Buffer {
    inputs: Tensor,
    targets: Tensor,
    /// The GPU has what was in it last; so does one that was never used.
    copied: Event,
}

impl Staging {
    /// `count` buffers for batches of up to `batch_size` samples like `sample`, which is a batch of one.
    pub(super) fn new(
        sample: &(Tensor, Tensor),
        batch_size: usize,
        count: usize,
        gpu: usize,
        group: &Rc<ProcessGroup>,
    ) -> Result<Self> {
        let room = |sample: &Tensor| {
            let shape = [&[batch_size as i64], &sample.size()[1..]].concat();
            // `pin_memory` without the warning that it should not be told the device, which tch always does.
            Tensor::f_empty(shape, (sample.kind(), Device::Cpu))?
                .f_internal_pin_memory(Device::Cuda(gpu))
        };
        let buffer = |_| {
            let pinned = Error::torch("allocating pinned memory for batches");
            let both = || Ok((room(&sample.0)?, room(&sample.1)?));
            let (inputs, targets) = both().map_err(pinned)?;
            Ok(Buffer { inputs, targets, copied: Event::new()? })
        };
        let buffers = (0..count).map(buffer).collect::<Result<_>>()?;
        Ok(Self { group: group.clone(), gpu, buffers, next: Cell::new(0) })
    }

    /// The batch on the GPU, for whatever this rank launches from now on: the copy is launched only. It waits for a
    /// buffer, if the GPU is that far behind.
    pub(super) fn send(&self, inputs: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
        let number = self.next.get();
        let buffer = &self.buffers[number];
        self.next.set((number + 1) % self.buffers.len());
        self.group.wait_for_device(&buffer.copied)?;
        let copy =
            || Ok((self.through(&buffer.inputs, inputs)?, self.through(&buffer.targets, targets)?));
        let copies = copy().map_err(Error::torch("copying a batch to the device"));
        // Also after an error: one of the two may be on its way.
        buffer.copied.record(self.gpu)?;
        copies
    }

    /// A copy of `tensor` on the GPU, by way of `pinned`; at once, if it is none of those that fit in there.
    fn through(&self, pinned: &Tensor, tensor: &Tensor) -> Result<Tensor, TchError> {
        let device = Device::Cuda(self.gpu);
        let (room, size) = (pinned.size(), tensor.size());
        let fits = pinned.kind() == tensor.kind()
            && size.len() == room.len()
            && size[0] <= room[0]
            && size[1..] == room[1..];
        if !fits {
            return tensor.f_to_device(device);
        }
        let mut pinned = pinned.f_narrow(0, 0, size[0])?;
        pinned.f_copy_(tensor)?;
        let non_blocking = true;
        pinned.f_to_device_(device, pinned.kind(), non_blocking, false)
    }
}
