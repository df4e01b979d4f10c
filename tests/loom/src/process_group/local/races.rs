//! Collectives on threads and real memory, which ranks free at every possible moment. The thread sanitizer watches.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use super::super::ReduceOp;
use super::{Barrier, Exchange, ExchangeSlot, element};
use crate::Kind;
use crate::error::Result;
use crate::operation::{OpId, Operation};
use crate::runtime::RunContext;
use crate::runtime::primitives::Arc;

const AT: OpId = OpId { operation: Operation::AllReduce, sequence: 0 };
const MINUTE: Duration = Duration::from_secs(60);

/// The number of elements: enough for a rank to be in the middle of its slice while another leaves.
const NUMEL: usize = 3000;

/// The number of elements that are part of an announcement.
const CONTENTS: usize = 200;

/// A rank's announcement: the number of its collective, the address of its tensor, and its first elements.
#[derive(Debug)]
struct CollectiveFingerprint {
    sequence: u64,
    data: *mut f32,
    contents: [f32; CONTENTS],
}

// SAFETY: ranks use the pointer between the two barriers of a collective only.
unsafe impl Send for CollectiveFingerprint {}
// SAFETY: likewise.
unsafe impl Sync for CollectiveFingerprint {}

/// Returns the element of `rank` for a collective, at one place of its tensor.
fn input(sequence: u64, rank: usize, place: usize) -> f32 {
    (sequence as usize + 7 * rank + place) as f32
}

/// Returns the sum of `len` elements of each of the inputs.
fn sum<'a>(inputs: &'a [*mut u8], outputs: &'a [*mut u8], len: usize) -> element::Reduction<'a> {
    let kinds = element::Kinds { from: Kind::Float, to: Kind::Float };
    let (op, addends) = (ReduceOp::Sum, inputs.len());
    element::Reduction { kinds, partial: None, inputs, outputs, len, op, addends }
}

/// One rank, its tensor, and its random state.
struct Rank {
    rank: usize,
    run: Arc<RunContext>,
    slot: ExchangeSlot<CollectiveFingerprint>,
    tensor: Box<[f32]>,
    random: u64,
}

impl Rank {
    /// Returns a number below `limit`, from an xorshift generator: the same in every run.
    fn random_below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Waits for a random time, or not at all.
    fn delay(&mut self) {
        match self.random_below(8) {
            0 => thread::sleep(Duration::from_micros(self.random % 200)),
            1 | 2 => thread::yield_now(),
            3 | 4 => (0..self.random % 2000).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }

    /// Announces this rank's tensor. Returns the addresses of all.
    fn exchange(&mut self, sequence: u64, timeout: Duration) -> Result<Vec<*mut f32>> {
        self.delay();
        let data = self.tensor.as_mut_ptr();
        self.slot.exchange(AT, timeout, |place| {
            (place.sequence, place.data) = (sequence, data);
            Ok(())
        })?;
        self.delay();
        assert!(self.slot.published().all(|theirs| theirs.sequence == sequence));
        Ok(self.slot.published().map(|theirs| theirs.data).collect())
    }

    /// Reduces the announced elements into this rank's tensor, and leaves at once.
    fn all_reduce_contents(&mut self, sequence: u64) {
        self.delay();
        let rank = self.rank;
        let publish = |place: &mut CollectiveFingerprint| {
            place.sequence = sequence;
            place.contents = std::array::from_fn(|place| input(sequence, rank, place));
            Ok(())
        };
        self.slot.exchange(AT, MINUTE, publish).unwrap();
        self.delay();
        let contents = |theirs: &CollectiveFingerprint| theirs.contents.as_ptr().cast_mut().cast();
        let inputs: Vec<*mut u8> = self.slot.published().map(contents).collect();
        let output = [self.tensor.as_mut_ptr().cast()];
        // SAFETY: no rank writes to these announcements before all have entered the next exchange, and no other rank
        // touches this tensor.
        unsafe { element::reduce(sum(&inputs, &output, CONTENTS)) };
        self.has_sum(sequence, inputs.len(), CONTENTS);
    }

    /// Checks the first `len` elements.
    fn has_sum(&self, sequence: u64, world_size: usize, len: usize) {
        for place in 0..len {
            let sum: f32 = (0..world_size).map(|rank| input(sequence, rank, place)).sum();
            assert_eq!(self.tensor[place], sum);
        }
    }

    /// Follows `threaded/mod.rs` and `threaded/kernels.rs`. `at_last` may panic.
    fn all_reduce(
        &mut self,
        sequence: u64,
        timeout: Duration,
        at_last: impl FnOnce(),
    ) -> Result<()> {
        let rank = self.rank;
        for place in 0..NUMEL {
            self.tensor[place] = input(sequence, rank, place);
        }
        let tensors = self.exchange(sequence, timeout)?;
        let part = NUMEL.div_ceil(tensors.len());
        let slice = part * rank..NUMEL.min(part * (rank + 1));
        let start = |tensor: &*mut f32| tensor.wrapping_add(slice.start).cast();
        let places: Vec<*mut u8> = tensors.iter().map(start).collect();
        self.slot.and_leave_together(|| {
            // SAFETY: all ranks have met, each of them writes to its own slice, and all tensors stay where
            // they are until all have left.
            unsafe { element::reduce(sum(&places, &places, slice.len())) };
            at_last();
        });
        self.has_sum(sequence, tensors.len(), NUMEL);
        Ok(())
    }

    /// Frees this rank's tensor, and reports that the rank has ended.
    fn go(self) {
        let Self { rank, run, tensor, .. } = self;
        drop(tensor);
        run.finish(rank);
    }
}

/// Runs `each` for every rank on a thread of its own. Returns the results in rank order.
fn on_threads<R: Send>(
    world_size: usize,
    seed: u64,
    each: impl Fn(Rank) -> R + Copy + Send,
) -> Vec<R> {
    let run = Arc::new(RunContext::new(world_size, MINUTE, None));
    let barrier = Barrier::new(run.clone(), (0..world_size).collect());
    let nothing = || CollectiveFingerprint {
        sequence: 0,
        data: std::ptr::null_mut(),
        contents: [0.; CONTENTS],
    };
    let exchange = Arc::new(Exchange::new(barrier, 0..world_size, nothing));
    thread::scope(|scope| {
        let start = |rank| {
            let (run, exchange) = (run.clone(), exchange.clone());
            scope.spawn(move || {
                run.cancel.register();
                let slot = ExchangeSlot::take(rank, exchange);
                let random = (seed + 1) * 1_000_003 + rank as u64;
                each(Rank { rank, run, slot, tensor: vec![0.; NUMEL].into(), random })
            })
        };
        let threads: Vec<_> = (0..world_size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Does `work` so many times on 1 to 4 ranks.
fn repeatedly(times: u64, work: impl Fn(&mut Rank, u64) + Copy + Send) {
    for world_size in 1..=4 {
        on_threads(world_size, 0, move |mut rank| {
            (0..times).for_each(|sequence| work(&mut rank, sequence));
            rank.go();
        });
    }
}

#[test]
fn repeated_reductions_of_announcements_have_no_race() {
    repeatedly(400, |rank, sequence| match sequence % 5 {
        4 => rank.all_reduce(sequence, MINUTE, || ()).unwrap(),
        _ => rank.all_reduce_contents(sequence),
    });
}

/// Tries often to do four reductions, with the time-out that `before` returns, and checks that all ranks do equally many.
fn all_do_the_same(before: impl Fn(&mut Rank, u64) -> Duration + Copy + Send) {
    for attempt in 0..100 {
        let done = on_threads(3, attempt, move |mut rank| {
            let is_done = |sequence: &u64| {
                let timeout = before(&mut rank, attempt);
                rank.all_reduce(*sequence, timeout, || ()).is_ok()
            };
            let done = (0..4).take_while(is_done).count();
            rank.go();
            done
        });
        assert!(done.iter().all(|theirs| *theirs == done[0]), "{done:?}");
    }
}

#[test]
fn failure_at_any_moment_has_no_race() {
    all_do_the_same(|rank, attempt| {
        if rank.rank == attempt as usize % 3 && rank.random_below(4) == 0 {
            rank.run.report(rank.rank, None, "the cause".into());
        }
        MINUTE
    });
}

#[test]
fn timeout_at_any_moment_has_no_race() {
    all_do_the_same(|rank, _| Duration::from_micros(rank.random_below(500)));
}

/// Its tensor is there until the others are through.
#[test]
fn panic_within_a_reduction_has_no_race() {
    for attempt in 0..50 {
        on_threads(3, attempt, |mut rank| {
            let panics = rank.rank == 1;
            let result = catch_unwind(AssertUnwindSafe(|| {
                rank.all_reduce(0, MINUTE, || {
                    if panics {
                        std::panic::resume_unwind(Box::new(())); // without a message
                    }
                })
            }));
            assert_eq!(result.is_err(), panics);
            rank.go();
        });
    }
}
