//! The times at which a rank's GPU has done the launched work. The host's own times end with the launch.
//!
//! Timed CUDA events are on the GPU's streams, between the phases of a step and around each collective. Whenever
//! the rank records something, it checks which events have passed; it never waits for one.
//!
//! The clocks of GPU and host are compared once, and drift apart. But the GPU passes an event after the host has recorded
//! it, and before the host sees that. Where a time is not within these bounds, the reference is shifted into them.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::ffi::cuda::{self, CudaEvent};
use crate::operation::Operation;
use crate::records::PhaseSeconds;
use crate::runtime::{RunContext, SpanId};

/// The maximum number of entries that wait for the GPU; enough for many steps.
const MAX_QUEUED: usize = 4096;

/// The maximum age of the reference event. CUDA's times have single precision; up to this age they are exact to a
/// microsecond.
const REBASE: Duration = Duration::from_secs(1);

/// One rank's launched work in one group, and its times on the GPU.
#[derive(Debug)]
pub(super) struct GpuClock {
    gpu: usize,
    /// The rank's number in the run.
    rank: usize,
    /// The stream of the rank's own work.
    stream: usize,
    origin: Origin,
    launched: VecDeque<TimedWork>,
    spare: Vec<CudaEvent>,
    /// The times of all work that is known to be done.
    pub(super) times: GpuSeconds,
    /// The phase that was done last, and when it ended.
    phase: Option<(Operation, Duration)>,
    /// When the phase ended whose times were noted last.
    noted: Duration,
    /// Whether recording has stopped because the GPU has failed. The code that uses the GPU reports the failure.
    stopped: bool,
}

/// The reference event for all other events.
#[derive(Debug)]
struct Origin {
    event: Rc<Mark>,
    /// When the GPU passed it, on the host's clock.
    passed: Duration,
}

/// A timed event on the GPU.
#[derive(Debug)]
struct Mark {
    event: CudaEvent,
    /// When the host recorded it.
    recorded: Duration,
}

/// The GPU's times for the work that one rank has launched, in seconds.
#[derive(Debug, Default, Clone, Copy)]
#[doc(hidden)]
pub struct GpuSeconds {
    /// The time of the phases, and of the collectives that they waited for.
    pub phases: PhaseSeconds,
    /// The summed time of the collectives on streams other than the rank's own.
    pub side_streams: f64,
    /// The time that the rank's own stream has waited for these collectives.
    pub waited: f64,
}

/// The work that is launched between two events.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Span {
    /// The work of this entry.
    Entry(SpanId),
    /// No work: the rank's stream waits for another stream.
    Wait,
}

#[derive(Debug)]
struct TimedWork {
    span: Span,
    operation: Operation,
    /// Whether the work is on a stream other than the rank's own.
    on_side_stream: bool,
    began: Rc<Mark>,
    ended: Option<Rc<Mark>>,
    /// The start and the end on the GPU; `None` if they are not known yet.
    times: Option<[Duration; 2]>,
}

impl GpuClock {
    /// Starts the clock. Waits for everything launched on the rank's stream so far.
    ///
    /// # Errors
    /// The errors of [`RunContext::poll`] and of libtorch.
    pub(super) fn start(run: &RunContext, rank: usize, gpu: usize) -> Result<Self> {
        let (origin, error) = closest(run, rank, gpu)?;
        run.flight_recorder.note_gpu_clock(rank, error);
        Ok(Self {
            gpu,
            rank,
            stream: cuda::current_stream(gpu)? as usize,
            origin,
            launched: VecDeque::new(),
            spare: Vec::new(),
            times: GpuSeconds::default(),
            phase: None,
            noted: Duration::ZERO,
            stopped: false,
        })
    }

    /// Records an event that ends the span `ended` and begins the span `begun`, if they are given. Work launched
    /// from now on is part of `begun`.
    pub(super) fn mark(
        &mut self,
        run: &RunContext,
        ended: Option<Span>,
        begun: Option<(Span, Operation)>,
    ) -> Result<()> {
        let is_open = |work: &&mut TimedWork| work.ended.is_none() && Some(work.span) == ended;
        let open = self.launched.iter_mut().rev().find(is_open);
        if self.stopped || (open.is_none() && begun.is_none()) {
            return Ok(());
        }
        let event = self.spare.pop().map_or_else(CudaEvent::timed, Ok)?;
        let recorded = run.flight_recorder.now();
        event.record(self.gpu)?;
        let mark = Rc::new(Mark { event, recorded });
        if let Some(open) = open {
            open.ended = Some(mark.clone());
        }
        if let Some((span, operation)) = begun {
            if self.launched.len() == MAX_QUEUED {
                self.launched.pop_front();
            }
            let on_side_stream = cuda::current_stream(self.gpu)? as usize != self.stream;
            self.launched.push_back(TimedWork {
                span,
                operation,
                on_side_stream,
                began: mark,
                ended: None,
                times: None,
            });
        }
        Ok(())
    }

    /// Stores the times of the work that the GPU has done meanwhile.
    pub(super) fn note_done(&mut self, run: &RunContext) -> Result<()> {
        let mut phase_goes_on = false;
        for work in self.launched.iter_mut().filter(|work| work.times.is_none()) {
            let is_phase = !work.operation.may_wait();
            if is_phase && phase_goes_on {
                continue; // phases follow each other on one stream
            }
            match &work.ended {
                Some(ended) if ended.event.is_done()? => {
                    let seen = run.flight_recorder.now();
                    let mut times = self.origin.times([&work.began, ended], seen)?;
                    if is_phase {
                        times[0] = times[0].max(self.noted).min(times[1]); // the clock may have been shifted meanwhile
                        self.noted = times[1];
                    }
                    if let Span::Entry(mark) = work.span {
                        run.flight_recorder.note_gpu(self.rank, mark, times);
                    }
                    work.times = Some(times);
                }
                // A collective within an unfinished phase may be done.
                _ if is_phase => phase_goes_on = true,
                _ => break,
            }
        }
        while self.launched.front().is_some_and(|work| work.times.is_some()) {
            let Some(done) = self.launched.pop_front() else { break };
            let Some(times) = done.times else { break };
            self.count(&done, times);
            // Later spans in the queue began later, so this event can be their reference.
            if times[0].saturating_sub(self.origin.passed) > REBASE {
                let passed = self.origin.time_of(&done.began)?; // later corrections included
                self.origin = Origin { event: done.began.clone(), passed };
            }
            let marks = [Some(done.began), done.ended].into_iter().flatten();
            self.spare.extend(marks.filter_map(Rc::into_inner).map(|mark| mark.event));
        }
        Ok(())
    }

    /// Returns whether the GPU has done all spans that are over.
    pub(crate) fn is_idle(&self) -> bool {
        self.launched.iter().all(|work| work.ended.is_none() || work.times.is_some())
    }

    /// Stops recording. Keeps the times known so far.
    pub(super) fn stop(&mut self) {
        self.launched.clear();
        self.stopped = true;
    }

    /// Counts the time of a phase, or of the rank's own work or wait within one, which follows the phase in the
    /// queue. A collective on another stream costs a phase only the wait for it.
    fn count(&mut self, done: &TimedWork, [began, ended]: [Duration; 2]) {
        let time = ended.saturating_sub(began).as_secs_f64();
        let GpuSeconds { phases, side_streams, waited } = &mut self.times;
        if done.on_side_stream {
            *side_streams += time;
        } else if let Some(seconds) = phases.phase_mut(done.operation) {
            *seconds += time;
            self.phase = Some((done.operation, ended));
        } else if !done.operation.may_wait() {
            self.phase = None;
        } else if let Some((phase, _)) = self.phase.filter(|(_, ended)| began < *ended)
            && let Some(seconds) = phases.phase_mut(phase)
        {
            *seconds -= time;
            phases.collectives += time;
        }
        if done.span == Span::Wait {
            *waited += time;
        }
    }
}

impl Origin {
    /// Returns when the GPU passed two marks, the earlier first, on the host's clock. The host has seen at `seen` that it
    /// passed both. Shifts the reference if the second would not be after it was recorded and before it was seen.
    fn times(&mut self, [began, ended]: [&Mark; 2], seen: Duration) -> Result<[Duration; 2]> {
        let measured = self.time_of(ended)?;
        let end = measured.max(ended.recorded).min(seen);
        self.passed = self.passed.saturating_add(end).saturating_sub(measured);
        // A clock that is too fast makes the work longer than it can have been.
        Ok([self.time_of(began)?.max(began.recorded).min(end), end])
    }

    /// Returns when the GPU passed `mark`, on the host's clock as it is known so far.
    fn time_of(&self, mark: &Mark) -> Result<Duration> {
        Ok(self.passed.saturating_add(mark.event.since(&self.event.event)?))
    }
}

impl GpuSeconds {
    /// Returns the share of the time of collectives that overlapped with other work of the rank's own stream, from
    /// 0 to 1.
    pub(crate) fn hidden(&self) -> f64 {
        if self.side_streams == 0.0 {
            return 0.0;
        }
        (1.0 - self.waited / self.side_streams).clamp(0.0, 1.0)
    }
}

/// Returns a reference event that the GPU has passed, and the possible error of its time. Takes the most exact of
/// `EVENTS` measurements.
fn closest(run: &RunContext, rank: usize, gpu: usize) -> Result<(Origin, Duration)> {
    const EVENTS: usize = 8;
    /// The time within which an idle GPU passes an event.
    const AT_ONCE: Duration = Duration::from_millis(1);
    let measure = || -> Result<(Origin, Duration)> {
        let event = CudaEvent::timed()?;
        let recorded = run.flight_recorder.now();
        event.record(gpu)?;
        let began = Instant::now();
        while began.elapsed() < AT_ONCE && !event.is_done()? {
            std::thread::yield_now();
        }
        run.poll(rank, || event.is_done())?;
        let error = run.flight_recorder.now().saturating_sub(recorded) / 2;
        let event = Rc::new(Mark { event, recorded });
        Ok((Origin { event, passed: recorded + error }, error))
    };
    let mut best = measure()?;
    for _ in 1..EVENTS {
        let next = measure()?;
        if next.1 < best.1 {
            best = next;
        }
    }
    Ok(best)
}
