//! The communication thread: runs a rank's collectives while the rank does something else.
//!
//! The first asynchronous operation of a group starts the thread. The rank's side of the group moves to the thread,
//! and back when the rank itself calls something. This keeps the rank's calls in order, and a rank with synchronous
//! collectives only pays nothing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Select, Sender, bounded, unbounded};
use parking_lot::Mutex;
use tch::Device;

use super::ProcessGroup;
use super::backend::SequencedBackend;
use super::network::{InFlight, Started};
use crate::error::{Error, Result};
use crate::ffi::cuda::CudaStream;
use crate::ffi::set_multithreading_enabled;
use crate::operation::OpId;
use crate::os::limits::not_started;
use crate::runtime::{SpanId, panics};

/// The stack size, that of a rank's own thread: closures of users run here. Only the used part takes memory.
const STACK_BYTES: usize = 64 << 20;

/// A queued call of an operation. Returns `Some` if it continues in the background while the thread does the next one.
pub(super) type QueuedCall =
    Box<dyn FnOnce(&ProcessGroup) -> Result<Option<(InFlight, SpanId)>> + Send>;

/// An operation in the background, the id of its entry, and the channel for its result.
type InBackground = (InFlight, SpanId, Sender<Result<()>>);

enum Job {
    /// Take over the rank's side of the group.
    Attach(SequencedBackend),
    /// Make the call and send its result.
    Run(QueuedCall, Sender<Result<()>>),
    /// Send the rank's side of the group back.
    GiveBack,
}

/// The rank's end of the channels to its communication thread. After this is dropped, the thread does all queued
/// jobs and ends.
#[derive(Debug)]
pub(super) struct CommunicationThread {
    jobs_tx: Sender<Job>,
    returned_rx: Receiver<SequencedBackend>,
    busy: Arc<Mutex<BusyTime>>,
}

/// The time in which a communication thread had operations under way.
#[derive(Debug, Default)]
struct BusyTime {
    total: Duration,
    /// The number of operations under way, and when the first of them began.
    running: usize,
    since: Option<Instant>,
}

impl BusyTime {
    fn begin(&mut self) {
        self.since.get_or_insert_with(Instant::now);
        self.running += 1;
    }

    fn end(&mut self) {
        self.running -= 1;
        if self.running == 0 {
            self.total = self.so_far();
            self.since = None;
        }
    }

    fn so_far(&self) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl CommunicationThread {
    /// Starts a communication thread for the calling rank, the member `group`.
    pub(super) fn start(group: &ProcessGroup) -> Result<Self> {
        let (jobs_tx, jobs_rx) = unbounded();
        let (returned_tx, returned_rx) = bounded(1);
        let make_group = group.on_another_thread();
        let stream = match group.device() {
            Device::Cuda(gpu) => Some(CudaStream::current(gpu)?),
            _ => None,
        };
        let rank = group.global_rank();
        let busy = Arc::<Mutex<BusyTime>>::default();
        let busy_there = busy.clone();
        let main = move || {
            let busy = busy_there;
            let group = make_group();
            let run = group.run();
            run.cancel.register();
            panics::watch_this_thread();
            set_multithreading_enabled(false);
            let mut in_flight: VecDeque<InBackground> = VecDeque::new();
            let tell = |result: Sender<Result<()>>, ended| {
                busy.lock().end();
                let _ = result.send(ended); // fails if the `Work` was dropped
                run.end_pending(rank);
            };
            let finish = |(work, entry, result): InBackground| {
                let InFlight { network, started } = work;
                let end = |group: &ProcessGroup| {
                    network.finish(&started).map(|()| group.record_end(entry))
                };
                tell(result, run_job(&group, stream.as_ref(), Some(started.at), end));
            };
            loop {
                // Whichever comes first: a job, or the end of the oldest operation in flight.
                if let Some((oldest, ..)) = in_flight.front()
                    && ends_before_a_job(&oldest.started, &jobs_rx, run.cancel.tripped())
                {
                    in_flight.pop_front().into_iter().for_each(finish);
                    continue;
                }
                let Ok(job) = jobs_rx.recv() else { break };
                match job {
                    Job::Attach(side) => group.attach(side),
                    Job::GiveBack => {
                        in_flight.drain(..).for_each(finish);
                        if let Some(side) = group.detach() {
                            let _ = returned_tx.send(side); // the rank waits for it
                        }
                    }
                    Job::Run(call, result) => {
                        busy.lock().begin();
                        match run_job(&group, stream.as_ref(), None, call) {
                            Ok(Some((work, entry))) => in_flight.push_back((work, entry, result)),
                            Ok(None) => tell(result, Ok(())),
                            Err(error) => tell(result, Err(error)),
                        }
                    }
                }
            }
            in_flight.drain(..).for_each(finish);
            run.cancel.deregister();
        };
        let name = format!("rank{rank}-comm");
        let thread = thread::Builder::new().name(name).stack_size(STACK_BYTES);
        thread.spawn(main).map_err(|error| {
            Error::unsupported(not_started(&format!("rank {rank}'s communication thread"), &error))
        })?;
        Ok(Self { jobs_tx, returned_rx, busy })
    }

    /// Hands over the rank's side of the group.
    pub(super) fn attach(&self, side: SequencedBackend) {
        self.send(Job::Attach(side));
    }

    /// Queues `call`. Returns the channel that will receive its result.
    pub(super) fn run(&self, group: &ProcessGroup, call: QueuedCall) -> Receiver<Result<()>> {
        let (result_tx, result_rx) = bounded(1);
        group.run().begin_pending(group.global_rank());
        self.send(Job::Run(call, result_tx));
        result_rx
    }

    /// Returns for how long operations have been under way.
    pub(super) fn busy(&self) -> Duration {
        self.busy.lock().so_far()
    }

    /// Takes the rank's side of the group back. Waits until all queued calls are over; each of them ends.
    pub(super) fn give_back(&self) -> Option<SequencedBackend> {
        self.send(Job::GiveBack);
        self.returned_rx.recv().ok()
    }

    fn send(&self, job: Job) {
        let _ = self.jobs_tx.send(job); // the thread receives until this sender is dropped
    }
}

/// Waits for the next job, for the end or the deadline of `started`, or for a cancelled run. Returns `false` if a job
/// came first.
fn ends_before_a_job(
    started: &Started,
    jobs: &Receiver<Job>,
    cancelled: &Receiver<Infallible>,
) -> bool {
    let mut select = Select::new_biased();
    select.recv(cancelled);
    select.recv(&started.ended);
    let job = select.recv(jobs);
    loop {
        match select.ready_timeout(started.deadline.left()) {
            Err(_) if !started.deadline.is_over() => {} // the process was suspended
            ready => return ready != Ok(job),
        }
    }
}

/// Runs `call` with the rank's own `stream`, if it has a GPU. `at` names the operation whose end it waits for, if it does
/// only that. Reports a failure to the run, because the rank may never ask for the result.
fn run_job<T>(
    group: &ProcessGroup,
    stream: Option<&CudaStream>,
    at: Option<OpId>,
    call: impl FnOnce(&ProcessGroup) -> Result<T>,
) -> Result<T> {
    let (run, rank) = (group.run(), group.global_rank());
    let work = || {
        if let Some(stream) = stream {
            stream.set_current()?;
        }
        call(group)
    };
    let at = || at.or_else(|| Some(group.activity().now()));
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let cause = panics::describe(&*panic);
        run.report_at(rank, at(), None, cause.clone());
        run.check(rank)?;
        Err(Error::unsupported(cause)) // not reached: the report has cancelled the run
    });
    if let Err(error) = &result {
        run.report_at(rank, at(), Some(error), error.to_string());
    }
    result
}
