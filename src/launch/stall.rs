//! Who is missing where: told once while the others wait, and in a table whenever somebody asks.

use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::operation::At;
use crate::sync::{Begin, Record, Run};

/// Who is told.
#[derive(Clone)]
pub(super) struct Tell(Arc<dyn Fn(&str) + Send + Sync>);

impl Tell {
    pub(super) fn new(tell: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    pub(super) fn tell(&self, text: &str) {
        (self.0)(text);
    }
}

impl fmt::Debug for Tell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tell")
    }
}

/// A collective in which ranks of this process wait for others for longer than they should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stall {
    /// Which one, for not telling it twice.
    pub key: (u32, At),
    /// What to tell, in lines.
    pub text: String,
}

/// The collective that ranks of this process, `here`, have waited in the longest, if that is longer than `limit`.
pub(super) fn stalled(run: &Run, here: Range<usize>, limit: Duration) -> Option<Stall> {
    let now = run.timeline.now();
    let waits = |it: &Record| it.ended.is_none() && now.saturating_sub(it.arrived) >= limit;
    let waiting = here.clone().flat_map(|rank| run.timeline.records(rank, 0)).filter(waits);
    // What a phase is in the midst of tells more than the phase.
    let first = waiting.filter(|it| it.begin.group.is_some()).min_by_key(|it| it.arrived)?;
    let Begin { at, group, .. } = first.begin;
    let group = group?;
    let members = run.members(group)?;
    let waited = seconds(now.saturating_sub(first.arrived));
    let mut text = format!("{} has not ended for {waited}", what(&first.begin));
    let (mut elsewhere, mut arrived) = (Vec::new(), Vec::new());
    let mut missing = String::new();
    for &rank in members.iter() {
        if !here.contains(&rank) {
            elsewhere.push(rank.to_string());
            continue;
        }
        let same =
            |it: &Record| it.begin.group == Some(group) && it.begin.at.sequence == at.sequence;
        match run.timeline.records(rank, 0).find(same) {
            Some(record) if record.begin.at == at => {
                let ago = seconds(now.saturating_sub(record.arrived));
                arrived.push(format!("rank {rank} {ago} ago"));
            }
            Some(record) => {
                let _ = write!(missing, "\n  rank {rank} is in {} instead", what(&record.begin));
            }
            None => {
                let last = last_seen(run, rank);
                let _ = write!(
                    missing,
                    "\n  rank {rank} has not entered {}; {last}",
                    name(&first.begin)
                );
            }
        }
    }
    let _ = write!(text, "\n  arrived: {}", arrived.join(", "));
    text += &missing;
    if !elsewhere.is_empty() {
        let _ = write!(text, "\n  in other processes: ranks {}", elsewhere.join(", "));
    }
    Some(Stall { key: (group, at), text })
}

/// What each rank of this process, `here`, does, and since when; a line for each.
pub(super) fn table(run: &Run, here: Range<usize>) -> String {
    let mut lines = Vec::new();
    for rank in here {
        let mut line = format!("  rank {rank} {}", last_seen(run, rank));
        let beside =
            run.timeline.records(rank, 0).filter(|it| it.begin.beside && it.ended.is_none());
        for record in beside {
            let ago = seconds(run.timeline.now().saturating_sub(record.arrived));
            let _ = write!(line, "; beside it in {}, {ago} ago", what(&record.begin));
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// What `rank` does now, or has done last.
fn last_seen(run: &Run, rank: usize) -> String {
    let now = run.timeline.now();
    let Some(record) = run.timeline.newest(rank) else {
        return format!("last seen in {}", run.activity[rank].now());
    };
    match record.ended {
        None => {
            let ago = seconds(now.saturating_sub(record.arrived));
            format!("last seen in {}, {ago} ago", what(&record.begin))
        }
        Some(ended) => {
            let ago = seconds(now.saturating_sub(ended));
            format!("last seen leaving {}, {ago} ago", what(&record.begin))
        }
    }
}

/// `all_reduce #118 (bucket 3) at src/main.rs:40`.
fn what(begin: &Begin) -> String {
    let place = begin.place.map_or(String::new(), |it| format!(" at {}:{}", it.file(), it.line()));
    name(begin) + &place
}

/// `all_reduce #118 (bucket 3)`.
fn name(begin: &Begin) -> String {
    let bucket = begin.bucket.map_or(String::new(), |bucket| format!(" (bucket {bucket})"));
    format!("{}{bucket}", begin.at)
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
