//! A clock that stands still while the system suspends the process, as Ctrl-Z, `docker pause` and `scontrol suspend` do. A wait
//! for other ranks, which were suspended as well, does not end because of that.

use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

/// How often a thread looks at the system's clock.
const TICK: Duration = Duration::from_millis(100);

/// After a longer time without a look the process was suspended.
const SUSPENDED: Duration = Duration::from_millis(500);

/// The clock of the process.
static CLOCK: Mutex<Option<Clock>> = Mutex::new(None);

/// The last look at the system's clock, and for how long the process ran and was suspended until then.
struct Clock {
    looked: std::time::Instant,
    ran: Duration,
    suspended: Duration,
}

impl Clock {
    fn new(now: std::time::Instant) -> Self {
        Self { looked: now, ran: Duration::ZERO, suspended: Duration::ZERO }
    }

    /// Looks at the system's clock, which shows `now`. If somebody looks at each tick, a long time without a look means
    /// that nobody could.
    fn look(&mut self, now: std::time::Instant, at_each_tick: bool) {
        let passed = now.saturating_duration_since(self.looked);
        let ran = if at_each_tick && passed >= SUSPENDED { TICK } else { passed };
        self.looked = now.max(self.looked);
        self.ran += ran;
        self.suspended += passed - ran;
    }
}

/// A time of the clock that stands still while the process is suspended. Like [`std::time::Instant`] otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    /// Returns the present time.
    pub(crate) fn now() -> Self {
        Self(Self::with_clock(|clock| clock.ran))
    }

    /// Returns for how long the process has been suspended so far.
    pub(crate) fn suspended() -> Duration {
        Self::with_clock(|clock| clock.suspended)
    }

    fn with_clock(read: impl FnOnce(&Clock) -> Duration) -> Duration {
        static LOOKS: OnceLock<bool> = OnceLock::new();
        let at_each_tick = *LOOKS.get_or_init(|| {
            // It runs as long as the process.
            let looks = || loop {
                thread::sleep(TICK);
                Self::now();
            };
            thread::Builder::new().name("clock".into()).spawn(looks).is_ok()
        });
        let mut clock = CLOCK.lock();
        let now = std::time::Instant::now();
        let clock = clock.get_or_insert_with(|| Clock::new(now));
        clock.look(now, at_each_tick);
        read(clock)
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
        let start = std::time::Instant::now();
        let mut clock = Clock::new(start);
        let mut look = |millis| {
            clock.look(start + Duration::from_millis(millis), true);
            (clock.ran.as_millis(), clock.suspended.as_millis())
        };
        assert_eq!([look(100), look(250), look(740)], [(100, 0), (250, 0), (740, 0)]);
        assert_eq!(look(60_740), (840, 59_900), "a minute of suspension");
        assert_eq!([look(60_839), look(60_838), look(60_840)].map(|it| it.0), [939, 939, 940]);
        // Without a thread that looks, all time counts: a wait must end.
        clock.look(start + Duration::from_secs(120), false);
        assert_eq!(clock.ran.as_millis(), 940 + 120_000 - 60_840);
    }
}
