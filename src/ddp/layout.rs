//! The memory layout of parameters and gradients: flat tensors, of which buckets are ranges.

use std::ffi::c_void;
use std::rc::Rc;

use tch::{Device, Kind, TchError, Tensor};

use super::bucket::{self, Size};
use super::comm_hooks::BucketParameter;
use super::parameters::NamedTensor;
use super::{DdpOptions, elements_per_line};
use crate::error::{Error, Result};
use crate::ffi::{move_grad, set_grad};
use crate::optim::{FlatBuffer, GradState, ParamLayout, ParamSpan};
use crate::process_group::num_bytes;
use crate::records::Parameter;

/// All parameters of one dtype and their gradients, in sequence. Allocated once: every parameter is a view of its
/// range, and so is its `grad` once backward has computed it.
#[derive(Debug)]
pub(super) struct FlatParams {
    pub parameters: Tensor,
    pub gradients: Tensor,
    pub places: ParamLayout,
}

impl FlatParams {
    /// Returns handles to the same memory, for an optimizer.
    pub(super) fn buffer(&self) -> FlatBuffer {
        FlatBuffer {
            parameters: self.parameters.shallow_clone(),
            gradients: self.gradients.shallow_clone(),
            places: self.places.clone(),
        }
    }
}

/// Parameters that are reduced together: a range of a [`FlatParams`].
#[derive(Debug)]
pub(super) struct Bucket {
    pub gradients: Tensor,
    pub parameters: Vec<BucketParameter>,
    /// The number of parameters that still lack their gradient in this step.
    pub pending: usize,
    /// Whether no rank has a gradient for any of them in this step, so that the bucket is not reduced.
    pub is_skipped: bool,
}

/// A parameter with its place in the flat tensors and buckets.
#[derive(Debug)]
pub(super) struct ParamSlot {
    pub name: String,
    pub parameter: Tensor,
    flat: usize,
    pub bucket: usize,
    /// The view of the bucket that holds its gradient.
    grad: Tensor,
    /// The address of that view's data.
    grad_data: *const c_void,
    /// The gradient from the other batches of a step, kept during a backward without samples, which must not change it.
    pub before: Option<Tensor>,
    /// Whether its gradient is complete in this step.
    pub ready: bool,
    /// Whether this rank has computed a gradient for it since the last backward that averaged.
    pub used: bool,
    /// Whether it has an averaged gradient: since `zero_grad` at least one rank has used it.
    pub has_gradient: bool,
}

impl ParamSlot {
    /// Moves the gradient into the bucket; zeros if there is none.
    pub(super) fn move_grad_into_bucket(&self) -> Result<()> {
        if self.grad.data_ptr().cast_const() != self.grad_data {
            return Err(Error::Input(format!(
                "the gradient of `{}` is no longer a view of its bucket, so it cannot be averaged; leave its memory \
                 where it is, and zero gradients with ddp.zero_grad()",
                self.name
            )));
        }
        move_grad(&self.parameter, &self.grad)
    }

    /// Removes the gradient and zeroes its place, whatever a communication hook has left there.
    pub(super) fn clear_grad(&self) -> Result<()> {
        let zeroed = tch::no_grad(|| self.grad.shallow_clone().f_zero_().map(drop));
        zeroed.map_err(Error::torch("zero_"))?;
        set_grad(&self.parameter, &Tensor::new())
    }

    /// Returns a copy of the gradient.
    pub(super) fn copy_gradient(&self) -> Result<Tensor> {
        self.grad.f_detach_copy().map_err(Error::torch("copying a gradient"))
    }

    /// Keeps a copy of the gradient before backward, which [`ParamSlot::complete`] restores.
    pub(super) fn keep_gradient(&mut self) -> Result<()> {
        let kept = match self.parameter.f_grad() {
            Ok(grad) if grad.defined() => grad.f_detach_copy(),
            Ok(_) => self.grad.f_zeros_like(),
            Err(error) => Err(error),
        };
        self.before = Some(kept.map_err(Error::torch("copying a gradient"))?);
        Ok(())
    }

    /// Moves the gradient that backward has computed into the bucket.
    pub(super) fn complete(&mut self) -> Result<()> {
        self.move_grad_into_bucket()?;
        self.used = true;
        self.before.take().map_or(Ok(()), |before| self.restore_gradient(&before))
    }

    /// Overwrites the gradient with `values`.
    pub(super) fn restore_gradient(&self, values: &Tensor) -> Result<()> {
        let copied = tch::no_grad(|| self.grad.shallow_clone().f_copy_(values));
        copied.map_err(Error::torch("copying a gradient"))
    }
}

/// All parameters of a model and their gradients.
#[derive(Debug)]
pub(super) struct Layout {
    pub flats: Vec<FlatParams>,
    pub buckets: Vec<Bucket>,
    /// The parameters, in the order of their creation.
    pub members: Vec<ParamSlot>,
    /// Storage for this rank's own gradient of the first parameter, if a probe watches it.
    pub watched: Option<Tensor>,
}

impl Layout {
    /// Moves `parameters` into flat tensors, and makes their `grad`s views.
    pub(super) fn new(parameters: &[&NamedTensor], options: &DdpOptions) -> Result<Self> {
        let member = |named: &&NamedTensor| ParamSlot {
            name: named.name.clone(),
            parameter: named.tensor.shallow_clone(),
            flat: 0,
            bucket: 0,
            grad: Tensor::new(),
            grad_data: std::ptr::null(),
            before: None,
            ready: false,
            used: false,
            has_gradient: false,
        };
        let members = parameters.iter().map(member).collect();
        let (flats, buckets, watched) = Default::default();
        let mut layout = Self { flats, buckets, members, watched };
        layout.fill_buckets(&layout.default_order(), options)?;
        let tensors: Rc<[Tensor]> =
            layout.members.iter().map(|it| it.parameter.shallow_clone()).collect();
        layout.flats.iter().for_each(|flat| flat.places.set_tensors(tensors.clone()));
        Ok(layout)
    }

    /// Returns the name, shape, size in bytes and bucket of each parameter.
    pub(super) fn parameter_places(&self) -> Vec<Parameter> {
        let place = |member: &ParamSlot| Parameter {
            name: member.name.clone(),
            shape: member.parameter.size(),
            bytes: num_bytes(member.parameter.kind(), member.parameter.numel()),
            bucket: Some(member.bucket),
        };
        self.members.iter().map(place).collect()
    }

    /// Removes all gradients. The next gradient of each parameter is then copied to its place, which is cheaper than to
    /// zero the place and add.
    pub(super) fn zero_grad(&mut self) -> Result<()> {
        self.set_gradients(GradState::Old);
        let none = Tensor::new();
        self.members.iter_mut().try_for_each(|member| {
            (member.used, member.has_gradient) = (false, false);
            set_grad(&member.parameter, &none)
        })
    }

    /// Moves all gradients into their buckets after backward, and zeros where there are none. With `are_averaged` the
    /// zeros count as gradients until they are averaged, because another rank may have one.
    pub(super) fn move_grads_into_buckets(&self, are_averaged: bool) -> Result<()> {
        self.set_gradients(GradState::Local);
        self.members.iter().try_for_each(|member| {
            if are_averaged || member.used || member.has_gradient {
                member.move_grad_into_bucket()
            } else {
                member.clear_grad()
            }
        })
    }

    /// Sets the state of all gradients.
    pub(super) fn set_gradients(&self, gradients: GradState) {
        self.flats.iter().for_each(|flat| flat.places.set_gradients(gradients));
    }

    /// Copies the first parameter's gradient before it is reduced, if a probe watches it and it is in `bucket`.
    pub(super) fn probe(&mut self, bucket: usize) -> Result<()> {
        let Some(local) = &mut self.watched else { return Ok(()) };
        let first = &self.members[0];
        if first.bucket != bucket {
            return Ok(());
        }
        tch::no_grad(|| local.f_copy_(&first.grad)).map_err(Error::torch("copy_"))
    }

    /// Returns the parameters from last to first: backward computes the gradients roughly in that order.
    pub(super) fn default_order(&self) -> Vec<usize> {
        (0..self.members.len()).rev().collect()
    }

    /// Assigns the parameters to buckets in `order`, and moves values and gradients there.
    pub(super) fn fill_buckets(&mut self, order: &[usize], options: &DdpOptions) -> Result<()> {
        let size = |&index: &usize| {
            let tensor = &self.members[index].parameter;
            let kind = tensor.kind();
            Size { kind, num_bytes: num_bytes(kind, tensor.numel()) }
        };
        let sizes: Vec<Size> = order.iter().map(size).collect();
        let assignment = bucket::assign(&sizes, &options.bucket_caps());

        // Each dtype takes the same space in any order.
        let room = |ParamSlot { parameter, .. }: &ParamSlot| {
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
            let flat = |(kind, device, total)| -> Result<FlatParams, TchError> {
                let zeros = || Tensor::f_zeros([total as i64], (kind, device));
                let places = ParamLayout::default();
                places.set_gradients(GradState::Old);
                Ok(FlatParams { parameters: zeros()?, gradients: zeros()?, places })
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
                let ParamSlot { name, parameter, .. } = &self.members[index];
                let (name, shape) = (name.clone(), parameter.size());
                parameters.push(BucketParameter { name, start: ends[flat] - begin, shape });
                starts[index] = ends[flat];
                ends[flat] += rooms[index];
                self.members[index].bucket = number;
                self.members[index].flat = flat;
            }
            let stretch =
                |tensor: &Tensor| tensor.f_narrow(0, begin as i64, (ends[flat] - begin) as i64);
            let gradients = stretch(&self.flats[flat].gradients);
            let gradients = gradients.map_err(Error::torch("making the buckets"))?;
            buckets.push(Bucket { gradients, parameters, pending: 0, is_skipped: false });
        }
        self.buckets = buckets;
        for (number, flat) in self.flats.iter().enumerate() {
            let mut places: Vec<ParamSpan> = Vec::new();
            for (index, member) in self.members.iter().enumerate() {
                if member.flat == number {
                    let (name, start) = (member.name.clone(), starts[index]);
                    places.push(ParamSpan { name, index, start, shape: member.parameter.size() });
                }
            }
            places.sort_by_key(|place| place.start);
            flat.places.set(places);
        }
        tch::no_grad(|| self.move_to(&starts)).map_err(Error::torch("making the buckets"))
    }

    /// Moves each parameter and its gradient to its start in the flat tensors.
    fn move_to(&mut self, starts: &[usize]) -> Result<(), TchError> {
        // Copies first, because new and old places of different parameters may overlap.
        let copy = |member: &ParamSlot| {
            let grad = member.parameter.grad();
            (member.parameter.copy(), grad.defined().then(|| grad.copy()))
        };
        let copies: Vec<_> = self.members.iter().map(copy).collect();
        for flat in &mut self.flats {
            let _ = flat.gradients.f_zero_()?;
            // Gives the same handles new memory: a graph whose backward has not run yet still needs the old values.
            let fresh = flat.parameters.f_zeros_like()?;
            flat.parameters.f_set_data(&fresh)?;
        }
        for ((member, &start), (value, grad)) in self.members.iter_mut().zip(starts).zip(copies) {
            let FlatParams { parameters, gradients, .. } = &self.flats[member.flat];
            let shape = member.parameter.size();
            let part = |flat: &Tensor| {
                flat.f_narrow(0, start as i64, value.numel() as i64)?.f_view(&shape[..])
            };
            // `f_data` hides the view from autograd: `zero_grad` of tch's optimizers detaches gradients, which views
            // refuse.
            let (mut new_value, mut new_grad) = (part(parameters)?, part(gradients)?.f_data()?);
            new_value.f_copy_(&value)?;
            if let Some(grad) = grad {
                new_grad.f_copy_(&grad)?;
                set_grad(&member.parameter, &new_grad)
                    .map_err(|error| TchError::Torch(error.to_string()))?;
            }
            member.parameter.shallow_clone().f_set_data(&new_value)?;
            member.grad_data = new_grad.data_ptr();
            member.grad = new_grad;
        }
        Ok(())
    }
}
