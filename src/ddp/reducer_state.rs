//! The reduction of a model's buckets in one step: counts the gradients that are ready, and reduces complete buckets.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::active_ranks::{JoinOptions, count_active};
use super::bucket_order::BucketOrder;
use super::comm_hooks::{AllReduce, CommHook, GradBucket, average};
use super::layout::Layout;
use super::options::DdpOptions;
use super::reduce_path::ReducePath;
use super::statistics::BackwardTimings;
use super::unused::UnusedParams;
use crate::error::{Error, Result};
use crate::optim::{GradState, SharedModel, average_gradients};
use crate::process_group::{CallContext, ProcessGroup};
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

/// The state of a [`Reducer`](super::reducer::Reducer), which the gradient hooks share.
pub(super) struct ReducerState {
    pub group: Rc<ProcessGroup>,
    pub layout: Layout,
    pub order: BucketOrder,
    unused: UnusedParams,
    mode: Mode,
    /// Options within `join`: what happens when ranks have run out of inputs.
    pub joining: Option<JoinOptions>,
    /// Whether autograd is running, so that hooks may be called.
    pub is_in_autograd: bool,
    /// The next bucket to reduce in this step.
    next: usize,
    /// The time at which backward began, and `times.communication` at that time.
    pub began: (Instant, Duration),
    /// Time from the start of backward to the completion of each bucket, without reductions. `None` if incomplete.
    pub bucket_times: Vec<Option<Duration>>,
    /// The call site of backward.
    call_site: Option<CallSite>,
    /// The error of a hook, which cannot return it.
    pub error: Option<Error>,
    /// The user's communication hook, if there is one.
    pub comm_hook: Option<Box<dyn CommHook>>,
    pub reduce_path: ReducePath,
    /// The model that the ranks of this process share; `None` if each has its own.
    pub shared: Option<Rc<SharedModel>>,
    pub times: BackwardTimings,
}

impl ReducerState {
    pub(super) fn new(layout: Layout, group: Rc<ProcessGroup>) -> Result<Self> {
        Ok(Self {
            reduce_path: ReducePath::new(&group)?,
            order: BucketOrder::new(layout.slots.len()),
            group,
            layout,
            unused: UnusedParams::default(),
            mode: Mode::AfterBackward,
            joining: None,
            is_in_autograd: false,
            next: 0,
            began: (Instant::now(), Duration::ZERO),
            bucket_times: Vec::new(),
            call_site: None,
            error: None,
            comm_hook: None,
            shared: None,
            times: BackwardTimings::default(),
        })
    }

    /// Prepares for the gradients of a backward that was called at `call_site`. From now on hooks may be called. Returns the
    /// factor of the loss, which is not 1 where ranks have run out of inputs.
    pub(super) fn begin(
        &mut self,
        averages: bool,
        overlaps: bool,
        call_site: CallSite,
    ) -> Result<f64> {
        // Gradients of an earlier backward to which this one adds.
        average_gradients(&self.layout.buffers)?;
        self.reset()?;
        let factor = match self.joining.filter(|_| averages) {
            Some(join) => {
                let active = count_active(&self.group, true, join)?;
                join.loss_factor(self.group.world_size(), active)
            }
            None => 1.0,
        };
        if factor != 1.0 {
            self.layout.multiply_gradients(factor)?;
        }
        self.mode = match averages {
            false => Mode::Local,
            true if overlaps => Mode::Overlap,
            true => Mode::AfterBackward,
        };
        self.call_site = Some(call_site);
        self.is_in_autograd = true;
        Ok(factor)
    }

    /// Ends a backward's autograd; from now on no hooks are called.
    pub(super) fn leave_autograd(&mut self) {
        self.is_in_autograd = false;
    }

    fn reset(&mut self) -> Result<()> {
        self.next = 0;
        self.error = None;
        self.shared.iter().for_each(|shared| shared.clear_average());
        self.began = (Instant::now(), self.times.communication);
        let Layout { buckets, slots, .. } = &mut self.layout;
        self.bucket_times.clear();
        self.bucket_times.resize(buckets.len(), None);
        for bucket in buckets.iter_mut() {
            bucket.pending = bucket.parameters.len();
            bucket.is_skipped = false;
        }
        slots.iter_mut().for_each(|slot| slot.ready = false);
        for &index in self.unused.always.iter().flatten() {
            // No hook will run for this parameter, and its bucket may be reduced at any time from now on.
            slots[index].take_gradient()?;
            slots[index].ready = true;
            buckets[slots[index].bucket].pending -= 1;
        }
        self.order.begin();
        Ok(())
    }

    /// Handles a gradient that backward has completed.
    pub(super) fn on_grad(&mut self, index: usize) {
        if self.error.is_none() {
            self.error = self.mark_ready(index).err();
        }
    }

    /// Marks a parameter's gradient as complete. During backward, reduces every complete bucket that is next.
    fn mark_ready(&mut self, index: usize) -> Result<()> {
        let slot = &mut self.layout.slots[index];
        if slot.ready {
            return Err(Error::InvalidInput(format!(
                "static_graph: `{}` had no gradient in the first step and has one now; set \
                 find_unused_parameters instead",
                slot.name
            )));
        }
        slot.complete()?;
        if self.mode == Mode::Local {
            return Ok(());
        }
        slot.ready = true;
        let bucket = slot.bucket;
        self.group.record_gradient(index, bucket, self.call_site);
        self.layout.buckets[bucket].pending -= 1;
        if self.layout.buckets[bucket].pending == 0 {
            let (began, before) = self.began;
            let reduced = self.times.communication - before;
            self.bucket_times[bucket] = Some(began.elapsed().saturating_sub(reduced));
        }
        self.order.push(index);
        if self.mode == Mode::Overlap { self.reduce_complete_buckets() } else { Ok(()) }
    }

    /// Reduces buckets in index order, up to the first that is not complete.
    fn reduce_complete_buckets(&mut self) -> Result<()> {
        while self.layout.buckets.get(self.next).is_some_and(|bucket| bucket.pending == 0) {
            if !self.layout.buckets[self.next].is_skipped {
                self.reduce_next_bucket()?;
            }
            self.next += 1;
        }
        self.group.set_context(CallContext::default());
        Ok(())
    }

    fn reduce_next_bucket(&mut self) -> Result<()> {
        let began = Instant::now();
        let scatters = self.scatters();
        let Self { layout, group, comm_hook, reduce_path, .. } = self;
        let (index, group) = (self.next, &**group);
        if layout.buckets[index].gradients.is_empty() {
            return Ok(()); // all of its parameters are empty
        }
        group.set_context(CallContext {
            call_site: self.call_site,
            bucket: u16::try_from(index).ok(),
        });
        layout.show_gradients(index)?;
        let is_last = layout.buckets[index + 1..].iter().all(|bucket| bucket.is_skipped);
        let Layout { buckets, slots, .. } = layout;
        let bucket = &mut buckets[index];
        let mut plain = AllReduce;
        let comm_hook = comm_hook.as_deref_mut().unwrap_or(&mut plain);
        if group.reduces_in_place() && comm_hook.is_plain_all_reduce() && !scatters {
            group.all_reduce_list(&bucket.gradients, &bucket.shapes, average(group))?;
            self.times.communication += began.elapsed();
            return Ok(());
        }
        let mut gradients = bucket.concat_gradients(slots)?;
        // A single bucket cannot overlap with anything.
        let is_async = self.mode == Mode::Overlap && !(is_last && index == 0);
        if is_async
            && comm_hook.is_plain_all_reduce()
            && let Some(works) = reduce_path.async_works(group)
        {
            works.push(if scatters {
                group.reduce_scatter_async(&gradients, average(group))?
            } else {
                group.all_reduce_async(&gradients, average(group))?
            });
            return Ok(());
        }
        reduce_path.run(group, |group| {
            if scatters {
                return group.reduce_scatter_in_place(&gradients, average(group));
            }
            let (gradients, parameters) = (&mut gradients, &bucket.parameters);
            comm_hook.reduce(&mut GradBucket { index, is_last, gradients, parameters }, group)?;
            // A hook may have replaced the tensor, as a Python hook would return a new one.
            bucket.copy_back(gradients, slots)
        })?;
        self.times.communication += began.elapsed();
        Ok(())
    }

    /// Returns whether each rank receives only its partitions of the averages in this step.
    fn scatters(&self) -> bool {
        let is_whole = !self.layout.observers.is_empty() || self.has_hook();
        self.layout.is_partitioned() && self.order.is_final() && !is_whole
    }

    /// Returns whether a communication hook does anything but average each bucket.
    fn has_hook(&self) -> bool {
        self.comm_hook.as_ref().is_some_and(|hook| !hook.is_plain_all_reduce())
    }

    /// Reduces all remaining buckets.
    pub(super) fn reduce_rest(&mut self, options: &DdpOptions) -> Result<()> {
        self.unused.account(&mut self.layout, options, &self.group)?;
        if self.steps_average(options) {
            self.leave_to_step();
            return Ok(());
        }
        self.reduce_complete_buckets()
    }

    /// Returns whether the optimizer averages the gradients as it steps: if the ranks share the model, all are in this
    /// process, and nothing else reads the averages or writes to them.
    fn steps_average(&self, options: &DdpOptions) -> bool {
        self.shared.is_some()
            && !self.group.spans_processes()
            && !self.has_hook()
            && self.mode != Mode::Overlap
            && self.joining.is_none()
            && self.layout.observers.is_empty()
            && !self.unused.must_agree(options)
    }

    /// Leaves the gradients to the optimizer's step.
    fn leave_to_step(&mut self) {
        if let Some(shared) = &self.shared {
            shared.set_average(average(&self.group));
        }
        self.next = self.layout.buckets.len();
    }

    /// Waits for the reductions and ends the step.
    pub(super) fn finish(&mut self, options: &DdpOptions) -> Result<()> {
        let scatters = self.scatters();
        let Self { group, layout, unused, .. } = self;
        self.times.communication += self.reduce_path.wait(group)?;
        unused.restore_unused(layout, options, group)?;
        self.order.rebuild_buckets(layout, options, group)?;
        layout.set_gradients(match &self.shared {
            Some(shared) if shared.averages() => GradState::Complete,
            _ if scatters => GradState::Partitioned,
            _ => GradState::Averaged,
        });
        unused.clear_gradients(layout)
    }

    /// Takes part with zero gradients in a step of the ranks that still have inputs.
    pub(super) fn shadow(&mut self, options: &DdpOptions) -> Result<()> {
        self.layout.zero_gradients()?;
        self.reset()?;
        // If the ranks agree on unused parameters in this step, this rank uses none. It must not learn from that which
        // ones are always unused.
        let (always_unused, times) = (self.unused.always.clone(), self.times);
        let uses_all = !self.unused.must_agree(options);
        self.layout.slots.iter_mut().for_each(|slot| slot.used = uses_all);
        self.mode = Mode::AfterBackward;
        self.reduce_rest(options)?;
        self.finish(options)?;
        self.unused.always = always_unused;
        self.times = times; // counts this rank's own steps only
        Ok(())
    }

    /// Takes all gradients, and zeros for those that backward has not computed.
    pub(super) fn take_gradients(&self) -> Result<()> {
        self.layout.take_gradients(self.mode != Mode::Local)
    }

    /// Accounts for the reductions before the end of autograd.
    pub(super) fn record_overlap(&mut self) {
        self.times.hidden += self.reduce_path.async_time(&self.group);
        self.times.overlapped += self.times.communication - self.began.1;
    }
}
