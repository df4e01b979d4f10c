//! Stopping a run before its end: who asks, and after which step all ranks stop.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::deadline;

/// Why a run ends before all epochs are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum StopReason {
    /// Ctrl-C.
    Interrupt = 1,
    /// Somebody wants the process to end, as Slurm, Kubernetes and `kill` say it.
    Terminate,
    /// What a scheduler can be told to send before the time is over: `sbatch --signal=USR1@120`.
    User1,
    /// The time that it was given is over.
    Time,
    /// It has made as many steps as it was to.
    Steps,
    /// The validation loss has not become smaller for as long as it was to wait.
    NoProgress,
}

impl StopReason {
    const ALL: [StopReason; 6] = [
        StopReason::Interrupt,
        StopReason::Terminate,
        StopReason::User1,
        StopReason::Time,
        StopReason::Steps,
        StopReason::NoProgress,
    ];

    fn of(number: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|it| *it as usize == number)
    }

    /// Its number; 0 for none.
    fn number(reason: Option<Self>) -> usize {
        reason.map_or(0, |reason| reason as usize)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            StopReason::Interrupt => "SIGINT",
            StopReason::Terminate => "SIGTERM",
            StopReason::User1 => "SIGUSR1",
            StopReason::Time => "max-seconds",
            StopReason::Steps => "max-steps",
            StopReason::NoProgress => "patience",
        }
    }
}

/// How a run is asked to stop, from any thread or signal handler, and how its ranks agree on the step to stop
/// after. One for each run, shared by its ranks.
///
/// Whoever asks, each rank would see it at another step. So rank 0 alone looks, before each of its steps, and if
/// it is asked, publishes the number of that very step as the last one. Every rank compares after each step.
/// That needs no collective of its own, because a step has one: nobody's step `n` ends before rank 0 has taken
/// part in its all_reduce (with `DataParallel`, has sent out the parameters), which comes after publishing. So
/// whoever is through with step `n` sees that it was the last, and whoever is through with an earlier one finds
/// a number that is larger, or none: all stop after step `n`.
pub struct Stop {
    /// A [`StopReason`]'s number; 0 if nobody asks.
    asked: Arc<AtomicUsize>,
    /// Whether SIGTERM has come to this very process.
    terminated: Arc<AtomicBool>,
    deadline: Option<Instant>,
    /// What rank 0 has published: the last step, and why.
    last_step: AtomicU64,
    reason: AtomicUsize,
    tell: Option<Box<dyn Fn(StopReason) + Send + Sync>>,
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stop").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// No step.
const NEVER: u64 = u64::MAX;

/// What processes tell each other about a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StopMessage {
    /// What rank 0 has decided, if it has.
    last_step: u64,
    reason: Option<StopReason>,
    /// Who asks in the process that tells.
    asked: Option<StopReason>,
}

impl StopMessage {
    /// There is none.
    pub(crate) const NONE: Self = Self { last_step: NEVER, reason: None, asked: None };

    pub(crate) fn to_numbers(self) -> [u64; 3] {
        let [reason, asked] = [self.reason, self.asked].map(|it| StopReason::number(it) as u64);
        [self.last_step, reason, asked]
    }

    /// `None` for numbers that no process tells.
    pub(crate) fn from_numbers([last_step, reason, asked]: [u64; 3]) -> Option<Self> {
        let read = |number: u64| match usize::try_from(number).ok()? {
            0 => Some(None),
            number => StopReason::of(number).map(Some),
        };
        let (reason, asked) = (read(reason)?, read(asked)?);
        // A last step has a reason; a reason may be seen before its step.
        (last_step == NEVER || reason.is_some()).then_some(Self { last_step, reason, asked })
    }
}

impl Default for Stop {
    fn default() -> Self {
        Self {
            asked: Arc::default(),
            terminated: Arc::default(),
            deadline: None,
            last_step: AtomicU64::new(NEVER),
            reason: AtomicUsize::new(0),
            tell: None,
        }
    }
}

impl Stop {
    /// Nobody asks yet; with `time`, it asks by itself when that is over.
    pub fn new(time: Option<Duration>) -> Self {
        Self { deadline: time.map(deadline), ..Self::default() }
    }

    /// Has `tell` called once, on the thread of rank 0, when the run is going to stop.
    #[must_use]
    pub fn on_stop(self, tell: impl Fn(StopReason) + Send + Sync + 'static) -> Self {
        Self { tell: Some(Box::new(tell)), ..self }
    }

    /// Asks the run to stop, at its next step. The last one to ask is the reason.
    pub fn ask(&self, reason: StopReason) {
        self.asked.store(reason as usize, Ordering::Relaxed);
    }

    /// Where a signal handler writes the number of its reason.
    pub(crate) fn asked(&self) -> &Arc<AtomicUsize> {
        &self.asked
    }

    /// Where a signal handler notes SIGTERM; other processes' is not noted here.
    pub(crate) fn terminated(&self) -> &Arc<AtomicBool> {
        &self.terminated
    }

    /// Why the run has been asked to stop, if it has.
    pub(crate) fn asked_for(&self) -> Option<StopReason> {
        StopReason::of(self.asked.load(Ordering::Relaxed))
    }

    /// On rank 0, before it begins `step`.
    pub(crate) fn decide(&self, step: u64) {
        if self.last_step.load(Ordering::Relaxed) != NEVER {
            return;
        }
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let reason = match self.asked.load(Ordering::Relaxed) {
            0 if late => StopReason::Time as usize,
            asked => asked,
        };
        if reason != 0 {
            self.reason.store(reason, Ordering::Relaxed);
            self.last_step.store(step, Ordering::Release);
            if let (Some(tell), Some(reason)) = (&self.tell, StopReason::of(reason)) {
                tell(reason);
            }
        }
    }

    /// What this process tells the others.
    pub(crate) fn news(&self) -> StopMessage {
        let last_step = self.last_step.load(Ordering::Acquire);
        let reason = |it: &AtomicUsize| StopReason::of(it.load(Ordering::Relaxed));
        StopMessage { last_step, reason: reason(&self.reason), asked: reason(&self.asked) }
    }

    /// What another process has told; `decides` says whether that is the one of rank 0. It told so within its part of a
    /// step, so nobody is through with the step that is the last.
    pub(crate) fn merge(&self, decides: bool, news: StopMessage) {
        let StopMessage { last_step, reason, asked } = news;
        if decides && last_step != NEVER {
            self.reason.store(StopReason::number(reason), Ordering::Relaxed);
            self.last_step.store(last_step, Ordering::Release);
        }
        if asked.is_some() {
            self.asked.store(StopReason::number(asked), Ordering::Relaxed);
        }
    }

    /// On every rank: why the run ends after `steps` steps, if it does.
    pub(crate) fn after(&self, steps: u64) -> Option<StopReason> {
        if steps <= self.last_step.load(Ordering::Acquire) {
            return None;
        }
        StopReason::of(self.reason.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_that_rank_0_is_about_to_make_is_the_last() {
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        let stop = Stop::new(None).on_stop(move |reason| {
            count.fetch_add(reason as usize, Ordering::Relaxed);
        });
        stop.decide(3);
        stop.ask(StopReason::User1);
        assert_eq!(stop.after(4), None, "nobody but rank 0 decides");
        stop.ask(StopReason::Terminate);
        stop.decide(4);
        stop.ask(StopReason::Interrupt);
        stop.decide(5);
        assert_eq!((stop.after(4), stop.after(5)), (None, Some(StopReason::Terminate)));
        assert_eq!(stop.after(6), Some(StopReason::Terminate));
        assert_eq!(told.load(Ordering::Relaxed), StopReason::Terminate as usize, "once");
    }

    #[test]
    fn time_that_is_over_asks_by_itself() {
        let stop = Stop::new(Some(Duration::ZERO));
        stop.decide(0);
        assert_eq!(stop.after(1), Some(StopReason::Time));
        let stop = Stop::new(Some(Duration::MAX));
        stop.decide(0);
        assert_eq!(stop.after(1), None);
    }
}
