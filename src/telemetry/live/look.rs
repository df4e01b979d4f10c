//! A look at the ranks: their newest operations at one moment of a run, or of a recorded trace.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::operation::OpId;
use crate::runtime::{CallSite, Entry, OpSnapshot};

/// The ranks of a run, to be looked at again and again.
pub(crate) trait RankSource: Send {
    /// Returns a label for each rank, such as `CPU:0`, in the order of ranks.
    fn labels(&self) -> Vec<String>;

    /// Looks at all ranks. Takes no lock that a rank needs.
    fn look(&mut self) -> Look;

    /// Returns a table of what each rank does, a line each.
    fn status_table(&self) -> String;
}

/// The newest operations of all ranks at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Look {
    /// The moment, on the clock of all times below.
    pub now: Duration,
    /// In the order of ranks.
    pub ranks: Vec<RankLook>,
    /// The ranks of each group. The group of all ranks, 0, is left out.
    pub groups: BTreeMap<u32, Arc<[usize]>>,
    /// The rank that failed first; `None` if none has.
    pub failed: Option<usize>,
    /// Whether some ranks are known from heartbeats only, so that their clocks and most of their operations are not.
    pub has_heartbeats: bool,
}

/// The newest operations of one rank.
#[derive(Debug, Clone)]
pub(crate) struct RankLook {
    /// The operation that the rank recorded last.
    pub at: OpId,
    /// Oldest first.
    pub ops: Vec<Op>,
    pub source: Source,
}

/// How the operations of a rank are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Source {
    /// At once.
    Direct,
    /// From a heartbeat of this age.
    Heartbeat(Duration),
    /// Not at all, for this reason.
    Unknown(&'static str),
}

/// An operation of a rank.
#[derive(Debug, Clone)]
pub(crate) struct Op {
    pub at: OpId,
    /// The group of ranks, for a collective.
    pub group: Option<u32>,
    pub bucket: Option<u16>,
    pub on_comm_thread: bool,
    pub started_at: Duration,
    /// `None` while it runs, or if it failed.
    pub finished_at: Option<Duration>,
    pub site: Site,
}

/// The source line that called the library.
#[derive(Debug, Clone)]
pub(crate) enum Site {
    Unknown,
    Here(CallSite),
    Text(Arc<str>),
}

impl Op {
    /// Returns the operation of a record.
    pub(crate) fn of_entry(entry: &Entry) -> Self {
        let Entry { begin, started_at, finished_at, .. } = entry;
        Self {
            at: begin.at,
            group: begin.group,
            bucket: begin.bucket,
            on_comm_thread: begin.on_comm_thread,
            started_at: *started_at,
            finished_at: *finished_at,
            site: begin.call_site.map_or(Site::Unknown, Site::Here),
        }
    }

    /// Returns the operation as it was at the time `now`; `None` if it had not begun.
    pub(crate) fn seen_at(self, now: Duration) -> Option<Self> {
        let finished_at = self.finished_at.filter(|end| *end <= now);
        (self.started_at <= now).then_some(Self { finished_at, ..self })
    }

    /// Returns the operation of a snapshot at the time `now`.
    pub(crate) fn of_snapshot(op: &OpSnapshot, now: Duration) -> Self {
        let site = op.call_site.strip_prefix(" at ").unwrap_or(&op.call_site);
        Self {
            at: op.at,
            group: op.group,
            bucket: op.bucket,
            on_comm_thread: op.on_comm_thread,
            started_at: now.saturating_sub(op.started_ago),
            finished_at: op.finished_ago.map(|ago| now.saturating_sub(ago)),
            site: if site.is_empty() { Site::Unknown } else { Site::Text(site.into()) },
        }
    }

    /// Returns whether the operation runs.
    pub(super) fn is_open(&self) -> bool {
        self.finished_at.is_none()
    }

    /// Returns the end of the operation, or `now` while it runs.
    pub(super) fn end(&self, now: Duration) -> Duration {
        self.finished_at.unwrap_or(now).max(self.started_at)
    }
}

impl fmt::Display for Op {
    /// Writes `all_reduce #118 (bucket 3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bucket {
            Some(bucket) => write!(f, "{} (bucket {bucket})", self.at),
            None => write!(f, "{}", self.at),
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => Ok(()),
            Self::Here(site) => write!(f, "{}:{}", site.file(), site.line()),
            Self::Text(text) => f.write_str(text),
        }
    }
}
