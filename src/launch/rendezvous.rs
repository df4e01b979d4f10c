//! How the ranks of one process find each other: rank 0 sends the others what they need over channels.
//!
//! This is what PyTorch does through a TCP store (`MASTER_ADDR`, `MASTER_PORT`): here no socket, no
//! file and no port is involved.

use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, bounded, never};
use crossbeam::select;

use crate::error::{Error, Result};
use crate::process_group::{Shared, UniqueId};
use crate::sync::{Barrier, Run};

/// What rank 0 sends to every other rank.
#[derive(Clone)]
pub(super) enum Invitation {
    /// The memory through which the ranks talk.
    Threaded(Arc<Shared>),
    /// NCCL's id of the communicator to join, and where the ranks of this process meet.
    Nccl(UniqueId, Arc<Barrier>),
}

/// One rank's end of the channels.
pub(super) enum Rendezvous {
    /// Rank 0 invites.
    Host(Vec<Sender<Invitation>>),
    /// The others are invited.
    Guest(Receiver<Invitation>),
}

/// The ends for `world_size` ranks, in their order.
pub(super) fn channels(world_size: usize) -> Vec<Rendezvous> {
    let (senders, receivers): (Vec<_>, Vec<_>) = (1..world_size).map(|_| bounded(1)).unzip();
    let guests = receivers.into_iter().map(Rendezvous::Guest);
    std::iter::once(Rendezvous::Host(senders)).chain(guests).take(world_size).collect()
}

impl Rendezvous {
    /// Rank 0 makes the invitation and sends it; the others wait for it.
    pub(super) fn meet(
        self,
        run: &Run,
        rank: usize,
        invite: impl FnOnce() -> Result<Invitation>,
    ) -> Result<Invitation> {
        match self {
            Rendezvous::Host(guests) => {
                let invitation = invite()?;
                for guest in guests {
                    // A guest that is gone has failed, and has tripped the token by now or soon.
                    let _ = guest.send(invitation.clone());
                }
                Ok(invitation)
            }
            Rendezvous::Guest(invitations) => wait_for(invitations, run, rank),
        }
    }
}

fn wait_for(mut invitations: Receiver<Invitation>, run: &Run, rank: usize) -> Result<Invitation> {
    let deadline = Instant::now() + run.timeout;
    loop {
        select! {
            recv(invitations) -> received => match received {
                Ok(invitation) => return Ok(invitation),
                // Rank 0 has left without inviting: it failed, or ended without a rendezvous.
                Err(_) if run.is_done(0) => {
                    run.cancel.check()?;
                    let at = run.activity[rank].now();
                    return Err(Error::Left { at, waiting: rank, left: 0 });
                }
                // It is about to report why, and that is the error to show.
                Err(_) => invitations = never(),
            },
            recv(run.cancel.tripped()) -> _ => run.cancel.check()?,
            default(deadline.saturating_duration_since(Instant::now())) => {
                let at = run.activity[rank].now();
                let (waiting, waited, late) = (rank, run.timeout, vec![run.late(0)]);
                return Err(Error::Timeout { at, waiting, waited, late });
            }
        }
    }
}
