//! The memory of parameters and gradients: flat buffers, of which buckets are ranges.

use std::ffi::c_void;
use std::rc::Rc;

use tch::Tensor;

use super::bucket::{self, Size};
use super::options::DdpOptions;
use super::parameters::NamedTensor;
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, move_grad, set_grad};
use crate::optim::{FlatBuffer, GradState, ParamLayout, ParamSpan};
use crate::process_group::num_bytes;
use crate::records::Parameter;

/// Parameters that are reduced together: a range of a [`FlatBuffer`].
#[derive(Debug)]
pub(super) struct Bucket {
    pub gradients: Tensor,
    /// Its parameters. Each [`ParamSpan::start`] counts from the start of the bucket.
    pub parameters: Vec<ParamSpan>,
    /// The number of parameters that still lack their gradient in this step.
    pub pending: usize,
    /// Whether no rank has a gradient for any of them in this step, so that the bucket is not reduced.
    pub is_skipped: bool,
}

/// A parameter with its place in the flat buffers and buckets.
#[derive(Debug)]
pub(super) struct ParamSlot {
    pub name: String,
    pub tensor: Tensor,
    /// The index of its bucket.
    pub bucket: usize,
    /// The view of the bucket that holds its gradient.
    grad: Tensor,
    /// The address of that view's data.
    grad_data: *const c_void,
    /// The gradient from the other batches of a step, kept during a backward without samples, which must not change it.
    pub kept_grad: Option<Tensor>,
    /// Whether its gradient is complete in this step.
    pub ready: bool,
    /// Whether this rank has computed a gradient for it since the last backward that averaged.
    pub used: bool,
    /// Whether it has an averaged gradient: since `zero_grad` at least one rank has used it.
    pub has_gradient: bool,
}

impl ParamSlot {
    fn new(named: &NamedTensor) -> Self {
        Self {
            name: named.name.clone(),
            tensor: named.tensor.shallow_clone(),
            bucket: 0,
            grad: Tensor::new(),
            grad_data: std::ptr::null(),
            kept_grad: None,
            ready: false,
            used: false,
            has_gradient: false,
        }
    }

    fn num_bytes(&self) -> usize {
        num_bytes(self.tensor.kind(), self.tensor.numel())
    }

    /// Returns the number of elements that the parameter takes in its buffer, with the gap behind it.
    ///
    /// Each parameter starts at a cache line, as if it were allocated alone. Kernels then take the same vector paths
    /// and give the same bits.
    fn padded_numel(&self) -> usize {
        const CACHE_LINE: usize = 64;
        self.tensor.numel().next_multiple_of(CACHE_LINE / self.tensor.kind().elt_size_in_bytes())
    }

    /// Moves the gradient into the bucket; zeros if there is none.
    pub(super) fn move_grad_into_bucket(&self) -> Result<()> {
        if self.grad.data_ptr().cast_const() != self.grad_data {
            return Err(Error::InvalidInput(format!(
                "the gradient of `{}` is no longer a view of its bucket, so it cannot be averaged; leave its memory \
                 where it is, and zero gradients with ddp.zero_grad()",
                self.name
            )));
        }
        move_grad(&self.tensor, &self.grad)
    }

    /// Removes the gradient and zeroes its place, whatever a communication hook has left there.
    pub(super) fn clear_grad(&self) -> Result<()> {
        let zeroed = tch::no_grad(|| self.grad.shallow_clone().f_zero_().map(drop));
        zeroed.doing("zero_")?;
        set_grad(&self.tensor, &Tensor::new())
    }

    /// Returns a copy of the gradient.
    pub(super) fn copy_gradient(&self) -> Result<Tensor> {
        self.grad.f_detach_copy().doing("copying a gradient")
    }

    /// Keeps a copy of the gradient before backward, which [`ParamSlot::complete`] restores.
    pub(super) fn keep_gradient(&mut self) -> Result<()> {
        let kept = match self.tensor.f_grad() {
            Ok(grad) if grad.defined() => grad.f_detach_copy(),
            Ok(_) => self.grad.f_zeros_like(),
            Err(error) => Err(error),
        };
        self.kept_grad = Some(kept.doing("copying a gradient")?);
        Ok(())
    }

    /// Moves the gradient that backward has computed into the bucket.
    pub(super) fn complete(&mut self) -> Result<()> {
        self.move_grad_into_bucket()?;
        self.used = true;
        self.kept_grad.take().map_or(Ok(()), |kept| self.restore_gradient(&kept))
    }

    /// Overwrites the gradient with `values`.
    pub(super) fn restore_gradient(&self, values: &Tensor) -> Result<()> {
        let copied = tch::no_grad(|| self.grad.shallow_clone().f_copy_(values));
        copied.doing("copying a gradient")
    }
}

/// All parameters of a model and their gradients.
#[derive(Debug)]
pub(super) struct Layout {
    /// One buffer per dtype. Allocated once: every parameter is a view of its range, and so is its `grad` once backward
    /// has computed it.
    pub buffers: Vec<FlatBuffer>,
    pub buckets: Vec<Bucket>,
    /// The parameters, in the order of their creation.
    pub slots: Vec<ParamSlot>,
    /// Storage for this rank's own gradient of the first parameter, if a probe watches it.
    pub probe: Option<Tensor>,
}

impl Layout {
    /// Moves `parameters` into flat buffers, and makes their `grad`s views.
    pub(super) fn new(parameters: &[&NamedTensor], options: &DdpOptions) -> Result<Self> {
        let slots: Vec<ParamSlot> = parameters.iter().copied().map(ParamSlot::new).collect();
        let tensors: Rc<[Tensor]> = slots.iter().map(|slot| slot.tensor.shallow_clone()).collect();
        let (buffers, buckets, probe) = Default::default();
        let mut layout = Self { buffers, buckets, slots, probe };
        layout.fill_buckets(&layout.default_order(), options)?;
        layout.buffers.iter().for_each(|buffer| buffer.places.set_tensors(tensors.clone()));
        Ok(layout)
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

    /// Removes all gradients. The next gradient of each parameter is then copied to its place, which is cheaper than to
    /// zero the place and add.
    pub(super) fn zero_grad(&mut self) -> Result<()> {
        self.set_gradients(GradState::Cleared);
        let none = Tensor::new();
        self.slots.iter_mut().try_for_each(|slot| {
            (slot.used, slot.has_gradient) = (false, false);
            set_grad(&slot.tensor, &none)
        })
    }

    /// Moves all gradients into their buckets after backward, and zeros where there are none. With `are_averaged` the
    /// zeros count as gradients until they are averaged, because another rank may have one.
    pub(super) fn move_grads_into_buckets(&self, are_averaged: bool) -> Result<()> {
        self.set_gradients(GradState::Local);
        self.slots.iter().try_for_each(|slot| {
            if are_averaged || slot.used || slot.has_gradient {
                slot.move_grad_into_bucket()
            } else {
                slot.clear_grad()
            }
        })
    }

    /// Sets the state of all gradients.
    pub(super) fn set_gradients(&self, gradients: GradState) {
        self.buffers.iter().for_each(|buffer| buffer.places.set_gradients(gradients));
    }

    /// Copies the first parameter's gradient before it is reduced, if a probe watches it and it is in `bucket`.
    pub(super) fn copy_to_probe(&mut self, bucket: usize) -> Result<()> {
        let (Some(local), [first, ..]) = (&mut self.probe, &self.slots[..]) else { return Ok(()) };
        if first.bucket != bucket {
            return Ok(());
        }
        tch::no_grad(|| local.f_copy_(&first.grad)).doing("copy_")
    }

    /// Returns the parameters from last to first: backward computes the gradients roughly in that order.
    pub(super) fn default_order(&self) -> Vec<usize> {
        (0..self.slots.len()).rev().collect()
    }

    /// Assigns the parameters to buckets in `order`, and moves values and gradients there.
    pub(super) fn fill_buckets(&mut self, order: &[usize], options: &DdpOptions) -> Result<()> {
        if self.buffers.is_empty() {
            self.allocate(order)?;
        }
        let size = |&index: &usize| {
            let slot = &self.slots[index];
            Size { dtype: slot.tensor.kind(), num_bytes: slot.num_bytes() }
        };
        let sizes: Vec<Size> = order.iter().map(size).collect();
        let mut buckets = Vec::new();
        let mut spans: Vec<Vec<ParamSpan>> = vec![Vec::new(); self.buffers.len()];
        let mut ends = vec![0; self.buffers.len()];
        for places in bucket::assign(&sizes, &options.bucket_caps()) {
            let dtype = sizes[places[0]].dtype;
            let buffer = self.buffers.iter().position(|buffer| buffer.parameters.kind() == dtype);
            let buffer = buffer
                .ok_or_else(|| Error::InvalidInput("a parameter has changed its dtype".into()))?;
            let start = ends[buffer];
            let mut parameters = Vec::with_capacity(places.len());
            for index in places.iter().map(|&place| order[place]) {
                let slot = &mut self.slots[index];
                slot.bucket = buckets.len();
                let (name, shape) = (slot.name.clone(), slot.tensor.size());
                let span = ParamSpan { name, index, start: ends[buffer], shape };
                parameters.push(ParamSpan { start: span.start - start, ..span.clone() });
                spans[buffer].push(span);
                ends[buffer] += slot.padded_numel();
            }
            let len = ends[buffer] - start;
            let gradients = self.buffers[buffer].gradients.f_narrow(0, start as i64, len as i64);
            let gradients = gradients.doing("making the buckets")?;
            buckets.push(Bucket { gradients, parameters, pending: 0, is_skipped: false });
        }
        self.buckets = buckets;
        tch::no_grad(|| self.move_to(&spans))?;
        for (buffer, spans) in self.buffers.iter().zip(spans) {
            buffer.places.set(spans);
        }
        Ok(())
    }

    /// Allocates a buffer for each dtype, in the order in which `order` has them. A dtype takes the same space in any
    /// order.
    fn allocate(&mut self, order: &[usize]) -> Result<()> {
        for &index in order {
            let (dtype, device) =
                (self.slots[index].tensor.kind(), self.slots[index].tensor.device());
            if self.buffers.iter().any(|buffer| buffer.parameters.kind() == dtype) {
                continue;
            }
            let same = self.slots.iter().filter(|slot| slot.tensor.kind() == dtype);
            let numel: usize = same.map(ParamSlot::padded_numel).sum();
            let zeros =
                || Tensor::f_zeros([numel as i64], (dtype, device)).doing("making the buckets");
            let places = ParamLayout::default();
            places.set_gradients(GradState::Cleared);
            self.buffers.push(FlatBuffer { parameters: zeros()?, gradients: zeros()?, places });
        }
        Ok(())
    }

    /// Moves each parameter and its gradient to its span in the buffers.
    fn move_to(&mut self, spans: &[Vec<ParamSpan>]) -> Result<()> {
        let doing = "making the buckets";
        // Copies first, because new and old places of different parameters may overlap.
        let copy = |slot: &ParamSlot| {
            let grad = slot.tensor.grad();
            (slot.tensor.copy(), grad.defined().then(|| grad.copy()))
        };
        let copies: Vec<_> = self.slots.iter().map(copy).collect();
        for FlatBuffer { parameters, gradients, .. } in &mut self.buffers {
            let _ = gradients.f_zero_().doing(doing)?;
            // Gives the same handles new memory: a graph whose backward has not run yet still needs the old values.
            let fresh = parameters.f_zeros_like().doing(doing)?;
            parameters.f_set_data(&fresh).doing(doing)?;
        }
        for (buffer, spans) in self.buffers.iter().zip(spans) {
            for span in spans {
                let (slot, (value, grad)) = (&mut self.slots[span.index], &copies[span.index]);
                let mut new_value = span.of(&buffer.parameters)?;
                // `f_data` hides the view from autograd: `zero_grad` of tch's optimizers detaches gradients, which
                // views refuse.
                let mut new_grad = span.of(&buffer.gradients)?.f_data().doing(doing)?;
                new_value.f_copy_(value).doing(doing)?;
                if let Some(grad) = grad {
                    new_grad.f_copy_(grad).doing(doing)?;
                    set_grad(&slot.tensor, &new_grad)?;
                }
                slot.tensor.f_set_data(&new_value).doing(doing)?;
                slot.grad_data = new_grad.data_ptr();
                slot.grad = new_grad;
            }
        }
        Ok(())
    }
}
