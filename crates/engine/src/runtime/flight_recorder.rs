//! The flight recorder: a ring of entries of each rank's operations, which any thread may read at any time.
//!
//! It is always on, so it must cost little. An entry is written without a lock and with two clock reads, and only the
//! first one allocates. The rank itself or one of its communication threads writes it.

use std::panic::Location;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::atomic::AtomicCell;
use crossbeam::utils::CachePadded;
use serde::Serialize;
use strum::EnumCount;

use super::{Instant, OpEntry, SourceLine};
use crate::operation::{OpId, Operation};

/// The number of newest entries kept per rank, unless all are wanted. A training step has about ten.
pub(crate) const ENTRIES: usize = if cfg!(loom) { 1 } else { 1024 };

/// The number of newest entries kept per rank where all are wanted: about three thousand steps of a small model.
pub(crate) const MOST_ENTRIES: usize = 1 << 15;

/// The entries of all ranks of a run, at most `keeps` per rank.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    /// The time at which the recorder's clock started.
    pub began: std::time::Instant,
    /// The same time on the clock of the entries.
    clock: Instant,
    /// The number of newest entries kept per rank.
    keeps: usize,
    ranks: Box<[Ring]>,
}

/// The source line that called the library.
pub(crate) type CallSite = &'static Location<'static>;

/// Formats a call site for messages, as ` at src/main.rs:40`; empty if `None`.
pub(crate) fn format_call_site(call_site: Option<CallSite>) -> String {
    call_site.map_or(SourceLine::Unknown, SourceLine::Here).in_message()
}

/// The part of an entry that is written when the operation begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpStart {
    pub at: OpId,
    /// The group of ranks, for a collective; the same number on all of them.
    pub group: Option<u32>,
    /// The bucket of gradients.
    pub bucket: Option<u16>,
    /// Size on this rank: bytes that are moved, or samples of a forward pass.
    pub amount: u64,
    pub call_site: Option<CallSite>,
    /// Whether a communication thread runs the operation.
    pub on_comm_thread: bool,
}

impl OpStart {
    /// Returns the start of an operation without a group.
    pub(crate) fn alone(at: OpId, call_site: CallSite) -> Self {
        Self {
            at,
            group: None,
            bucket: None,
            amount: 0,
            call_site: Some(call_site),
            on_comm_thread: false,
        }
    }
}

/// The index and start time of an entry, for [`FlightRecorder::end`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SpanId {
    index: u64,
    started_at: Duration,
}

/// How often a rank has begun a kind of collective or message.
#[derive(Debug, Default, Clone, Copy, Serialize)]
pub struct OpTotals {
    /// How often.
    pub calls: u64,
    /// With how many bytes in all.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Ring {
    /// The number of entries begun.
    next: CachePadded<AtomicU64>,
    /// Allocated with the first record, so the ranks of other processes have none.
    entries: OnceLock<Box<[AtomicEntry]>>,
    /// Largest error of the GPU times, in nanoseconds; 0 without a GPU.
    gpu_error: AtomicU64,
    /// The calls and bytes of each kind of collective and message.
    totals: [[AtomicU64; 2]; Operation::COUNT],
}

/// One entry. It is consistent if a reader finds the same `index` before and after reading it.
#[derive(Debug, Default)]
struct AtomicEntry {
    /// The index of the operation, plus one; 0 if the entry is empty or is being written.
    index: AtomicU64,
    at: AtomicU64,
    /// From the highest bit: the group plus one (32 bits), the bucket plus one (17), `on_comm_thread` (1).
    marks: AtomicU64,
    amount: AtomicU64,
    started_at: AtomicU64,
    /// 0 while the operation runs.
    finished_at: AtomicU64,
    /// The GPU times: see [`OpEntry`]. They are those of the operation with this index, plus one.
    on_gpu: [AtomicU64; 2],
    on_gpu_index: AtomicU64,
    call_site: AtomicCell<Option<CallSite>>,
}

impl FlightRecorder {
    /// Returns an empty recorder whose clock starts now, for `ranks` ranks with up to `keeps` entries each.
    pub(crate) fn new(ranks: usize, keeps: usize) -> Self {
        let (began, clock) = (std::time::Instant::now(), Instant::now());
        Self { began, clock, keeps, ranks: (0..ranks).map(|_| Ring::default()).collect() }
    }

    /// Returns whether more entries than usual are kept, because all are wanted.
    pub(crate) fn keeps_all(&self) -> bool {
        self.keeps > ENTRIES
    }

    /// Returns the time since the recorder's clock started, without the time in which the process was suspended.
    pub(crate) fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    /// Records that `rank` begins an operation now.
    pub(crate) fn begin(&self, rank: usize, begin: OpStart) -> SpanId {
        let OpStart { at, group, bucket, amount, call_site, on_comm_thread } = begin;
        let ring = &self.ranks[rank];
        if at.operation.may_wait() && at.operation != Operation::Synchronize {
            let [calls, bytes] = &ring.totals[at.operation as usize];
            calls.fetch_add(1, Ordering::Relaxed);
            bytes.fetch_add(amount, Ordering::Relaxed);
        }
        // Several threads of one rank may get here at once; each has its own entry.
        let index = ring.next.fetch_add(1, Ordering::Relaxed);
        let entry = ring.entry(index, self.keeps);
        let group = group.map_or(0, |group| u64::from(group) + 1);
        let bucket = bucket.map_or(0, |bucket| u64::from(bucket) + 1);
        entry.index.store(0, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::Release);
        entry.at.store(at.into(), Ordering::Relaxed);
        entry.marks.store(group << 18 | bucket << 1 | u64::from(on_comm_thread), Ordering::Relaxed);
        entry.amount.store(amount, Ordering::Relaxed);
        let started_at = self.now();
        entry.started_at.store(nanos(started_at), Ordering::Relaxed);
        entry.finished_at.store(0, Ordering::Relaxed);
        entry.call_site.store(call_site);
        entry.index.store(index + 1, Ordering::Release);
        SpanId { index, started_at }
    }

    /// Records that the operation has ended. Returns its duration.
    pub(crate) fn end(&self, rank: usize, span: SpanId) -> Duration {
        let SpanId { index, started_at } = span;
        let (entry, now) = (self.ranks[rank].entry(index, self.keeps), self.now());
        // A newer entry may have overwritten this one.
        if entry.index.load(Ordering::Relaxed) == index + 1 {
            entry.finished_at.store(nanos(now).max(1), Ordering::Release);
        }
        now.saturating_sub(started_at)
    }

    /// Records the error of the GPU times of `rank` in one of its groups.
    pub(crate) fn note_gpu_clock(&self, rank: usize, error: Duration) {
        self.ranks[rank].gpu_error.fetch_max(nanos(error).max(1), Ordering::Relaxed);
    }

    /// Returns the largest such error over all groups; `None` without a GPU.
    pub(crate) fn gpu_clock_error(&self, rank: usize) -> Option<Duration> {
        let error = self.ranks[rank].gpu_error.load(Ordering::Relaxed);
        (error > 0).then(|| Duration::from_nanos(error))
    }

    /// Records when the GPU of `rank` started and finished the work that an entry's operation launched.
    pub(crate) fn note_gpu(&self, rank: usize, span: SpanId, times: [Duration; 2]) {
        let entry = self.ranks[rank].entry(span.index, self.keeps);
        // A newer entry may have overwritten this one, now or meanwhile: these are not its times.
        if entry.index.load(Ordering::Relaxed) == span.index + 1 {
            entry.on_gpu_index.store(0, Ordering::Relaxed);
            std::sync::atomic::fence(Ordering::Release);
            for (on_gpu, time) in entry.on_gpu.iter().zip(times) {
                on_gpu.store(nanos(time), Ordering::Relaxed);
            }
            entry.on_gpu_index.store(span.index + 1, Ordering::Release);
        }
    }

    /// Returns the number of entries that `rank` has begun.
    pub(crate) fn count(&self, rank: usize) -> u64 {
        self.ranks[rank].next.load(Ordering::Acquire)
    }

    /// Returns the kept entries of `rank` from index `from` on, oldest first. Skips entries that are being written.
    pub(crate) fn entries(
        &self,
        rank: usize,
        from: u64,
    ) -> impl DoubleEndedIterator<Item = OpEntry> {
        let (ring, count) = (&self.ranks[rank], self.count(rank));
        let first = from.max(count.saturating_sub(self.keeps as u64));
        (first..count).filter_map(|index| ring.read(index, self.keeps))
    }

    /// Returns how often `rank` has begun each operation, if it is a collective or message.
    pub(crate) fn totals(&self, rank: usize) -> Vec<OpTotals> {
        let load = |[calls, bytes]: &[AtomicU64; 2]| OpTotals {
            calls: calls.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        };
        self.ranks[rank].totals.iter().map(load).collect()
    }
}

impl Ring {
    fn entry(&self, index: u64, keeps: usize) -> &AtomicEntry {
        let entries =
            self.entries.get_or_init(|| (0..keeps).map(|_| AtomicEntry::default()).collect());
        &entries[(index % keeps as u64) as usize]
    }

    fn read(&self, index: u64, keeps: usize) -> Option<OpEntry> {
        let entry = self.entry(index, keeps);
        if entry.index.load(Ordering::Acquire) != index + 1 {
            return None;
        }
        let (at, marks) = (entry.at.load(Ordering::Relaxed), entry.marks.load(Ordering::Relaxed));
        let (amount, call_site) = (entry.amount.load(Ordering::Relaxed), entry.call_site.load());
        let started_at = entry.started_at.load(Ordering::Relaxed);
        let finished_at = entry.finished_at.load(Ordering::Acquire);
        let has_gpu_times = |order| entry.on_gpu_index.load(order) == index + 1;
        let had_gpu_times = has_gpu_times(Ordering::Acquire);
        let on_gpu = entry.on_gpu.each_ref().map(|time| time.load(Ordering::Relaxed));
        std::sync::atomic::fence(Ordering::Acquire);
        if entry.index.load(Ordering::Relaxed) != index + 1 {
            return None;
        }
        let (group, bucket) = (marks >> 18, marks >> 1 & 0x1_ffff);
        Some(OpEntry {
            at: OpId::try_from(at).ok()?,
            group: group.checked_sub(1).map(|group| group as u32),
            bucket: bucket.checked_sub(1).map(|bucket| bucket as u16),
            amount,
            source_line: call_site.map_or(SourceLine::Unknown, SourceLine::Here),
            on_comm_thread: marks & 1 == 1,
            started_at: Duration::from_nanos(started_at),
            finished_at: (finished_at > 0).then(|| Duration::from_nanos(finished_at)),
            on_gpu: (had_gpu_times && has_gpu_times(Ordering::Relaxed))
                .then(|| on_gpu.map(Duration::from_nanos)),
        })
    }
}

/// Converts to nanoseconds; 64 bits are enough for centuries.
pub(super) fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn begin(sequence: u64) -> OpStart {
        OpStart {
            at: OpId { operation: Operation::AllReduce, sequence },
            group: Some(u32::MAX),
            bucket: Some(u16::MAX),
            amount: sequence * 3,
            call_site: Some(Location::caller()),
            on_comm_thread: false,
        }
    }

    #[test]
    fn recorded_operation_is_read_back() {
        let recorder = FlightRecorder::new(2, ENTRIES);
        let newest = |recorder: &FlightRecorder| recorder.entries(1, 0).next_back();
        assert!(newest(&recorder).is_none());
        let index = recorder.begin(1, begin(7));
        let open = newest(&recorder).unwrap();
        assert_eq!(open.finished_at, None);
        assert_eq!(open.at.to_string(), "all_reduce #7");
        assert_eq!((open.group, open.bucket), (Some(u32::MAX), Some(u16::MAX)));
        assert_eq!((open.amount, open.on_comm_thread), (21, false));
        assert!(open.source_line.to_string().contains("flight_recorder.rs:"));
        recorder.end(1, index);
        let done = newest(&recorder).unwrap();
        assert!(done.finished_at.unwrap() >= done.started_at && done.started_at == open.started_at);
        let other = OpStart {
            group: None,
            bucket: None,
            call_site: None,
            on_comm_thread: true,
            ..begin(8)
        };
        recorder.begin(1, other);
        let last = newest(&recorder).unwrap();
        assert!(last.on_comm_thread && last.source_line == SourceLine::Unknown);
        assert_eq!((last.group, last.bucket), (None, None));
        assert_eq!(recorder.entries(0, 0).count(), 0);
    }

    #[test]
    fn newest_entries_are_kept() {
        let recorder = FlightRecorder::new(1, ENTRIES);
        let first = recorder.begin(0, begin(0));
        for sequence in 1..3000 {
            let index = recorder.begin(0, begin(sequence));
            recorder.end(0, index);
        }
        recorder.end(0, first); // too late: a newer entry is there
        let entries: Vec<OpEntry> = recorder.entries(0, 0).collect();
        assert_eq!(entries.len(), ENTRIES);
        let sequences = entries.iter().map(|entry| entry.at.sequence);
        assert!(
            sequences.eq(3000 - 1024..3000)
                && entries.iter().all(|entry| entry.finished_at.is_some())
        );
        assert_eq!(recorder.entries(0, 2990).count(), 10);
    }

    /// Two threads of a rank write while a third one reads. No entry that it reads mixes two writes.
    #[test]
    fn concurrent_reads_return_whole_entries() {
        let recorder = FlightRecorder::new(1, ENTRIES);
        let write = |offset: u64| {
            for sequence in 0..50_000 {
                let index = recorder.begin(0, begin(2 * sequence + offset));
                recorder.end(0, index);
            }
        };
        std::thread::scope(|scope| {
            let writers = [scope.spawn(|| write(0)), scope.spawn(|| write(1))];
            while writers.iter().any(|writer| !writer.is_finished()) {
                for entry in recorder.entries(0, 0) {
                    assert_eq!(entry.amount, entry.at.sequence * 3);
                    assert!(
                        entry.finished_at.is_none_or(|finished_at| finished_at >= entry.started_at)
                    );
                }
            }
        });
        assert_eq!(recorder.count(0), 100_000);
    }
}
