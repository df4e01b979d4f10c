//! The barrier alone.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{AT, barrier_of, in_every_order};

fn barrier_holds_until_all_ranks_have_arrived(
    world_size: usize,
    rounds: usize,
    preemptions: Option<usize>,
) {
    in_every_order(
        &format!("{rounds} rounds of {world_size} ranks"),
        world_size,
        preemptions,
        // Not loom's: it only counts.
        move || (barrier_of(world_size), AtomicUsize::new(0)),
        move |rank, (barrier, arrivals)| {
            for round in 1..=rounds {
                arrivals.fetch_add(1, Ordering::Relaxed);
                if round % 2 == 1 {
                    barrier.wait(rank, AT).unwrap();
                } else {
                    barrier.wait_to_leave(rank);
                }
                assert!(arrivals.load(Ordering::Relaxed) >= round * world_size);
            }
        },
        drop,
    );
}

#[test]
fn barrier_of_two_ranks_holds_in_every_order() {
    barrier_holds_until_all_ranks_have_arrived(2, 1, None);
    barrier_holds_until_all_ranks_have_arrived(2, 4, Some(4));
}

#[test]
fn barrier_of_three_ranks_holds_in_every_order() {
    barrier_holds_until_all_ranks_have_arrived(3, 1, Some(3));
    barrier_holds_until_all_ranks_have_arrived(3, 2, Some(2));
}
