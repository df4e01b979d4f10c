//! A rank's wait for its communication threads.

use super::{TIMEOUT, Watched, in_every_order};
use crate::runtime::RunContext;

#[test]
fn rank_waits_until_its_pending_operations_are_over() {
    in_every_order(
        "a rank and two communication threads",
        3,
        None,
        || {
            let run = RunContext::new(1, TIMEOUT, None);
            run.begin_pending(0);
            run.begin_pending(0);
            (run, [Watched::new(0), Watched::new(0)])
        },
        |thread, (run, tensors)| {
            if thread == 0 {
                run.start(0);
                run.wait_until_idle(0);
                assert!(tensors.iter().all(|tensor| tensor.get() == 1));
            } else {
                tensors[thread - 1].set(1);
                run.end_pending(0);
            }
        },
        drop,
    );
}
