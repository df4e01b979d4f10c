//! Stopping a run early: the sources of a request, and the step after which all ranks stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use strum::{FromRepr, IntoStaticStr};

use crate::error::opaque_debug;

/// Reason for which a run ends before all epochs are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRepr, IntoStaticStr, Serialize, Deserialize)]
#[repr(usize)]
pub enum StopReason {
    /// SIGINT, from Ctrl-C.
    #[strum(to_string = "SIGINT")]
    Interrupt = 1,
    /// SIGTERM, from Slurm, Kubernetes or `kill`.
    #[strum(to_string = "SIGTERM")]
    Terminate,
    /// SIGHUP, when the terminal or the connection to it closes.
    #[strum(to_string = "SIGHUP")]
    HangUp,
    /// SIGUSR1, which a scheduler can send before the time limit: `sbatch --signal=USR1@120`.
    #[strum(to_string = "SIGUSR1")]
    User1,
    /// The time limit has passed.
    #[strum(to_string = "max-seconds")]
    Time,
    /// The maximum number of steps is reached.
    #[strum(to_string = "max-steps")]
    Steps,
    /// The validation loss has not improved within the patience.
    #[strum(to_string = "patience")]
    NoProgress,
    /// A key that the user has pressed.
    #[strum(to_string = "key press")]
    Key,
    /// A callback of the trainer asked for it.
    #[strum(to_string = "callback")]
    Callback,
}

impl StopReason {
    /// Returns whether it is a signal that asks a process to end.
    pub fn is_signal(self) -> bool {
        matches!(self, Self::Interrupt | Self::Terminate | Self::HangUp)
    }

    /// Returns the reason's number; 0 for `None`.
    fn number(reason: Option<Self>) -> usize {
        reason.map_or(0, |reason| reason as usize)
    }

    /// Returns the reason's name in reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A request to stop a run, from any thread or signal handler, and the agreement of its ranks on the last step. One per
/// run, shared by its ranks.
///
/// Each rank would see a request at a different step, so only rank 0 looks for one, before each of its steps. On a
/// request it publishes that step's number as the last one, and every rank compares after each step. No extra
/// collective is needed: no rank ends step `n` before rank 0 has taken part in the step's collectives. Rank 0 publishes
/// before that. A rank that ends step `n` therefore sees that it was the last; a rank that ends an earlier step sees a larger
/// number, or none. All ranks stop after step `n`.
#[derive(Default)]
pub struct StopRequest {
    /// Number of the requested [`StopReason`], which a signal handler sets; 0 without a request.
    pub(crate) asked: Arc<AtomicUsize>,
    /// Whether this process itself has received SIGTERM. SIGTERM of other processes does not set it.
    pub(crate) terminated: Arc<AtomicBool>,
    /// Whether the next SIGINT, SIGTERM or SIGHUP ends the process.
    pub(crate) next_signal_ends: Arc<AtomicBool>,
    /// When the run began, and for how long it may take.
    time: Option<(Instant, Duration)>,
    /// The number of steps after which all stop, published by rank 0; 0 while it has not. `reason` is published with it.
    last: AtomicU64,
    reason: AtomicUsize,
    notify: Option<Box<dyn Fn(StopReason) + Send + Sync>>,
    is_notified: AtomicBool,
}

opaque_debug!(StopRequest);

/// The message about a stop that processes send to each other.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StopMessage {
    /// The number of steps that rank 0 has published; 0 if it has not.
    last: u64,
    reason: Option<StopReason>,
    /// The reason of a request in the sending process.
    asked: Option<StopReason>,
}

impl StopMessage {
    pub(crate) fn to_numbers(self) -> [u64; 3] {
        let [reason, asked] =
            [self.reason, self.asked].map(|reason| StopReason::number(reason) as u64);
        [self.last, reason, asked]
    }

    /// Returns `None` for numbers that no process sends.
    pub(crate) fn from_numbers([last, reason, asked]: [u64; 3]) -> Option<Self> {
        let read = |number: u64| match usize::try_from(number).ok()? {
            0 => Some(None),
            number => StopReason::from_repr(number).map(Some),
        };
        let (reason, asked) = (read(reason)?, read(asked)?);
        // An end has a reason. The reason may be seen before the end.
        (last == 0 || reason.is_some()).then_some(Self { last, reason, asked })
    }
}

impl StopRequest {
    /// Returns a `StopRequest` without a request. If `time` is `Some`, the run stops when that has passed.
    pub fn new(time: Option<Duration>) -> Self {
        Self { time: time.map(|time| (Instant::now(), time)), ..Self::default() }
    }

    /// Calls `notify` once: when a signal has asked this process to stop, or when rank 0 decides that the run stops.
    #[must_use]
    pub fn on_stop(self, notify: impl Fn(StopReason) + Send + Sync + 'static) -> Self {
        Self { notify: Some(Box::new(notify)), ..self }
    }

    /// Requests the run to stop at its next step. The last request gives the reason.
    pub fn ask(&self, reason: StopReason) {
        self.asked.store(reason as usize, Ordering::Relaxed);
    }

    /// Requests the run to stop at its next step, unless that is requested already.
    pub fn ask_unless_asked(&self, reason: StopReason) {
        let relaxed = Ordering::Relaxed;
        let _ = self.asked.compare_exchange(0, reason as usize, relaxed, relaxed);
    }

    /// Calls the function of [`StopRequest::on_stop`], unless it has been called.
    pub(crate) fn notify(&self, reason: StopReason) {
        if let Some(notify) = &self.notify
            && !self.is_notified.swap(true, Ordering::Relaxed)
        {
            notify(reason);
        }
    }

    /// Prepares for another start of the run in this process, which goes on from a step before the end that rank 0 had
    /// published. A request of a callback is dropped: it may ask again. All others stay.
    #[doc(hidden)]
    pub fn begin_again(&self) {
        let (callback, relaxed) = (StopReason::Callback as usize, Ordering::Relaxed);
        let _ = self.asked.compare_exchange(callback, 0, relaxed, relaxed);
        self.last.store(0, relaxed);
        self.reason.store(0, relaxed);
    }

    /// Returns the reason of the request to stop, if there is one.
    pub fn request_reason(&self) -> Option<StopReason> {
        StopReason::from_repr(self.asked.load(Ordering::Relaxed))
    }

    /// Publishes `step` as the last one if a stop is requested. Called on rank 0 before it begins `step`.
    pub(crate) fn decide(&self, step: u64) {
        if self.last.load(Ordering::Relaxed) != 0 {
            return;
        }
        let is_over = self.time.is_some_and(|(began, time)| began.elapsed() >= time);
        if let Some(reason) = self.request_reason().or(is_over.then_some(StopReason::Time)) {
            self.reason.store(reason as usize, Ordering::Relaxed);
            self.last.store(step + 1, Ordering::Release);
            self.notify(reason);
        }
    }

    /// Returns the message of this process for the others.
    pub(crate) fn message(&self) -> StopMessage {
        let last = self.last.load(Ordering::Acquire);
        let reason = |number: &AtomicUsize| StopReason::from_repr(number.load(Ordering::Relaxed));
        StopMessage { last, reason: reason(&self.reason), asked: reason(&self.asked) }
    }

    /// Merges the message of another process; `decides` is true for the process of rank 0. That process sent it before
    /// its part of the last step, so no rank has ended that step yet.
    pub(crate) fn merge(&self, decides: bool, message: StopMessage) {
        let StopMessage { last, reason, asked } = message;
        if decides && last != 0 {
            self.reason.store(StopReason::number(reason), Ordering::Relaxed);
            self.last.store(last, Ordering::Release);
        }
        if let Some(asked) = asked {
            self.ask(asked);
        }
    }

    /// Returns the reason if the run ends after `steps` steps. Called on every rank.
    pub(crate) fn after(&self, steps: u64) -> Option<StopReason> {
        let StopMessage { last, reason, .. } = self.message();
        reason.filter(|_| last != 0 && steps >= last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_signals_and_the_time_outlast_a_start() {
        for (reason, asked) in [
            (StopReason::Terminate, Some(StopReason::Terminate)),
            (StopReason::Key, Some(StopReason::Key)),
            (StopReason::Callback, None),
        ] {
            let stop = StopRequest::new(None);
            stop.ask(reason);
            stop.decide(7);
            stop.begin_again();
            assert_eq!((stop.after(8), stop.request_reason()), (None, asked));
            stop.decide(2);
            assert_eq!(stop.after(3), asked);
        }
        let stop = StopRequest::new(Some(Duration::ZERO));
        stop.decide(7);
        stop.begin_again();
        stop.decide(2);
        assert_eq!((stop.after(2), stop.after(3)), (None, Some(StopReason::Time)));
    }

    #[test]
    fn stop_takes_effect_after_the_step_rank_0_decides() {
        let notified = Arc::new(AtomicUsize::new(0));
        let count = notified.clone();
        let stop = StopRequest::new(None).on_stop(move |reason| {
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
        assert_eq!(notified.load(Ordering::Relaxed), StopReason::Terminate as usize, "once");
    }

    #[test]
    fn time_limit_requests_a_stop() {
        let stop = StopRequest::new(Some(Duration::ZERO));
        stop.decide(0);
        assert_eq!(stop.after(1), Some(StopReason::Time));
        let stop = StopRequest::new(Some(Duration::MAX));
        stop.decide(0);
        assert_eq!(stop.after(1), None);
    }
}
