//! The reduction of a model's buckets in one step: counts the gradients that are ready, and reduces complete buckets.

use std::rc::Rc;
use std::time::Instant;

use tch::Device;

use super::active_ranks::{JoinOptions, count_active};
use super::averaging::{Averaging, BucketTurn};
use super::comm_hooks::average;
use super::layout::{Layout, default_order};
use super::options::DdpOptions;
use super::statistics::BackwardClock;
use super::unused::UnusedParams;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::models::NamedTensor;
use crate::optim::average_gradients;
use crate::process_group::{CallContext, ProcessGroup};
use crate::runtime::CallSite;

/// The state of a [`Reducer`](super::reducer::Reducer), which the gradient hooks share.
pub(super) struct ReducerState {
    pub options: DdpOptions,
    pub group: Rc<ProcessGroup>,
    pub layout: Layout,
    /// The parameters in the order in which their gradients become ready in the first iteration. `None` once the buckets
    /// follow it.
    ready: Option<Vec<usize>>,
    pub averaging: Averaging,
    unused: UnusedParams,
    /// Options within `join`: what happens when ranks have run out of inputs.
    pub joining: Option<JoinOptions>,
    pub clock: BackwardClock,
    pub backward: Backward,
}

/// The state of one backward.
#[derive(Default)]
pub(super) struct Backward {
    /// Whether it averages. Gradients stay on this rank otherwise: `no_sync`.
    averages: bool,
    /// Whether it reduces buckets as they become complete, and not at its end.
    overlaps: bool,
    /// Whether autograd is running, so that hooks may be called.
    pub is_in_autograd: bool,
    /// The next bucket to reduce.
    next: usize,
    /// Where the user has called it.
    call_site: Option<CallSite>,
    /// The error of a hook, which cannot return it.
    pub error: Option<Error>,
}

impl ReducerState {
    /// Moves `parameters` into buckets, of which their `grad`s will be views.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        group: Rc<ProcessGroup>,
        options: DdpOptions,
    ) -> Result<Self> {
        // On GPUs a copy into a bucket costs little, and a kernel for each gradient would cost more.
        let in_place = group.reduces_in_place() && group.device() == Device::Cpu;
        let in_place = in_place && !options.optimizer_layout.partitions(group.world_size());
        let layout = Layout::new(parameters, &options, in_place, group.clone())?;
        Ok(Self {
            options,
            averaging: Averaging::new(&group, layout.memory.is_partitioned())?,
            ready: Some(Vec::with_capacity(layout.states.len())),
            group,
            layout,
            unused: UnusedParams::default(),
            joining: None,
            clock: BackwardClock::new(),
            backward: Backward::default(),
        })
    }

    /// Prepares for the gradients of a backward that was called at `call_site`. From now on hooks may be called. Returns the
    /// factor of the loss, which is not 1 where ranks have run out of inputs.
    pub(super) fn begin(&mut self, averages: bool, call_site: CallSite) -> Result<f64> {
        // Averages the gradients of an earlier backward first, because this one adds to them.
        average_gradients(&self.layout.memory.buffers)?;
        self.reset()?;
        let mut factor = 1.0;
        if let Some(join) = self.joining.filter(|_| averages) {
            let active = count_active(&self.group, true, join)?;
            // The gradients are divided by the number of all ranks.
            if !join.divide_by_initial_world_size {
                factor = self.group.world_size() as f64 / active as f64;
                let earlier = self.layout.memory.buffers.iter_mut().filter(|_| factor != 1.0);
                for buffer in earlier {
                    let _ = buffer.gradients.f_mul_scalar_(factor).doing("mul_")?;
                }
            }
        }
        self.unused.multiplied_by = factor;
        self.backward = Backward {
            averages,
            overlaps: averages && self.can_overlap(),
            is_in_autograd: true,
            call_site: Some(call_site),
            ..Backward::default()
        };
        Ok(factor)
    }

    /// Returns whether buckets are reduced during backward. Where ranks may use different parameters, a bucket is
    /// complete at different times on different ranks. The order of its reduction and other collectives in backward
    /// (SyncBatchNorm's) would differ too.
    fn can_overlap(&self) -> bool {
        let DdpOptions { find_unused_parameters, static_graph, overlap, .. } = self.options;
        let same_everywhere = !find_unused_parameters && !static_graph;
        overlap.unwrap_or_else(|| same_everywhere && self.averaging.path.overlaps())
    }

    fn reset(&mut self) -> Result<()> {
        self.layout.memory.average_in_step(None);
        self.clock.begin(&self.group, self.layout.buckets.len());
        let Layout { buckets, memory, states, .. } = &mut self.layout;
        for bucket in buckets.iter_mut() {
            bucket.pending = bucket.parameters.len();
        }
        states.iter_mut().for_each(|state| state.ready = false);
        for &index in self.unused.always.iter().flatten() {
            // No hook will run for this parameter, and its bucket may be reduced at any time from now on.
            memory.parameters[index].take_gradient()?;
            states[index].ready = true;
            buckets[states[index].bucket].pending -= 1;
        }
        self.ready.iter_mut().for_each(Vec::clear);
        Ok(())
    }

    /// Handles a gradient that backward has completed.
    pub(super) fn on_grad(&mut self, index: usize) {
        if self.backward.error.is_none() {
            self.backward.error = self.mark_ready(index).err();
        }
    }

    /// Marks a parameter's gradient as ready. Reduces the complete buckets from the next one on if this backward overlaps.
    fn mark_ready(&mut self, index: usize) -> Result<()> {
        let (parameter, state) =
            (&self.layout.memory.parameters[index], &mut self.layout.states[index]);
        if state.ready {
            return Err(Error::usage(format!(
                "static_graph: `{}` had no gradient in the first step and has one now; set \
                 find_unused_parameters instead",
                parameter.name
            )));
        }
        state.used = true;
        parameter.take_gradient()?;
        if !self.backward.averages {
            return Ok(());
        }
        state.ready = true;
        let bucket = state.bucket;
        self.group.record_gradient(index, bucket, self.backward.call_site);
        self.layout.buckets[bucket].pending -= 1;
        if self.layout.buckets[bucket].pending == 0 {
            self.clock.bucket_is_complete(bucket);
        }
        self.ready.iter_mut().for_each(|ready| ready.push(index));
        if self.backward.overlaps { self.reduce_complete_buckets() } else { Ok(()) }
    }

    /// Reduces buckets in index order, up to the first that is not complete.
    fn reduce_complete_buckets(&mut self) -> Result<()> {
        while self.layout.buckets.get(self.backward.next).is_some_and(|bucket| bucket.pending == 0)
        {
            self.reduce_next_bucket()?;
            self.backward.next += 1;
        }
        self.group.set_context(CallContext::default());
        Ok(())
    }

    fn reduce_next_bucket(&mut self) -> Result<()> {
        let began = Instant::now();
        let scatters = self.scatters();
        let Self { layout, group, averaging, backward, .. } = self;
        let index = backward.next;
        if layout.buckets[index].gradients.is_empty() {
            return Ok(()); // all of its parameters are empty
        }
        group.set_context(CallContext {
            call_site: backward.call_site,
            bucket: u16::try_from(index).ok(),
        });
        layout.show_gradients(index)?;
        let mut later = layout.buckets[index + 1..].iter();
        let is_last = later.all(|bucket| bucket.gradients.is_empty());
        let turn = BucketTurn { index, is_last, scatters, overlaps: backward.overlaps };
        let Layout { buckets, memory, .. } = layout;
        if averaging.reduce(&mut buckets[index], &memory.parameters, group, turn)? {
            self.clock.totals.communication += began.elapsed();
        }
        Ok(())
    }

    /// Returns whether each rank receives only its partitions of the averages in this step.
    fn scatters(&self) -> bool {
        self.layout.memory.is_partitioned()
            && self.averaging.hook().is_none()
            && self.ready.is_none()
            && self.layout.observers.is_empty()
    }

    /// Reduces all remaining buckets, or leaves them to the optimizer's step.
    pub(super) fn reduce_rest(&mut self) -> Result<()> {
        self.clock.end_of_autograd(&self.group);
        self.unused.account(&mut self.layout, &self.options, &self.group)?;
        if self.step_can_average() {
            self.layout.memory.average_in_step(Some(average(&self.group)));
            self.backward.next = self.layout.buckets.len();
            return Ok(());
        }
        self.reduce_complete_buckets()
    }

    /// Returns whether the optimizer can average the gradients as it steps, and nothing else reads the averages or writes to
    /// them.
    fn step_can_average(&self) -> bool {
        self.layout.memory.can_average_in_step()
            && self.averaging.hook().is_none()
            && !self.backward.overlaps
            && self.joining.is_none()
            && self.layout.observers.is_empty()
            && !self.unused.must_agree(&self.options)
    }

    /// Waits for the reductions and ends the step.
    pub(super) fn finish(&mut self) -> Result<()> {
        let scatters = self.scatters(); // as in this step: after it the order of the buckets is final
        let Self { group, layout, unused, options, .. } = self;
        self.clock.totals.communication += self.averaging.path.wait(group)?;
        unused.restore_unused(layout, options, group)?;
        // Rebuilds the buckets after the first iteration, in the order in which rank 0's gradients became ready. One bucket
        // gains nothing, and in an iteration that need not use all parameters some may be missing.
        if let Some(mut order) = self.ready.take()
            && !options.find_unused_parameters
            && layout.buckets.len() > 1
        {
            if order.len() < layout.states.len() {
                // This rank has run out of inputs, or some parameters are never used.
                order = default_order(layout.states.len());
            }
            group.broadcast_object_list(&mut order, 0)?;
            layout.fill_buckets(&order, options)?;
        }
        layout.memory.set_averaged(scatters);
        unused.undefined.iter().try_for_each(|&index| layout.memory.parameters[index].clear_grad())
    }

    /// Takes part with zero gradients in a step of the ranks that still have inputs.
    pub(super) fn shadow(&mut self) -> Result<()> {
        self.layout.memory.zero_gradients()?;
        self.reset()?;
        self.unused.multiplied_by = 1.0;
        // If the ranks agree on unused parameters in this step, this rank uses none. It must not learn from that which
        // ones are always unused.
        let (always_unused, totals) = (self.unused.always.clone(), self.clock.totals);
        let uses_all = !self.unused.must_agree(&self.options);
        self.layout.states.iter_mut().for_each(|state| state.used = uses_all);
        // Errors name the last backward of this rank.
        self.backward = Backward { call_site: self.backward.call_site, ..Backward::default() };
        self.reduce_rest()?;
        self.finish()?;
        self.unused.always = always_unused;
        self.clock.totals = totals; // counts this rank's own steps only
        Ok(())
    }
}
