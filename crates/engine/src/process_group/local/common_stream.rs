//! The CUDA stream on which ranks that share a GPU exchange tensors: the device's default stream.
//!
//! Each rank computes on a stream of its own. The default stream waits for a rank before its tensors are used there, and
//! the rank's stream waits for the default stream afterwards.

use tch::Device;

use crate::error::Result;
use crate::ffi::cuda::{CudaEvent, CudaStream};

/// The common stream of the ranks on one GPU, as one rank uses it.
#[derive(Debug)]
pub(crate) struct CommonStream {
    gpu: usize,
    stream: CudaStream,
    /// Recorded when the rank's tensors are complete.
    computed: CudaEvent,
    /// Recorded when they have been exchanged.
    exchanged: CudaEvent,
}

impl CommonStream {
    /// Returns the common stream of the ranks on `device`; `None` on the CPU.
    pub(crate) fn of(device: Device) -> Result<Option<Self>> {
        let Device::Cuda(gpu) = device else { return Ok(None) };
        let (computed, exchanged) = (CudaEvent::new()?, CudaEvent::new()?);
        Ok(Some(Self { gpu, stream: CudaStream::default_of(gpu)?, computed, exchanged }))
    }

    /// Makes the common stream wait for all that the calling rank has launched.
    pub(crate) fn wait_for_rank(&self) -> Result<()> {
        self.computed.record(self.gpu)?;
        self.with(|| self.computed.block(self.gpu))
    }

    /// Makes what the calling rank launches from now on wait for all that the common stream has got.
    pub(crate) fn let_rank_wait(&self) -> Result<()> {
        self.with(|| self.exchanged.record(self.gpu))?;
        self.exchanged.block(self.gpu)
    }

    /// Runs `work`, which launches on the common stream.
    pub(crate) fn with<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.stream.with(work)
    }
}
