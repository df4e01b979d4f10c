//! The possible orders in which ranks take turns: loom tries them all.

mod collectives;
mod failures;
mod messages;
mod pending;

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::operation::{OpId, Operation};
use crate::process_group::local::Barrier;
use crate::runtime::RunContext;
use crate::runtime::primitives::{Arc, UnsafeCell};

const AT: OpId = OpId { operation: Operation::AllReduce, sequence: 0 };

/// Never over, because no time passes.
const TIMEOUT: Duration = Duration::from_secs(3600);

fn barrier_of(world_size: usize) -> Barrier {
    Barrier::new(Arc::new(RunContext::new(world_size, TIMEOUT, None)), (0..world_size).collect())
}

/// Calls `each` on `threads` threads, with the thread's number, once in every order. Returns the different results of
/// `at_last`. Each order gets a new `shared`.
///
/// `preemptions` limits how often a thread is interrupted where it could continue. Without a limit, loom tries every
/// order: two ranks can do one all_reduce then, and three ranks nothing. Hardly any bug needs more than two preemptions.
/// LOOM_MAX_PREEMPTIONS raises the limit.
fn in_every_order<S: Send + Sync + 'static, T: Ord + Send + 'static>(
    name: &str,
    threads: usize,
    preemptions: Option<usize>,
    shared: impl Fn() -> S + Send + Sync + 'static,
    each: impl Fn(usize, &S) + Copy + Send + Sync + 'static,
    at_last: impl Fn(S) -> T + Copy + Send + Sync + 'static,
) -> BTreeSet<T> {
    let mut model = loom::model::Builder::new();
    let preemptions = model.preemption_bound.or(preemptions); // the former from the environment
    model.preemption_bound = preemptions;
    model.max_branches = 20_000;
    let (seen, began) = (Arc::new(Mutex::new((0, BTreeSet::new()))), Instant::now());
    let see = seen.clone();
    model.check(move || {
        let shared = Arc::new(shared());
        let start = |thread| {
            let (shared, see) = (shared.clone(), see.clone());
            move || {
                each(thread, &shared);
                // No thread joins another: a join is one more event to order, and loom panics when a thread is
                // unparked that joins another.
                let Some(shared) = Arc::into_inner(shared) else { return };
                let outcome = at_last(shared);
                let (orders, outcomes) = &mut *see.lock().unwrap();
                *orders += 1;
                outcomes.insert(outcome);
            }
        };
        let main = start(0);
        for thread in 1..threads {
            loom::thread::spawn(start(thread));
        }
        drop(shared);
        main();
    });
    let (orders, outcomes) = std::mem::take(&mut *seen.lock().unwrap());
    let limit = preemptions.map_or(String::new(), |n| format!(" with up to {n} preemptions"));
    println!("{name}: {orders} orders{limit} in {:.1?}", began.elapsed());
    outcomes
}

/// Memory of which loom sees who reads and writes it when.
struct Watched<T>(UnsafeCell<T>);

// SAFETY: none is needed: loom ends the test when an access meets another that it must not meet.
unsafe impl<T: Send> Sync for Watched<T> {}

impl<T: Clone> Watched<T> {
    fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    fn get(&self) -> T {
        // SAFETY: checked by loom.
        self.0.with(|place| unsafe { (*place).clone() })
    }

    fn set(&self, value: T) {
        // SAFETY: checked by loom.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}
