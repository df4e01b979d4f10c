//! Records what a rank does in the flight recorder of its run.

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tch::{Device, Tensor};
use xxhash_rust::xxh3::xxh3_64;

use super::ProcessGroup;
use super::gpu_clock::{GpuClock, GpuSeconds, Span};
use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
use crate::records::PhaseSeconds;
use crate::runtime::{CallSite, OpStart, SpanId};

/// A group's state for its entries.
#[derive(Debug, Default)]
pub(super) struct PhaseTracker {
    /// The group's number, the same on all of its ranks; 0 for the group of all ranks.
    pub group: u32,
    /// The context of the next collectives, which DistributedDataParallel sets.
    pub context: Cell<CallContext>,
    /// The current phase of a training step; `None` if there is none.
    phase: Cell<Option<Phase>>,
    seconds: Cell<PhaseSeconds>,
}

#[derive(Debug, Clone, Copy)]
struct Phase {
    is: Operation,
    step: u64,
    mark: SpanId,
    /// The time in collectives within this phase so far.
    collectives: Duration,
}

/// The call site that a collective is attributed to, and its bucket of gradients.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct CallContext {
    pub call_site: Option<CallSite>,
    pub bucket: Option<u16>,
}

impl ProcessGroup {
    /// Notes that this rank begins training step `step`, for failure reports. Not a collective.
    ///
    /// # Errors
    /// [`Error::Fault`], if the run was started with a fault for this rank and step.
    #[track_caller]
    pub fn enter_step(&self, step: u64) -> Result<()> {
        self.enter_phase(Operation::Step, step);
        self.activity().enter(Operation::Step, step);
        self.run().fault_point(self.global_rank(), Operation::Step, step)?;
        let is_first = self.rank() == self.common.shared.here.start;
        let network = self.common.network.as_ref().filter(|_| self.is_stream_ordered() && is_first);
        // NCCL transfers no stop requests, so the processes exchange them here.
        let Some(network) = network.filter(|network| network.shares_stop()) else { return Ok(()) };
        let at = OpId { operation: Operation::Synchronize, sequence: self.sequence()? };
        let before = self.activity().enter(at.operation, at.sequence);
        let group = Some(self.phase_tracker.group);
        let begin = OpStart { group, ..OpStart::alone(at, Location::caller()) };
        self.recorded(before, begin, || network.exchange_stop(at.sequence))
    }

    /// Records that this rank saves a checkpoint after `steps` steps, for failure reports: it may wait for the
    /// disk. Returns the rank's activity before, for [`leave_save`](Self::leave_save). Not a collective.
    #[track_caller]
    pub(crate) fn enter_save(&self, steps: u64) -> OpId {
        let before = self.activity().enter(Operation::Save, steps);
        self.enter_phase(Operation::Save, steps);
        before
    }

    /// Records that this rank has saved a checkpoint, and is where it was `before`.
    pub(crate) fn leave_save(&self, before: OpId) {
        self.end_phase();
        self.activity().restore(before);
    }

    /// Sets the context of the following collectives, until the next call.
    pub(crate) fn set_context(&self, context: CallContext) {
        self.phase_tracker.context.set(context);
    }

    /// Runs `work`, an operation that may wait for other ranks, and records it as `begin` describes it. Then this rank's
    /// activity is the one `before`.
    ///
    /// If the operation fails, its entry ends where this rank can go on. If it has waited for other ranks in vain, the
    /// entry stays open: it shows where the run has ended.
    pub(super) fn recorded<T>(
        &self,
        before: OpId,
        begin: OpStart,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mark = self.begin(None, begin);
        let result = work();
        if !result.as_ref().is_err_and(Error::waited_in_vain) {
            self.on_gpu(|clock| clock.mark(self.run(), Some(Span::Entry(mark)), None));
            self.record_wait(self.run().flight_recorder.end(self.global_rank(), mark));
        }
        if result.is_ok() {
            self.activity().restore(before);
        }
        result
    }

    /// Records the start of an operation, or of a phase after the phase `ended`.
    fn begin(&self, ended: Option<SpanId>, begin: OpStart) -> SpanId {
        let mark = self.run().flight_recorder.begin(self.global_rank(), begin);
        let begun = Some((Span::Entry(mark), begin.at.operation));
        self.on_gpu(|clock| clock.mark(self.run(), ended.map(Span::Entry), begun));
        self.note_gpu();
        mark
    }

    /// Counts `time` as spent in collectives of the current phase.
    pub(crate) fn record_wait(&self, time: Duration) {
        if let Some(phase) = self.phase_tracker.phase.get() {
            let collectives = phase.collectives + time;
            self.phase_tracker.phase.set(Some(Phase { collectives, ..phase }));
        }
    }

    /// Returns this rank's time in each phase so far, in seconds; the time of its GPU, where the rank only launches
    /// work. Ranks that share a GPU also share a stream, so their work cannot be told apart. Not a collective.
    #[doc(hidden)]
    pub fn phase_seconds(&self) -> PhaseSeconds {
        let on_gpu = self.gpu_seconds().filter(|_| self.is_stream_ordered());
        on_gpu.map_or(self.host_phase_seconds(), |gpu| gpu.phases)
    }

    /// Returns the time of this rank itself in each phase so far, in seconds. Not a collective.
    #[doc(hidden)]
    pub fn host_phase_seconds(&self) -> PhaseSeconds {
        self.phase_tracker.seconds.get()
    }

    /// Returns the GPU's time for the work that this rank has launched, in seconds; `None` without a GPU. Not a
    /// collective.
    #[doc(hidden)]
    pub fn gpu_seconds(&self) -> Option<GpuSeconds> {
        self.note_gpu();
        self.gpu_clock.borrow().as_ref().map(|clock| clock.times)
    }

    /// Runs `block`, which makes this rank's GPU wait for another of its streams. Counts that wait as time in
    /// collectives.
    pub(crate) fn record_gpu_wait(&self, block: impl FnOnce() -> Result<()>) -> Result<()> {
        self.on_gpu(|clock| {
            clock.mark(self.run(), None, Some((Span::Wait, Operation::Synchronize)))
        });
        let blocked = block();
        self.on_gpu(|clock| clock.mark(self.run(), Some(Span::Wait), None));
        blocked
    }

    /// Starts to record the GPU's times, if this rank has a GPU.
    pub(super) fn start_gpu_clock(&self) -> Result<()> {
        if let Device::Cuda(gpu) = self.device() {
            let clock = GpuClock::start(self.run(), self.global_rank(), gpu)?;
            *self.gpu_clock.borrow_mut() = Some(clock);
        }
        Ok(())
    }

    /// Records what this rank's GPU has finished meanwhile, if it has one. Not a collective.
    pub(super) fn note_gpu(&self) {
        self.on_gpu(|clock| clock.note_done(self.run()));
    }

    /// Waits until this rank's GPU, if it has one, has finished all phases and collectives that are over. Not a
    /// collective.
    ///
    /// # Errors
    /// The errors of `RunContext::poll`.
    #[doc(hidden)]
    pub fn wait_for_gpu(&self) -> Result<()> {
        self.run().poll(self.global_rank(), || {
            self.note_gpu();
            Ok(self.gpu_clock.borrow().as_ref().is_none_or(GpuClock::is_idle))
        })
    }

    fn on_gpu(&self, f: impl FnOnce(&mut GpuClock) -> Result<()>) {
        if let Some(clock) = &mut *self.gpu_clock.borrow_mut()
            && f(clock).is_err()
        {
            clock.stop();
        }
    }

    /// Records that this rank begins `phase` of training step `step`. Not a collective.
    #[track_caller]
    #[doc(hidden)]
    pub fn enter_phase(&self, phase: Operation, step: u64) {
        let at = OpId { operation: phase, sequence: step };
        self.begin_phase(OpStart::alone(at, Location::caller()));
    }

    fn begin_phase(&self, begin: OpStart) {
        let ended = self.close_phase();
        let OpId { operation: phase, sequence: step } = begin.at;
        let mark = self.begin(ended, begin);
        let collectives = Duration::ZERO;
        self.phase_tracker.phase.set(Some(Phase { is: phase, step, mark, collectives }));
    }

    /// Records that this rank begins `phase` of its current step. Does nothing outside of steps.
    #[track_caller]
    pub(crate) fn next_phase(&self, phase: Operation) {
        if let Some(before) = self.phase_tracker.phase.get() {
            self.enter_phase(phase, before.step);
        }
    }

    /// Records that this rank begins the forward pass of `samples`, if it is in a step. Not a collective.
    #[track_caller]
    pub(crate) fn enter_forward(&self, samples: &Tensor) {
        if let Some(before) = self.phase_tracker.phase.get() {
            let at = OpId { operation: Operation::Forward, sequence: before.step };
            let amount = samples.size().first().map_or(0, |&samples| samples as u64);
            self.begin_phase(OpStart { amount, ..OpStart::alone(at, Location::caller()) });
        }
    }

    /// Records that the gradient of the `index`-th parameter, which is in `bucket`, is complete. Does nothing
    /// unless the flight recorder keeps all entries. Not a collective.
    pub(crate) fn record_gradient(&self, index: usize, bucket: usize, call_site: Option<CallSite>) {
        let recorder = &self.run().flight_recorder;
        if recorder.keeps_all() {
            let at = OpId { operation: Operation::Gradient, sequence: index as u64 };
            let bucket = u16::try_from(bucket).ok();
            let (group, amount, on_comm_thread) = (None, 0, false);
            let begin = OpStart { at, group, bucket, amount, call_site, on_comm_thread };
            let mark = recorder.begin(self.global_rank(), begin);
            recorder.end(self.global_rank(), mark);
        }
    }

    /// Records the end of the current phase, if no other follows.
    pub(crate) fn end_phase(&self) {
        let ended = self.close_phase().map(Span::Entry);
        self.on_gpu(|clock| clock.mark(self.run(), ended, None));
    }

    /// Ends the current phase. Returns its entry; `None` if there is no phase.
    fn close_phase(&self) -> Option<SpanId> {
        let Phase { is, mark, collectives, .. } = self.phase_tracker.phase.take()?;
        let elapsed = self.run().flight_recorder.end(self.global_rank(), mark);
        let mut seconds = self.phase_tracker.seconds.get();
        if let Some(phase_seconds) = seconds.phase_mut(is) {
            *phase_seconds += elapsed.saturating_sub(collectives).as_secs_f64();
            seconds.collectives += collectives.as_secs_f64();
            self.phase_tracker.seconds.set(seconds);
        }
        Some(mark)
    }

    /// Names this group for the flight recorder. The `sequence`-th call of `parent` has created it.
    pub(super) fn record_as_part_of(self, parent: &ProcessGroup, sequence: u64) -> Self {
        let name = [u64::from(parent.phase_tracker.group), sequence].map(u64::to_le_bytes).concat();
        // 0 is the group of all ranks.
        let group = (xxh3_64(&name) as u32).max(1);
        self.run().register_group(group, &Arc::from(self.ranks()));
        let phase_tracker = PhaseTracker { group, ..PhaseTracker::default() };
        Self { phase_tracker, ..self }
    }
}
