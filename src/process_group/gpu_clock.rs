//! When a rank's GPU has done what the rank has launched: the host only launches, and its own times tell no more than that.
//!
//! Events with times lie on the rank's stream between the phases of a step and around each collective. The rank looks at
//! those that are passed whenever it records something, and never waits for one.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use crate::error::Result;
use crate::observe::PhaseSeconds;
use crate::operation::Operation;
use crate::sync::{Mark, Run};
use crate::torch::cuda::Event;

/// So many records may wait for the GPU: many steps.
const MOST: usize = 4096;

/// Times are single-precision numbers of CUDA's: from an event that lies no longer back they are exact to a microsecond.
const REBASE: Duration = Duration::from_secs(1);

/// What one rank has launched in one group, and when its GPU has done it.
#[derive(Debug)]
pub(super) struct GpuClock {
    gpu: usize,
    /// The rank's number in the run.
    rank: usize,
    /// The event from which the others are measured, and when the GPU passed it.
    origin: (Rc<Event>, Duration),
    launched: VecDeque<Launched>,
    spare: Vec<Event>,
    seconds: PhaseSeconds,
    /// The phase that was done last, and when.
    phase: Option<(Operation, Duration)>,
}

/// What was launched between two events.
#[derive(Debug)]
struct Launched {
    mark: Mark,
    operation: Operation,
    began: Rc<Event>,
    ended: Option<Rc<Event>>,
    /// When the GPU has begun and ended it.
    times: Option<[Duration; 2]>,
}

impl GpuClock {
    /// Begins now. Waits for what the rank has launched on its stream so far.
    ///
    /// # Errors
    /// As [`Run::poll`], and libtorch's own.
    pub(super) fn start(run: &Run, rank: usize, gpu: usize) -> Result<Self> {
        let origin = Event::timed()?;
        origin.record(gpu)?;
        run.poll(rank, || origin.is_done())?;
        let origin = (Rc::new(origin), run.timeline.now());
        let (launched, spare) = (VecDeque::new(), Vec::new());
        Ok(Self {
            gpu,
            rank,
            origin,
            launched,
            spare,
            seconds: PhaseSeconds::default(),
            phase: None,
        })
    }

    /// Notes that the record `ended`, if there is one, is over, and that another one begins, if one does: what is
    /// launched from now on is part of it.
    pub(super) fn mark(
        &mut self,
        ended: Option<Mark>,
        begun: Option<(Mark, Operation)>,
    ) -> Result<()> {
        if ended.is_none() && begun.is_none() {
            return Ok(());
        }
        let event = self.spare.pop().map_or_else(Event::timed, Ok)?;
        event.record(self.gpu)?;
        let event = Rc::new(event);
        let open = self.launched.iter_mut().rev().find(|it| Some(it.mark) == ended);
        if let Some(open) = open {
            open.ended = Some(event.clone());
        }
        if let Some((mark, operation)) = begun {
            if self.launched.len() == MOST {
                self.launched.pop_front();
            }
            let (ended, times) = (None, None);
            self.launched.push_back(Launched { mark, operation, began: event, ended, times });
        }
        Ok(())
    }

    /// Writes down what the GPU has done meanwhile.
    pub(super) fn note_done(&mut self, run: &Run) -> Result<()> {
        let (origin, passed) = &self.origin;
        for it in self.launched.iter_mut().filter(|it| it.times.is_none()) {
            match &it.ended {
                Some(ended) if ended.is_done()? => {
                    let since = [it.began.since(origin)?, ended.since(origin)?];
                    let times = since.map(|since| passed.saturating_add(since));
                    run.timeline.note_gpu(self.rank, it.mark, times);
                    it.times = Some(times);
                }
                // A collective of a phase that goes on may be done.
                _ if !it.operation.may_wait() => {}
                _ => break,
            }
        }
        while let Some(&Launched { operation, times: Some(times), .. }) = self.launched.front() {
            self.count(operation, times);
            let Some(Launched { began, ended, .. }) = self.launched.pop_front() else { break };
            // What comes next in the queue has begun later.
            if times[0].saturating_sub(self.origin.1) > REBASE {
                self.origin = (began.clone(), times[0]);
            }
            self.spare
                .extend([Some(began), ended].into_iter().flatten().filter_map(Rc::into_inner));
        }
        Ok(())
    }

    /// Whether the GPU has done all of it.
    pub(super) fn is_idle(&self) -> bool {
        self.launched.is_empty()
    }

    /// Counts the time of a phase, or of a collective within one, which comes after it in the queue.
    fn count(&mut self, operation: Operation, [began, ended]: [Duration; 2]) {
        let time = ended.saturating_sub(began).as_secs_f64();
        if let Some(seconds) = self.seconds.of_phase(operation) {
            *seconds += time;
            self.phase = Some((operation, ended));
        } else if !operation.may_wait() {
            self.phase = None;
        } else if let Some((phase, _)) = self.phase.filter(|(_, ended)| began < *ended)
            && let Some(seconds) = self.seconds.of_phase(phase)
        {
            *seconds -= time;
            self.seconds.collectives += time;
        }
    }

    /// How long the GPU has been at each phase, as far as it is known.
    pub(super) fn seconds(&self) -> PhaseSeconds {
        self.seconds
    }
}
