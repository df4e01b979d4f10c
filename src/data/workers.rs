//! Worker threads that load batches ahead of time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crossbeam::channel::{Receiver, Sender, bounded};
use tch::Tensor;

use super::Dataset;
use crate::error::{Error, Result};
use crate::os::limits::not_started;
use crate::process_group::ProcessGroup;
use crate::runtime::panics;

/// The number of worker threads, and the number of batches that each loads ahead.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workers {
    pub count: usize,
    pub prefetch: usize,
}

type Loaded = Result<(Tensor, Tensor)>;

/// The worker threads of one epoch. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Loading {
    group: Rc<ProcessGroup>,
    /// One channel per thread. Batch `n` comes from thread `n % count`, so the order is the same as without workers.
    arrive: Vec<Receiver<Loaded>>,
    threads: Vec<JoinHandle<()>>,
    next: usize,
}

impl Workers {
    /// Starts threads that load `batches` of `dataset`.
    pub(super) fn start(
        self,
        dataset: &Arc<dyn Dataset>,
        batches: Vec<Vec<usize>>,
        group: &Rc<ProcessGroup>,
    ) -> Result<Loading> {
        let batches = Arc::new(batches);
        let mut loading =
            Loading { group: group.clone(), arrive: Vec::new(), threads: Vec::new(), next: 0 };
        for worker in 0..self.count.min(batches.len()) {
            let (send, receive) = bounded(self.prefetch);
            let (dataset, batches, step) = (dataset.clone(), batches.clone(), self.count);
            let name = format!("loader{}.{worker}", group.rank());
            let work = move || load(&*dataset, batches.iter().skip(worker).step_by(step), &send);
            let thread = Builder::new().name(name).spawn(work).map_err(|error| Error::Data {
                samples: "with workers".into(),
                reason: not_started(&format!("worker {worker} of {}", self.count), &error),
            })?;
            loading.arrive.push(receive);
            loading.threads.push(thread);
        }
        Ok(loading)
    }
}

fn load<'a>(
    dataset: &dyn Dataset,
    batches: impl Iterator<Item = &'a Vec<usize>>,
    send: &Sender<Loaded>,
) {
    // The cores are for the ranks' own kernels.
    tch::set_num_threads(1);
    panics::watch_this_thread();
    for indices in batches {
        let batch = catch_unwind(AssertUnwindSafe(|| dataset.batch(indices)));
        let batch = batch.unwrap_or_else(|panic| Err(panics::error(panic)));
        let failed = batch.is_err();
        // The send fails if the epoch ended early.
        if send.send(batch.map_err(Error::data(indices))).is_err() || failed {
            return;
        }
    }
}

impl Loading {
    /// Waits for the next batch and returns it.
    pub(super) fn next(&mut self) -> Loaded {
        let worker = self.next % self.arrive.len();
        self.next += 1;
        let ended = || Error::Data {
            samples: "with workers".into(),
            reason: format!("worker {worker} has ended after an error"),
        };
        self.group.receive(&self.arrive[worker])?.unwrap_or_else(|| Err(ended()))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.arrive.clear(); // a thread that sends a batch then fails and ends
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // its panics have been caught
        }
    }
}
