//! Panic handling for the threads that carry messages: a panic is a failure of the rank that the thread served.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::operation::OpId;
use crate::runtime::{RunContext, panics};

/// The global rank that a thread serves now, and in which operation, if known.
pub(super) type Serving = Cell<(usize, Option<OpId>)>;

/// Runs `work` on this thread, which serves `rank` until `work` sets another rank.
pub(super) fn run(run: &RunContext, rank: usize, work: impl FnOnce(&Serving)) {
    panics::watch_this_thread();
    let serving = Cell::new((rank, None));
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&serving))) {
        let (rank, at) = serving.get();
        run.report_at(rank, at, None, panics::describe(&*panic));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::operation::Operation;

    #[test]
    fn panic_is_a_failure_of_the_served_rank() {
        let timeout = Duration::from_secs(60);
        let receives = OpId { operation: Operation::Recv, sequence: 7 };
        for (at, served) in [(Some(receives), 2), (None, 1)] {
            let group = RunContext::new(3, timeout, None);
            super::run(&group, 1, |serving| {
                serving.set((served, at));
                panic!("the cause");
            });
            let failures = group.failures();
            let [failure] = &failures[..] else { panic!("{failures:?}") };
            assert_eq!(failure.rank, served);
            assert!(failure.error.contains("the cause"), "{}", failure.error);
            assert_eq!(failure.at, at.unwrap_or(group.activity[served].now()));
            assert_eq!(group.cancel.cancelled_by(), Some(served));
        }
        let well = RunContext::new(3, timeout, None);
        super::run(&well, 1, |serving| serving.set((2, None)));
        assert!(well.failures().is_empty());
    }
}
