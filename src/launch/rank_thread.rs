//! The thread of one rank, from start to end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::Sender;
use tch::Device;

use super::rendezvous::Rendezvous;
use super::{BindChoice, ProcessWorld, Rank};
use crate::error::{Error, Result};
use crate::ffi;
use crate::operation::Operation;
use crate::os::affinity::CpuList;
use crate::process_group::Backend;
use crate::runtime::{RunContext, panics};

/// Everything that one rank's thread starts with.
pub(super) struct RankThread<T> {
    pub rank: usize,
    pub local_rank: usize,
    /// The first rank of the process.
    pub first: usize,
    pub world: Option<Arc<ProcessWorld>>,
    pub device: Device,
    /// How many threads libtorch uses in this rank.
    pub threads: usize,
    pub bind: BindChoice,
    /// The CPUs to bind it to, if it is bound.
    pub cpus: Option<CpuList>,
    /// The backend that suits the ranks: see [`Rank::backend`].
    pub backend: Backend,
    pub rendezvous: Rendezvous,
    pub run: Arc<RunContext>,
    pub ended: Sender<Ended<T>>,
}

/// The end of a rank's thread; the thread can be joined now.
pub(super) struct Ended<T> {
    pub rank: usize,
    /// The result of the rank's function; `None` if it failed.
    pub value: Option<T>,
}

impl<T> RankThread<T> {
    pub(super) fn main(self, f: &dyn Fn(&Rank) -> anyhow::Result<T>) {
        let Self { rank, local_rank, first, device, threads, backend, .. } = self;
        // First of all: memory comes from the node of the CPU that writes to it first.
        let bound = self.cpus.as_ref().map_or(Ok(()), |cpus| self.bind.bind_this_thread(cpus));
        let Self { world, rendezvous, run, ended, .. } = self;
        run.start(rank);
        panics::watch_this_thread();
        let context =
            Rank::new([rank, local_rank, first], device, backend, run.clone(), world, rendezvous);
        let result = catch_unwind(AssertUnwindSafe(|| {
            bound?;
            prepare(device, threads)?;
            f(&context)
        }))
        .unwrap_or_else(|panic| Err(panics::error(panic)));
        // The order matters. Report how this rank ended, so that no rank waits for it. Wait until the work it has
        // started ends. Shut down the group, which may need the others. Then report that the thread can be joined.
        if let Err(error) = &result {
            let cause = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
            run.report(rank, cause, format!("{error:#}"));
        }
        run.wait_until_idle(rank);
        run.finish(rank);
        context.shut_down();
        drop(context);
        run.activity[rank].enter(Operation::Done, 0);
        // The supervisor has stopped receiving if the grace period is over.
        let _ = ended.send(Ended { rank, value: result.ok() });
    }
}

/// Prepares the thread for its rank's function: sets its device and its share of the cores. Backward runs on this
/// very thread, so that its errors belong to this rank.
fn prepare(device: Device, threads: usize) -> Result<()> {
    if let Device::Cuda(index) = device {
        ffi::cuda::set_device(index)?;
    }
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    // Reading it once makes this thread keep it, whatever another thread sets.
    tch::get_num_threads();
    ffi::set_multithreading_enabled(false);
    if !panics::wants_backtraces() {
        ffi::hide_stack_traces();
    }
    Ok(())
}
