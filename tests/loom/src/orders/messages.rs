//! A wait for one other rank, which hands something over as `mail.rs` does.

use std::collections::BTreeSet;
use std::sync::Mutex as NotWatched;
use std::time::Duration;

use super::{AT, TIMEOUT, Watched, in_every_order};
use crate::error::Error;
use crate::runtime::primitives::{AtomicBool, Mutex, Ordering, Thread, current, park};
use crate::runtime::{Peers, RunContext};

/// From rank 1 to rank 0.
struct Message {
    run: RunContext,
    mailbox: Mutex<Mailbox>,
    /// The receiver's memory.
    text: Watched<u64>,
    is_completed: AtomicBool,
    outcome: NotWatched<&'static str>,
}

#[derive(Default)]
struct Mailbox {
    sent: bool,
    expected: Option<Thread>,
}

impl Message {
    fn send(&self) {
        let receiver = {
            let Mailbox { sent, expected } = &mut *self.mailbox.lock();
            *sent = expected.is_none();
            expected.take()
        };
        if let Some(receiver) = receiver {
            self.text.set(1);
            self.is_completed.store(true, Ordering::Release);
            receiver.unpark();
        }
    }

    fn receive(&self) -> &'static str {
        let was_sent = {
            let Mailbox { sent, expected } = &mut *self.mailbox.lock();
            if !*sent {
                *expected = Some(current());
            }
            *sent
        };
        if was_sent {
            return "received";
        }
        let is_completed = || self.is_completed.load(Ordering::Acquire);
        let cancel = || {
            if self.mailbox.lock().expected.take().is_some() {
                return true;
            }
            while !is_completed() {
                park();
            }
            false
        };
        let peers = Peers { ranks: &[1], are_elsewhere: false, limit: None };
        let result = self.run.wait_for_peers(0, peers, AT, is_completed, cancel);
        if result.is_ok() {
            assert_eq!(self.text.get(), 1);
        }
        // It is the receiver's own again: whoever still writes there is seen by loom.
        self.text.set(2);
        match result {
            Ok(_) => "received",
            Err(Error::Cancelled { .. }) => "cancelled",
            Err(Error::PeerExited { left: 1, .. }) => "left",
            Err(Error::Timeout { missing, .. }) if missing[0].rank == 1 => "late",
            Err(other) => panic!("{other}"),
        }
    }
}

/// Returns the different ends of a receive while other ranks do `others`.
fn receive(
    name: &str,
    world_size: usize,
    timeout: Duration,
    preemptions: Option<usize>,
    others: impl Fn(usize, &Message) + Copy + Send + Sync + 'static,
) -> BTreeSet<&'static str> {
    in_every_order(
        name,
        world_size,
        preemptions,
        move || Message {
            run: RunContext::new(world_size, timeout, None),
            mailbox: Mutex::default(),
            text: Watched::new(0),
            is_completed: AtomicBool::default(),
            outcome: NotWatched::new(""),
        },
        move |rank, message| {
            message.run.cancel.register();
            if rank == 0 {
                *message.outcome.lock().unwrap() = message.receive();
            } else {
                others(rank, message);
            }
            message.run.finish(rank);
        },
        |message| message.outcome.into_inner().unwrap(),
    )
}

#[test]
fn message_sent_before_the_sender_ended_is_received() {
    let outcomes = receive("a message", 2, TIMEOUT, None, |_, message| message.send());
    assert_eq!(outcomes, BTreeSet::from(["received"]));
}

#[test]
fn message_of_a_failed_or_ended_sender_is_not_waited_for() {
    let fail = |rank, message: &Message| message.run.report(rank, None, "the cause".into());
    let outcomes = receive("a sender that fails", 2, TIMEOUT, None, fail);
    assert_eq!(outcomes, BTreeSet::from(["cancelled"]));
    let outcomes = receive("a sender that ends", 2, TIMEOUT, None, |_, _| ());
    assert_eq!(outcomes, BTreeSet::from(["left"]));
}

#[test]
fn abandoned_receive_gets_its_memory_back() {
    let send = |_, message: &Message| message.send();
    let outcomes = receive("a message, too late", 2, Duration::ZERO, None, send);
    assert_eq!(outcomes, BTreeSet::from(["late", "received"]));
    let send_or_fail = |rank, message: &Message| match rank {
        1 => message.send(),
        _ => message.run.report(rank, None, "the cause".into()),
    };
    let outcomes = receive("a message while another rank fails", 3, TIMEOUT, Some(4), send_or_fail);
    assert_eq!(outcomes, BTreeSet::from(["cancelled", "received"]));
}
