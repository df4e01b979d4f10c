//! The state that the threads of all connections of a group share.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use crossbeam::channel::Sender;
use parking_lot::Mutex;

use super::super::process_map::ProcessMap;
use super::guard::{self, Serving};
use super::pending::Pending;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::os::limits::not_started;
use crate::process_group::local::Mailboxes;
use crate::runtime::RunContext;

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

    pub(super) fn writing(&self) -> Option<Sender<Infallible>> {
        self.writing.lock().clone()
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
        let work = move || guard::run(&context.run, context.first_rank(), work);
        let thread = thread::Builder::new().name("ddp-mp message".into()).spawn(work);
        thread
            .map(drop)
            .map_err(|error| Error::Unsupported(not_started("a thread for messages", &error)))
    }
}
