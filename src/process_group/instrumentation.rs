//! How what a rank does gets into the timeline of its run.

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tch::{Device, Tensor};
use xxhash_rust::xxh3::xxh3_64;

use super::gpu_clock::{GpuClock, GpuSeconds, Span};
use super::{Call, ProcessGroup, num_bytes};
use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
use crate::runtime::{CallSite, FaultKind, FaultSite, OpStart, SpanId};
use crate::telemetry::PhaseSeconds;

/// What a group knows for its records.
#[derive(Debug, Default)]
pub(super) struct PhaseTracker {
    /// The group's number, the same on all of its ranks.
    pub group: u32,
    /// On a communication thread.
    pub on_comm_thread: bool,
    /// What DistributedDataParallel says of what it is about to reduce.
    pub context: Cell<CallContext>,
    /// The phase of a training step that this rank is in.
    phase: Cell<Option<Phase>>,
    seconds: Cell<PhaseSeconds>,
}

#[derive(Debug, Clone, Copy)]
struct Phase {
    is: Operation,
    step: u64,
    mark: SpanId,
    /// How long it has been in collectives.
    collectives: Duration,
}

/// On whose behalf a collective is called, and with which bucket of gradients.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct CallContext {
    pub place: Option<CallSite>,
    pub bucket: Option<u16>,
}

impl PhaseTracker {
    /// The same for the group's communication thread.
    pub(super) fn beside(&self) -> Self {
        Self { group: self.group, on_comm_thread: true, ..Self::default() }
    }
}

impl ProcessGroup {
    /// Notes that this rank begins training step `step`, for failure reports. Not a collective.
    ///
    /// # Errors
    /// [`Error::Fault`], when the run was started with a fault that strikes here.
    #[track_caller]
    pub fn enter_step(&self, step: u64) -> Result<()> {
        self.enter_phase(Operation::Step, step);
        self.activity().enter(Operation::Step, step);
        self.run().fault_point(self.global_rank(), FaultSite::Step, step)?;
        match &self.network {
            // NCCL carries no news of a stop.
            Some(network)
                if self.is_stream_ordered
                    && network.shares_stop()
                    && self.rank == self.shared.here().start =>
            {
                let at = OpId { operation: Operation::Synchronize, sequence: self.sequence()? };
                let before = self.activity().enter(at.operation, at.sequence);
                let group = Some(self.phase_tracker.group);
                let mark = self.record(OpStart { group, ..OpStart::alone(at, Location::caller()) });
                let exchanged = network.exchange_stop(at.sequence);
                exchanged.inspect_err(|error| self.record_failure(mark, error))?;
                self.record_end(mark);
                self.activity().restore(before);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Notes that this rank saves after `steps` steps, for failure reports: it may wait for the disk. Not a
    /// collective.
    #[track_caller]
    pub(crate) fn enter_save(&self, steps: u64) {
        self.activity().enter(Operation::Save, steps);
        self.enter_phase(Operation::Save, steps);
    }

    /// What follows is called with `note`, until the next one.
    pub(crate) fn set_context(&self, note: CallContext) {
        self.phase_tracker.context.set(note);
    }

    /// What else than to fail or to be slow this rank is to do in training step `step`: `--inject-fault`.
    pub(crate) fn planned_fault(&self, step: u64) -> Option<FaultKind> {
        let fault = self.run().fault?;
        let here =
            (fault.rank, fault.at, fault.step) == (self.global_rank(), FaultSite::Step, step);
        here.then_some(fault.kind)
    }

    /// On whose behalf this rank calls at `place`.
    pub(super) fn place_of(&self, place: CallSite) -> CallSite {
        self.phase_tracker.context.get().place.unwrap_or(place)
    }

    /// Records that this rank comes to `call`; what is returned is for [`ProcessGroup::record_end`].
    pub(super) fn record_call(&self, call: &Call) -> SpanId {
        let CallContext { bucket, .. } = self.phase_tracker.context.get();
        let numel = |tensors: &[Tensor]| -> usize { tensors.iter().map(Tensor::numel).sum() };
        let most = numel(call.inputs).max(numel(call.outputs));
        self.record(OpStart {
            at: call.at(),
            group: Some(self.phase_tracker.group),
            bucket,
            amount: num_bytes(call.kind, most) as u64,
            place: call.place,
            on_comm_thread: self.phase_tracker.on_comm_thread,
        })
    }

    /// Records that this rank begins what may wait for others. The returned number is for [`ProcessGroup::record_end`].
    pub(super) fn record(&self, begin: OpStart) -> SpanId {
        let mark = self.run().flight_recorder.begin(self.global_rank(), begin);
        self.on_gpu(|clock| clock.mark(None, Some((Span::Record(mark), begin.at.operation))));
        self.note_gpu();
        mark
    }

    /// Records that it is through with it.
    pub(super) fn record_end(&self, mark: SpanId) {
        self.on_gpu(|clock| clock.mark(Some(Span::Record(mark)), None));
        self.record_wait(self.run().flight_recorder.end(self.global_rank(), mark));
    }

    /// Records that it has failed, and is over if this rank can go on. What it has waited for in vain is not: that shows
    /// where the run has ended.
    pub(super) fn record_failure(&self, mark: SpanId, error: &Error) {
        use Error::{Cancelled, ConnectionLost, PeerExited, PeersMissing, Timeout};
        let in_vain = matches!(
            error,
            PeersMissing { .. }
                | Cancelled { .. }
                | PeerExited { .. }
                | ConnectionLost { .. }
                | Timeout { .. }
        );
        if !in_vain {
            self.record_end(mark);
        }
    }

    /// Counts `time` as spent in collectives.
    pub(crate) fn record_wait(&self, time: Duration) {
        if let Some(phase) = self.phase_tracker.phase.get() {
            let collectives = phase.collectives + time;
            self.phase_tracker.phase.set(Some(Phase { collectives, ..phase }));
        }
    }

    /// How long this rank has been at each phase so far: its GPU, where the rank only launches. Ranks that share a GPU
    /// also share a stream, in which the work of one is not told from that of another. Not a collective.
    pub(crate) fn phase_seconds(&self) -> PhaseSeconds {
        let on_gpu = self.gpu_seconds().filter(|_| self.is_stream_ordered);
        on_gpu.map_or(self.phase_tracker.seconds.get(), |it| it.phases)
    }

    /// How long this rank's GPU has been at what the rank has launched, if it has one. Not a collective.
    pub(crate) fn gpu_seconds(&self) -> Option<GpuSeconds> {
        self.note_gpu();
        self.gpu_clock.borrow().as_ref().map(GpuClock::times)
    }

    /// Runs `block`, after which this rank's GPU waits for another of its streams, and counts that as time in collectives.
    pub(crate) fn record_gpu_wait(&self, block: impl FnOnce() -> Result<()>) -> Result<()> {
        self.on_gpu(|clock| clock.mark(None, Some((Span::Wait, Operation::Synchronize))));
        let blocked = block();
        self.on_gpu(|clock| clock.mark(Some(Span::Wait), None));
        blocked
    }

    /// Has the GPU's times recorded from now on, if this rank has one.
    pub(super) fn start_gpu_clock(&self) -> Result<()> {
        if let Device::Cuda(gpu) = self.device {
            let clock = GpuClock::start(self.run(), self.global_rank(), gpu)?;
            *self.gpu_clock.borrow_mut() = Some(clock);
        }
        Ok(())
    }

    /// Records what this rank's GPU has done meanwhile, if it has one. Not a collective.
    pub(super) fn note_gpu(&self) {
        self.on_gpu(|clock| clock.note_done(self.run()));
    }

    /// Waits until this rank's GPU has done all phases and collectives that are over, if it has one. Not a collective.
    ///
    /// # Errors
    /// As [`RunContext::poll`](crate::runtime::RunContext::poll).
    pub(crate) fn wait_for_gpu(&self) -> Result<()> {
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

    /// Records that this rank goes on with `phase` of training step `step`. Not a collective.
    #[track_caller]
    pub(crate) fn enter_phase(&self, phase: Operation, step: u64) {
        let at = OpId { operation: phase, sequence: step };
        self.begin_phase(OpStart::alone(at, Location::caller()));
    }

    fn begin_phase(&self, begin: OpStart) {
        let ended = self.close_phase();
        let OpId { operation: phase, sequence: step } = begin.at;
        let mark = self.run().flight_recorder.begin(self.global_rank(), begin);
        let ended = ended.map(Span::Record);
        self.on_gpu(|clock| clock.mark(ended, Some((Span::Record(mark), phase))));
        self.note_gpu();
        let collectives = Duration::ZERO;
        self.phase_tracker.phase.set(Some(Phase { is: phase, step, mark, collectives }));
    }

    /// The same, of the step that this rank is in; nothing outside of steps.
    #[track_caller]
    pub(crate) fn next_phase(&self, phase: Operation) {
        if let Some(before) = self.phase_tracker.phase.get() {
            self.enter_phase(phase, before.step);
        }
    }

    /// Records that this rank goes on with the forward pass of `samples` samples, if it is in a step. Not a collective.
    #[track_caller]
    pub(crate) fn enter_forward(&self, samples: &Tensor) {
        if let Some(before) = self.phase_tracker.phase.get() {
            let at = OpId { operation: Operation::Forward, sequence: before.step };
            let amount = samples.size().first().map_or(0, |&samples| samples as u64);
            self.begin_phase(OpStart { amount, ..OpStart::alone(at, Location::caller()) });
        }
    }

    /// Records that the gradient of the `index`-th parameter, which is in `bucket`, is complete, if somebody wants to see
    /// everything. Not a collective.
    pub(crate) fn record_gradient(&self, index: usize, bucket: usize, place: Option<CallSite>) {
        let timeline = &self.run().flight_recorder;
        if timeline.keeps_all() {
            let at = OpId { operation: Operation::Gradient, sequence: index as u64 };
            let bucket = u16::try_from(bucket).ok();
            let (group, amount, beside) = (None, 0, false);
            let begin = OpStart { at, group, bucket, amount, place, on_comm_thread: beside };
            let mark = timeline.begin(self.global_rank(), begin);
            timeline.end(self.global_rank(), mark);
        }
    }

    /// Records that the phase is over, and none follows.
    pub(crate) fn end_phase(&self) {
        let ended = self.close_phase().map(Span::Record);
        self.on_gpu(|clock| clock.mark(ended, None));
    }

    /// Returns the record that is over now, if there is one.
    fn close_phase(&self) -> Option<SpanId> {
        let Phase { is, mark, collectives, .. } = self.phase_tracker.phase.take()?;
        let elapsed = self.run().flight_recorder.end(self.global_rank(), mark);
        let mut seconds = self.phase_tracker.seconds.get();
        if let Some(of_phase) = seconds.of_phase(is) {
            *of_phase += elapsed.saturating_sub(collectives).as_secs_f64();
            seconds.collectives += collectives.as_secs_f64();
            self.phase_tracker.seconds.set(seconds);
        }
        Some(mark)
    }

    /// Names this group for the timeline, as its `sequence`-th call of `parent` has made it.
    pub(super) fn record_as_part_of(self, parent: &ProcessGroup, sequence: u64) -> Self {
        let name = [u64::from(parent.phase_tracker.group), sequence].map(u64::to_le_bytes).concat();
        // Not 0, which is the group of all.
        let group = (xxh3_64(&name) as u32).max(1);
        self.run().register_group(group, &Arc::from(self.ranks()));
        let recorded = PhaseTracker { group, ..PhaseTracker::default() };
        Self { phase_tracker: recorded, weight: parent.weight.clone(), ..self }
    }
}
