//! Averages gradients over the ranks, bucket by bucket, while backward goes on or after it.

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tch::{Device, Kind, TchError, Tensor};

use super::bucket::{self, Size};
use super::comm_hooks::{CommHook, GradBucket};
use super::communication::Communication;
use super::parameters::NamedTensor;
use super::{DdpOptions, elements_per_line, mib};
use crate::error::{Error, Result};
use crate::process_group::{ProcessGroup, ReduceOp, num_bytes};
use crate::torch::{GradHooks, grad_data, set_grad};

/// All parameters of one kind, one after the other, and their gradients: allocated once, and every parameter
/// and `grad` is a view of its part.
#[derive(Debug)]
pub(super) struct Flat {
    pub parameters: Tensor,
    pub gradients: Tensor,
}

/// Parameters that are reduced together: a stretch of a [`Flat`].
#[derive(Debug)]
struct Bucket {
    gradients: Tensor,
    /// Where each of its parameters begins in it, and its shape.
    parameters: Vec<(usize, Vec<i64>)>,
    /// How many of them still lack their gradient in this step.
    pending: usize,
}

/// A parameter's place.
struct Member {
    name: String,
    parameter: Tensor,
    flat: usize,
    bucket: usize,
    /// Where its gradient must lie: in the bucket.
    grad_data: *const c_void,
    /// Whether its gradient is complete in this step.
    ready: bool,
}

/// What backward on this rank is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Gradients stay here: no_sync, or no backward of ours.
    Local,
    /// Buckets are reduced as they become complete.
    Overlap,
    /// Buckets are reduced when backward is through.
    AfterBackward,
}

/// How long the parts of the last backward took on this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    /// From the beginning of backward to the end of the last bucket.
    pub total: Duration,
    /// In which this rank was busy with reducing, or waited for it.
    pub communication: Duration,
    /// That part of `communication` that passed before backward was through.
    pub overlapped: Duration,
}

/// All buckets of a model, in the order in which they are reduced: their index order, on every rank,
/// whichever gradient is ready first.
pub(super) struct Reducer {
    state: Rc<RefCell<State>>,
    hooks: GradHooks,
    options: DdpOptions,
}

struct State {
    group: Rc<ProcessGroup>,
    flats: Vec<Flat>,
    buckets: Vec<Bucket>,
    /// The parameters, in the order of their creation.
    members: Vec<Member>,
    /// The order in which the gradients became ready in the first iteration; kept until buckets follow it.
    ready_order: Option<Vec<usize>>,
    mode: Mode,
    /// The next bucket to reduce in this step.
    next: usize,
    /// What went wrong in a hook, which cannot return it.
    error: Option<Error>,
    comm_hook: Box<dyn CommHook>,
    communication: Communication,
    times: Times,
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer").field("buckets", &self.state.borrow().buckets).finish()
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
        let member = |named: &&NamedTensor| Member {
            name: named.name.clone(),
            parameter: named.tensor.shallow_clone(),
            flat: 0,
            bucket: 0,
            grad_data: std::ptr::null(),
            ready: false,
        };
        let communication = Communication::new(&group)?;
        let mut state = State {
            group,
            flats: Vec::new(),
            buckets: Vec::new(),
            members: parameters.iter().map(member).collect(),
            ready_order: Some(Vec::with_capacity(parameters.len())),
            mode: Mode::Local,
            next: 0,
            error: None,
            comm_hook: Box::new(super::comm_hooks::AllReduce),
            communication,
            times: Times::default(),
        };
        // Last parameter first: backward computes the gradients roughly in that order.
        let reverse: Vec<usize> = (0..parameters.len()).rev().collect();
        state.fill_buckets(&reverse, options)?;
        let state = Rc::new(RefCell::new(state));
        let in_hooks = state.clone();
        let hooks =
            GradHooks::register(handles, move |index| in_hooks.borrow_mut().on_grad(index))?;
        Ok(Self { state, hooks, options })
    }

    /// Runs `f` on the parameters and gradients of each kind.
    pub(super) fn for_each_flat(&self, f: impl FnMut(&mut Flat) -> Result<()>) -> Result<()> {
        self.state.borrow_mut().flats.iter_mut().try_for_each(f)
    }

    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        let bytes = |b: &Bucket| num_bytes(b.gradients.kind(), b.gradients.numel());
        self.state.borrow().buckets.iter().map(bytes).collect()
    }

    pub(super) fn set_comm_hook(&self, hook: Box<dyn CommHook>) {
        self.state.borrow_mut().comm_hook = hook;
    }

    pub(super) fn times(&self) -> Times {
        self.state.borrow().times
    }

    /// Runs backward on `loss`; averages the gradients over the ranks if `sync`.
    pub(super) fn backward(&self, loss: &Tensor, sync: bool) -> Result<()> {
        let began = Instant::now();
        self.state.borrow_mut().begin(sync, self.options.overlap)?;
        let backward = loss.f_backward().map_err(Error::torch("backward"));
        self.hooks.resume_panic();
        let mut state = self.state.borrow_mut();
        let mode = std::mem::replace(&mut state.mode, Mode::Local);
        // What went wrong in a hook comes first: it is why backward was of no use, if it was.
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        backward?;
        if !sync {
            return Ok(());
        }
        state.times.overlapped = state.times.communication;
        state.check_unused(&self.options)?;
        state.mode = mode;
        let reduced = state.reduce_the_rest();
        state.mode = Mode::Local;
        reduced?;
        state.times.total = began.elapsed();
        state.rebuild_buckets(self.options)
    }
}

impl State {
    /// Deals the parameters, taken in `order`, into buckets, and moves values and gradients there.
    fn fill_buckets(&mut self, order: &[usize], options: DdpOptions) -> Result<()> {
        let size = |&index: &usize| {
            let tensor = &self.members[index].parameter;
            let kind = tensor.kind();
            Size { kind, num_bytes: num_bytes(kind, tensor.numel()) }
        };
        let sizes: Vec<Size> = order.iter().map(size).collect();
        let (first_cap, cap) = (mib(options.first_bucket_mb), mib(options.bucket_cap_mb));
        let assignment = bucket::assign(&sizes, first_cap, cap);

        // Whatever the order, each kind takes the same room.
        let room = |Member { parameter, .. }: &Member| {
            parameter.numel().next_multiple_of(elements_per_line(parameter.kind()))
        };
        let rooms: Vec<usize> = self.members.iter().map(room).collect();
        if self.flats.is_empty() {
            let mut totals: Vec<(Kind, Device, usize)> = Vec::new();
            for &index in order {
                let parameter = &self.members[index].parameter;
                let (kind, device) = (parameter.kind(), parameter.device());
                match totals.iter_mut().find(|total| total.0 == kind) {
                    Some(total) => total.2 += rooms[index],
                    None => totals.push((kind, device, rooms[index])),
                }
            }
            let flat = |(kind, device, total)| -> Result<Flat, TchError> {
                let zeros = || Tensor::f_zeros([total as i64], (kind, device));
                Ok(Flat { parameters: zeros()?, gradients: zeros()? })
            };
            let flats = totals.into_iter().map(flat).collect::<Result<_, _>>();
            self.flats = flats.map_err(Error::torch("making the buckets"))?;
        }
        let mut ends = vec![0; self.flats.len()];
        let mut starts = vec![0; self.members.len()];
        let mut buckets = Vec::with_capacity(assignment.len());
        for (number, places) in assignment.iter().enumerate() {
            let kind = sizes[places[0]].kind;
            let flat = self.flats.iter().position(|flat| flat.parameters.kind() == kind);
            let flat =
                flat.ok_or_else(|| Error::Input("a parameter has changed its kind".into()))?;
            let begin = ends[flat];
            let mut parameters = Vec::with_capacity(places.len());
            for index in places.iter().map(|&place| order[place]) {
                parameters.push((ends[flat] - begin, self.members[index].parameter.size()));
                starts[index] = ends[flat];
                ends[flat] += rooms[index];
                self.members[index].bucket = number;
                self.members[index].flat = flat;
            }
            let stretch =
                |tensor: &Tensor| tensor.f_narrow(0, begin as i64, (ends[flat] - begin) as i64);
            let gradients = stretch(&self.flats[flat].gradients);
            let gradients = gradients.map_err(Error::torch("making the buckets"))?;
            buckets.push(Bucket { gradients, parameters, pending: 0 });
        }
        self.buckets = buckets;
        tch::no_grad(|| self.move_to(&starts)).map_err(Error::torch("making the buckets"))?;
        for member in &mut self.members {
            member.grad_data = grad_data(&member.parameter);
        }
        Ok(())
    }

    /// Moves each parameter and its gradient to its place in the flat tensors.
    fn move_to(&mut self, starts: &[usize]) -> Result<(), TchError> {
        // Copies first: the new place of one may be the old one of another.
        let copy = |member: &Member| {
            let grad = member.parameter.grad();
            (member.parameter.copy(), grad.defined().then(|| grad.copy()))
        };
        let copies: Vec<_> = self.members.iter().map(copy).collect();
        for flat in &mut self.flats {
            let _ = flat.gradients.f_zero_()?;
        }
        for ((member, &start), (value, grad)) in self.members.iter().zip(starts).zip(copies) {
            let Flat { parameters, gradients } = &self.flats[member.flat];
            let shape = member.parameter.size();
            let part = |flat: &Tensor| {
                flat.f_narrow(0, start as i64, value.numel() as i64)?.f_view(&shape[..])
            };
            let (mut new_value, mut new_grad) = (part(parameters)?, part(gradients)?);
            new_value.f_copy_(&value)?;
            if let Some(grad) = grad {
                new_grad.f_copy_(&grad)?;
            }
            member.parameter.shallow_clone().f_set_data(&new_value)?;
            set_grad(&member.parameter, &new_grad)
                .map_err(|error| TchError::Torch(error.to_string()))?;
        }
        Ok(())
    }

    fn begin(&mut self, sync: bool, overlap: Option<bool>) -> Result<()> {
        self.next = 0;
        self.error = None;
        self.times = Times::default();
        self.buckets.iter_mut().for_each(|bucket| bucket.pending = bucket.parameters.len());
        self.members.iter_mut().for_each(|member| member.ready = false);
        if let Some(order) = &mut self.ready_order {
            order.clear();
        }
        self.mode = match sync {
            false => Mode::Local,
            true if overlap.unwrap_or(self.communication.overlaps()) => Mode::Overlap,
            true => Mode::AfterBackward,
        };
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
        let member = &mut self.members[index];
        if grad_data(&member.parameter) != member.grad_data {
            return Err(Error::Input(format!(
                "the gradient of `{}` is no longer a view of its bucket, so it cannot be averaged; somebody \
                 has replaced it: zero gradients with DistributedDataParallel::zero_grad, not with an \
                 optimizer's",
                member.name
            )));
        }
        if self.mode == Mode::Local || member.ready {
            return Ok(());
        }
        member.ready = true;
        let bucket = member.bucket;
        self.buckets[bucket].pending -= 1;
        if let Some(order) = &mut self.ready_order {
            order.push(index);
        }
        if self.mode == Mode::Overlap { self.reduce_complete_buckets() } else { Ok(()) }
    }

    fn reduce_complete_buckets(&mut self) -> Result<()> {
        while self.buckets.get(self.next).is_some_and(|bucket| bucket.pending == 0) {
            let began = Instant::now();
            let State { buckets, next, group, comm_hook, communication, .. } = self;
            let is_last = *next + 1 == buckets.len();
            let Bucket { gradients, parameters, .. } = &mut buckets[*next];
            let mut bucket = GradBucket { index: *next, is_last, gradients, parameters };
            communication.run(group, |group| comm_hook.reduce(&mut bucket, group))?;
            self.next += 1;
            self.times.communication += began.elapsed();
        }
        Ok(())
    }

    /// Backward is through: everything that has not been reduced is.
    fn reduce_the_rest(&mut self) -> Result<()> {
        for bucket in &mut self.buckets {
            bucket.pending = 0; // whoever had no gradient contributes what is there: zeros
        }
        self.reduce_complete_buckets()?;
        self.communication.wait()
    }

    /// Without `find_unused_parameters` every parameter must have had a gradient.
    fn check_unused(&mut self, options: &DdpOptions) -> Result<()> {
        if options.find_unused_parameters {
            return Ok(());
        }
        let unused: Vec<&str> =
            self.members.iter().filter(|m| !m.ready).map(|m| m.name.as_str()).collect();
        if unused.is_empty() {
            return Ok(());
        }
        Err(Error::UnusedParameters { rank: self.group.rank(), names: unused.join(", ") })
    }

    /// After the first iteration: the order of rank 0's gradients becomes that of the buckets, on all ranks.
    fn rebuild_buckets(&mut self, options: DdpOptions) -> Result<()> {
        let Some(mut order) = self.ready_order.take() else { return Ok(()) };
        if options.find_unused_parameters || self.buckets.len() == 1 {
            return Ok(()); // not all parameters need have been seen; or there is nothing to gain
        }
        let mine: Vec<i64> = order.iter().map(|&index| index as i64).collect();
        let mut agreed = Tensor::from_slice(&mine).to_device(self.group.device());
        self.group.broadcast(&mut agreed, 0)?;
        self.group.synchronize()?;
        let agreed = Vec::<i64>::try_from(agreed.to_device(Device::Cpu).to_kind(Kind::Int64));
        order = agreed
            .map_err(Error::torch("reading rank 0's order"))?
            .into_iter()
            .map(|index| index as usize)
            .collect();
        self.fill_buckets(&order, options)
    }
}

/// How DDP averages: each gradient is divided before they are summed, as PyTorch does.
pub(super) fn average(group: &ProcessGroup) -> ReduceOp {
    ReduceOp::PremulSum(1.0 / group.world_size() as f64)
}
