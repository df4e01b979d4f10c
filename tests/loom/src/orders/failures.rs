//! Ranks that fail, end or give up while the others work.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::collectives::{CollectiveFingerprint, Rank, exchange_of};
use super::{TIMEOUT, in_every_order};
use crate::error::{Error, Result};
use crate::process_group::local::{Barrier, Exchange};
use crate::runtime::RunContext;
use crate::runtime::primitives::Arc;

struct Ranks {
    run: Arc<RunContext>,
    exchange: Arc<Exchange<CollectiveFingerprint>>,
    /// The number of all_reduce that each rank has finished.
    done: Vec<AtomicU64>,
}

impl Ranks {
    /// Creates a run. Its first `members` ranks are a group.
    fn new(world_size: usize, members: usize) -> Self {
        let run = Arc::new(RunContext::new(world_size, TIMEOUT, None));
        let exchange = exchange_of(Barrier::new(run.clone(), (0..members).collect()));
        Self { run, exchange, done: (0..members).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Runs `times` all_reduce as `rank`. The rank reports a failure before number `fails`, if there is one.
    fn reduce(&self, rank: usize, times: u64, fails: Option<u64>, timeout: Duration) -> Result<()> {
        self.run.cancel.register();
        let mut member = Rank::new(rank, &self.exchange);
        member.timeout = timeout;
        let result = (0..times).try_for_each(|sequence| {
            if fails == Some(sequence) {
                self.run.report(rank, None, "the cause".into());
            }
            member.all_reduce(sequence)?;
            self.done[rank].fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        member.go();
        self.run.finish(rank);
        result
    }

    /// Returns the number of all_reduce that the ranks have finished. It is the same for all, because no rank continues
    /// with one that another has given up. Checks that at most `most` failures are reported.
    fn outcome(&self, times: u64, most: usize) -> u64 {
        let done: Vec<u64> = self.done.iter().map(|done| done.load(Ordering::Relaxed)).collect();
        assert!(done.iter().all(|&theirs| theirs == done[0]), "{done:?}");
        let failures = self.run.failures();
        assert!(
            (1..=most).contains(&failures.len()) || (failures.is_empty() && done[0] == times),
            "{failures:?}"
        );
        done[0]
    }
}

/// The last rank says that it failed before all_reduce `nth` (from 0), or ends there, while the others go on. Nobody is
/// through with that one: not even a rank that failed, which goes on as if it were nothing.
fn a_rank_leaves(fails: bool, world_size: usize, nth: u64, preemptions: Option<usize>) {
    let odd = world_size - 1;
    let leaves = if fails { "fails" } else { "ends" };
    let outcomes = in_every_order(
        &format!("one of {world_size} ranks {leaves} before all_reduce #{nth}"),
        world_size,
        preemptions,
        move || Ranks::new(world_size, world_size),
        move |rank, ranks| {
            if rank == odd && !fails {
                return ranks.reduce(rank, nth, None, TIMEOUT).unwrap();
            }
            match ranks.reduce(rank, nth + 1, (rank == odd).then_some(nth), TIMEOUT) {
                Err(Error::PeerExited { left, .. }) if !fails => assert_eq!(left, odd),
                Err(Error::Cancelled { by, cause }) => {
                    assert_eq!(by, odd);
                    assert!(!fails || cause == "the cause", "{cause}");
                }
                other => panic!("{other:?}"),
            }
        },
        move |ranks| ranks.outcome(nth + 1, 1),
    );
    assert_eq!(outcomes, BTreeSet::from([nth]));
}

#[test]
fn failure_or_exit_of_one_of_two_ranks_ends_both() {
    for fails in [true, false] {
        a_rank_leaves(fails, 2, 0, None);
        a_rank_leaves(fails, 2, 1, Some(4));
    }
}

#[test]
fn failure_of_one_of_three_ranks_ends_all() {
    a_rank_leaves(true, 3, 0, Some(2));
    a_rank_leaves(true, 3, 1, Some(2));
}

#[test]
fn exit_of_one_of_three_ranks_ends_all() {
    a_rank_leaves(false, 3, 0, Some(3));
    a_rank_leaves(false, 3, 1, Some(2));
}

/// A rank that is not of the group fails at any time.
fn another_rank_fails(members: usize, times: u64, preemptions: Option<usize>) {
    let outcomes = in_every_order(
        &format!("another rank fails while {members} do {times} all_reduce"),
        members + 1,
        preemptions,
        move || Ranks::new(members + 1, members),
        move |rank, ranks| {
            if rank == members {
                ranks.run.report(rank, None, "the cause".into());
            } else if let Err(error) = ranks.reduce(rank, times, None, TIMEOUT) {
                assert!(matches!(error, Error::Cancelled { by, .. } if by == members), "{error:?}");
            }
        },
        move |ranks| ranks.outcome(times, 1),
    );
    assert_eq!(outcomes, (0..=times).collect());
}

#[test]
fn failure_of_an_outside_rank_ends_two_reducing_ranks() {
    another_rank_fails(2, 1, Some(3));
    another_rank_fails(2, 2, Some(2));
}

#[test]
fn failure_of_an_outside_rank_ends_three_reducing_ranks() {
    another_rank_fails(3, 1, Some(2));
}

/// The deadline of the first `hurried` ranks is over as soon as they wait, which may be at the moment when
/// the last one comes.
fn ranks_give_up(hurried: usize, world_size: usize, times: u64, preemptions: Option<usize>) {
    let outcomes = in_every_order(
        &format!("{hurried} of {world_size} ranks give up in {times} all_reduce"),
        world_size,
        preemptions,
        move || Ranks::new(world_size, world_size),
        move |rank, ranks| {
            let timeout = if rank < hurried { Duration::ZERO } else { TIMEOUT };
            match ranks.reduce(rank, times, None, timeout) {
                Ok(()) => {}
                Err(Error::Timeout { missing, .. }) => {
                    assert!(rank < hurried);
                    assert!(!missing.is_empty() && missing.iter().all(|it| it.rank != rank));
                }
                Err(Error::Cancelled { by, .. }) => assert_eq!(by, ranks.run.failures()[0].rank),
                other => panic!("{other:?}"),
            }
        },
        move |ranks| ranks.outcome(times, hurried),
    );
    assert_eq!(outcomes, (0..=times).collect());
}

#[test]
fn timeout_on_any_of_two_ranks_is_consistent() {
    for hurried in [1, 2] {
        ranks_give_up(hurried, 2, 1, Some(5));
        ranks_give_up(hurried, 2, 2, Some(3));
    }
}

#[test]
fn timeout_on_any_of_three_ranks_is_consistent() {
    for hurried in [1, 2, 3] {
        ranks_give_up(hurried, 3, 1, Some(2));
    }
}

/// The first rank gives up as soon as it waits, and both ranks ignore the error and call again. Meanwhile the other may
/// still read the announcements of the last exchange that all ranks entered.
#[test]
fn calls_after_a_failure_keep_failing() {
    let outcomes = in_every_order(
        "2 ranks call on after a failure",
        2,
        Some(4),
        || Ranks::new(2, 2),
        |rank, ranks| {
            ranks.run.cancel.register();
            let mut member = Rank::new(rank, &ranks.exchange);
            member.timeout = if rank == 0 { Duration::ZERO } else { TIMEOUT };
            let mut all_entered = true;
            for sequence in 0..3 {
                let entered = member.exchange(sequence).is_ok();
                assert!(all_entered || !entered, "what has been given up stays so");
                all_entered = entered;
                ranks.done[rank].fetch_add(u64::from(entered), Ordering::Relaxed);
            }
        },
        |ranks| ranks.outcome(3, 1),
    );
    assert_eq!(outcomes, BTreeSet::from([0, 1, 2, 3]));
}
