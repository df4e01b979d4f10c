//! The communication thread: runs a rank's collectives while the rank does something else.
//!
//! The first asynchronous operation of a group starts the thread. The rank's side of the group moves to the thread,
//! and back when the rank itself calls something. This keeps the rank's calls in order, and a rank with synchronous
//! collectives only pays nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;
use tch::Device;

use super::ProcessGroup;
use super::backend::SequencedBackend;
use crate::error::{Error, Result};
use crate::ffi::cuda::CudaStream;
use crate::ffi::set_multithreading_enabled;
use crate::os::limits::not_started;
use crate::runtime::panics;

/// The stack size, that of a rank's own thread: closures of users run here. Only the used part takes memory.
const STACK_BYTES: usize = 64 << 20;

/// A queued call of an operation.
pub(super) type QueuedCall = Box<dyn FnOnce(&ProcessGroup) -> Result<()> + Send>;

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

/// The time in which a communication thread ran operations.
#[derive(Debug, Default)]
struct BusyTime {
    total: Duration,
    /// When the current operation began.
    since: Option<Instant>,
}

impl BusyTime {
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
            for job in jobs_rx {
                match job {
                    Job::Attach(side) => group.attach(side),
                    Job::GiveBack => {
                        if let Some(side) = group.detach() {
                            let _ = returned_tx.send(side); // the rank waits for it
                        }
                    }
                    Job::Run(call, result) => {
                        busy.lock().since = Some(Instant::now());
                        let ended = run_job(&group, stream.as_ref(), call);
                        let mut busy = busy.lock();
                        *busy = BusyTime { total: busy.so_far(), since: None };
                        drop(busy);
                        let _ = result.send(ended); // fails if the `Work` was dropped
                        run.end_pending(rank);
                    }
                }
            }
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

/// Runs `call` with the rank's own `stream`, if it has a GPU. Reports a failure to the run, because the rank may never
/// ask for the result.
fn run_job(group: &ProcessGroup, stream: Option<&CudaStream>, call: QueuedCall) -> Result<()> {
    let (run, rank) = (group.run(), group.global_rank());
    let work = || {
        if let Some(stream) = stream {
            stream.set_current()?;
        }
        call(group)
    };
    let at = || Some(group.activity().now());
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
