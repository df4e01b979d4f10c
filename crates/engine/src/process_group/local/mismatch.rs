//! The text of [`Error::Mismatch`]: which rank called what, and at which line.
//!
//! Processes exchange their ranks' calls as text.

use std::time::Duration;

use super::fingerprint::{CollectiveFingerprint, SIZES};
use crate::error::{Error, Result, Suspects, counted, list_ranks, runs};
use crate::ffi::TcpStore;
use crate::operation::{OpId, Operation};
use crate::runtime::{Deadline, format_call_site};

/// The number of different calls that an error lists one by one.
const MAX_LISTED_CALLS: usize = 8;

/// The number of characters that are shown of each line of text from another process.
const MAX_CALL_CHARS: usize = 400;

/// One rank's call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankCall {
    pub rank: usize,
    /// The call, such as `all_reduce(sum) of float32 [4]`.
    pub call: String,
    /// The call site, such as ` at src/main.rs:7`; empty if it is unknown.
    pub call_site: String,
}

impl RankCall {
    pub(super) fn new(rank: usize, announced: &CollectiveFingerprint) -> Self {
        Self { rank, call: announced.describe(), call_site: format_call_site(announced.call_site) }
    }

    /// Returns the operation, with which the call begins. `UserCode` for text of another process that names none.
    fn operation(&self) -> Operation {
        let is_of_name = |char: char| char.is_ascii_lowercase() || char == '_';
        let name = self.call.split(|char| !is_of_name(char)).next().unwrap_or_default();
        name.parse().unwrap_or(Operation::UserCode)
    }

    /// Returns the part of the call that must be the same on all ranks.
    fn agreed(&self) -> &str {
        self.call.split(SIZES).next().unwrap_or_default()
    }
}

/// Returns the ranks of each `kind` of call, in order of first appearance.
fn groups<'a, K: PartialEq>(
    calls: &'a [RankCall],
    kind: impl Fn(&'a RankCall) -> K,
) -> Vec<(K, Vec<usize>)> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for call in calls {
        let kind = kind(call);
        match groups.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, ranks)) => ranks.push(call.rank),
            None => groups.push((kind, vec![call.rank])),
        }
    }
    groups
}

/// Returns the error of ranks that have made different calls. The rank to look at first is the first rank of the
/// smallest group with the same call; of equally small groups, the last one counts.
pub(crate) fn mismatch(sequence: u64, calls: &[RankCall]) -> Error {
    let mut groups = groups(calls, RankCall::agreed);
    if groups.len() == 1 {
        // All calls are the same but for the sizes.
        groups = self::groups(calls, |call| call.call.as_str());
    }
    let outlier = groups.iter().rev().min_by_key(|(_, ranks)| ranks.len());
    let outlier = outlier.map_or(0, |(_, ranks)| ranks[0]);
    let calls_of = |group: usize| groups[group].1.iter().map(move |&rank| (rank, group));
    let answers: Vec<(usize, usize)> = (0..groups.len()).flat_map(calls_of).collect();
    let mut suspects = Suspects::of(&answers);
    suspects.ranks.sort_unstable();
    let called = calls.iter().find(|call| call.rank == outlier);
    Error::Mismatch {
        sequence,
        calls: list(calls, outlier),
        suspects,
        outlier,
        called: called.map_or(Operation::UserCode, RankCall::operation),
    }
}

/// Longest wait for the text of another part's call.
const TEXT_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the error of the parts of a group, processes or ranks, that have made different calls. Every part writes its
/// call to the store, because every part has seen a different one. `parts` are the ranks of each; `mine` is the number
/// of this one, and `text` its call.
///
/// # Errors
/// The errors of the store.
pub(crate) fn mismatch_in_store<'a>(
    store: &TcpStore,
    sequence: u64,
    mine: usize,
    text: &str,
    parts: impl Iterator<Item = &'a [usize]>,
    is_different: impl Fn(usize) -> bool,
) -> Result<Error> {
    let key = |part| format!("call/{sequence}/{part}");
    store.set(&key(mine), text.as_bytes())?;
    let same = text.lines().next().unwrap_or_default();
    let deadline = Deadline::after(TEXT_TIMEOUT);
    let mut calls = Vec::new();
    for (part, ranks) in parts.enumerate() {
        let mut text = store.get(&key(part), deadline.left())?;
        if !is_different(part) {
            text.get_or_insert_with(|| same.into());
        }
        calls.extend(from_text(text.as_deref(), ranks));
    }
    Ok(mismatch(sequence, &calls))
}

/// Returns the error of a collective in which the ranks `from` send another number of elements to the ranks `to`
/// than these expect: `[sent, expected]`. Each side is one rank or the ranks of one process, with its call site, if
/// that is known.
pub(crate) fn sizes_differ(
    OpId { operation, sequence }: OpId,
    (from, at): (&[usize], String),
    (to, there): (&[usize], String),
    [sent, expected]: [usize; 2],
) -> Error {
    let (outlier, suspects) = (to[0], Suspects::tied([from, to].concat()));
    let is_one = |ranks: &[usize]| ranks.len() == 1;
    let receives = if from == to && is_one(to) {
        " to itself, but expects".into()
    } else {
        let expect = if is_one(to) { "expects" } else { "expect" };
        format!("{at} to {}, which {expect}", list_ranks(to))
    };
    let sends = if is_one(from) { "sends" } else { "send" };
    let calls = format!(
        "in {operation} {} {sends} {sent} elements{receives} {expected}{there}",
        list_ranks(from)
    );
    Error::Mismatch { sequence, calls, suspects, outlier, called: operation }
}

/// Returns the calls as text: "ranks 0-2 called barrier at src/main.rs:7; rank 3 called barrier at src/main.rs:9".
fn list(calls: &[RankCall], outlier: usize) -> String {
    let mut lines = groups(calls, |call| (&call.call, &call.call_site));
    let mut left_out = String::new();
    if lines.len() > MAX_LISTED_CALLS {
        let outlier_line =
            lines.iter().position(|(_, ranks)| ranks.contains(&outlier)).unwrap_or(0);
        lines.swap(MAX_LISTED_CALLS - 1, outlier_line.max(MAX_LISTED_CALLS - 1));
        let more = counted(lines.len() - MAX_LISTED_CALLS, "more different call");
        left_out = format!("; the others made {more}");
    }
    let listed = lines.iter().take(MAX_LISTED_CALLS).map(|((call, call_site), ranks)| {
        let s = if ranks.len() > 1 { "s" } else { "" };
        format!("rank{s} {} called {call}{call_site}", runs(ranks))
    });
    let listed: Vec<String> = listed.collect();
    listed.join("; ") + &left_out
}

/// Returns the call of this process's ranks as text for other processes. All ranks have made the same call: one
/// line has the call, and one line per rank has its call site.
pub(super) fn to_text<'a>(
    mut calls: impl Iterator<Item = &'a CollectiveFingerprint> + Clone,
) -> String {
    let lines = calls.clone().map(|call| format!("\n{}", format_call_site(call.call_site)));
    let lines: String = lines.collect();
    calls.next().map_or(String::new(), CollectiveFingerprint::describe) + &lines
}

/// Returns the calls in the text of a process with these `ranks`. A missing or empty call is shown as "something
/// else".
fn from_text(text: Option<&[u8]>, ranks: &[usize]) -> Vec<RankCall> {
    let text = String::from_utf8_lossy(text.unwrap_or_default());
    // The text goes to a terminal, so it must not have control characters.
    let shown = |line: &str| -> String {
        line.chars().filter(|char| !char.is_control()).take(MAX_CALL_CHARS).collect()
    };
    let mut lines = text.split('\n').map(shown);
    let call =
        lines.next().filter(|line| !line.is_empty()).unwrap_or_else(|| "something else".into());
    let called =
        |&rank| RankCall { rank, call: call.clone(), call_site: lines.next().unwrap_or_default() };
    ranks.iter().map(called).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::runtime::{Failure, RunContext};

    fn called(rank: usize, call: &str, line: usize) -> RankCall {
        RankCall { rank, call: call.into(), call_site: format!(" at a.rs:{line}") }
    }

    fn told(calls: &[RankCall]) -> (String, usize) {
        match mismatch(0, calls) {
            Error::Mismatch { calls, outlier, .. } => (calls, outlier),
            other => panic!("{other}"),
        }
    }

    fn blamed(error: &Error) -> Failure {
        RunContext::new(8, Duration::ZERO, None).blamed(error).unwrap()
    }

    #[test]
    fn mismatch_of_two_ranks_ties_and_of_more_suspects_the_minority() {
        let end = |calls: &[RankCall]| {
            let error = mismatch(0, calls);
            let text = error.to_string();
            let end = text.split("same dtypes and shapes").nth(1).unwrap().to_string();
            (end, blamed(&error).tied)
        };
        let (two, tied) = end(&[called(4, "x", 1), called(5, "y", 1)]);
        assert_eq!(
            (&two[..], &tied[..]),
            ("; with two ranks it is unknown which one is wrong", &[4, 5][..])
        );
        let (minority, tied) = end(&[called(4, "x", 1), called(5, "y", 1), called(6, "x", 2)]);
        assert_eq!((&minority[..], tied.len()), ("", 0));
        let (three, tied) = end(&[called(4, "x", 1), called(5, "y", 1), called(6, "z", 2)]);
        assert_eq!(tied, [4, 5, 6]);
        assert_eq!(three, "; no majority agrees, so it is unknown which rank is wrong");
    }

    #[test]
    fn equal_calls_are_grouped_and_the_smallest_group_is_blamed() {
        let mut calls: Vec<RankCall> = (0..600).map(|rank| called(rank, "barrier", 1)).collect();
        calls[17] = called(17, "broadcast", 3);
        calls[19] = called(19, "barrier", 2);
        let expected = "ranks 0-16, 18, 20-599 called barrier at a.rs:1; rank 17 called broadcast at a.rs:3; \
                        rank 19 called barrier at a.rs:2";
        assert_eq!(told(&calls), (expected.into(), 17));
        let two = [called(4, "x", 1), called(5, "y", 1)];
        assert_eq!(told(&two).1, 5);
    }

    /// What another process was last seen doing may be older than its call.
    #[test]
    fn blamed_operation_is_the_one_in_the_call() {
        for operation in [Operation::AllReduce, Operation::Barrier, Operation::NewGroup] {
            let text = format!("{operation} of ranks [0, 1]\n at a.rs:3");
            let calls =
                [from_text(Some(b"broadcast"), &[0, 1]), from_text(Some(text.as_bytes()), &[2])];
            let failure = blamed(&mismatch(7, &calls.concat()));
            assert_eq!((failure.rank, failure.at), (2, OpId { operation, sequence: 7 }));
        }
        let unknown = [from_text(Some(b"broadcast"), &[0, 1]), from_text(None, &[2])].concat();
        assert_eq!(blamed(&mismatch(7, &unknown)).at.operation, Operation::UserCode);
    }

    #[test]
    fn sizes_that_may_differ_are_no_mismatch() {
        let uneven = |rank, size| {
            called(rank, &format!("all_to_all of float32{SIZES}[{size}] and expecting [1]"), 1)
        };
        let barrier = called(1, "barrier", 2);
        let calls = [uneven(0, 5), barrier, uneven(2, 6), uneven(3, 7)];
        let (text, outlier) = told(&calls);
        assert_eq!((text.matches(" called ").count(), outlier), (4, 1), "{text}");
        // Only the sizes differ, as they can between processes.
        assert_eq!(told(&[uneven(0, 5), uneven(1, 6), uneven(2, 5)]).1, 1);
    }

    #[test]
    fn long_list_of_calls_is_cut_but_keeps_the_blamed_one() {
        let mut calls: Vec<RankCall> =
            (0..40).map(|rank| called(rank, &format!("x {}", rank / 2), 1)).collect();
        calls.push(called(40, "y", 2));
        let (text, outlier) = told(&calls);
        assert_eq!((text.matches(" called ").count(), outlier), (MAX_LISTED_CALLS, 40));
        assert!(text.contains("rank 40 called y at a.rs:2; the others made 13 more"), "{text}");
    }

    proptest! {
        #[test]
        fn call_from_random_bytes_is_short_and_printable(
            bytes: Option<Vec<u8>>,
            count in 0..4usize,
        ) {
            let ranks: Vec<usize> = (3..3 + count).collect();
            let calls = from_text(bytes.as_deref(), &ranks);
            prop_assert_eq!(calls.iter().map(|call| call.rank).collect::<Vec<_>>(), ranks);
            for RankCall { call, call_site, .. } in calls {
                prop_assert!(!call.is_empty() && call.chars().count() <= MAX_CALL_CHARS);
                prop_assert!(call_site.chars().count() <= MAX_CALL_CHARS);
                prop_assert!(!(call + &call_site).contains(char::is_control));
            }
        }
    }
}
