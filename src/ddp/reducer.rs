//! Averages gradients over the ranks, bucket by bucket, during backward or after it.

use std::cell::RefCell;
use std::ffi::CStr;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tch::Tensor;

use super::DdpOptions;
use super::comm_hooks::{AllReduce, CommHook, GradBucket, average};
use super::join::{Active, Inputs, JoinOptions, count_active};
use super::layout::{Bucket, FlatParams, Layout};
use super::parameters::NamedTensor;
use super::reduce_path::ReducePath;
use super::timings::BackwardTimings;
use super::turn::Turn;
use super::weight::Weight;
use crate::error::{Error, Result};
use crate::ffi::GradHooks;
use crate::optim::{FlatBuffer, GradState};
use crate::process_group::{CallContext, ProcessGroup, num_bytes};
use crate::records::Parameter;
use crate::runtime::CallSite;

/// The handling of complete gradients in a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Gradients stay on this rank: `no_sync`.
    Local,
    /// Buckets are reduced as they become complete.
    Overlap,
    /// Buckets are reduced after backward.
    AfterBackward,
}

/// The error for a backward outside of `ddp.backward`, after which the ranks would diverge silently.
const BACKWARD_BYPASSED: &CStr =
    c"backward reached a parameter of a DistributedDataParallel: outside of ddp.backward its gradient would not be \
      averaged; call ddp.backward instead of Tensor::backward or an optimizer's backward_step, within no_sync() too; \
      for a loss that depends on several wrapped models call ddp::backward with all of them";

/// All buckets of a model. Every rank reduces them in index order, whichever gradient is ready first.
pub struct Reducer {
    pub(super) state: Rc<RefCell<State>>,
    hooks: GradHooks,
    pub(super) options: DdpOptions,
}

pub(super) struct State {
    pub group: Rc<ProcessGroup>,
    pub layout: Layout,
    /// This rank's number of samples in this step, if ranks are weighted by their samples.
    pub weight: Option<Weight>,
    /// The order in which gradients became ready in the first iteration; `None` once buckets follow it.
    pub ready_order: Option<Vec<usize>>,
    mode: Mode,
    /// Options within `join`: what happens when ranks have run out of inputs.
    pub joining: Option<JoinOptions>,
    /// The number of ranks to divide by in this step; `None` for all ranks.
    active: Option<usize>,
    /// With `static_graph`: the parameters that have no gradient on this rank in any step.
    pub always_unused: Option<Vec<usize>>,
    /// With `static_graph`: whether the ranks have agreed on the parameters that are unused everywhere in all steps.
    pub has_agreed: bool,
    /// Parameters without a gradient on any rank since `zero_grad`, as of the last step.
    pub undefined: Vec<usize>,
    /// Earlier gradients of the parameters that this rank does not use in this step, by index.
    pub kept: Vec<(usize, Tensor)>,
    /// This model's turn where one backward reduces several models.
    turn: Turn,
    /// Whether autograd is running, so that hooks may be called.
    pub is_in_autograd: bool,
    /// The next bucket to reduce in this step.
    next: usize,
    /// The time at which backward began, and `times.communication` at that time.
    began: (Instant, Duration),
    /// Time from the start of backward to the completion of each bucket, without reductions. `None` if incomplete.
    complete: Vec<Option<Duration>>,
    /// The call site of backward.
    place: Option<CallSite>,
    /// The error of a hook, which cannot return it.
    error: Option<Error>,
    /// The user's communication hook, if there is one.
    pub comm_hook: Option<Box<dyn CommHook>>,
    pub communication: ReducePath,
    times: BackwardTimings,
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer").field("buckets", &self.state.borrow().layout.buckets).finish()
    }
}

impl Reducer {
    /// Moves `parameters` into buckets, makes their `grad`s views, and registers gradient hooks.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        let handles: Vec<Tensor> = parameters.iter().map(|p| p.tensor.shallow_clone()).collect();
        let communication = ReducePath::new(&group)?;
        let state = State {
            group,
            layout: Layout::new(parameters, &options)?,
            weight: None,
            ready_order: Some(Vec::with_capacity(parameters.len())),
            mode: Mode::AfterBackward,
            joining: None,
            active: None,
            always_unused: None,
            has_agreed: false,
            undefined: Vec::new(),
            kept: Vec::new(),
            turn: Turn::default(),
            is_in_autograd: false,
            next: 0,
            began: (Instant::now(), Duration::ZERO),
            complete: Vec::new(),
            place: None,
            error: None,
            comm_hook: None,
            communication,
            times: BackwardTimings::default(),
        };
        let state = Rc::new(RefCell::new(state));
        let in_hooks = state.clone();
        let hooks = GradHooks::register(handles, move |index| match in_hooks.try_borrow_mut() {
            Ok(state) if !state.is_in_autograd => Some(BACKWARD_BYPASSED),
            Ok(mut state) => {
                state.on_grad(index);
                None
            }
            Err(_) => panic!("backward within a communication hook"),
        })?;
        Ok(Self { state, hooks, options })
    }

    /// Runs `f` on the parameters and gradients of each dtype.
    pub(super) fn for_each_flat(&self, f: impl FnMut(&mut FlatParams) -> Result<()>) -> Result<()> {
        self.state.borrow_mut().layout.flats.iter_mut().try_for_each(f)
    }

    pub(super) fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.state.borrow().layout.flats.iter().map(FlatParams::buffer).collect()
    }

    pub(super) fn with_state<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.borrow_mut())
    }

    pub(super) fn zero_grad(&self) -> Result<()> {
        let state = &mut *self.state.borrow_mut();
        state.weight = None;
        state.layout.zero_grad()
    }

    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        let bytes = |b: &Bucket| num_bytes(b.gradients.kind(), b.gradients.numel());
        self.state.borrow().layout.buckets.iter().map(bytes).collect()
    }

    pub(super) fn parameter_places(&self) -> Vec<Parameter> {
        self.state.borrow().layout.parameter_places()
    }

    /// Registers `hook` for averaging; only one can be registered.
    pub(super) fn set_comm_hook(&self, hook: Box<dyn CommHook>) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if let Some(known) = &state.comm_hook {
            return Err(Error::Input(format!(
                "the communication hook `{}` cannot be registered: `{}` is already registered, and a model has one; \
                 wrap the model again to use another",
                hook.name(),
                known.name()
            )));
        }
        state.comm_hook = Some(hook);
        Ok(())
    }

    pub(super) fn probe_first(&self, local: Option<Tensor>) {
        self.state.borrow_mut().layout.watched = local;
    }

    pub(super) fn times(&self) -> BackwardTimings {
        self.state.borrow().times
    }

    /// Returns the time that the last backward took to complete each bucket; `None` for a bucket that lacked a
    /// gradient.
    pub(super) fn bucket_times(&self) -> Vec<Option<Duration>> {
        self.state.borrow().complete.clone()
    }

    pub(super) fn group(&self) -> Rc<ProcessGroup> {
        self.state.borrow().group.clone()
    }

    /// Returns whether buckets are reduced during backward. Where ranks may use different parameters, a bucket is
    /// complete at different times on different ranks. The order of its reduction and other collectives in backward
    /// (SyncBatchNorm's) would differ too. The buckets to skip are known only after backward.
    pub(super) fn overlaps(&self) -> bool {
        let DdpOptions { find_unused_parameters, static_graph, overlap, .. } = self.options;
        let same_everywhere = !find_unused_parameters && !static_graph;
        let pays = || same_everywhere && self.state.borrow().communication.overlaps();
        overlap.unwrap_or_else(pays) && !self.options.skip_all_reduce_unused_params
    }

    /// Prepares for the gradients of a backward that was called at `place`.
    pub(super) fn begin(
        &self,
        averages: bool,
        overlaps: bool,
        turn: Turn,
        place: CallSite,
    ) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.begin(averages, overlaps)?;
        state.turn = turn;
        state.place = Some(place);
        Ok(())
    }

    /// Returns the error of a hook, if any. No hook runs after this.
    pub(super) fn end_of_autograd(&self) -> Result<()> {
        self.hooks.resume_panic();
        let mut state = self.state.borrow_mut();
        state.leave_autograd();
        state.error.take().map_or(Ok(()), Err)
    }

    /// Moves all gradients into their buckets.
    pub(super) fn move_grads_into_buckets(&self) -> Result<()> {
        let state = self.state.borrow();
        state.layout.move_grads_into_buckets(state.mode != Mode::Local)
    }

    /// Reduces the buckets that were not reduced during autograd.
    pub(super) fn reduce_rest(&self) -> Result<()> {
        let mut state = self.state.borrow_mut();
        let beside = state.communication.since().map_or(Duration::ZERO, |it| it.elapsed());
        state.times.beside += beside;
        let during = state.times.communication - state.began.1;
        state.times.overlapped += during;
        let result = state.reduce_rest(&self.options);
        drop(state);
        self.hooks.resume_panic();
        result
    }

    /// Waits for the reductions and ends the step. The backward began at `began`.
    pub(super) fn finish(&self, began: Instant) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.finish(&self.options)?;
        state.times.total += began.elapsed();
        state.times.count += 1;
        Ok(())
    }

    /// Waits for reductions that still use the gradients, after a failure.
    pub(super) fn give_up(&self) {
        let mut state = self.state.borrow_mut();
        state.leave_autograd();
        // The wait ends: either the other ranks take part in these reductions, or the run ends. The error is already
        // known.
        let State { communication, group, .. } = &mut *state;
        let _ = communication.wait(group);
    }

    /// Takes part with zero gradients in a step of the `active` ranks.
    pub(super) fn shadow(&self, active: Active, join: JoinOptions) -> Result<()> {
        self.for_each_flat(|flat| {
            flat.gradients.f_zero_().map(drop).map_err(Error::torch("zero_"))
        })?;
        let state = &mut *self.state.borrow_mut();
        state.reset()?;
        // If the ranks agree on unused parameters in this step, this rank uses none. It must not learn from that which
        // ones are always unused.
        let (known, times) = (state.always_unused.clone(), state.times);
        let agrees = state.syncs_unused(&self.options);
        state.layout.members.iter_mut().for_each(|member| member.used = !agrees);
        state.weight = active.weighted.then(Weight::default);
        state.active = active.to_divide_by(join);
        (state.mode, state.turn) = (Mode::AfterBackward, Turn::default());
        state.reduce_rest(&self.options)?;
        state.finish(&self.options)?;
        state.always_unused = known;
        state.times = times; // counts this rank's own steps only
        Ok(())
    }
}

impl State {
    fn begin(&mut self, averages: bool, overlaps: bool) -> Result<()> {
        self.reset()?;
        let joining = self.joining.filter(|_| averages);
        let mine = if self.weight.is_some() { Inputs::Weighted } else { Inputs::Plain };
        let active = joining.map(|join| count_active(&self.group, mine, join)).transpose()?;
        self.active = active.zip(joining).and_then(|(active, join)| active.to_divide_by(join));
        self.enter_autograd(averages)?;
        self.mode = match averages {
            false => Mode::Local,
            true if overlaps => Mode::Overlap,
            true => Mode::AfterBackward,
        };
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.next = 0;
        self.error = None;
        self.began = (Instant::now(), self.times.communication);
        let Layout { buckets, members, .. } = &mut self.layout;
        self.complete.clear();
        self.complete.resize(buckets.len(), None);
        for bucket in buckets.iter_mut() {
            (bucket.pending, bucket.is_skipped) = (bucket.parameters.len(), false);
        }
        members.iter_mut().for_each(|member| member.ready = false);
        for &index in self.always_unused.iter().flatten() {
            // No hook will run for this parameter, and its bucket may be reduced at any time from now on.
            members[index].move_grad_into_bucket()?;
            members[index].ready = true;
            buckets[members[index].bucket].pending -= 1;
        }
        if let Some(order) = &mut self.ready_order {
            order.clear();
        }
        Ok(())
    }

    /// Handles a gradient that backward has completed.
    fn on_grad(&mut self, index: usize) {
        if self.error.is_some() {
            return;
        }
        if let Err(error) = self.mark_ready(index) {
            self.error = Some(error);
        }
    }

    /// Marks a parameter's gradient as complete. Reduces every complete bucket whose turn it is.
    fn mark_ready(&mut self, index: usize) -> Result<()> {
        let member = &mut self.layout.members[index];
        if member.ready {
            return Err(Error::Input(format!(
                "static_graph: `{}` had no gradient in the first step and has one now; set \
                 find_unused_parameters instead",
                member.name
            )));
        }
        member.complete()?;
        if self.mode == Mode::Local {
            return Ok(());
        }
        member.ready = true;
        let bucket = member.bucket;
        self.group.record_gradient(index, bucket, self.place);
        self.layout.buckets[bucket].pending -= 1;
        if self.layout.buckets[bucket].pending == 0 {
            let (began, before) = self.began;
            let reduced = self.times.communication - before;
            self.complete[bucket] = Some(began.elapsed().saturating_sub(reduced));
        }
        if let Some(order) = &mut self.ready_order {
            order.push(index);
        }
        let is_due = self.mode == Mode::Overlap && self.turn.has_come();
        if is_due { self.reduce_complete_buckets() } else { Ok(()) }
    }

    fn reduce_complete_buckets(&mut self) -> Result<()> {
        while self.layout.buckets.get(self.next).is_some_and(|bucket| bucket.pending == 0) {
            let began = Instant::now();
            let State { layout, next, group, comm_hook, communication, place, weight, .. } = self;
            if layout.buckets[*next].is_skipped {
                *next += 1;
                continue;
            }
            group.set_context(CallContext { place: *place, bucket: u16::try_from(*next).ok() });
            weight.map_or(Ok(()), |it| it.apply(&mut layout.buckets[*next].gradients))?;
            let weight = weight.map(|it| it.samples);
            layout.probe(*next)?;
            let is_last = layout.buckets[*next + 1..].iter().all(|bucket| bucket.is_skipped);
            let Bucket { gradients, parameters, .. } = &mut layout.buckets[*next];
            let mut handle = gradients.shallow_clone();
            let mut plain = AllReduce;
            let comm_hook = comm_hook.as_deref_mut().unwrap_or(&mut plain);
            // A single bucket cannot overlap with anything.
            let goes_on = self.mode == Mode::Overlap && !(is_last && *next == 0);
            if goes_on
                && comm_hook.is_plain_all_reduce()
                && let Some(works) = communication.beside()
            {
                works.push(group.all_reduce_async(&handle, average(group), weight)?);
                self.next += 1;
                continue;
            }
            let mut bucket =
                GradBucket { index: *next, is_last, gradients: &mut handle, parameters, weight };
            communication.run(group, |group| {
                comm_hook.reduce(&mut bucket, group)?;
                // A hook may have replaced the tensor, as a Python hook would return a new one.
                if bucket.gradients.data_ptr() != gradients.data_ptr() {
                    tch::no_grad(|| gradients.f_copy_(bucket.gradients))
                        .map_err(Error::torch("taking over what a hook has made"))?;
                }
                Ok(())
            })?;
            self.next += 1;
            self.times.communication += began.elapsed();
        }
        if self.next == self.layout.buckets.len() {
            self.turn.pass_on();
        }
        self.group.set_context(CallContext::default());
        Ok(())
    }

    /// Reduces all remaining buckets.
    fn reduce_rest(&mut self, options: &DdpOptions) -> Result<()> {
        self.account_for_unused(options)?;
        self.reduce_complete_buckets()
    }

    /// Waits for the reductions and ends the step.
    fn finish(&mut self, options: &DdpOptions) -> Result<()> {
        let began = Instant::now();
        self.communication.wait(&self.group)?;
        self.times.communication += began.elapsed();
        if let Some(active) = self.active.take() {
            let factor = self.group.world_size() as f64 / active as f64;
            for flat in &mut self.layout.flats {
                let _ = flat.gradients.f_mul_scalar_(factor).map_err(Error::torch("mul_"))?;
            }
        }
        self.weight = None;
        self.settle_unused(options)?;
        self.rebuild_buckets(options)?;
        self.layout.set_gradients(GradState::Averaged);
        self.undefined.iter().try_for_each(|&index| self.layout.members[index].clear_grad())
    }
}
