//! What the threads of all connections of a group share: their state, and what happens if one of them panics.

use std::cell::Cell;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use crossbeam::channel::Sender;
use parking_lot::Mutex;

use super::super::process_map::ProcessMap;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::operation::OpId;
use crate::os::{affinity::CpuList, limits::not_started};
use crate::process_group::local::Mailboxes;
use crate::runtime::{RunContext, panics};

/// The state that the threads of all connections share.
pub(super) struct MessageContext {
    pub run: Arc<RunContext>,
    pub store: TcpStore,
    pub members: Arc<[usize]>,
    pub process_map: ProcessMap,
    pub token: u64,
    /// The mailboxes in which the ranks of this process receive. They end with the group.
    pub mail: Weak<Mailboxes>,
    pub closing: AtomicBool,
    /// Held by every message that has not gone. `None` once no more can be sent.
    pub sending: Mutex<Option<Sender<Infallible>>>,
    /// Held by every thread that writes. `None` once the connections end.
    pub writing: Mutex<Option<Sender<Infallible>>>,
}

impl MessageContext {
    pub(super) fn first_rank(&self) -> usize {
        self.members[self.process_map.here().start]
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Returns a guard for a message that `rank` has sent.
    pub(super) fn pending(&self, rank: usize) -> Pending {
        let sending = self.sending.lock().clone();
        Pending::new(&self.run, rank, sending)
    }

    /// Starts a thread, which `top -H` shows by name. If it panics, the rank that it serves then fails.
    pub(super) fn thread(
        self: &Arc<Self>,
        work: impl FnOnce(&Serving) + Send + 'static,
    ) -> Result<()> {
        let context = self.clone();
        let work = move || serve(&context.run, context.first_rank(), work);
        let thread = thread::Builder::new().name("ddp-mp message".into()).spawn(work);
        thread
            .map(drop)
            .map_err(|error| Error::unsupported(not_started("a thread for messages", &error)))
    }
}

/// The global rank that a thread serves now, and in which operation, if known.
pub(super) type Serving = Cell<(usize, Option<OpId>)>;

/// Runs `work` on this thread, which serves `rank` until `work` sets another rank.
fn serve(run: &RunContext, rank: usize, work: impl FnOnce(&Serving)) {
    panics::watch_this_thread();
    CpuList::unbind_this_thread();
    let serving = Cell::new((rank, None));
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&serving))) {
        let (rank, at) = serving.get();
        run.report_at(rank, at, None, panics::describe(&*panic));
    }
}

/// A message that is sent but not written: its rank must not end, nor the connection, before this is dropped.
pub(super) struct Pending {
    run: Arc<RunContext>,
    rank: usize,
    /// The channel closes with the last message of a group.
    _sending: Option<Sender<Infallible>>,
}

impl Pending {
    /// Registers an open operation of the global rank `rank`.
    pub(super) fn new(
        run: &Arc<RunContext>,
        rank: usize,
        sending: Option<Sender<Infallible>>,
    ) -> Self {
        run.begin_pending(rank);
        Self { run: run.clone(), rank, _sending: sending }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.run.end_pending(self.rank);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::operation::Operation;

    #[test]
    fn panic_is_a_failure_of_the_served_rank() {
        let timeout = Duration::from_secs(60);
        let receives = OpId { operation: Operation::Recv, sequence: 7 };
        for (at, served) in [(Some(receives), 2), (None, 1)] {
            let group = RunContext::new(3, timeout, None);
            serve(&group, 1, |serving| {
                serving.set((served, at));
                panic!("the cause");
            });
            let failures = group.failures();
            let [failure] = &failures[..] else { panic!("{failures:?}") };
            assert_eq!(failure.rank, served);
            assert!(failure.error.contains("the cause"), "{}", failure.error);
            assert_eq!(failure.at, at.unwrap_or(group.activity[served].now()));
            assert_eq!(group.cancel.cancelled_by(), Some(served));
        }
        let well = RunContext::new(3, timeout, None);
        serve(&well, 1, |serving| serving.set((2, None)));
        assert!(well.failures().is_empty());
    }
}
