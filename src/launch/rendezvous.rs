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
    /// The first rank's end, which sends, and a flag that it has begun to.
    Host(Vec<Sender<Bootstrap>>, Arc<AtomicBool>),
    /// The end of each other rank, which receives, and the same flag.
    Guest(Receiver<Bootstrap>, Arc<AtomicBool>),
}

/// Returns the ends for `world_size` ranks, in rank order.
pub(super) fn channels(world_size: usize) -> Vec<Rendezvous> {
    let (senders, receivers): (Vec<_>, Vec<_>) = (1..world_size).map(|_| bounded(1)).unzip();
    let invites = Arc::new(AtomicBool::new(false));
    let guests = receivers.into_iter().map(|it| Rendezvous::Guest(it, invites.clone()));
    let host = Rendezvous::Host(senders, invites.clone());
    std::iter::once(host).chain(guests).take(world_size).collect()
}

impl Rendezvous {
    /// Runs the rendezvous: the first rank, `first`, makes the [`Bootstrap`] and sends it; the others wait for it.
    pub(super) fn meet(
        self,
        run: &RunContext,
        rank: usize,
        first: usize,
        invite: impl FnOnce() -> Result<Bootstrap>,
    ) -> Result<Bootstrap> {
        match self {
            Rendezvous::Host(guests, invites) => {
                invites.store(true, Ordering::Release);
                let invitation = invite()?;
                for guest in guests {
                    // A rank that is gone has failed, and has cancelled the run or is about to.
                    let _ = guest.send(invitation.clone());
                }
                Ok(invitation)
            }
            Rendezvous::Guest(invitations, invites) => {
                wait_for(invitations, &invites, run, rank, first)
            }
        }
    }
}

fn wait_for(
    invitations: Receiver<Bootstrap>,
    invites: &AtomicBool,
    run: &RunContext,
    rank: usize,
    first: usize,
) -> Result<Bootstrap> {
    let began = Instant::now();
    let time_left = || run.timeout.checked_sub(began.elapsed());
    select! {
        recv(invitations) -> received => if let Ok(invitation) = received {
            return Ok(invitation);
        },
        recv(run.cancel.tripped()) -> _ => run.check(rank)?,
        default(run.timeout) => {}
    }
    // The first rank may still be connecting to other processes. That has timeouts of its own and names what is
    // missing.
    if run.peer_status.is_some() && invites.load(Ordering::Acquire) {
        select! {
            recv(invitations) -> received => if let Ok(invitation) = received {
                return Ok(invitation);
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
