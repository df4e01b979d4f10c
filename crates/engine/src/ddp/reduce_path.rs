//! The path of a bucket's reduction: on a separate stream or thread during backward, or by the rank itself.

use std::time::{Duration, Instant};

use tch::Device;

use crate::error::Result;
use crate::ffi::cuda::{CudaEvent, CudaStream};
use crate::process_group::{ProcessGroup, Work};

/// The place where reductions run.
#[derive(Debug)]
pub(super) enum ReducePath {
    /// On a GPU, with a backend that runs on streams (`nccl`): a separate stream, ordered with the rank's own by events
    /// in both directions.
    OnGpu {
        gpu: usize,
        stream: CudaStream,
        /// Recorded when the gradients are complete.
        computed: CudaEvent,
        /// Recorded when they are reduced.
        reduced: CudaEvent,
        /// Whether a launched reduction has not been waited for.
        pending: bool,
    },
    /// Over a network on CPUs: the operations on the group's communication thread, until [`wait`](Self::wait).
    OnThread(Vec<Work>),
    /// By the rank itself.
    ByRank,
}

impl ReducePath {
    pub(super) fn new(group: &ProcessGroup) -> Result<Self> {
        Ok(match group.device() {
            // Ranks that share a GPU communicate through one stream, which orders their work.
            Device::Cuda(gpu) if group.is_stream_ordered() => Self::OnGpu {
                gpu,
                stream: CudaStream::from_pool(gpu, true)?,
                computed: CudaEvent::new()?,
                reduced: CudaEvent::new()?,
                pending: false,
            },
            _ if group.uses_network() => Self::OnThread(Vec::new()),
            _ => Self::ByRank,
        })
    }

    /// Returns whether to reduce during backward by default.
    ///
    /// It pays on a GPU, where both run at the same time, and between machines, where the network works while the rank
    /// computes. On CPU ranks that share memory nothing is gained, because the rank itself reduces. A slowdown was
    /// measured there (`ddp-mp bench step`, an MLP of 2.1 million parameters, 2 ranks on 2 cores). A rank that waits
    /// for a late one during backward gives up its core, while after backward both ranks are at the same point.
    pub(super) fn overlaps(&self) -> bool {
        !matches!(self, Self::ByRank)
    }

    /// Runs `reduce` after all work that this rank has launched so far.
    pub(super) fn run(
        &mut self,
        group: &ProcessGroup,
        reduce: impl FnOnce(&ProcessGroup) -> Result<()>,
    ) -> Result<()> {
        let Self::OnGpu { gpu, stream, computed, reduced, pending } = self else {
            return reduce(group);
        };
        computed.record(*gpu)?;
        *pending = true;
        // The rank's own stream becomes idle if the host waits for other ranks before it launches.
        group.record_gpu_wait(|| {
            stream.with(|| {
                computed.block(*gpu)?;
                reduce(group)?;
                reduced.record(*gpu)
            })
        })
    }

    /// Makes all later work of this rank wait for all reductions. No reduction is pending afterwards, even on an error.
    /// Returns how long the rank itself has waited.
    pub(super) fn wait(&mut self, group: &ProcessGroup) -> Result<Duration> {
        match self {
            Self::OnGpu { gpu, reduced, pending, .. } => {
                if std::mem::take(pending) {
                    group.record_gpu_wait(|| reduced.block(*gpu))?;
                }
                Ok(Duration::ZERO)
            }
            Self::OnThread(works) => {
                let began = Instant::now();
                let result = works.drain(..).map(Work::wait).fold(Ok(()), Result::and);
                let waited = began.elapsed();
                group.record_wait(waited);
                result.map(|()| waited)
            }
            Self::ByRank => Ok(Duration::ZERO),
        }
    }
}
