//! A clock that stands still while the system suspends the process, as Ctrl-Z, `docker pause` and `scontrol suspend` do. A
//! wait for other ranks, which were suspended as well, does not end because of that, and no rank is blamed for that time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::flight_recorder::nanos;

/// How often a thread looks at the system's clock, in nanoseconds.
const TICK: u64 = 100_000_000;

/// After a longer time without a look the process was suspended.
const SUSPENDED: u64 = 5 * TICK;

/// The clock of the process.
static CLOCK: Clock = Clock::new();

/// The system's time of the last look, and for how long the process was suspended until then, in nanoseconds from the first.
struct Clock {
    looked: AtomicU64,
    suspended: AtomicU64,
    /// Held by who changes them.
    changes: Mutex<()>,
}

impl Clock {
    const fn new() -> Self {
        Self { looked: AtomicU64::new(0), suspended: AtomicU64::new(0), changes: Mutex::new(()) }
    }

    /// Looks at the system's clock, which shows `now`.
    fn look(&self, now: u64) {
        let _change = self.changes.lock();
        let passed = now.saturating_sub(self.looked.load(Ordering::Relaxed));
        if passed >= SUSPENDED {
            self.suspended.fetch_add(passed - TICK, Ordering::Release);
        }
        self.looked.fetch_max(now, Ordering::Release); // last, for who reads both
    }

    /// Returns for how long the process has run when the system's clock shows `now`. Takes a lock when a tick has passed since
    /// the last look: the process runs, even if the thread that looks has to wait for a CPU, so that no time that was shown
    /// is taken back.
    fn ran(&self, now: u64) -> u64 {
        if now.saturating_sub(self.looked.load(Ordering::Acquire)) >= TICK {
            self.look(now);
        }
        now.saturating_sub(self.suspended.load(Ordering::Acquire))
    }
}

/// A time of the clock that stands still while the process is suspended. Like [`std::time::Instant`] otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    /// Returns the present time.
    pub(crate) fn now() -> Self {
        static BEGAN: OnceLock<(std::time::Instant, bool)> = OnceLock::new();
        let (began, at_each_tick) = BEGAN.get_or_init(|| {
            let began = std::time::Instant::now();
            // It runs as long as the process.
            let look = move || loop {
                thread::sleep(Duration::from_nanos(TICK));
                CLOCK.look(nanos(began.elapsed()));
            };
            (began, thread::Builder::new().name("clock".into()).spawn(look).is_ok())
        });
        let now = nanos(began.elapsed());
        // Without the thread all time counts: a wait must end.
        Self(Duration::from_nanos(if *at_each_tick { CLOCK.ran(now) } else { now }))
    }

    /// Returns for how long the process was suspended so far.
    pub(crate) fn suspended() -> Duration {
        Duration::from_nanos(CLOCK.suspended.load(Ordering::Acquire))
    }

    /// Returns the time since this one, without the time in which the process was suspended.
    pub(crate) fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_stands_still_while_nobody_can_look() {
        let clock = Clock::new();
        let ran = |millis: u64| clock.ran(millis * 1_000_000) / 1_000_000;
        let look = |millis: u64| clock.look(millis * 1_000_000);
        assert_eq!([50, 250, 499].map(ran), [50, 250, 499]);
        look(450);
        assert_eq!(ran(900), 900);
        // A minute of suspension: whoever looks first counts one tick of it.
        assert_eq!([60_900, 60_901, 60_899].map(ran), [1000, 1001, 999]);
        look(61_000);
        assert_eq!([61_001, 61_400].map(ran), [1101, 1500]);
    }

    /// On a busy machine the thread that looks may get no CPU for longer than a suspension.
    #[test]
    fn clock_goes_on_while_others_read_it() {
        let clock = Clock::new();
        let times = (0..2000).step_by(99).map(|millis| (millis, clock.ran(millis * 1_000_000)));
        times.for_each(|(millis, ran)| assert_eq!(ran, millis * 1_000_000));
        // The last reading before a suspension is not taken back.
        let before = clock.ran(2_070_000_000);
        assert!(clock.ran(60_000_000_000) >= before);
    }
}
