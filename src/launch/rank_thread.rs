//! The thread of one rank, from its first to its last line.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::Sender;
use tch::Device;

use super::rendezvous::Rendezvous;
use super::{Backend, ProcessWorld, Rank};
use crate::error::Error;
use crate::ffi;
use crate::operation::Operation;
use crate::runtime::{RunContext, panics};

/// The start of one rank's thread.
pub(super) struct RankThread<T> {
    pub rank: usize,
    pub local_rank: usize,
    /// The first rank of the process.
    pub first: usize,
    pub world: Option<Arc<ProcessWorld>>,
    pub device: Device,
    /// How many threads libtorch uses in this rank.
    pub threads: usize,
    /// What suits the ranks: see [`Rank::backend`].
    pub backend: Backend,
    pub rendezvous: Rendezvous,
    pub run: Arc<RunContext>,
    pub ended: Sender<Ended<T>>,
}

/// The end of a rank's thread, which can be joined then.
pub(super) struct Ended<T> {
    pub rank: usize,
    /// What its function returned; `None` if it failed.
    pub value: Option<T>,
}

impl<T> RankThread<T> {
    pub(super) fn main(self, f: &dyn Fn(&Rank) -> anyhow::Result<T>) {
        let Self { rank, local_rank, first, device, threads, backend, .. } = self;
        let Self { world, rendezvous, run, ended, .. } = self;
        run.start(rank);
        panics::watch_this_thread();
        let context =
            Rank::new([rank, local_rank, first], device, backend, run.clone(), world, rendezvous);
        let result = catch_unwind(AssertUnwindSafe(|| {
            prepare(device, threads)?;
            f(&context)
        }))
        .unwrap_or_else(|panic| Err(panics::error(panic)));
        // In this order: tell how it ended, so that nobody waits for this rank; let what it has started end;
        // then part from the group, for which the others may be needed; then say that the thread can be
        // joined.
        if let Err(error) = &result {
            let cause = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
            run.report(rank, cause, format!("{error:#}"));
        }
        run.wait_until_idle(rank);
        run.finish(rank);
        context.shut_down();
        drop(context);
        run.activity[rank].enter(Operation::Done, 0);
        // Nobody listens any more if the grace period is over.
        let _ = ended.send(Ended { rank, value: result.ok() });
    }
}

/// Prepares the thread for its rank's function: its device, its share of the cores, and backward on this very
/// thread, so that its errors belong to this rank.
fn prepare(device: Device, threads: usize) -> crate::Result<()> {
    if let Device::Cuda(index) = device {
        ffi::cuda::set_device(index)?;
    }
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    // Asked for once, so that this thread keeps it whatever another one sets.
    tch::get_num_threads();
    ffi::set_multithreading_enabled(false);
    if !panics::wants_backtraces() {
        ffi::hide_stack_traces();
    }
    Ok(())
}
