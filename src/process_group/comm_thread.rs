//! The thread that carries on a rank's collectives while the rank does something else.
//!
//! It is started by the first asynchronous operation of a group. The rank's side of the group moves there
//! and comes back when the rank calls something itself, so that the order of its calls is kept and a rank
//! that never asks for more than synchronous collectives pays nothing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crossbeam::channel::{Receiver, Select, Sender, bounded, unbounded};
use tch::Device;

use super::gloo::InFlight;
use super::{ProcessGroup, SequencedBackend};
use crate::error::{Error, Result};
use crate::ffi::limits::not_started;
use crate::ffi::{cuda, set_multithreading_enabled};
use crate::operation::OpId;
use crate::runtime::{SpanId, panics};

/// As much as a rank's own thread has: closures of users run here. Only what is used becomes memory.
const STACK_BYTES: usize = 64 << 20;

/// What it is asked to do. What is left may go on by itself, while the thread does the next.
pub(super) type Operation =
    Box<dyn FnOnce(&ProcessGroup) -> Result<Option<(InFlight, SpanId)>> + Send>;

enum Job {
    /// Go on from here.
    Take(SequencedBackend),
    /// Do this, and tell how it ended.
    Run(Operation, Sender<Result<()>>),
    /// Send it back.
    GiveBack,
}

/// A rank's end of the channels to its thread. The thread ends when this is dropped and all is done.
#[derive(Debug)]
pub(super) struct CommunicationThread {
    jobs: Sender<Job>,
    returned: Receiver<SequencedBackend>,
}

impl CommunicationThread {
    /// Starts a thread for the rank that `group` belongs to, which is the calling one.
    pub(super) fn start(group: &ProcessGroup) -> Result<Self> {
        let (jobs, received) = unbounded();
        let (give_back, returned) = bounded(1);
        let make_group = group.on_another_thread();
        let rank = group.global_rank();
        let main = move || {
            let group = make_group();
            let run = group.run();
            run.cancel.register();
            panics::watch_this_thread();
            set_multithreading_enabled(false);
            let mut in_flight: VecDeque<(InFlight, SpanId, Sender<Result<()>>)> = VecDeque::new();
            let tell = |result: Sender<Result<()>>, ended| {
                let _ = result.send(ended); // need not be waited for
                run.end_pending(rank);
            };
            let finish = |(work, record, result): (InFlight, SpanId, Sender<Result<()>>)| {
                let at = work.at();
                let end = |group: &ProcessGroup| work.wait().map(|()| group.record_end(record));
                tell(result, run_job(&group, Some(at), end));
            };
            loop {
                // Whatever is there first: a job, or an end.
                if let Some((oldest, ..)) = in_flight.front()
                    && ends_before_a_job(oldest, &received, run.cancel.tripped())
                {
                    in_flight.pop_front().into_iter().for_each(finish);
                    continue;
                }
                let Ok(job) = received.recv() else { break };
                match job {
                    Job::Take(side) => group.take(side),
                    Job::GiveBack => {
                        in_flight.drain(..).for_each(finish);
                        if let Some(side) = group.detach() {
                            let _ = give_back.send(side); // whoever asked waits for it
                        }
                    }
                    Job::Run(operation, result) => match run_job(&group, None, operation) {
                        Ok(Some((work, record))) => in_flight.push_back((work, record, result)),
                        Ok(None) => tell(result, Ok(())),
                        Err(error) => tell(result, Err(error)),
                    },
                }
            }
            in_flight.drain(..).for_each(finish);
            run.cancel.deregister();
        };
        let name = format!("rank{rank}-comm");
        let thread = thread::Builder::new().name(name).stack_size(STACK_BYTES);
        thread.spawn(main).map_err(|error| {
            Error::Unsupported(not_started(&format!("rank {rank}'s communication thread"), &error))
        })?;
        Ok(Self { jobs, returned })
    }

    /// Hands over the rank's side of the group.
    pub(super) fn take(&self, side: SequencedBackend) {
        self.send(Job::Take(side));
    }

    /// Queues `operation`; how it ends will be in the channel.
    pub(super) fn run(&self, group: &ProcessGroup, operation: Operation) -> Receiver<Result<()>> {
        let (sender, result) = bounded(1);
        group.run().begin_pending(group.global_rank());
        self.send(Job::Run(operation, sender));
        result
    }

    /// Takes the rank's side of the group back, when all that was queued is over: each of it ends.
    pub(super) fn give_back(&self) -> Option<SequencedBackend> {
        self.send(Job::GiveBack);
        self.returned.recv().ok()
    }

    fn send(&self, job: Job) {
        let _ = self.jobs.send(job); // the thread listens as long as this end lives
    }
}

/// Waits for the next job, or until `work` has ended or must.
fn ends_before_a_job(
    work: &InFlight,
    jobs: &Receiver<Job>,
    cancelled: &Receiver<Infallible>,
) -> bool {
    let mut select = Select::new_biased();
    select.recv(cancelled);
    select.recv(work.ended());
    let job = select.recv(jobs);
    select.ready_timeout(work.time_left()) != Ok(job)
}

/// Does one operation, or at `at` waits for its end. The run learns of a failure here, because its rank may never
/// ask.
fn run_job<T>(
    group: &ProcessGroup,
    at: Option<OpId>,
    operation: impl FnOnce(&ProcessGroup) -> Result<T>,
) -> Result<T> {
    let (run, rank) = (group.run(), group.global_rank());
    let work = || {
        if let Device::Cuda(gpu) = group.device() {
            cuda::set_device(gpu)?;
        }
        operation(group)
    };
    let at = || at.or_else(|| Some(group.activity().now()));
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let cause = panics::describe(&*panic);
        run.report_at(rank, at(), None, cause.clone());
        run.check(rank)?;
        Err(Error::Unsupported(cause)) // the report has cancelled the run, so this does not happen
    });
    if let Err(error) = &result {
        run.report_at(rank, at(), Some(error), error.to_string());
    }
    result
}
