//! The state of a group that the ranks of one process share: exchange, mailboxes, sub-group bootstraps.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::Bootstrap;
use super::exchange::{Exchange, ExchangeSlot};
use super::fingerprint::CollectiveFingerprint;
use super::mail::Mailboxes;
use crate::error::Result;
use crate::runtime::{Barrier, RunContext};

/// The state of a group in one process. One rank creates it and hands it to the others.
#[derive(Debug)]
pub(crate) struct Shared {
    meeting: Arc<Exchange<CollectiveFingerprint>>,
    mail: Arc<Mailboxes>,
    run: Arc<RunContext>,
    members: Arc<[usize]>,
    here: Range<usize>,
    /// Bootstraps that not every rank has fetched, with the number of ranks still to fetch each.
    invitations: Mutex<HashMap<SubgroupKey, (Bootstrap, usize)>>,
}

/// The purpose of a bootstrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SubgroupKey {
    /// The `new_group` with this sequence number in the group.
    NewGroup(u64),
    /// The first message between these two ranks, the lower one first.
    Pair(usize, usize),
}

impl Shared {
    /// Creates the state for the ranks `members` of `run`. This process has those with the group ranks `here`.
    pub(crate) fn new(run: Arc<RunContext>, members: Arc<[usize]>, here: Range<usize>) -> Self {
        let barrier = Barrier::new(run.clone(), members[here.clone()].into());
        Self {
            meeting: Arc::new(Exchange::new(barrier, CollectiveFingerprint::nothing)),
            mail: Arc::new(Mailboxes::new(run.clone(), members.clone())),
            run,
            members,
            here,
            invitations: Mutex::default(),
        }
    }

    /// Returns the run that the ranks belong to.
    pub(crate) fn run(&self) -> &Arc<RunContext> {
        &self.run
    }

    /// Returns the global ranks of the group's members, in group order.
    pub(crate) fn members(&self) -> &Arc<[usize]> {
        &self.members
    }

    /// Returns the group ranks of this process.
    pub(crate) fn here(&self) -> Range<usize> {
        self.here.clone()
    }

    /// Returns the mailboxes, where sent tensors wait to be received.
    pub(crate) fn mail(&self) -> &Arc<Mailboxes> {
        &self.mail
    }

    /// Takes the exchange slot of group rank `rank`, which must be in this process. Each slot can be taken once.
    pub(crate) fn seat(&self, rank: usize) -> ExchangeSlot<CollectiveFingerprint> {
        ExchangeSlot::take(rank - self.here.start, self.meeting.clone())
    }

    /// Returns the same bootstrap to each of `guests` ranks. The first rank to call it makes it.
    pub(crate) fn invitation(
        &self,
        occasion: SubgroupKey,
        guests: usize,
        make: impl FnOnce() -> Result<Bootstrap>,
    ) -> Result<Bootstrap> {
        let mut waiting = self.invitations.lock().unwrap_or_else(PoisonError::into_inner);
        let (invitation, left) = match waiting.remove(&occasion) {
            Some((invitation, left)) => (invitation, left - 1),
            None => (make()?, guests - 1),
        };
        if left > 0 {
            waiting.insert(occasion, (invitation.clone(), left));
        }
        Ok(invitation)
    }
}
