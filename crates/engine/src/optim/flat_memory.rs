//! The memory of a model's parameters and gradients: flat buffers, of which the buckets are ranges.

use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::param_layout::Partitions;
use super::param_memory::{ParamMemory, cache_line_numel};
use super::{FlatBuffer, GradState, OptimizerLayout, ParamSpan, SharedModel};
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, set_grad};
use crate::process_group::{ProcessGroup, ReduceOp, device_name, join_shapes};

/// All parameters of a model and their gradients, which the ranks keep as an [`OptimizerLayout`] says.
#[derive(Debug)]
pub(crate) struct FlatMemory {
    /// The parameters, in the order of their creation.
    pub parameters: Vec<ParamMemory>,
    /// First one buffer per dtype: every parameter in it is a view of its range, and so is its `grad` once backward has
    /// computed it. Then one for each parameter whose gradient stays where autograd puts it.
    pub buffers: Vec<FlatBuffer>,
    /// The number of buffers with a dtype's parameters.
    num_flat: usize,
    /// The ranks that reduce the gradients.
    group: Rc<ProcessGroup>,
    layout: OptimizerLayout,
    /// This rank's side of the model, if the ranks of its process share one.
    shared: Option<Rc<SharedModel>>,
}

/// A bucket: parameters whose gradients are reduced together.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// The gradients: a range of a [`FlatBuffer`], and each gradient that stays where autograd puts it.
    pub gradients: Vec<Tensor>,
    /// Their shapes, as the ranks compare them.
    pub shapes: Vec<i64>,
    pub dtype: Kind,
    /// The number of elements, with gaps.
    pub numel: usize,
    /// Its parameters. Each [`ParamSpan::start`] counts from the start of the bucket.
    pub parameters: Vec<ParamSpan>,
    /// A copy of all gradients in sequence, for a communication hook. `None` until a hook needs it.
    pub concatenated: Option<Tensor>,
    /// The number of parameters that still lack their gradient in this step.
    pub pending: usize,
}

impl FlatMemory {
    /// Allocates flat buffers for `parameters`: one per dtype, in the order in which `order` first has them, and one for each
    /// parameter whose gradient stays where it is. A dtype takes the same space in any order. The ranks of `group` reduce the
    /// gradients, and keep the model as `layout` says.
    pub(crate) fn new(
        parameters: Vec<ParamMemory>,
        order: &[usize],
        group: Rc<ProcessGroup>,
        layout: OptimizerLayout,
    ) -> Result<Self> {
        let mut memory =
            Self { parameters, buffers: Vec::new(), num_flat: 0, group, layout, shared: None };
        for &index in order {
            let parameter = &memory.parameters[index];
            let (dtype, device) = (parameter.tensor.kind(), parameter.tensor.device());
            let known = memory.buffers.iter().any(|buffer| buffer.parameters.kind() == dtype);
            if known || parameter.in_place_memory().is_some() {
                continue;
            }
            let same = memory.parameters.iter().filter(|other| other.tensor.kind() == dtype);
            // Each bucket has at least one parameter, and at most this much padding.
            let gap = memory.partition_multiple(dtype) - 1;
            let numel: usize = same
                .filter(|other| other.in_place_memory().is_none())
                .map(|other| other.padded_numel() + gap)
                .sum();
            let zeros = |group| zeros(group, numel, dtype, device);
            let parameters = zeros(memory.partition_group())?;
            let gradients = zeros(Some(&memory.group))?;
            memory.buffers.push(FlatBuffer { parameters, gradients, layout: Vec::new().into() });
        }
        memory.num_flat = memory.buffers.len();
        for (index, parameter) in memory.parameters.iter().enumerate() {
            let Some(gradients) = parameter.in_place_memory() else { continue };
            // `f_view` and then `f_data`: a view would keep its base, and with it memory that `share` has replaced.
            let flat = parameter.tensor.f_view(-1).and_then(|tensor| tensor.f_data());
            memory.buffers.push(FlatBuffer {
                parameters: flat.doing("making the buckets")?,
                gradients,
                layout: vec![parameter.span(index, 0)].into(),
            });
        }
        memory.set_gradients(GradState::Cleared);
        let handles = memory.parameters.iter().map(|parameter| parameter.tensor.shallow_clone());
        let handles: Rc<[Tensor]> = handles.collect();
        for buffer in &memory.buffers {
            buffer.layout.change(|arrangement| arrangement.tensors = handles.clone());
        }
        Ok(memory)
    }

    /// Moves values and gradients into the sequence of these `buckets`, each a list of parameters of one dtype. Returns the
    /// buckets. With `are_new`, the buffers are new and zero. A collective if the ranks share the model.
    pub(crate) fn arrange(&mut self, buckets: &[Vec<usize>], are_new: bool) -> Result<Vec<Bucket>> {
        let mut contents = vec![FlatContents::default(); self.num_flat];
        let make = |indices: &Vec<usize>| self.make_bucket(indices, &mut contents);
        let made = buckets.iter().map(make).collect::<Result<_>>()?;
        tch::no_grad(|| self.move_to(&contents, are_new))?;
        for (buffer, FlatContents { spans, buckets }) in self.buffers.iter().zip(contents) {
            let group = self.partition_group().cloned();
            let partitions = group.map(|group| Rc::new(Partitions { group, buckets }));
            buffer.layout.change(|arrangement| {
                arrangement.spans = spans.into();
                arrangement.partitions = partitions;
            });
        }
        if let Some(shared) = self.shared.clone() {
            self.share_with(&shared)?; // they have moved
        }
        Ok(made)
    }

    /// Returns a bucket of the parameters with these `indices`. `contents` has an entry for each flat buffer:
    /// the parameters that move into the buffer of this dtype are added to its entry.
    fn make_bucket(&self, indices: &[usize], contents: &mut [FlatContents]) -> Result<Bucket> {
        let dtype = self.parameters[indices[0]].tensor.kind();
        let (parameters, numel) = self.in_sequence(indices);
        let (staying, moved): (Vec<usize>, Vec<usize>) =
            indices.iter().partition(|&&index| self.parameters[index].in_place_memory().is_some());
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
        for parameter in staying.into_iter().map(|index| &self.parameters[index]) {
            gradients.extend(parameter.in_place_memory());
            // Not the size of the gradient, which is empty until backward has computed it.
            lengths.push(vec![parameter.tensor.numel() as i64]);
        }
        let shapes = join_shapes(lengths.into_iter());
        let (concatenated, pending) = (None, 0);
        Ok(Bucket { gradients, shapes, dtype, numel, parameters, concatenated, pending })
    }

    /// Returns the spans of the parameters with these `indices` in sequence, and the number of elements with the gaps.
    fn in_sequence(&self, indices: &[usize]) -> (Vec<ParamSpan>, usize) {
        let (mut spans, mut end) = (Vec::new(), 0);
        for &index in indices {
            let parameter = &self.parameters[index];
            spans.push(parameter.span(index, end));
            end += parameter.padded_numel();
        }
        (spans, end)
    }

    /// Moves each parameter and its gradient to its span in the buffers.
    fn move_to(&mut self, contents: &[FlatContents], are_new: bool) -> Result<()> {
        let doing = "making the buckets";
        // Copies first, because new and old places of the gradients of different parameters may overlap.
        let copy = |parameter: &ParamMemory| {
            let grad = parameter.tensor.grad();
            let moves = parameter.in_place_memory().is_none() && grad.defined();
            moves.then(|| grad.copy())
        };
        let grads: Vec<Option<Tensor>> = self.parameters.iter().map(copy).collect();
        let used = if are_new { 0 } else { self.num_flat };
        let group = self.partition_group().cloned();
        for FlatBuffer { parameters, gradients, .. } in &mut self.buffers[..used] {
            let _ = gradients.f_zero_().doing(doing)?;
            // Gives the same handles new memory: a graph whose backward has not run yet still needs the old values.
            let (numel, dtype) = (parameters.numel(), parameters.kind());
            let fresh = zeros(group.as_ref(), numel, dtype, parameters.device())?;
            parameters.f_set_data(&fresh).doing(doing)?;
        }
        for (buffer, contents) in self.buffers.iter().zip(contents) {
            for span in &contents.spans {
                let parameter = &mut self.parameters[span.index];
                let mut new_value = span.of(&buffer.parameters)?;
                // `f_data` hides the view from autograd: tch's `Tensor::zero_grad` detaches gradients, which
                // views refuse.
                let mut new_grad = span.of(&buffer.gradients)?.f_data().doing(doing)?;
                new_value.f_copy_(&parameter.tensor).doing(doing)?;
                if let Some(grad) = &grads[span.index] {
                    new_grad.f_copy_(grad).doing(doing)?;
                    set_grad(&parameter.tensor, &new_grad)?;
                }
                parameter.tensor.f_set_data(&new_value).doing(doing)?;
                parameter.set_view(new_grad);
            }
        }
        Ok(())
    }

    /// Gives all ranks of this process the memory of one rank's parameters, if the ranks share the model. This is a
    /// collective then, and all ranks must hold the same values. Does nothing where each rank has a process and a GPU of its
    /// own.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the ranks of this process are on devices that share no memory.
    pub(crate) fn share(&mut self) -> Result<()> {
        if self.layout != OptimizerLayout::SharedModel {
            return Ok(());
        }
        if let Some(shared) = SharedModel::of(&self.group)? {
            let shared = Rc::new(shared);
            self.share_with(&shared)?;
            self.shared = Some(shared);
        }
        Ok(())
    }

    fn share_with(&mut self, shared: &Rc<SharedModel>) -> Result<()> {
        let doing = "sharing the parameters";
        // Handles of their own: another rank uses these while this one changes its buffers.
        let own = |buffer: &FlatBuffer| buffer.parameters.f_data().doing(doing);
        let tensors = shared.group.share_tensors(|| self.buffers.iter().map(own).collect())?;
        for (buffer, tensor) in self.buffers.iter_mut().zip(&tensors) {
            let (mine, theirs) = (shared.group.device(), tensor.device());
            if mine != theirs {
                return Err(Error::unsupported(format!(
                    "SharedModel: this rank is on {} and another on {}, which cannot share memory; start ranks on the CPU \
                     or on one GPU, or use another OptimizerLayout",
                    device_name(mine),
                    device_name(theirs)
                )));
            }
            buffer.parameters.f_set_data(tensor).doing(doing)?;
            buffer.layout.change(|arrangement| arrangement.shared = Some(shared.clone()));
            for span in &*buffer.layout.get() {
                let value = span.of(tensor)?;
                self.parameters[span.index].tensor.f_set_data(&value).doing(doing)?;
            }
        }
        Ok(())
    }

    /// Returns the multiple, in elements, to which each bucket is padded, so that its partitions are equal.
    fn partition_multiple(&self, dtype: Kind) -> usize {
        self.partition_group().map_or(1, |group| group.world_size() * cache_line_numel(dtype))
    }

    /// Returns whether the ranks partition the optimizer.
    pub(crate) fn is_partitioned(&self) -> bool {
        self.layout.partitions(self.group.world_size())
    }

    /// Returns the ranks that partition the optimizer. `None` if they do not.
    fn partition_group(&self) -> Option<&Rc<ProcessGroup>> {
        self.is_partitioned().then_some(&self.group)
    }

    /// Returns whether an optimizer's step is one collective: the ranks share a model of one dtype.
    pub(crate) fn steps_at_once(&self) -> bool {
        let mut dtypes = self.buffers.iter().map(|buffer| buffer.parameters.kind());
        let first = dtypes.next();
        self.shared.is_some() && dtypes.all(|dtype| Some(dtype) == first)
    }

    /// Returns whether the optimizer can average the gradients as it steps: all ranks share the model.
    pub(crate) fn can_average_in_step(&self) -> bool {
        self.shared.is_some() && !self.group.spans_processes()
    }

    /// Sets how the optimizer averages the gradients as it steps. `None` if it is not to.
    pub(crate) fn average_in_step(&self, op: Option<ReduceOp>) {
        if let Some(shared) = &self.shared {
            shared.average.set(op);
        }
    }

    /// Returns handles to the same memory, for an optimizer.
    pub(crate) fn flat_buffers(&self) -> Vec<FlatBuffer> {
        self.buffers.iter().map(FlatBuffer::shallow_clone).collect()
    }

    /// Sets the state of all gradients.
    pub(crate) fn set_gradients(&self, gradients: GradState) {
        self.buffers.iter().for_each(|buffer| buffer.layout.set_gradients(gradients));
    }

    /// Notes that the gradients are averaged, or left to the optimizer's step. With `are_scattered` each rank has only the
    /// averages of its partitions.
    pub(crate) fn set_averaged(&self, are_scattered: bool) {
        let average = self.shared.as_ref().and_then(|shared| shared.average.get());
        self.set_gradients(if average.is_some() {
            GradState::LeftToStep
        } else if are_scattered {
            GradState::Partitioned
        } else {
            GradState::Averaged
        });
    }

    /// Sets all gradients to zeros, with the gaps between them.
    pub(crate) fn zero_gradients(&mut self) -> Result<()> {
        for buffer in &mut self.buffers[..self.num_flat] {
            let _ = buffer.gradients.f_zero_().doing("zero_")?;
        }
        for parameter in self.parameters.iter().filter(|it| it.in_place_memory().is_some()) {
            parameter.zero_gradient()?;
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

/// The contents of a flat buffer: the spans of its parameters, and the range of each of its buckets.
#[derive(Debug, Clone, Default)]
struct FlatContents {
    spans: Vec<ParamSpan>,
    buckets: Vec<Range<usize>>,
}

impl FlatContents {
    /// Appends a bucket of `numel` elements, padded to a multiple of `multiple`. The starts of its `parameters` count
    /// from the start of the bucket. Returns its range; `None` if it has no elements.
    fn add(
        &mut self,
        parameters: Vec<ParamSpan>,
        numel: usize,
        multiple: usize,
    ) -> Option<Range<usize>> {
        let start = self.buckets.last().map_or(0, |bucket| bucket.end);
        let in_buffer = |span: ParamSpan| ParamSpan { start: start + span.start, ..span };
        self.spans.extend(parameters.into_iter().map(in_buffer));
        if numel == 0 {
            return None;
        }
        let range = start..start + numel.next_multiple_of(multiple);
        self.buckets.push(range.clone());
        Some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(index: usize, start: usize, len: i64) -> ParamSpan {
        ParamSpan { name: index.to_string(), index, start, shape: vec![len] }
    }

    #[test]
    fn buckets_follow_each_other_in_a_flat_buffer() {
        let mut contents = FlatContents::default();
        // A parameter takes 16 elements or a multiple of that, with the gap behind it.
        assert_eq!(contents.add(vec![span(3, 0, 3), span(2, 16, 4)], 32, 1), Some(0..32));
        assert_eq!(contents.add(vec![span(1, 0, 16)], 16, 48), Some(32..80), "padded");
        assert_eq!(contents.add(vec![span(0, 0, 1)], 16, 48), Some(80..128));
        assert_eq!(contents.buckets, [0..32, 32..80, 80..128]);
        let starts: Vec<usize> = contents.spans.iter().map(|span| span.start).collect();
        assert_eq!(starts, [0, 16, 32, 80]);
    }

    #[test]
    fn bucket_without_elements_has_places_but_no_range() {
        let mut contents = FlatContents::default();
        assert_eq!(contents.add(vec![span(1, 0, 0)], 0, 48), None);
        assert_eq!(contents.add(vec![span(0, 0, 1)], 16, 48), Some(0..48));
        assert_eq!(contents.add(Vec::new(), 0, 48), None);
        assert_eq!(contents.add(vec![span(2, 0, 1)], 16, 48), Some(48..96));
        assert_eq!(contents.buckets, [0..48, 48..96]);
        assert_eq!(contents.spans, [span(1, 0, 0), span(0, 0, 1), span(2, 48, 1)]);
    }
}
