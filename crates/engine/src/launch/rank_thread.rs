//! The thread of one rank, from start to end.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::Sender;
use tch::Device;

use super::rank::SharedBootstrap;
use super::{JoinedLaunch, Rank};
use crate::error::{Error, Result};
use crate::events::Observers;
use crate::ffi;
use crate::ffi::cuda::RankStream;
use crate::operation::Operation;
use crate::os::affinity::CpuList;
use crate::runtime::{RunContext, panics};

/// Everything that one rank's thread starts with.
pub(super) struct RankThread {
    /// The rank's number among those of its process.
    pub index: usize,
    pub joined_launch: Arc<JoinedLaunch>,
    /// The CPUs to bind it to, if it is bound.
    pub cpus: Option<CpuList>,
    pub bootstrap: Arc<SharedBootstrap>,
    pub run: Arc<RunContext>,
    pub observers: Observers,
    /// Gets `index` when the thread can be joined.
    pub ended_tx: Sender<usize>,
}

impl RankThread {
    /// Runs the rank's function, `f`. Returns its result; `None` if it failed.
    pub(super) fn main<T>(self, f: &dyn Fn(&Rank) -> anyhow::Result<T>) -> Option<T> {
        let Self { index, joined_launch, cpus, bootstrap, run, observers, ended_tx } = self;
        // First of all: memory comes from the node of the CPU that writes to it first.
        let bind = joined_launch.launch.bind;
        let bound = match cpus {
            Some(cpus) => bind.bind_this_thread(&cpus),
            None => Ok(()),
        };
        let threads = joined_launch.placement.threads_per_rank;
        let context = Rank::new(index, joined_launch, run.clone(), observers, bootstrap);
        let rank = context.rank();
        run.start(rank);
        panics::watch_this_thread();
        let result = catch_unwind(AssertUnwindSafe(|| {
            bound?;
            let stream = prepare(context.device(), threads)?;
            let value = f(&context)?;
            if let Some(stream) = stream {
                stream.leave()?;
            }
            Ok(value)
        }))
        .unwrap_or_else(|panic| Err(error_of(panic)));
        // The order matters. Report how this rank ended, so that no rank waits for it. Wait until the work it has
        // started ends. Shut down the group, which may need the others. Then report that the thread can be joined.
        let value = match result {
            Ok(value) => Some(value),
            Err(error) => {
                report(&run, rank, error);
                None
            }
        };
        run.wait_until_idle(rank);
        run.finish(rank);
        context.shut_down();
        drop(context);
        run.activity[rank].enter(Operation::Done, 0);
        // The supervisor has stopped receiving if the grace period is over.
        let _ = ended_tx.send(index);
        value
    }
}

/// Returns the error of a rank that has panicked. The drop of what it has thrown may panic, too.
fn error_of(panic: Box<dyn Any + Send>) -> anyhow::Error {
    catch_unwind(AssertUnwindSafe(|| panics::error(panic)))
        .unwrap_or_else(|panic| anyhow::Error::msg(panics::describe(&*panic)))
}

/// Reports the error of a rank. Its text and its drop are the user's code, which may panic.
fn report(run: &RunContext, rank: usize, error: anyhow::Error) {
    let report = move || {
        let cause = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
        run.report(rank, cause, format!("{error:#}"));
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(report)) {
        let why = panics::describe(&*panic);
        let message = format!("it returned an error, and printing or dropping that error {why}");
        run.report(rank, None, message);
    }
}

/// Prepares the thread for its rank's function: sets its device, its stream there and its share of the cores. Backward
/// runs on this very thread, so that its errors belong to this rank.
///
/// Each rank computes on a stream of its own, which it returns. So ranks that share a GPU can compute at the same time, and
/// none waits in a collective of NCCL for another that is behind it on the same stream.
fn prepare(device: Device, threads: usize) -> Result<Option<RankStream>> {
    let stream = match device {
        Device::Cuda(index) => Some(RankStream::enter(index)?),
        _ => None,
    };
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    // Reading it once makes this thread keep it, whatever another thread sets.
    tch::get_num_threads();
    ffi::set_multithreading_enabled(false);
    if !panics::wants_backtraces() {
        ffi::hide_stack_traces();
    }
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use crate::launch::spawn;

    /// An error whose text panics.
    #[derive(Debug)]
    struct Unprintable;

    impl fmt::Display for Unprintable {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            panic!("no text")
        }
    }

    impl std::error::Error for Unprintable {}

    /// An error, or the payload of a panic, whose drop panics.
    struct Undroppable;

    impl Drop for Undroppable {
        fn drop(&mut self) {
            panic!("no drop")
        }
    }

    impl fmt::Debug for Undroppable {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Undroppable")
        }
    }

    impl fmt::Display for Undroppable {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("its text")
        }
    }

    impl std::error::Error for Undroppable {}

    #[test]
    fn panic_in_the_error_of_a_rank_is_its_failure() {
        for count in [1, 3] {
            let fails: [(fn() -> anyhow::Error, _); 2] = [
                (|| Unprintable.into(), "printing or dropping that error panicked at"),
                (|| Undroppable.into(), "its text"),
            ];
            for (error, expected) in fails {
                let fail = move |rank: &crate::Rank| match rank.rank() {
                    0 => Err(error()),
                    _ => Ok(()),
                };
                let error = spawn(count, fail).unwrap_err();
                assert_eq!(error.failure.rank, 0, "{error}");
                assert!(error.to_string().contains(expected) && error.stuck.is_empty(), "{error}");
            }
            let error = spawn(count, |_| -> anyhow::Result<()> {
                std::panic::panic_any(Undroppable);
            });
            assert!(error.is_err());
        }
    }
}
