//! The rendezvous of the ranks of one process: the first rank sends the others what they need over channels.
//!
//! PyTorch does this through a TCP store (`MASTER_ADDR`, `MASTER_PORT`). Here no socket, file or port is involved.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, bounded};
use crossbeam::select;

use crate::error::{Error, Result};
use crate::process_group::Bootstrap;
use crate::runtime::RunContext;

/// One rank's end of the channels.
pub(super) enum Rendezvous {
    /// The first rank's end, which sends, and a flag that it has begun to make the bootstrap.
    Root(Vec<Sender<Bootstrap>>, Arc<AtomicBool>),
    /// The end of each other rank, which receives, and the same flag.
    Peer(Receiver<Bootstrap>, Arc<AtomicBool>),
}

/// Returns the ends for `world_size` ranks, in rank order.
pub(super) fn channels(world_size: usize) -> Vec<Rendezvous> {
    let (all_tx, all_rx): (Vec<_>, Vec<_>) = (1..world_size).map(|_| bounded(1)).unzip();
    let has_begun = Arc::new(AtomicBool::new(false));
    let peers = all_rx.into_iter().map(|receiver| Rendezvous::Peer(receiver, has_begun.clone()));
    let root = Rendezvous::Root(all_tx, has_begun.clone());
    std::iter::once(root).chain(peers).take(world_size).collect()
}

impl Rendezvous {
    /// Runs the rendezvous: the first rank, `first`, calls `make` and sends the
    /// [`Bootstrap`]; the others wait for it.
    pub(super) fn run(
        self,
        run: &RunContext,
        rank: usize,
        first: usize,
        make: impl FnOnce() -> Result<Bootstrap>,
    ) -> Result<Bootstrap> {
        match self {
            Rendezvous::Root(peers, has_begun) => {
                has_begun.store(true, Ordering::Release);
                let bootstrap = make()?;
                for peer in peers {
                    // A rank that is gone has failed, and has cancelled the run or is about to.
                    let _ = peer.send(bootstrap.clone());
                }
                Ok(bootstrap)
            }
            Rendezvous::Peer(bootstraps, has_begun) => {
                wait_for(bootstraps, &has_begun, run, rank, first)
            }
        }
    }
}

/// Waits for the bootstrap on a rank that is not the first.
fn wait_for(
    bootstraps: Receiver<Bootstrap>,
    has_begun: &AtomicBool,
    run: &RunContext,
    rank: usize,
    first: usize,
) -> Result<Bootstrap> {
    let began = Instant::now();
    let time_left = || run.timeout.checked_sub(began.elapsed());
    select! {
        recv(bootstraps) -> received => if let Ok(bootstrap) = received {
            return Ok(bootstrap);
        },
        recv(run.cancel.tripped()) -> _ => run.check(rank)?,
        default(run.timeout) => {}
    }
    // The first rank may still be connecting to other processes. That has timeouts of its own and names what is
    // missing.
    if run.peer_status.is_some() && has_begun.load(Ordering::Acquire) {
        select! {
            recv(bootstraps) -> received => if let Ok(bootstrap) = received {
                return Ok(bootstrap);
            },
            recv(run.cancel.tripped()) -> _ => run.check(rank)?,
        }
    }
    // Nothing was received: the first rank is missing, or it has returned without sending. If it has failed, it is
    // about to report that. If it has returned, it is about to be marked as done. Either wakes this thread.
    let (at, waiting) = (run.activity[rank].now(), rank);
    let error = loop {
        let has_ended = run.is_done(first);
        run.check(rank)?;
        if has_ended {
            break Error::PeerExited { at, waiting, left: first };
        }
        let Some(time_left) = time_left() else {
            break Error::Timeout {
                at,
                waiting,
                waited: run.timeout,
                missing: run.missing_ranks(vec![first]),
            };
        };
        thread::park_timeout(time_left);
    };
    run.report(rank, Some(&error), error.to_string());
    Err(error)
}
