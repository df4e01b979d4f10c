//! The wait for the threads of the ranks: until all have ended or one has failed, and then until all have come back or the
//! grace period is over.

use std::mem;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::Receiver;
use crossbeam::select;

use super::Spawn;
use super::stopping::Stopping;
use crate::error::counted;
use crate::launch::stall::{Stall, stalled, status_table};
use crate::operation::Operation;
use crate::runtime::{Deadline, Instant, RunContext};

/// The shortest interval between checks for stalls.
const MIN_STALL_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The longest interval between checks for stalls.
const MAX_STALL_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between checks for a request to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long the other ranks get to come back from their collectives when some hang after a signal.
const AFTER_HANG: Duration = Duration::from_secs(1);

/// The time from a failure until the user learns of it although ranks have not come back.
const NOTICE_AFTER: Duration = Duration::from_secs(3);

/// A rank's thread, as seen by the supervisor.
pub(super) enum Thread<T> {
    /// Runs, or has not been joined yet.
    Runs(JoinHandle<Option<T>>),
    /// Has ended, with the result of its function; `None` if that failed.
    Ended(Option<T>),
}

impl<T> Thread<T> {
    pub(super) fn runs(&self) -> bool {
        matches!(self, Thread::Runs(_))
    }

    pub(super) fn value(self) -> Option<T> {
        match self {
            Thread::Runs(_) => None,
            Thread::Ended(value) => value,
        }
    }
}

/// The state of the wait.
pub(super) struct Watching<'a, T> {
    spawn: &'a Spawn,
    run: &'a RunContext,
    ended_rx: &'a Receiver<usize>,
    threads: &'a mut [Thread<T>],
    /// How many threads have not ended.
    running: usize,
    /// The interval between checks for stalls.
    poll: Duration,
    last_look: Instant,
    /// The stall that the user knows of.
    last_notice: Option<Stall>,
    stopping: Option<Stopping<'a>>,
}

impl<'a, T> Watching<'a, T> {
    pub(super) fn new(
        spawn: &'a Spawn,
        run: &'a RunContext,
        ended_rx: &'a Receiver<usize>,
        threads: &'a mut [Thread<T>],
    ) -> Self {
        let running = threads.len();
        let poll = spawn.stall_warning.div_f64(8.0);
        Self {
            spawn,
            run,
            ended_rx,
            threads,
            running,
            poll: poll.clamp(MIN_STALL_POLL_INTERVAL, MAX_STALL_POLL_INTERVAL),
            last_look: Instant::now(),
            last_notice: None,
            stopping: None,
        }
    }

    /// Joins the threads as they end, and gives up on the rest when the grace period is over. A thread that still
    /// runs then did not come back. Returns the status table of the ranks at the failure; `None` without a failure.
    pub(super) fn watch(mut self) -> Option<String> {
        self.until_failure();
        let table = self.table_of_failure();
        self.until_all_return(self.time_to_return());
        table
    }

    /// Waits until all threads have ended, or the run has failed.
    fn until_failure(&mut self) {
        while self.running > 0 && self.run.cancel.cancelled_by().is_none() {
            select! {
                recv(self.ended_rx) -> ended => match ended {
                    Ok(ended) => self.ended(ended),
                    Err(_) => {
                        let why = "a rank's thread has ended without a result";
                        return self.run.report(self.run.local_ranks.start, None, why.into());
                    }
                },
                recv(self.spawn.status_requests) -> _ => {
                    let table = status_table(self.run);
                    self.spawn.observers.warn(format!("what each rank does\n{table}"));
                }
                recv(self.run.cancel.tripped()) -> _ => return,
                default(self.poll.min(STOP_POLL_INTERVAL)) => self.look(),
            }
        }
    }

    /// Looks whether the run is to stop, and whether ranks are stalled. The user learns of both.
    fn look(&mut self) {
        let stall_warning = self.spawn.stall_warning;
        let mut limit = (self.last_look.elapsed() >= self.poll).then_some(stall_warning);
        if self.stopping.is_none() {
            self.stopping = self.spawn.stop.as_deref().and_then(Stopping::begin);
            if self.stopping.is_some() {
                // The user learns what the stop waits for, also if that is known from an earlier warning.
                limit = Some(stall_warning.min(MAX_STALL_POLL_INTERVAL));
                self.last_notice = None;
            }
        }
        let grace_period = self.spawn.joined_launch.grace_period;
        let hang =
            self.stopping.as_mut().and_then(|stopping| stopping.hang(self.run, grace_period));
        match (hang, limit) {
            (Some(hang), _) => self.run.report_failure(hang),
            (None, Some(limit)) => self.warn_of_stall(limit),
            (None, None) => {}
        }
    }

    /// Warns of ranks that have not made progress for `limit`, once of each stall.
    fn warn_of_stall(&mut self, limit: Duration) {
        self.last_look = Instant::now();
        if let Some((stall, _)) = stalled(self.run, limit)
            && self.last_notice != Some(stall)
            && let Some(text) = stall.text(self.run, limit)
        {
            self.spawn.observers.warn(text);
            self.last_notice = Some(stall);
        }
    }

    /// Joins the thread with this index. Its last act is behind it, and it cannot have panicked.
    fn ended(&mut self, index: usize) {
        self.running -= 1;
        if let Thread::Runs(thread) = mem::replace(&mut self.threads[index], Thread::Ended(None)) {
            self.threads[index] = Thread::Ended(thread.join().ok().flatten());
        }
    }

    /// Returns what the ranks do at the failure; `None` without one.
    fn table_of_failure(&self) -> Option<String> {
        self.run.cancel.cancelled_by()?;
        if self.run.failures().first().is_some_and(|failure| failure.waited) {
            self.run.poll_peers();
        }
        Some(status_table(self.run))
    }

    /// Returns how long the ranks have after a failure. Ranks that hang after a signal have had their grace period. A
    /// checkpoint that is being written is completed.
    fn time_to_return(&self) -> Duration {
        let was_stopped =
            self.run.failures().first().is_some_and(|failure| failure.stopped.is_some());
        let grace_period = self.spawn.joined_launch.grace_period;
        if was_stopped && !self.saves() { grace_period.min(AFTER_HANG) } else { grace_period }
    }

    /// Returns whether a rank of this process saves a checkpoint.
    fn saves(&self) -> bool {
        let now = |rank: usize| self.run.activity[rank].now().operation;
        self.run.local_ranks.clone().any(|rank| now(rank) == Operation::Save)
    }

    /// Waits until all threads have ended, or `grace_period` is over. A rank may hang in a library, such as NCCL's abort,
    /// so the failure is shown before that.
    fn until_all_return(&mut self, grace_period: Duration) {
        let (mut end, notice) = (Deadline::after(grace_period), Deadline::after(NOTICE_AFTER));
        let longest = Deadline::after(self.spawn.joined_launch.grace_period);
        let mut is_shown = grace_period <= NOTICE_AFTER;
        while self.running > 0 {
            match (if is_shown { end } else { notice }).recv(self.ended_rx) {
                Ok(ended) => self.ended(ended),
                Err(_) if is_shown => {
                    // A rank that has begun to save meanwhile completes it.
                    if longest.is_over() || !self.saves() {
                        return;
                    }
                    end = Deadline::after(AFTER_HANG);
                }
                Err(_) => {
                    is_shown = true;
                    self.show_failure(grace_period);
                }
            }
        }
    }

    fn show_failure(&self, grace_period: Duration) {
        let failures = self.run.failures();
        let Some(failure) = failures.first() else { return };
        let (failure, running) = (self.spawn.with_devices(failure), counted(self.running, "rank"));
        self.spawn.observers.warn(format!(
            "{failure}; {running} of this process did not come back within {NOTICE_AFTER:?}; the process ends \
             {grace_period:?} (--grace-period) after the failure"
        ));
    }
}
