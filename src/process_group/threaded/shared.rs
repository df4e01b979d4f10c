//! What the ranks of one process share of a group: where they meet, their mail, invitations to sub-groups.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::Bootstrap;
use super::exchange::{Exchange, ExchangeSlot};
use super::fingerprint::CollectiveFingerprint;
use super::mail::Mailboxes;
use crate::error::Result;
use crate::runtime::{Barrier, RunContext};

/// Made by one rank and handed to the others.
#[derive(Debug)]
pub(crate) struct Shared {
    meeting: Arc<Exchange<CollectiveFingerprint>>,
    mail: Arc<Mailboxes>,
    run: Arc<RunContext>,
    members: Arc<[usize]>,
    here: Range<usize>,
    /// Those that not everybody has taken, and how many still have to.
    invitations: Mutex<HashMap<SubgroupKey, (Bootstrap, usize)>>,
}

/// What an invitation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SubgroupKey {
    /// The `new_group` with this number in the order of the group's calls.
    NewGroup(u64),
    /// The first message between these two ranks, the lower one first.
    Pair(usize, usize),
}

impl Shared {
    /// For the ranks `members` of `run`, of which this process has those at the places `here`.
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

    /// Everybody that is in the process's run.
    pub(crate) fn run(&self) -> &Arc<RunContext> {
        &self.run
    }

    /// The members of the group by their numbers in the run, in their order in the group.
    pub(crate) fn members(&self) -> &Arc<[usize]> {
        &self.members
    }

    /// The places in the group of the ranks that are in this process.
    pub(crate) fn here(&self) -> Range<usize> {
        self.here.clone()
    }

    /// Where sent tensors wait to be received.
    pub(crate) fn mail(&self) -> &Arc<Mailboxes> {
        &self.mail
    }

    /// The place of `rank`, which is in this process, where those of this process meet; can be taken once.
    pub(crate) fn seat(&self, rank: usize) -> ExchangeSlot<CollectiveFingerprint> {
        ExchangeSlot::take(rank - self.here.start, self.meeting.clone())
    }

    /// The same invitation for each of `guests` ranks: the first to come makes it.
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
