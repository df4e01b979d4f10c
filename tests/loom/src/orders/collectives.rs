//! Exchanges in a row, and both kinds of all_reduce as `threaded/mod.rs` and `threaded/kernels.rs` do them.

use std::time::Duration;

use super::{AT, TIMEOUT, Watched, barrier_of, in_every_order};
use crate::error::Result;
use crate::process_group::local::{Barrier, Exchange, ExchangeSlot};
use crate::runtime::primitives::Arc;

/// A rank's tensor: one element for every rank's slice.
type Memory = Arc<[Watched<u64>]>;

/// A rank's announcement: the number of its collective, and its tensor.
pub(super) type CollectiveFingerprint = Watched<Option<(u64, Memory)>>;

pub(super) fn exchange_of(barrier: Barrier) -> Arc<Exchange<CollectiveFingerprint>> {
    let ranks = 0..barrier.members().len();
    Arc::new(Exchange::new(barrier, ranks, || Watched::new(None)))
}

/// One rank, and its tensor.
pub(super) struct Rank {
    slot: ExchangeSlot<CollectiveFingerprint>,
    memory: Memory,
    pub(super) timeout: Duration,
}

/// Returns the element of `rank` for the `sequence`-th collective, at one place of its tensor.
fn input(rank: usize, sequence: u64, place: usize) -> u64 {
    100 * sequence + 10 * rank as u64 + place as u64
}

impl Rank {
    pub(super) fn new(rank: usize, exchange: &Arc<Exchange<CollectiveFingerprint>>) -> Self {
        let slot = ExchangeSlot::take(rank, exchange.clone());
        let world_size = slot.barrier().members().len();
        let memory = (0..world_size).map(|_| Watched::new(0)).collect();
        Self { slot, memory, timeout: TIMEOUT }
    }

    /// Announces this rank's tensor. Returns the tensors of all ranks.
    pub(super) fn exchange(&mut self, sequence: u64) -> Result<Vec<Memory>> {
        let memory = &self.memory;
        self.slot.exchange(AT, self.timeout, |place| {
            place.set(Some((sequence, memory.clone())));
            Ok(())
        })?;
        let published = self.slot.published().map(|place| {
            let (theirs, memory) = place.get().unwrap();
            assert_eq!(theirs, sequence, "published too early or too late");
            memory
        });
        Ok(published.collect())
    }

    pub(super) fn all_reduce(&mut self, sequence: u64) -> Result<()> {
        let rank = self.slot.rank();
        for (place, element) in self.memory.iter().enumerate() {
            element.set(input(rank, sequence, place));
        }
        let tensors = self.exchange(sequence)?;
        self.slot.and_leave_together(|| {
            let sum = tensors.iter().map(|tensor| tensor[rank].get()).sum();
            tensors.iter().for_each(|tensor| tensor[rank].set(sum));
        });
        for (place, element) in self.memory.iter().enumerate() {
            let sum: u64 = (0..tensors.len()).map(|rank| input(rank, sequence, place)).sum();
            assert_eq!(element.get(), sum);
        }
        Ok(())
    }

    /// Reduces elements that are part of the announcement. No rank touches another's memory, so none waits for the others
    /// after the exchange.
    fn all_reduce_contents(&mut self, sequence: u64) {
        let rank = self.slot.rank();
        let own: Memory = [Watched::new(input(rank, sequence, 0))].into();
        self.slot
            .exchange(AT, self.timeout, |place| {
                place.set(Some((sequence, own)));
                Ok(())
            })
            .unwrap();
        let announced = self.slot.published().map(|place| place.get().unwrap().1[0].get());
        self.memory[0].set(announced.sum());
        let sum: u64 = (0..self.memory.len()).map(|rank| input(rank, sequence, 0)).sum();
        assert_eq!(self.memory[0].get(), sum);
        assert_eq!(self.slot.announced().get().unwrap().0, sequence);
    }

    /// Drops this rank's tensor. loom sees every rank that still touches it.
    pub(super) fn go(self) {
        self.memory.iter().for_each(|element| element.set(u64::MAX));
    }
}

/// Tries every order in which `world_size` ranks make `times` calls of `work`, which gets the number of the call.
fn again_and_again(
    what: &str,
    [world_size, times]: [usize; 2],
    preemptions: Option<usize>,
    work: fn(&mut Rank, u64),
) {
    in_every_order(
        &format!("{times} times {what}, {world_size} ranks"),
        world_size,
        preemptions,
        move || exchange_of(barrier_of(world_size)),
        move |rank, exchange| {
            let mut rank = Rank::new(rank, exchange);
            (0..times as u64).for_each(|sequence| work(&mut rank, sequence));
            rank.go();
        },
        drop,
    );
}

fn reduce_again_and_again(world_size: usize, times: usize, preemptions: Option<usize>) {
    again_and_again("an all_reduce", [world_size, times], preemptions, |rank, sequence| {
        rank.all_reduce(sequence).unwrap();
    });
}

/// Reduces announced elements. Every third all_reduce is one in the ranks' memory, if there are so many.
fn reduce_contents_again_and_again(world_size: usize, times: usize, preemptions: Option<usize>) {
    let what = "an all_reduce of what is announced";
    again_and_again(what, [world_size, times], preemptions, |rank, sequence| {
        if sequence % 3 == 2 {
            rank.all_reduce(sequence).unwrap();
        } else {
            rank.all_reduce_contents(sequence);
        }
    });
}

#[test]
fn two_ranks_reduce_in_every_order() {
    reduce_again_and_again(2, 1, None);
    reduce_again_and_again(2, 3, Some(4));
}

#[test]
fn three_ranks_reduce_in_every_order() {
    reduce_again_and_again(3, 2, Some(2));
}

#[test]
fn two_ranks_reduce_their_announcements_in_every_order() {
    reduce_contents_again_and_again(2, 1, None);
    reduce_contents_again_and_again(2, 4, Some(4));
}

#[test]
fn three_ranks_reduce_their_announcements_in_every_order() {
    reduce_contents_again_and_again(3, 3, Some(2));
}
