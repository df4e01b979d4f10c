//! Averages gradients over the ranks, bucket by bucket, while backward goes on or after it.

use std::cell::RefCell;
use std::ffi::CStr;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::DdpOptions;
use super::comm_hooks::{CommHook, GradBucket, average};
use super::communication::Communication;
use super::join::{JoinOptions, count_active};
use super::layout::{Bucket, Flat, Layout, Member};
use super::parameters::NamedTensor;
use super::times::Times;
use crate::error::{Error, Result};
use crate::observe::report::Parameter;
use crate::optim::{FlatBuffer, Gradients};
use crate::process_group::{Note, ProcessGroup, ReduceOp, num_bytes};
use crate::sync::Place;
use crate::torch::{self, GradHooks};

/// What backward on this rank is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Nobody has called it here.
    Outside,
    /// Gradients stay here: no_sync.
    Local,
    /// Buckets are reduced as they become complete.
    Overlap,
    /// Buckets are reduced when backward is through.
    AfterBackward,
}

/// Why gradients may not be computed behind the engine's back: the ranks would part without a word.
const OUTSIDE: &CStr =
    c"call DistributedDataParallel::backward instead of Tensor::backward, which averages \
                         nothing; within no_sync() too";

/// All buckets of a model, in the order in which they are reduced: their index order, on every rank,
/// whichever gradient is ready first.
pub(super) struct Reducer {
    state: Rc<RefCell<State>>,
    hooks: GradHooks,
    options: DdpOptions,
}

struct State {
    group: Rc<ProcessGroup>,
    layout: Layout,
    /// The order in which the gradients became ready in the first iteration; kept until buckets follow it.
    ready_order: Option<Vec<usize>>,
    mode: Mode,
    /// Within `join`: what happens when ranks have run out.
    joining: Option<JoinOptions>,
    /// With `static_graph`: which parameters have no gradient on this rank, in every step.
    always_unused: Option<Vec<usize>>,
    /// With `static_graph`: whether the ranks have agreed on what is unused everywhere, for all steps.
    has_agreed: bool,
    /// Parameters that no rank had a gradient for in the last step.
    undefined: Vec<usize>,
    /// The next bucket to reduce in this step.
    next: usize,
    /// When backward began, and what `times` had counted as communication by then.
    began: (Instant, Duration),
    /// How far backward was when it had completed each bucket, not counting what was reduced meanwhile.
    complete: Vec<Option<Duration>>,
    /// Who has called backward.
    place: Option<Place>,
    /// What went wrong in a hook, which cannot return it.
    error: Option<Error>,
    comm_hook: Box<dyn CommHook>,
    communication: Communication,
    times: Times,
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer").field("buckets", &self.state.borrow().layout.buckets).finish()
    }
}

impl Reducer {
    /// Moves `parameters` into buckets, makes their `grad`s views, and waits for their gradients.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        let handles: Vec<Tensor> = parameters.iter().map(|p| p.tensor.shallow_clone()).collect();
        let communication = Communication::new(&group)?;
        let state = State {
            group,
            layout: Layout::new(parameters, options)?,
            ready_order: Some(Vec::with_capacity(parameters.len())),
            mode: Mode::Outside,
            joining: None,
            always_unused: None,
            has_agreed: false,
            undefined: Vec::new(),
            next: 0,
            began: (Instant::now(), Duration::ZERO),
            complete: Vec::new(),
            place: None,
            error: None,
            comm_hook: Box::new(super::comm_hooks::AllReduce),
            communication,
            times: Times::default(),
        };
        let state = Rc::new(RefCell::new(state));
        let in_hooks = state.clone();
        let hooks = GradHooks::register(handles, move |index| match in_hooks.try_borrow_mut() {
            Ok(state) if state.mode == Mode::Outside => Some(OUTSIDE),
            Ok(mut state) => {
                state.on_grad(index);
                None
            }
            Err(_) => panic!("backward within a communication hook"),
        })?;
        Ok(Self { state, hooks, options })
    }

    /// Runs `f` on the parameters and gradients of each kind.
    pub(super) fn for_each_flat(&self, f: impl FnMut(&mut Flat) -> Result<()>) -> Result<()> {
        self.state.borrow_mut().layout.flats.iter_mut().try_for_each(f)
    }

    pub(super) fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.state.borrow().layout.flats.iter().map(Flat::buffer).collect()
    }

    pub(super) fn zero_grad(&self) -> Result<()> {
        let layout = &mut self.state.borrow_mut().layout;
        layout.members.iter_mut().for_each(|member| member.used = false);
        layout.zero_grad()
    }

    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        let bytes = |b: &Bucket| num_bytes(b.gradients.kind(), b.gradients.numel());
        self.state.borrow().layout.buckets.iter().map(bytes).collect()
    }

    pub(super) fn parameter_places(&self) -> Vec<Parameter> {
        self.state.borrow().layout.parameter_places()
    }

    pub(super) fn set_comm_hook(&self, hook: Box<dyn CommHook>) {
        self.state.borrow_mut().comm_hook = hook;
    }

    pub(super) fn watch_first(&self, local: Option<Tensor>) {
        self.state.borrow_mut().layout.watched = local;
    }

    pub(super) fn times(&self) -> Times {
        self.state.borrow().times
    }

    /// How long the last backward took to complete each bucket. None of one that it has not, for want of a gradient.
    pub(super) fn bucket_times(&self) -> Vec<Option<Duration>> {
        self.state.borrow().complete.clone()
    }

    pub(super) fn group(&self) -> Rc<ProcessGroup> {
        self.state.borrow().group.clone()
    }

    pub(super) fn is_joining(&self) -> bool {
        self.state.borrow().joining.is_some()
    }

    pub(super) fn set_joining(&self, joining: Option<JoinOptions>) {
        self.state.borrow_mut().joining = joining;
    }

    /// Runs backward on `loss`; averages the gradients over the ranks if `sync`. Also if that fails, nothing is left
    /// that goes on with the gradients.
    pub(super) fn backward(&self, loss: &Tensor, sync: bool, place: Place) -> Result<()> {
        let result = self.try_backward(loss, sync, place);
        if result.is_err() {
            // The others take part in what has been started, or the run ends, and so do these. Why it ends is known.
            let State { communication, group, .. } = &mut *self.state.borrow_mut();
            let _ = communication.wait(group);
        }
        result
    }

    fn try_backward(&self, loss: &Tensor, sync: bool, place: Place) -> Result<()> {
        let began = Instant::now();
        let before = self.state.borrow().times.communication;
        // Where ranks may use different parameters, the time at which a bucket is complete differs between them,
        // and so would the order of its reduction and other collectives in backward (SyncBatchNorm's).
        let same_everywhere = !self.options.find_unused_parameters && !self.options.static_graph;
        let overlaps = same_everywhere && self.state.borrow().communication.overlaps();
        let overlap = self.options.overlap.unwrap_or(overlaps);
        let active = self.state.borrow_mut().begin(sync, overlap)?;
        self.state.borrow_mut().place = Some(place);
        let backward = torch::backward(loss);
        let mode = std::mem::replace(&mut self.state.borrow_mut().mode, Mode::Outside);
        self.hooks.resume_panic();
        let mut state = self.state.borrow_mut();
        // What went wrong in a hook comes first: it is why backward was of no use, if it was.
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        backward?;
        state.layout.settle()?;
        if sync {
            let beside = state.communication.since().map_or(Duration::ZERO, |it| it.elapsed());
            state.times.beside += beside;
            let so_far = state.times.communication;
            state.times.overlapped += so_far - before;
            state.mode = mode;
            let finished = state.finish(self.options, active);
            state.mode = Mode::Outside;
            self.hooks.resume_panic();
            finished?;
            state.times.total += began.elapsed();
            state.times.count += 1;
        }
        Ok(())
    }

    /// Takes part in a step of the others, `active` of them, with gradients of zero.
    pub(super) fn shadow(&self, active: usize, join: JoinOptions) -> Result<()> {
        self.for_each_flat(|flat| {
            flat.gradients.f_zero_().map(drop).map_err(Error::torch("zero_"))
        })?;
        let state = &mut *self.state.borrow_mut();
        state.reset()?;
        // Where the ranks agree on what is used, this one uses nothing; and learns nothing from that.
        let (known, times) = (state.always_unused.clone(), state.times);
        let agrees = state.agrees(self.options);
        state.layout.members.iter_mut().for_each(|member| member.used = !agrees);
        let active = (!join.divide_by_initial_world_size).then_some(active);
        state.finish(self.options, active)?;
        state.always_unused = known;
        state.times = times; // which are those of steps of its own
        Ok(())
    }
}

impl State {
    /// Returns the number of ranks to divide by, if it is not that of all.
    fn begin(&mut self, sync: bool, overlap: bool) -> Result<Option<usize>> {
        self.reset()?;
        let joining = self.joining.filter(|_| sync);
        let active = joining.map(|join| count_active(&self.group, true, join)).transpose()?;
        self.mode = match sync {
            false => Mode::Local,
            true if overlap => Mode::Overlap,
            true => Mode::AfterBackward,
        };
        Ok(active.filter(|_| joining.is_some_and(|join| !join.divide_by_initial_world_size)))
    }

    fn reset(&mut self) -> Result<()> {
        self.next = 0;
        self.error = None;
        self.began = (Instant::now(), self.times.communication);
        let Layout { buckets, members, .. } = &mut self.layout;
        self.complete.clear();
        self.complete.resize(buckets.len(), None);
        buckets.iter_mut().for_each(|bucket| bucket.pending = bucket.parameters.len());
        members.iter_mut().for_each(|member| member.ready = false);
        for &index in self.always_unused.iter().flatten() {
            // Nobody will tell when to, and its bucket may go out at any time from now on.
            members[index].settle()?;
            members[index].ready = true;
            buckets[members[index].bucket].pending -= 1;
        }
        if let Some(order) = &mut self.ready_order {
            order.clear();
        }
        Ok(())
    }

    /// Backward has completed the gradient of a parameter.
    fn on_grad(&mut self, index: usize) {
        if self.error.is_some() {
            return;
        }
        if let Err(error) = self.mark_ready(index) {
            self.error = Some(error);
        }
    }

    /// Notes that a parameter's gradient is complete, and reduces every bucket that is complete and whose
    /// turn it is.
    fn mark_ready(&mut self, index: usize) -> Result<()> {
        let member = &mut self.layout.members[index];
        if member.ready {
            return Err(Error::Input(format!(
                "static_graph: `{}` had no gradient in the first step and has one now; set \
                 find_unused_parameters instead",
                member.name
            )));
        }
        member.settle()?;
        member.used = true;
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
        if self.mode == Mode::Overlap { self.reduce_complete_buckets() } else { Ok(()) }
    }

    fn reduce_complete_buckets(&mut self) -> Result<()> {
        while self.layout.buckets.get(self.next).is_some_and(|bucket| bucket.pending == 0) {
            let began = Instant::now();
            let State { layout, next, group, comm_hook, communication, place, .. } = self;
            group.note(Note { place: *place, bucket: u16::try_from(*next).ok() });
            layout.keep_local(*next)?;
            let buckets = &mut layout.buckets;
            let is_last = *next + 1 == buckets.len();
            let Bucket { gradients, parameters, .. } = &mut buckets[*next];
            let mut handle = gradients.shallow_clone();
            // A bucket that is alone has nothing to go on beside.
            let goes_on = self.mode == Mode::Overlap && !(is_last && *next == 0);
            if goes_on
                && comm_hook.only_averages()
                && let Some(works) = communication.beside()
            {
                works.push(group.all_reduce_beside(&handle, average(group))?);
                self.next += 1;
                continue;
            }
            let mut bucket =
                GradBucket { index: *next, is_last, gradients: &mut handle, parameters };
            communication.run(group, |group| {
                comm_hook.reduce(&mut bucket, group)?;
                // A hook may have put another tensor in its place, as it would return one in Python.
                if bucket.gradients.data_ptr() != gradients.data_ptr() {
                    tch::no_grad(|| gradients.f_copy_(bucket.gradients))
                        .map_err(Error::torch("taking over what a hook has made"))?;
                }
                Ok(())
            })?;
            self.next += 1;
            self.times.communication += began.elapsed();
        }
        self.group.note(Note::default());
        Ok(())
    }

    /// Everything that has not been reduced is.
    fn finish(&mut self, options: DdpOptions, active: Option<usize>) -> Result<()> {
        let agrees = self.agrees(options);
        if options.static_graph && self.always_unused.is_none() {
            self.always_unused = Some(self.unused().map(|(index, _)| index).collect());
        } else if !agrees {
            self.refuse_unused()?;
        }
        for bucket in &mut self.layout.buckets {
            bucket.pending = 0; // whoever had no gradient contributes zeros
        }
        self.reduce_complete_buckets()?;
        let began = Instant::now();
        self.communication.wait(&self.group)?;
        self.times.communication += began.elapsed();
        if let Some(active) = active {
            let factor = self.group.world_size() as f64 / active as f64;
            for flat in &mut self.layout.flats {
                let _ = flat.gradients.f_mul_scalar_(factor).map_err(Error::torch("mul_"))?;
            }
        }
        if agrees {
            // After the buckets, which some ranks have reduced by now and others not.
            self.undefined = self.agree_on_unused()?;
            for flat in &self.layout.flats {
                flat.places.set_unused(&self.undefined);
            }
            self.has_agreed = options.static_graph;
        }
        self.layout.members.iter_mut().for_each(|member| member.used = false);
        self.rebuild_buckets(options)?;
        self.layout.set_gradients(Gradients::Averaged);
        self.undefined.iter().try_for_each(|&index| self.layout.members[index].take_gradient_away())
    }

    /// Every parameter must have had a gradient on this rank.
    fn refuse_unused(&self) -> Result<()> {
        let allowed =
            |index: &usize| self.always_unused.iter().flatten().any(|known| known == index);
        let missing = self.unused().filter(|(index, _)| !allowed(index));
        let names: Vec<&str> = missing.map(|(_, member)| member.name.as_str()).collect();
        if names.is_empty() {
            return Ok(());
        }
        let rank = self.group.ranks()[self.group.rank()];
        Err(Error::UnusedParameters { rank, names: names.join(", ") })
    }

    /// Whether the ranks have to find out together what is unused in this step.
    fn agrees(&self, options: DdpOptions) -> bool {
        options.find_unused_parameters || (options.static_graph && !self.has_agreed)
    }

    /// The parameters that had no gradient on this rank.
    fn unused(&self) -> impl Iterator<Item = (usize, &Member)> {
        self.layout.members.iter().enumerate().filter(|(_, member)| !member.used)
    }

    /// The parameters that no rank had a gradient for.
    fn agree_on_unused(&self) -> Result<Vec<usize>> {
        let used = self.layout.members.iter().map(|member| i32::from(member.used));
        let used: Vec<i32> = used.collect();
        let mut used = Tensor::from_slice(&used).to_device(self.group.device());
        self.group.all_reduce(&mut used, ReduceOp::Max)?;
        self.group.synchronize()?;
        let used = Vec::<i32>::try_from(used.to_device(Device::Cpu));
        let used = used.map_err(Error::torch("reading which parameters are used"))?;
        Ok((0..used.len()).filter(|&index| used[index] == 0).collect())
    }

    /// After the first iteration: the order of rank 0's gradients becomes that of the buckets, on all ranks.
    fn rebuild_buckets(&mut self, options: DdpOptions) -> Result<()> {
        let Some(mut order) = self.ready_order.take() else { return Ok(()) };
        if options.find_unused_parameters || self.layout.buckets.len() == 1 {
            return Ok(()); // not all parameters need have been seen; or there is nothing to gain
        }
        if order.len() < self.layout.members.len() {
            // A rank that has run out of inputs, or parameters that are never used.
            order = self.layout.default_order();
        }
        let mine: Vec<i64> = order.iter().map(|&index| index as i64).collect();
        let mut agreed = Tensor::from_slice(&mine).to_device(self.group.device());
        self.group.broadcast(&mut agreed, 0)?;
        self.group.synchronize()?;
        let agreed = Vec::<i64>::try_from(agreed.to_device(Device::Cpu).to_kind(Kind::Int64));
        let agreed = agreed.map_err(Error::torch("reading rank 0's order"))?;
        order = agreed.into_iter().map(|index| index as usize).collect();
        self.layout.fill_buckets(&order, options)
    }
}
