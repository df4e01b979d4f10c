//! What a rank's losses of an epoch add up to, where other ranks can read it although that rank has failed.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The losses of one rank in the epoch so far, after each of its last two steps. Memory of zeros is a valid record.
///
/// A rank writes it before the gradients of a step are averaged, except with a step of the program's own. So whoever has the
/// averages can read what all ranks have written. A rank is at most one step ahead of another, so two entries are enough.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct LossRecord([Entry; 2]);

#[derive(Debug, Default)]
#[repr(C)]
struct Entry {
    /// The number of steps; 0 if there is no entry.
    steps: AtomicU64,
    /// The bits of the sum.
    sum: AtomicU64,
    counted: AtomicU64,
}

/// The losses of one rank in the epoch so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RecordedLosses {
    /// The sum of the losses of the samples.
    pub sum: f64,
    /// What the batches count as, if the criterion counts.
    pub counted: u64,
}

impl LossRecord {
    fn entry(&self, steps: u64) -> &Entry {
        &self.0[(steps % 2) as usize]
    }

    /// Records the losses up to the end of step number `steps`, counted from 1.
    pub(crate) fn write(&self, steps: u64, losses: RecordedLosses) {
        let entry = self.entry(steps);
        entry.steps.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        entry.sum.store(losses.sum.to_bits(), Ordering::Relaxed);
        entry.counted.store(losses.counted, Ordering::Relaxed);
        entry.steps.store(steps, Ordering::Release);
    }

    /// Returns the number of steps and the losses of the newest entry, as numbers to send; zeros without an entry.
    pub(crate) fn newest(&self) -> [u64; 3] {
        let [even, odd] = &self.0;
        let steps = |entry: &Entry| entry.steps.load(Ordering::Acquire);
        let entry = if steps(even) > steps(odd) { even } else { odd };
        let [sum, counted] = [&entry.sum, &entry.counted].map(|it| it.load(Ordering::Relaxed));
        [steps(entry), sum, counted]
    }

    /// Records what [`newest`](Self::newest) has returned for a rank of another host.
    pub(crate) fn receive(&self, [steps, sum, counted]: [u64; 3]) {
        if steps > 0 {
            self.write(steps, RecordedLosses { sum: f64::from_bits(sum), counted });
        }
    }

    /// Returns the losses up to the end of step number `steps`; `None` if the rank has not recorded them.
    pub(crate) fn read(&self, steps: u64) -> Option<RecordedLosses> {
        let entry = self.entry(steps);
        let is_there = entry.steps.load(Ordering::Acquire) == steps;
        let sum = f64::from_bits(entry.sum.load(Ordering::Relaxed));
        let counted = entry.counted.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        // The rank may have begun to write the entry of a later step.
        let is_same = entry.steps.load(Ordering::Relaxed) == steps;
        (steps > 0 && is_there && is_same).then_some(RecordedLosses { sum, counted })
    }

    /// Removes what an earlier training has recorded.
    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|entry| entry.steps.store(0, Ordering::Release));
    }
}
