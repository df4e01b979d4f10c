//! The memory of parameters and gradients: flat buffers, of which buckets are ranges.

use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::bucket::{self, FlatContents, Size};
use super::grad_observer::GradObservers;
use super::options::DdpOptions;
use super::param_slot::{ParamSlot, cache_line_numel};
use super::parameters::NamedTensor;
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, set_grad};
use crate::optim::{FlatBuffer, GradState, ParamLayout, ParamSpan, Partitions, SharedModel};
use crate::process_group::{ProcessGroup, device_name, join_shapes};
use crate::records::Parameter;

/// Parameters that are reduced together.
#[derive(Debug)]
pub(super) struct Bucket {
    /// The gradients: a range of a [`FlatBuffer`], and each gradient that stays where autograd puts it.
    pub gradients: Vec<Tensor>,
    /// Their shapes, as the ranks compare them.
    pub shapes: Vec<i64>,
    /// A copy of all gradients in sequence, for a communication hook. `None` until a hook needs it.
    concatenated: Option<Tensor>,
    pub dtype: Kind,
    /// The number of elements, with gaps.
    pub numel: usize,
    /// Its parameters. Each [`ParamSpan::start`] counts from the start of the bucket.
    pub parameters: Vec<ParamSpan>,
    /// The number of parameters that still lack their gradient in this step.
    pub pending: usize,
    /// Whether no rank has a gradient for any of them in this step, so that the bucket is not reduced.
    pub is_skipped: bool,
}

impl Bucket {
    /// Returns the gradients in one tensor: their own memory if they are in one range, otherwise a copy.
    pub(super) fn concat_gradients(&mut self, slots: &[ParamSlot]) -> Result<Tensor> {
        if let [one] = &self.gradients[..] {
            return Ok(one.shallow_clone());
        }
        let doing = "joining the gradients of a bucket";
        if self.concatenated.is_none() {
            let options = (self.dtype, slots[self.parameters[0].index].tensor.device());
            self.concatenated = Some(Tensor::f_zeros([self.numel as i64], options).doing(doing)?);
        }
        let concatenated =
            self.concatenated.as_ref().map_or_else(Tensor::new, Tensor::shallow_clone);
        for span in &self.parameters {
            let gradient = slots[span.index].gradient()?;
            tch::no_grad(|| span.of(&concatenated)?.f_copy_(&gradient).doing(doing))?;
        }
        Ok(concatenated)
    }

    /// Copies the gradients back from `concatenated`, unless that is their memory.
    pub(super) fn copy_back(&self, concatenated: &Tensor, slots: &[ParamSlot]) -> Result<()> {
        if let [one] = &self.gradients[..] {
            if concatenated.data_ptr() == one.data_ptr() {
                return Ok(());
            }
            let copied = tch::no_grad(|| one.shallow_clone().f_copy_(concatenated));
            return copied.doing("copying the result of a communication hook");
        }
        let mut spans = self.parameters.iter();
        spans.try_for_each(|span| slots[span.index].restore_gradient(&span.of(concatenated)?))
    }
}

/// All parameters of a model and their gradients.
#[derive(Debug)]
pub(super) struct Layout {
    /// First one buffer per dtype, allocated once: every parameter in it is a view of its range, and so is its `grad`
    /// once backward has computed it. Then one for each parameter whose gradient stays where autograd puts it.
    pub buffers: Vec<FlatBuffer>,
    /// The number of buffers with a dtype's parameters.
    num_flat: usize,
    /// The indices of the parameters in the order in which they were assigned to buckets.
    order: Vec<usize>,
    pub buckets: Vec<Bucket>,
    /// The parameters, in the order of their creation.
    pub slots: Vec<ParamSlot>,
    /// What sees this rank's own gradients before they are averaged.
    pub observers: GradObservers,
    /// The ranks that reduce the gradients.
    group: Rc<ProcessGroup>,
    /// The ranks that partition the optimizer, if they do.
    partitioned_over: Option<Rc<ProcessGroup>>,
}

impl Layout {
    /// Multiplies all gradients by `factor`.
    pub(super) fn multiply_gradients(&mut self, factor: f64) -> Result<()> {
        for buffer in &mut self.buffers {
            let _ = buffer.gradients.f_mul_scalar_(factor).doing("mul_")?;
        }
        Ok(())
    }

    /// Moves `parameters` into flat buffers, and makes their `grad`s views. With `in_place`, large parameters stay where
    /// they are, and so do their gradients. The ranks of `group` reduce the gradients; with [`DdpOptions::zero`] they
    /// partition each bucket into equal partitions.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        options: &DdpOptions,
        in_place: bool,
        group: Rc<ProcessGroup>,
    ) -> Result<Self> {
        let slot = |named: &&NamedTensor| ParamSlot::new(named, in_place);
        let slots = parameters.iter().map(slot).collect::<Result<Vec<_>>>()?;
        let tensors: Rc<[Tensor]> = slots.iter().map(|slot| slot.tensor.shallow_clone()).collect();
        let partitioned_over = options.partitions(group.world_size()).then(|| group.clone());
        let mut layout = Self {
            buffers: Vec::new(),
            num_flat: 0,
            order: Vec::new(),
            buckets: Vec::new(),
            slots,
            observers: GradObservers::default(),
            group,
            partitioned_over,
        };
        layout.fill_buckets(&layout.default_order(), options)?;
        layout.buffers.iter().for_each(|buffer| buffer.places.set_tensors(tensors.clone()));
        Ok(layout)
    }

    /// Makes the parameters of all ranks that share the model the same memory: that of one of them. All hold the same
    /// values. A collective of these ranks.
    pub(super) fn share_parameters(&mut self, shared: &Rc<SharedModel>) -> Result<()> {
        let doing = "sharing the parameters";
        // Handles of their own: another rank uses these while this one changes its buffers.
        let own = |buffer: &FlatBuffer| buffer.parameters.f_data().doing(doing);
        let tensors = shared.group().share_tensors(|| self.buffers.iter().map(own).collect())?;
        for (buffer, tensor) in self.buffers.iter_mut().zip(&tensors) {
            check_device(tensor.device(), buffer.parameters.device())?;
            buffer.parameters.f_set_data(tensor).doing(doing)?;
            buffer.places.set_shared(shared.clone());
            for span in &*buffer.places.get() {
                let value = span.of(tensor)?;
                self.slots[span.index].tensor.f_set_data(&value).doing(doing)?;
            }
        }
        Ok(())
    }

    /// Returns handles to the same memory, for an optimizer.
    pub(super) fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.buffers.iter().map(FlatBuffer::shallow_clone).collect()
    }

    /// Returns the name, shape, size in bytes and bucket of each parameter.
    pub(super) fn parameter_places(&self) -> Vec<Parameter> {
        let place = |slot: &ParamSlot| Parameter {
            name: slot.name.clone(),
            shape: slot.tensor.size(),
            bytes: slot.num_bytes(),
            bucket: Some(slot.bucket),
        };
        self.slots.iter().map(place).collect()
    }

    /// Removes all gradients. The next gradient of each parameter then replaces the old values, which is cheaper than
    /// to set them to zero and add.
    pub(super) fn zero_grad(&mut self) -> Result<()> {
        self.set_gradients(GradState::Cleared);
        self.slots.iter_mut().try_for_each(ParamSlot::remove_gradient)
    }

    /// Sets all gradients to zeros, with the gaps between them.
    pub(super) fn zero_gradients(&mut self) -> Result<()> {
        for buffer in &mut self.buffers[..self.num_flat] {
            let _ = buffer.gradients.f_zero_().doing("zero_")?;
        }
        let mut staying = self.slots.iter().filter(|slot| slot.in_place_memory().is_some());
        staying.try_for_each(ParamSlot::zero_gradient)
    }

    /// Takes all gradients after backward, and zeros where there are none. With `are_averaged` the zeros count as
    /// gradients until they are averaged, because another rank may have one.
    pub(super) fn take_gradients(&self, are_averaged: bool) -> Result<()> {
        self.set_gradients(GradState::Local);
        self.slots.iter().try_for_each(|slot| {
            if are_averaged || slot.used || slot.has_gradient {
                slot.take_gradient()
            } else {
                slot.clear_grad()
            }
        })
    }

    /// Sets the state of all gradients.
    pub(super) fn set_gradients(&self, gradients: GradState) {
        self.buffers.iter().for_each(|buffer| buffer.places.set_gradients(gradients));
    }

    /// Shows the gradients in `bucket` to the observers, before they are reduced.
    pub(super) fn show_gradients(&mut self, bucket: usize) -> Result<()> {
        let Self { observers, buckets, slots, .. } = self;
        if observers.is_empty() {
            return Ok(());
        }
        let mut spans = buckets[bucket].parameters.iter();
        spans.try_for_each(|span| observers.observe(span.index, &mut slots[span.index].gradient()?))
    }

    /// Returns the parameters from last to first: backward computes the gradients roughly in that order.
    pub(super) fn default_order(&self) -> Vec<usize> {
        (0..self.slots.len()).rev().collect()
    }

    /// Assigns the parameters to buckets in `order`, and moves values and gradients there. Does nothing if they have
    /// this order already. A collective if the ranks share the model.
    pub(super) fn fill_buckets(&mut self, order: &[usize], options: &DdpOptions) -> Result<()> {
        if self.order == order {
            return Ok(());
        }
        let are_new = self.buffers.is_empty();
        if are_new {
            self.allocate(order)?;
        }
        let mut contents = vec![FlatContents::default(); self.num_flat];
        let assigned = self.assigned(order, options);
        let make = |indices: Vec<usize>| self.make_bucket(&indices, &mut contents);
        self.buckets = assigned.into_iter().map(make).collect::<Result<_>>()?;
        for (number, bucket) in self.buckets.iter().enumerate() {
            bucket.parameters.iter().for_each(|span| self.slots[span.index].bucket = number);
        }
        tch::no_grad(|| self.move_to(&contents, are_new))?;
        for (buffer, FlatContents { spans, buckets }) in self.buffers.iter().zip(contents) {
            let group = self.partitioned_over.clone();
            buffer.places.set(spans, group.map(|group| Partitions::new(group, buckets)));
        }
        let shared = self.buffers.first().and_then(|buffer| buffer.places.shared());
        shared.map_or(Ok(()), |shared| self.share_parameters(&shared))?; // they have moved
        self.order = order.to_vec();
        Ok(())
    }

    /// Assigns the parameters to buckets in `order`. Returns the indices of the parameters of each bucket.
    fn assigned(&self, order: &[usize], options: &DdpOptions) -> Vec<Vec<usize>> {
        let size = |&index: &usize| {
            let slot = &self.slots[index];
            Size { dtype: slot.tensor.kind(), num_bytes: slot.num_bytes() }
        };
        let sizes: Vec<Size> = order.iter().map(size).collect();
        let buckets = bucket::assign(&sizes, &options.bucket_caps()).into_iter();
        buckets.map(|places| places.into_iter().map(|place| order[place]).collect()).collect()
    }

    /// Returns a bucket of the parameters with these `indices`, all of one dtype. `contents` has an entry for each
    /// flat buffer: the parameters that move into the buffer of this dtype are added to its entry.
    fn make_bucket(&self, indices: &[usize], contents: &mut [FlatContents]) -> Result<Bucket> {
        let dtype = self.slots[indices[0]].tensor.kind();
        let (parameters, numel) = self.in_sequence(indices);
        let (staying, moved): (Vec<usize>, Vec<usize>) =
            indices.iter().partition(|&&index| self.slots[index].in_place_memory().is_some());
        let mut gradients = Vec::new();
        // Without a flat buffer of this dtype all its parameters stay.
        let mut flat = self.buffers.iter().zip(contents);
        if let Some((buffer, contents)) = flat.find(|(buffer, _)| buffer.parameters.kind() == dtype)
        {
            let (spans, numel) = self.in_sequence(&moved);
            if let Some(range) = contents.add(spans, numel, self.partition_multiple(dtype)) {
                let part = buffer.gradients.f_narrow(0, range.start as i64, range.len() as i64);
                gradients.push(part.doing("making the buckets")?);
            }
        }
        let mut lengths: Vec<Vec<i64>> = gradients.iter().map(Tensor::size).collect();
        for slot in staying.into_iter().map(|index| &self.slots[index]) {
            gradients.extend(slot.in_place_memory());
            // Not the size of the gradient, which is empty until backward has computed it.
            lengths.push(vec![slot.tensor.numel() as i64]);
        }
        Ok(Bucket {
            gradients,
            shapes: join_shapes(lengths.into_iter()),
            concatenated: None,
            dtype,
            numel,
            parameters,
            pending: 0,
            is_skipped: false,
        })
    }

    /// Returns the places of the parameters with these `indices` in sequence, and the number of elements with the gaps.
    fn in_sequence(&self, indices: &[usize]) -> (Vec<ParamSpan>, usize) {
        let (mut spans, mut end) = (Vec::new(), 0);
        for &index in indices {
            let slot = &self.slots[index];
            spans.push(slot.span(index, end));
            end += slot.padded_numel();
        }
        (spans, end)
    }

    /// Returns the number of elements to a multiple of which each bucket is padded, so that its partitions are equal.
    fn partition_multiple(&self, dtype: Kind) -> usize {
        let ranks = self.partitioned_over.as_ref().map(|group| group.world_size());
        ranks.map_or(1, |ranks| ranks * cache_line_numel(dtype))
    }

    /// Returns whether the ranks partition the optimizer.
    pub(super) fn is_partitioned(&self) -> bool {
        self.partitioned_over.is_some()
    }

    /// Makes the buffers: for each dtype one, in the order in which `order` has them, and one for each parameter whose
    /// gradient stays where it is. A dtype takes the same space in any order.
    fn allocate(&mut self, order: &[usize]) -> Result<()> {
        for &index in order {
            let slot = &self.slots[index];
            let (dtype, device) = (slot.tensor.kind(), slot.tensor.device());
            let known = self.buffers.iter().any(|buffer| buffer.parameters.kind() == dtype);
            if known || slot.in_place_memory().is_some() {
                continue;
            }
            let same = self.slots.iter().filter(|slot| slot.tensor.kind() == dtype);
            // Each bucket has at least one parameter, and at most this much padding.
            let gap = self.partition_multiple(dtype) - 1;
            let numel: usize = same
                .filter(|slot| slot.in_place_memory().is_none())
                .map(|slot| slot.padded_numel() + gap)
                .sum();
            let zeros = |group| zeros(group, numel, dtype, device);
            let parameters = zeros(self.partitioned_over.as_ref())?;
            let gradients = zeros(Some(&self.group))?;
            self.buffers.push(FlatBuffer { parameters, gradients, places: ParamLayout::default() });
        }
        self.num_flat = self.buffers.len();
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(gradients) = slot.in_place_memory() else { continue };
            // In this order: a view would keep its base, and with it memory that `share_parameters` has replaced.
            let flat = slot.tensor.f_view(-1).and_then(|tensor| tensor.f_data());
            self.buffers.push(FlatBuffer {
                parameters: flat.doing("making the buckets")?,
                gradients,
                places: vec![slot.span(index, 0)].into(),
            });
        }
        self.set_gradients(GradState::Cleared);
        Ok(())
    }

    /// Moves each parameter and its gradient to its span in the buffers, whose memory may be new and zero.
    fn move_to(&mut self, contents: &[FlatContents], are_new: bool) -> Result<()> {
        let doing = "making the buckets";
        // Copies first, because new and old places of the gradients of different parameters may overlap.
        let copy = |slot: &ParamSlot| {
            let grad = slot.tensor.grad();
            let moves = slot.in_place_memory().is_none() && grad.defined();
            moves.then(|| grad.copy())
        };
        let grads: Vec<Option<Tensor>> = self.slots.iter().map(copy).collect();
        let used = if are_new { 0 } else { self.num_flat };
        for FlatBuffer { parameters, gradients, .. } in &mut self.buffers[..used] {
            let _ = gradients.f_zero_().doing(doing)?;
            // Gives the same handles new memory: a graph whose backward has not run yet still needs the old values.
            let group = self.partitioned_over.as_ref();
            let fresh = zeros(group, parameters.numel(), parameters.kind(), parameters.device())?;
            parameters.f_set_data(&fresh).doing(doing)?;
        }
        for (buffer, contents) in self.buffers.iter().zip(contents) {
            for span in &contents.spans {
                let slot = &mut self.slots[span.index];
                let mut new_value = span.of(&buffer.parameters)?;
                // `f_data` hides the view from autograd: `zero_grad` of tch's optimizers detaches gradients, which
                // views refuse.
                let mut new_grad = span.of(&buffer.gradients)?.f_data().doing(doing)?;
                new_value.f_copy_(&slot.tensor).doing(doing)?;
                if let Some(grad) = &grads[span.index] {
                    new_grad.f_copy_(grad).doing(doing)?;
                    set_grad(&slot.tensor, &new_grad)?;
                }
                slot.tensor.f_set_data(&new_value).doing(doing)?;
                slot.set_place(new_grad);
            }
        }
        Ok(())
    }
}

/// Returns zeros for the collectives of `group`, or for none.
fn zeros(
    group: Option<&Rc<ProcessGroup>>,
    numel: usize,
    dtype: Kind,
    device: Device,
) -> Result<Tensor> {
    match group {
        Some(group) => group.zeros_for_collectives(numel, dtype),
        None => Tensor::f_zeros([numel as i64], (dtype, device)).doing("making the buckets"),
    }
}

/// Refuses to share the memory of another device.
fn check_device(theirs: Device, mine: Device) -> Result<()> {
    if theirs == mine {
        return Ok(());
    }
    Err(Error::InvalidInput(format!(
        "share_model: this rank is on {} and another on {}, which cannot share memory; start ranks on the CPU or on one \
         GPU, or leave share_model out",
        device_name(mine),
        device_name(theirs)
    )))
}
