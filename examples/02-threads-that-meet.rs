//! 02. Ranks as threads: by hand, with `spawn`, and what happens to the other ranks when one fails.
//!
//!     cargo run --release --example 02-threads-that-meet
//!
//! In Python ranks are processes (`torch.multiprocessing.spawn`), and their rendezvous needs an address and a port.
//! Threads need neither. A channel is enough, because threads share memory.

#![allow(clippy::print_stdout)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use anyhow::{Context, bail, ensure};
use crossbeam::channel::unbounded;
use ddp_mp::Error;
use ddp_mp::prelude::*;

const RANKS: usize = 4;

/// The memory that the ranks share: a slot for each rank, and a barrier that blocks until all ranks have reached it.
struct Shared {
    slots: [AtomicUsize; RANKS],
    barrier: Barrier,
}

/// The work of one rank. Every rank runs the same function with its own rank number.
fn rank_by_hand(rank: usize, shared: &Shared) -> usize {
    shared.slots[rank].store(10 * rank, Ordering::Relaxed);
    shared.barrier.wait(); // exercise; otherwise a rank may read a slot too early
    shared.slots.iter().map(|slot| slot.load(Ordering::Relaxed)).sum()
}

fn by_hand() -> anyhow::Result<()> {
    let (sender, receiver) = unbounded::<Arc<Shared>>();
    let rank = |rank| -> anyhow::Result<usize> {
        // The rendezvous: rank 0 allocates the shared memory and sends it to the other ranks, which wait for it.
        if rank > 0 {
            return Ok(rank_by_hand(rank, &*receiver.recv()?));
        }
        let (slots, barrier) = (Default::default(), Barrier::new(RANKS));
        let shared = Arc::new(Shared { slots, barrier });
        (1..RANKS).try_for_each(|_| sender.send(shared.clone()))?;
        Ok(rank_by_hand(rank, &shared))
    };
    thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|number| scope.spawn(move || rank(number)));
        for (rank, thread) in threads.into_iter().enumerate() {
            let sum = thread.join().ok().context("a rank has panicked")??;
            println!("by hand: rank {rank} put down {:2}; the sum of all is {sum}", 10 * rank);
            ensure!(sum == 60, "every rank must write its slot before any rank adds up");
        }
        Ok(())
    })
}

/// The same with `spawn`, which starts a thread for each rank, assigns it a device, and provides the channel.
fn with_spawn() -> anyhow::Result<()> {
    spawn(RANKS, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?; // the rendezvous
        // Prints in rank order: in each turn one rank prints, and then all ranks enter the barrier.
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

    // With the barrier by hand, the other ranks would wait forever for a rank that failed. `spawn` cancels their wait.
    let cancelled = Arc::new(AtomicUsize::new(0));
    let count = cancelled.clone();
    let result = spawn(RANKS, move |rank| {
        if rank.rank() == 2 {
            bail!("the milk is sour");
        }
        // The other ranks wait for rank 2: in the barrier, or already in the rendezvous.
        let result = rank.init_process_group(Backend::Threaded).and_then(|group| group.barrier());
        if let Err(Error::Cancelled { by: 2, .. }) = result {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(result?)
    });
    let error = result.err().context("the run must fail when a rank fails")?;
    let woken = cancelled.load(Ordering::Relaxed);
    println!("failure: {}; {woken} ranks that waited for it were woken", error.failure);
    ensure!(error.failure.rank == 2 && woken == 3, "the first failure must be reported");
    Ok(())
}
