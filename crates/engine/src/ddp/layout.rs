//! The buckets of a model: ranges of its flat memory, whose gradients are reduced together.

use std::rc::Rc;

use tch::Tensor;

use super::bucket::{self, Size};
use super::options::DdpOptions;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::models::NamedTensor;
use crate::optim::{Bucket, FlatMemory, GradState, ParamMemory};
use crate::process_group::ProcessGroup;
use crate::records::Parameter;

impl Bucket {
    /// Returns the gradients in one tensor: their own memory if they are in one range, otherwise a copy.
    pub(super) fn concat_gradients(&mut self, parameters: &[ParamMemory]) -> Result<Tensor> {
        let Self { gradients, dtype, numel, parameters: spans, concatenated, .. } = self;
        if let [one] = &gradients[..] {
            return Ok(one.shallow_clone());
        }
        let doing = "joining the gradients of a bucket";
        let joined = match concatenated.take() {
            Some(known) => known,
            None => {
                let options = (*dtype, parameters[spans[0].index].tensor.device());
                Tensor::f_zeros([*numel as i64], options).doing(doing)?
            }
        };
        for span in spans.iter() {
            let gradient = parameters[span.index].gradient()?;
            tch::no_grad(|| span.of(&joined)?.f_copy_(&gradient).doing(doing))?;
        }
        *concatenated = Some(joined.shallow_clone());
        Ok(joined)
    }

    /// Copies the gradients back from `concatenated`, unless that is their memory.
    pub(super) fn copy_back(
        &self,
        concatenated: &Tensor,
        parameters: &[ParamMemory],
    ) -> Result<()> {
        if let [one] = &self.gradients[..] {
            if concatenated.data_ptr() == one.data_ptr() {
                return Ok(());
            }
            let copied = tch::no_grad(|| one.shallow_clone().f_copy_(concatenated));
            return copied.doing("copying the result of a communication hook");
        }
        for span in &self.parameters {
            parameters[span.index].restore_gradient(&span.of(concatenated)?)?;
        }
        Ok(())
    }
}

/// The state of a parameter in the reducer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ParamState {
    /// The index of its bucket.
    pub bucket: usize,
    /// Whether its gradient is complete in this step.
    pub ready: bool,
    /// Whether this rank has computed a gradient for it since the last backward that averaged.
    pub used: bool,
    /// Whether it has an averaged gradient: since `zero_grad` at least one rank has used it.
    pub has_gradient: bool,
}

/// A function that gets the index of a trained parameter and this rank's own gradient of it, whose values it may change.
pub(crate) type Observe = Box<dyn FnMut(usize, &mut Tensor) -> Result<()>>;

/// All parameters of a model with their buckets.
pub(super) struct Layout {
    pub memory: FlatMemory,
    /// The state of each parameter, in the order of their creation.
    pub states: Vec<ParamState>,
    /// The indices of the parameters in the order in which they were assigned to buckets.
    order: Vec<usize>,
    pub buckets: Vec<Bucket>,
    /// The observers of this rank's own gradients before they are averaged, each with its name. They run in the order in
    /// which they were added.
    pub observers: Vec<(&'static str, Observe)>,
}

impl Layout {
    /// Moves `parameters` into buckets, of which their `grad`s will be views. With `in_place`, large parameters stay where
    /// they are, and so do their gradients. The ranks of `group` reduce the gradients.
    pub(super) fn new(
        parameters: &[&NamedTensor],
        options: &DdpOptions,
        in_place: bool,
        group: Rc<ProcessGroup>,
    ) -> Result<Self> {
        let memory = |it: &&NamedTensor| ParamMemory::new(&it.name, &it.tensor, in_place);
        let parameters = parameters.iter().map(memory).collect::<Result<Vec<_>>>()?;
        let order = default_order(parameters.len());
        let mut layout = Self {
            states: vec![ParamState::default(); parameters.len()],
            memory: FlatMemory::new(parameters, &order, group, options.optimizer_layout)?,
            order: Vec::new(),
            buckets: Vec::new(),
            observers: Vec::new(),
        };
        layout.fill_buckets(&order, options)?;
        Ok(layout)
    }

    /// Assigns the parameters to buckets in `order`, and moves values and gradients there. Does nothing if they have
    /// this order already. A collective if the ranks share the model.
    pub(super) fn fill_buckets(&mut self, order: &[usize], options: &DdpOptions) -> Result<()> {
        if self.order == order {
            return Ok(());
        }
        let size = |&index: &usize| {
            let parameter = &self.memory.parameters[index];
            Size { dtype: parameter.tensor.kind(), num_bytes: parameter.num_bytes() }
        };
        let sizes: Vec<Size> = order.iter().map(size).collect();
        let assigned = bucket::assign(&sizes, &options.bucket_caps()).into_iter();
        let assigned: Vec<Vec<usize>> =
            assigned.map(|bucket| bucket.into_iter().map(|at| order[at]).collect()).collect();
        for (bucket, indices) in assigned.iter().enumerate() {
            indices.iter().for_each(|&index| self.states[index].bucket = bucket);
        }
        self.buckets.clear(); // frees their copies before memory is allocated
        self.buckets = self.memory.arrange(&assigned, self.order.is_empty())?;
        self.order = order.to_vec();
        Ok(())
    }

    /// Returns the name, shape, size in bytes and bucket of each parameter.
    pub(super) fn described(&self) -> Vec<Parameter> {
        let describe = |(parameter, state): (&ParamMemory, &ParamState)| Parameter {
            name: parameter.name.clone(),
            shape: parameter.tensor.size(),
            bytes: parameter.num_bytes(),
            bucket: Some(state.bucket),
        };
        self.memory.parameters.iter().zip(&self.states).map(describe).collect()
    }

    /// Removes all gradients. The next gradient of each parameter then replaces the old values, which is cheaper than
    /// to set them to zero and add.
    pub(super) fn zero_grad(&mut self) -> Result<()> {
        self.memory.set_gradients(GradState::Cleared);
        for (parameter, state) in self.memory.parameters.iter_mut().zip(&mut self.states) {
            (state.used, state.has_gradient) = (false, false);
            parameter.remove_gradient()?;
        }
        Ok(())
    }

    /// Moves all gradients to their memory after backward, and writes zeros where autograd has made none. With
    /// `are_averaged` the zeros count as gradients until they are averaged, because another rank may have one.
    pub(super) fn take_gradients(&self, are_averaged: bool) -> Result<()> {
        self.memory.set_gradients(GradState::Local);
        for (parameter, state) in self.memory.parameters.iter().zip(&self.states) {
            if are_averaged || state.used || state.has_gradient {
                parameter.take_gradient()?;
            } else {
                parameter.clear_grad()?;
            }
        }
        Ok(())
    }

    /// Shows the gradients in `bucket` to the observers, before they are reduced.
    pub(super) fn show_gradients(&mut self, bucket: usize) -> Result<()> {
        if self.observers.is_empty() {
            return Ok(());
        }
        for span in &self.buckets[bucket].parameters {
            let mut gradient = self.memory.parameters[span.index].gradient()?;
            for (_, observe) in &mut self.observers {
                observe(span.index, &mut gradient)?;
            }
        }
        Ok(())
    }
}

/// Returns the indices of `count` parameters from last to first: backward computes the gradients roughly in that order.
pub(super) fn default_order(count: usize) -> Vec<usize> {
    (0..count).rev().collect()
}
