//! Tests of what a run reports about its ranks, and of the ranks that it names as missing.

use strum::IntoEnumIterator;

use super::*;
use crate::error::Compared;

#[test]
fn activity_round_trip_is_exact() {
    let activity = Activity::default();
    assert_eq!(activity.now(), OpId { operation: Operation::UserCode, sequence: 0 });
    for operation in Operation::iter() {
        activity.enter(operation, (1 << 56) - 1);
        assert_eq!(activity.now(), OpId { operation, sequence: (1 << 56) - 1 });
    }
    activity.enter(Operation::Step, 7);
    let before = activity.enter(Operation::AllReduce, 3);
    assert_eq!(activity.now().to_string(), "all_reduce #3");
    activity.restore(before);
    assert_eq!(activity.now().to_string(), "step #7");
}

#[test]
fn poll_ends_when_done_late_or_cancelled() {
    let run = RunContext::new(2, Duration::from_secs(60), None);
    let asked = std::cell::Cell::new(0);
    let third_time = || Ok(asked.replace(asked.get() + 1) == 2);
    run.poll(0, third_time).unwrap();
    assert_eq!(asked.get(), 3);
    let missing = RunContext::new(2, Duration::ZERO, None).poll(0, || Ok(false));
    assert!(
        matches!(missing, Err(Error::Timeout { waiting: 0, missing, .. }) if missing.is_empty())
    );
    run.report(1, None, "the cause".into());
    assert!(matches!(run.poll(0, || Ok(false)), Err(Error::Cancelled { by: 1, .. })));
}

#[test]
fn errors_after_the_first_failure_are_echoes() {
    let run = RunContext::new(3, Duration::from_secs(1), None);
    run.check(0).unwrap();
    run.report(1, None, "the cause".into());
    assert!(matches!(run.check(0), Err(Error::Cancelled { by: 1, .. })));
    run.report(0, None, "an echo in words of its own".into());
    run.report(2, None, "independent".into());
    run.report(2, None, "the same with more words: independent".into());
    let errors: Vec<String> = run.failures().iter().map(|f| f.error.clone()).collect();
    assert_eq!(errors, ["the cause", "independent"]);
}

#[test]
fn text_of_a_failure_has_a_limit() {
    let run = RunContext::new(1, Duration::from_secs(1), None);
    run.report(0, None, "x".repeat(MAX_ERROR - 1) + "äöü");
    let error = run.failures()[0].error.clone();
    assert_eq!(error, "x".repeat(MAX_ERROR - 1) + " ...");
}

#[test]
fn rank_is_overdue_only_after_it_finished() {
    let [strict, patient] =
        [Duration::ZERO, Duration::from_secs(60)].map(|timeout| RunContext::new(2, timeout, None));
    assert!(!strict.is_overdue(0));
    for run in [&strict, &patient] {
        run.wait_until_idle(0);
    }
    assert_eq!(
        [strict.is_overdue(0), strict.is_overdue(1), patient.is_overdue(0)],
        [true, false, false]
    );
}

/// A process with ranks 1 and 2, whose operations are given.
#[derive(Debug)]
struct Other([Operation; 2]);

impl PeerStatus for Other {
    fn refresh(&self, run: &RunContext) -> Vec<MissingRank> {
        self.poll(run);
        Vec::new()
    }

    fn poll(&self, run: &RunContext) {
        for (rank, operation) in (1..).zip(self.0) {
            run.activity[rank].enter(operation, 4);
        }
    }
}

#[test]
fn nccl_timeout_names_the_ranks_that_did_not_arrive() {
    use Operation::{AllReduce, Broadcast, Init, Step};
    for (others, named) in [
        ([AllReduce, Step], &[2][..]),
        ([Broadcast, Step], &[2, 1]), // the computing rank delays the waiting one
        ([Init, Init], &[1, 2]),
        ([AllReduce, AllReduce], &[]),
    ] {
        let mut run = RunContext::new(3, Duration::ZERO, None);
        run.peer_status = Some(Arc::new(Other(others)));
        run.start(0);
        run.activity[0].enter(AllReduce, 4);
        let Err(Error::Timeout { missing, .. }) = run.poll(0, || Ok(false)) else { panic!() };
        assert_eq!(missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), named);
        let Error::Timeout { missing, .. } = run.timeout_error(0, vec![1]) else { panic!() };
        assert_eq!((missing[0].rank, missing[0].last_seen.operation), (1, others[0]));
    }
}

#[test]
fn error_blames_one_rank_or_all_that_are_tied() {
    let run = RunContext::new(3, Duration::ZERO, None);
    run.activity[2].enter(Operation::AllReduce, 4);
    let tied = |error: Error| {
        let failure = run.blamed(&error).unwrap();
        (failure.rank, failure.tied, failure.at.to_string())
    };
    let replicas = |answers: &[(usize, char)]| Error::ReplicasDiverged {
        parameter: "weight".into(),
        others: 0,
        suspects: Suspects::of(answers),
        step: 5,
        compared: Compared::AfterStep,
    };
    assert_eq!(tied(replicas(&[(0, 'a'), (1, 'b')])), (0, vec![0, 1], "step #5".into()));
    assert_eq!(tied(replicas(&[(0, 'a'), (1, 'b'), (2, 'a')])), (1, vec![], "step #5".into()));
    for (first, expected) in [(1, vec![1, 2]), (2, vec![])] {
        let error = Error::OverlappingTensors { first, second: 2 };
        assert_eq!(tied(error), (2, expected, "all_reduce #4".into()));
    }
    assert_eq!(run.blamed(&Error::Internal(String::new())), None);
}
