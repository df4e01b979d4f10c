//! The rendezvous of the ranks of one process: the first rank makes what all need to join the group.
//!
//! PyTorch does this through a TCP store (`MASTER_ADDR`, `MASTER_PORT`). Here no socket, file or port is involved.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::process_group::Bootstrap;
use crate::runtime::{Peers, RunContext};

/// What the ranks of one process share until they have joined the group of all ranks.
#[derive(Default)]
pub(super) struct RankRendezvous {
    /// `None` until the first rank has made it.
    bootstrap: Mutex<Option<Bootstrap>>,
    /// Whether the first rank makes it now.
    is_being_made: AtomicBool,
}

impl RankRendezvous {
    /// Runs the rendezvous: the first rank, `first`, calls `make` for the [`Bootstrap`]; the others wait for it.
    pub(super) fn run(
        &self,
        run: &RunContext,
        rank: usize,
        first: usize,
        make: impl FnOnce() -> Result<Bootstrap>,
    ) -> Result<Bootstrap> {
        if rank == first {
            self.is_being_made.store(true, Ordering::Release);
            let made = make();
            *self.bootstrap.lock() = made.as_ref().ok().cloned();
            self.is_being_made.store(false, Ordering::Release);
            run.cancel.wake_all();
            return made;
        }
        let peers = Peers { ranks: &[first], are_elsewhere: false, limit: None };
        let is_made = || self.bootstrap.lock().is_some();
        // The first rank may be connecting to other processes. That has timeouts of its own and names what is missing.
        let connects = || run.peer_status.is_some() && self.is_being_made.load(Ordering::Acquire);
        loop {
            run.wait_for_peers(rank, peers, run.activity[rank].now(), is_made, || !connects())?;
            run.check(rank)?;
            if let Some(bootstrap) = &*self.bootstrap.lock() {
                return Ok(bootstrap.clone());
            }
        }
    }
}
