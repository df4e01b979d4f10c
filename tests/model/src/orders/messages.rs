//! A wait for one other rank, as for a message (`mail.rs`).

use std::collections::BTreeSet;
use std::iter::once;

use super::{AT, TIMEOUT, Watched, in_every_order};
use crate::error::Error;
use crate::sync::Run;
use crate::sync::primitives::{AtomicBool, Mutex, Ordering, Thread, current};

/// How the sender ends.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Sends,
    Fails,
    SendsNothing,
}

struct Letter {
    run: Run,
    /// Who expects it, and whether it was sent before somebody did.
    letter_box: Mutex<(Option<Thread>, bool)>,
    text: Watched<u64>,
    has_been_handed_over: AtomicBool,
}

/// Returns how the receiver's wait ended.
fn a_letter(end: End) -> BTreeSet<&'static str> {
    in_every_order(
        "a message",
        2,
        None,
        || Letter {
            run: Run::new(2, TIMEOUT, None),
            letter_box: Mutex::default(),
            text: Watched::new(0),
            has_been_handed_over: AtomicBool::default(),
        },
        move |rank, letter| {
            letter.run.cancel.register();
            if rank == 0 {
                let was_sent = {
                    let (expected_by, sent) = &mut *letter.letter_box.lock().unwrap();
                    *expected_by = Some(current());
                    *sent
                };
                let is_done = || was_sent || letter.has_been_handed_over.load(Ordering::Acquire);
                match letter.run.wait_for_peers(0, once(1), AT, is_done, || true) {
                    Ok(()) => assert_eq!(letter.text.get(), 1),
                    Err(Error::Cancelled { by: 1, .. }) => assert!(end == End::Fails),
                    Err(Error::Left { left: 1, .. }) => assert!(end == End::SendsNothing),
                    other => panic!("{other:?}"),
                }
            } else if end == End::Sends {
                let (expected_by, sent) = &mut *letter.letter_box.lock().unwrap();
                letter.text.set(1);
                match expected_by {
                    None => *sent = true,
                    Some(receiver) => {
                        letter.has_been_handed_over.store(true, Ordering::Release);
                        receiver.unpark();
                    }
                }
            } else if end == End::Fails {
                letter.run.report(1, None, "the cause".into());
            }
            letter.run.finish(rank);
        },
        |letter| if letter.run.failures().is_empty() { "received" } else { "failed" },
    )
}

#[test]
fn what_a_rank_sent_before_it_ended_is_received() {
    assert_eq!(a_letter(End::Sends), BTreeSet::from(["received"]));
}

#[test]
fn a_message_that_will_not_come_is_not_waited_for() {
    assert_eq!(a_letter(End::Fails), BTreeSet::from(["failed"]));
    assert_eq!(a_letter(End::SendsNothing), BTreeSet::from(["failed"]));
}
