//! Where buckets are reduced: beside backward on a stream of its own, or in its midst.

use std::time::Instant;

use tch::Device;

use crate::error::Result;
use crate::ffi::cuda::{Event, Stream};
use crate::process_group::{ProcessGroup, Work};

/// How it is done.
#[derive(Debug)]
pub(super) enum ReducePath {
    /// On a GPU with `nccl`: on a stream for the reductions, ordered with the rank's own by events in both
    /// directions.
    OnGpu(OnGpu),
    /// Between processes on CPUs: what goes on on the group's communication thread, and since when.
    OnThread(Vec<Work>, Option<Instant>),
    /// By the rank itself.
    InPlace,
}

#[derive(Debug)]
pub(super) struct OnGpu {
    gpu: usize,
    stream: Stream,
    /// The gradients are complete up to here.
    computed: Event,
    /// They have been reduced up to here.
    reduced: Event,
    /// Whether something has been launched that nobody has waited for.
    pending: bool,
}

impl ReducePath {
    pub(super) fn new(group: &ProcessGroup) -> Result<Self> {
        let on_gpu = match group.device() {
            // Ranks that share a GPU talk through one stream, which orders what they do.
            Device::Cuda(gpu) if group.backend() == "nccl" => Self::OnGpu(OnGpu {
                gpu,
                stream: Stream::new(gpu)?,
                computed: Event::new()?,
                reduced: Event::new()?,
                pending: false,
            }),
            _ if group.spans_processes() => Self::OnThread(Vec::new(), None),
            _ => Self::InPlace,
        };
        Ok(on_gpu)
    }

    /// Whether it pays to reduce while backward goes on.
    ///
    /// On a GPU it does: the two run at the same time. Between processes it does too: the network works while the
    /// rank computes. On CPU ranks of one process the rank itself reduces, so nothing is
    /// gained, and what was lost has been measured (`ddp-mp bench step`, an MLP of 2.1 million parameters, 2
    /// ranks on 2 cores): a rank that waits in the midst of backward for one that is late gives up its core,
    /// while both are at one place when backward is through.
    pub(super) fn overlaps(&self) -> bool {
        !matches!(self, Self::InPlace)
    }

    /// Where an operation that goes on by itself is to be kept until [`wait`](Self::wait), if that may be.
    pub(super) fn beside(&mut self) -> Option<&mut Vec<Work>> {
        match self {
            Self::OnThread(works, since) => {
                since.get_or_insert_with(Instant::now);
                Some(works)
            }
            _ => None,
        }
    }

    /// When the first of these operations was started, unless they have been waited for.
    pub(super) fn since(&self) -> Option<Instant> {
        match self {
            Self::OnThread(_, since) => *since,
            _ => None,
        }
    }

    /// Runs `reduce` once all that this rank has launched so far is done.
    pub(super) fn run(
        &mut self,
        group: &ProcessGroup,
        reduce: impl FnOnce(&ProcessGroup) -> Result<()>,
    ) -> Result<()> {
        let Self::OnGpu(OnGpu { gpu, stream, computed, reduced, pending }) = self else {
            return reduce(group);
        };
        computed.record(*gpu)?;
        *pending = true;
        // The rank's own stream runs dry if the host waits for other ranks before it launches.
        group.record_gpu_wait(|| {
            stream.with(|| {
                computed.block(*gpu)?;
                reduce(group)?;
                reduced.record(*gpu)
            })
        })
    }

    /// Has whatever this rank launches from now on wait for all reductions. None is left, also if one has failed.
    pub(super) fn wait(&mut self, group: &ProcessGroup) -> Result<()> {
        match self {
            Self::OnGpu(OnGpu { gpu, reduced, pending, .. }) => {
                if std::mem::take(pending) {
                    group.record_gpu_wait(|| reduced.block(*gpu))
                } else {
                    Ok(())
                }
            }
            Self::OnThread(works, since) => {
                *since = None;
                let began = Instant::now();
                let result = works.drain(..).map(Work::wait).fold(Ok(()), Result::and);
                group.record_wait(began.elapsed());
                result
            }
            Self::InPlace => Ok(()),
        }
    }
}
