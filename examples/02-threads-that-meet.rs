//! 02. Threads that meet: ranks by hand, ranks from `spawn`, and what happens to the others when one fails.
//!
//!     cargo run --release --example 02-threads-that-meet
//!
//! In Python ranks are processes (`torch.multiprocessing.spawn`), which meet at an address and a port. Threads need
//! neither: a channel will do, and what one of them makes all of them can use.

#![allow(clippy::print_stdout)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use anyhow::{Context, bail, ensure};
use crossbeam::channel::unbounded;
use ddp_mp::Error;
use ddp_mp::prelude::*;

const RANKS: usize = 4;

/// What ranks share: a place for each, and a barrier, which nobody passes before all have come to it.
struct Meeting {
    places: [AtomicUsize; RANKS],
    barrier: Barrier,
}

/// What one rank does, if all is done by hand. Every rank runs the same function; they differ by their number.
fn rank_by_hand(rank: usize, meeting: &Meeting) -> usize {
    meeting.places[rank].store(10 * rank, Ordering::Relaxed);
    meeting.barrier.wait(); // or this rank might read the place of one that has not written yet
    meeting.places.iter().map(|place| place.load(Ordering::Relaxed)).sum()
}

fn by_hand() -> anyhow::Result<()> {
    let (invite, invitations) = unbounded::<Arc<Meeting>>();
    let rank = |rank| -> anyhow::Result<usize> {
        // The rendezvous: rank 0 makes what all are to share, and sends it to the others, who wait for it.
        if rank > 0 {
            return Ok(rank_by_hand(rank, &*invitations.recv()?));
        }
        let (places, barrier) = (Default::default(), Barrier::new(RANKS));
        let meeting = Arc::new(Meeting { places, barrier });
        (1..RANKS).try_for_each(|_| invite.send(meeting.clone()))?;
        Ok(rank_by_hand(rank, &meeting))
    };
    thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|number| scope.spawn(move || rank(number)));
        for (rank, thread) in threads.into_iter().enumerate() {
            let sum = thread.join().ok().context("a rank has panicked")??;
            println!("by hand: rank {rank} put down {:2}; the sum of all is {sum}", 10 * rank);
            ensure!(sum == 60, "all must have put theirs down before anybody adds up");
        }
        Ok(())
    })
}

/// The same with `spawn`, which has a thread for each rank, a device for each thread, and the channel.
fn with_spawn() -> anyhow::Result<()> {
    spawn(RANKS, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?; // the rendezvous
        // One after the other: in each turn all come to the barrier, and one of them prints before it does.
        for turn in 0..rank.world_size() {
            if turn == rank.rank() {
                let (rank, count, device) = (rank.rank(), rank.world_size(), rank.device());
                let thread = thread::current();
                let name = thread.name().unwrap_or_default();
                println!("spawn:   rank {rank} of {count} has {device:?} and the thread {name}");
            }
            group.barrier()?;
        }
        Ok(())
    })?;
    Ok(())
}

fn main() -> anyhow::Result<()> {
    by_hand()?;
    with_spawn()?;

    // By hand, a rank that failed before the barrier would leave the others there for ever. Here they are woken.
    let woken = Arc::new(AtomicUsize::new(0));
    let count = woken.clone();
    let result = spawn(RANKS, move |rank| {
        if rank.rank() == 2 {
            bail!("the milk is sour");
        }
        // The others wait for it: at the barrier, if not on the way there.
        let result = rank.init_process_group(Backend::Threaded).and_then(|group| group.barrier());
        if let Err(Error::Cancelled { by: 2, .. }) = result {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(result?)
    });
    let error = result.err().context("a run in which a rank fails is to fail")?;
    let woken = woken.load(Ordering::Relaxed);
    println!("failure: {}; {woken} ranks that waited for it were woken", error.failure);
    ensure!(error.failure.rank == 2 && woken == 3, "the first failure is the one to tell");
    Ok(())
}
