//! The layout of parameters and their gradients in flat buffers, and the parts of it that each rank steps.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Tensor};

use super::SharedModel;
use crate::error::{Result, opaque_debug};
use crate::ffi::TorchResult;
use crate::process_group::ProcessGroup;

/// Parameters and their gradients for an optimizer: two one-dimensional tensors of the same length and dtype, which
/// share the model's memory. `gradients` keeps its length without gradients, unless the buffer has a single parameter whose
/// gradient stays where autograd puts it. It is empty then.
#[derive(Debug)]
pub struct FlatBuffer {
    /// The parameters' values, in sequence.
    pub parameters: Tensor,
    /// Their gradients, in the same layout. Gaps between parameters are zero.
    pub gradients: Tensor,
    /// Where the parameters are.
    pub layout: ParamLayout,
}

impl FlatBuffer {
    /// Returns handles to the same memory.
    pub fn shallow_clone(&self) -> Self {
        Self {
            parameters: self.parameters.shallow_clone(),
            gradients: self.gradients.shallow_clone(),
            layout: self.layout.clone(),
        }
    }
}

/// The spans of a buffer's parameters in order, and the parameters without a gradient; shared by all clones. The
/// spans change once, when the buckets are rebuilt. The parameters without a gradient change with each use of the
/// model.
#[derive(Debug, Clone)]
pub struct ParamLayout(Rc<Current>);

#[derive(Debug)]
struct Current {
    gradients: Cell<GradState>,
    arrangement: RefCell<Rc<Arrangement>>,
}

/// The state of the gradients in a [`FlatBuffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradState {
    /// The gradients have been removed since the last backward.
    Cleared,
    /// This rank's own gradients: the last backward was within `no_sync`.
    Local,
    /// This rank's own gradients of a whole step, which the optimizer of a
    /// [shared model](super::OptimizerLayout::SharedModel) averages as it steps.
    LeftToStep,
    /// The mean of all ranks' gradients, in this rank's [partitions](super::OptimizerLayout::Partitioned) only. The other
    /// values are unspecified.
    Partitioned,
    /// The mean of all ranks' gradients.
    Averaged,
}

/// The arrangement of a buffer's parameters. It stays the same for those who keep it: a change makes another one.
#[derive(Debug, Clone, Default)]
pub(super) struct Arrangement {
    pub spans: Rc<[ParamSpan]>,
    pub unused: Rc<[usize]>,
    /// The model's own tensors, each at its [`ParamSpan::index`]; none if the buffer does not belong to a model. They
    /// share the buffer's memory but are not views of it.
    pub tensors: Rc<[Tensor]>,
    /// This rank's side of the model, if the ranks of its process share one.
    pub shared: Option<Rc<SharedModel>>,
    /// The ranks' partitions of the buffer, if they partition the optimizer.
    pub partitions: Option<Rc<Partitions>>,
}

impl From<Vec<ParamSpan>> for ParamLayout {
    fn from(spans: Vec<ParamSpan>) -> Self {
        let arrangement = Arrangement { spans: spans.into(), ..Arrangement::default() };
        let gradients = Cell::new(GradState::Averaged);
        Self(Rc::new(Current { gradients, arrangement: RefCell::new(Rc::new(arrangement)) }))
    }
}

impl ParamLayout {
    /// Returns the current spans.
    pub fn get(&self) -> Rc<[ParamSpan]> {
        self.now().spans.clone()
    }

    /// Returns the sorted [`index`](ParamSpan::index) of each parameter without a gradient on any rank since
    /// `zero_grad`, including those of other buffers. In PyTorch its `grad` is `None`, and optimizers skip it.
    pub fn unused(&self) -> Rc<[usize]> {
        self.now().unused.clone()
    }

    /// Returns the state of the gradients in the buffer.
    pub fn gradients(&self) -> GradState {
        self.0.gradients.get()
    }

    /// Sets the state of the gradients in the buffer. For callers that fill it other than by a backward.
    pub fn set_gradients(&self, gradients: GradState) {
        self.0.gradients.set(gradients);
    }

    /// Returns the current arrangement.
    pub(super) fn now(&self) -> Rc<Arrangement> {
        self.0.arrangement.borrow().clone()
    }

    /// Changes the arrangement.
    pub(super) fn change(&self, change: impl FnOnce(&mut Arrangement)) {
        change(Rc::make_mut(&mut self.0.arrangement.borrow_mut()));
    }

    pub(crate) fn set_unused(&self, unused: &[usize]) {
        if *self.now().unused != *unused {
            self.change(|arrangement| arrangement.unused = unused.into());
        }
    }
}

/// Where a parameter is in its buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpan {
    /// The parameter's name.
    pub name: String,
    /// Index among all parameters of the model, in creation order.
    pub index: usize,
    /// Start in the buffer, or in the bucket of a [`GradBucket`](crate::GradBucket), in elements.
    pub start: usize,
    /// The parameter's shape.
    pub shape: Vec<i64>,
}

impl ParamSpan {
    /// Returns the number of elements of the parameter.
    pub fn numel(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    /// Returns whether this is a weight and not a bias or a norm's parameter, which have one dimension or are named
    /// `bias`. Weight decay usually applies to weights only.
    pub fn is_weight(&self) -> bool {
        let name = self.name.rsplit('.').next();
        self.shape.len() > 1 && name != Some("bias")
    }

    /// Returns the parameter's part of `flat` in the parameter's shape.
    pub(crate) fn of(&self, flat: &Tensor) -> Result<Tensor> {
        let part = flat.f_narrow(0, self.start as i64, self.numel() as i64);
        part.and_then(|part| part.f_view(&self.shape[..])).doing("view")
    }
}

impl Arrangement {
    /// Returns the parts of `range` that this rank updates: ranges of the buffer, each with the offset of its first
    /// element in a state tensor. With partitions that tensor has this rank's partitions in sequence.
    pub(super) fn owned(&self, range: Range<usize>) -> Vec<(Range<usize>, usize)> {
        let Some(partitions) = &self.partitions else { return vec![(range.clone(), range.start)] };
        let (mut owned, mut offset) = (Vec::new(), 0);
        for partition in partitions.mine() {
            let part = partition.start.max(range.start)..partition.end.min(range.end);
            if part.start < part.end {
                owned.push((part.clone(), offset + part.start - partition.start));
            }
            offset += partition.len();
        }
        owned
    }

    /// Returns a copy of a parameter's values for a checkpoint. With partitions the copy is on the CPU, because one
    /// GPU may not have enough memory for the whole state.
    pub(super) fn copy(&self, values: &Tensor) -> Result<Tensor> {
        let doing = "copying the optimizer's state";
        match &self.partitions {
            Some(_) if values.device() != Device::Cpu => {
                values.f_to_device(Device::Cpu).doing(doing)
            }
            _ => values.f_detach_copy().doing(doing),
        }
    }

    /// Returns the parameters in a section of the buffer.
    pub(super) fn spans_in(&self, section: &Range<usize>) -> impl Iterator<Item = &ParamSpan> {
        let is_in = |span: &&ParamSpan| {
            section.start <= span.start && span.start + span.numel() <= section.end
        };
        self.spans.iter().filter(is_in)
    }

    /// Calls `f` with the values of a state tensor and their range in the buffer.
    ///
    /// With partitions this is a collective: it gathers one bucket at a time, and calls `f` for each on rank 0, or on
    /// all ranks with `on_all`. Without partitions every rank has the whole tensor, and calls `f` once.
    pub(super) fn each_section(
        &self,
        state: &Tensor,
        on_all: bool,
        mut f: impl FnMut(&Range<usize>, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let Some(partitions) = &self.partitions else { return f(&(0..state.numel()), state) };
        let doing = "gathering the optimizer's state";
        let (group, mut start) = (&partitions.group, 0);
        for bucket in &partitions.buckets {
            let len = (bucket.len() / group.world_size()) as i64;
            let mine = state.f_narrow(0, start, len).doing(doing)?;
            start += len;
            let whole = || Tensor::f_empty([bucket.len() as i64], (state.kind(), state.device()));
            if on_all {
                let mut whole = whole().doing(doing)?;
                group.all_gather_single(&mut whole, &mine)?;
                f(bucket, &whole)?;
            } else if group.rank() == 0 {
                let whole = whole().doing(doing)?;
                let mut parts = whole.f_split(len, 0).doing(doing)?;
                group.gather(&mine, Some(&mut parts), 0)?;
                group.synchronize()?;
                f(bucket, &whole)?;
            } else {
                group.gather(&mine, None, 0)?;
            }
        }
        Ok(())
    }
}

/// The partitions of a flat buffer, with [`OptimizerLayout::Partitioned`](super::OptimizerLayout).
///
/// Every rank has all parameters, but keeps the optimizer's state of its own partitions only. Each bucket has an equal
/// partition for each rank. A rank receives the averaged gradients of its partitions, updates their parameters, and
/// gathers the partitions that the other ranks have updated. This is stage 1 of ZeRO, as in PyTorch's
/// `ZeroRedundancyOptimizer`.
pub(super) struct Partitions {
    pub group: Rc<ProcessGroup>,
    /// The buckets in the buffer, in order. The length of each is a multiple of the number of ranks.
    pub buckets: Vec<Range<usize>>,
}

opaque_debug!(Partitions);

impl Partitions {
    /// Returns this rank's partition of each bucket, as a range of the buffer.
    pub(super) fn mine(&self) -> impl Iterator<Item = Range<usize>> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        self.buckets.iter().map(move |bucket| {
            let part = bucket.len() / ranks;
            let start = bucket.start + rank * part;
            start..start + part
        })
    }

    /// Copies each rank's partitions of `flat`, a tensor of the buffer's length, to all ranks. A collective.
    pub(super) fn gather_in_place(&self, flat: &Tensor) -> Result<()> {
        for bucket in &self.buckets {
            let (start, len) = (bucket.start as i64, bucket.len() as i64);
            self.group.all_gather_in_place(&flat.f_narrow(0, start, len).doing("narrow")?)?;
        }
        Ok(())
    }
}

/// Returns how many elements of a buffer this rank steps.
pub(super) fn state_numel(buffer: &FlatBuffer) -> usize {
    match &buffer.layout.now().partitions {
        Some(partitions) => partitions.mine().map(|partition| partition.len()).sum(),
        None => buffer.parameters.numel(),
    }
}

/// Returns a state tensor for the parts of a buffer that this rank steps.
pub(super) fn zeros_like(buffer: &FlatBuffer) -> Result<Tensor> {
    let options = (buffer.parameters.kind(), buffer.parameters.device());
    let numel = state_numel(buffer) as i64;
    Tensor::f_zeros([numel], options).doing("making the optimizer's state")
}

/// Copies `len` elements of one-dimensional tensors from one place to another.
pub(super) fn copy_range(
    to: &Tensor,
    to_start: usize,
    from: &Tensor,
    from_start: usize,
    len: usize,
) -> Result<()> {
    let part = |tensor: &Tensor, start: usize| tensor.f_narrow(0, start as i64, len as i64);
    let copy = || part(to, to_start)?.f_copy_(&part(from, from_start)?).map(drop);
    tch::no_grad(copy).doing("copying the optimizer's state")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_has_two_dimensions_and_is_not_a_bias() {
        let is_weight = |name: &str, shape: &[i64]| {
            ParamSpan { name: name.into(), index: 0, start: 0, shape: shape.into() }.is_weight()
        };
        assert!(is_weight("0.weight", &[3, 2]) && is_weight("unbiased", &[3, 2]));
        assert!(!is_weight("norm.weight", &[3]) && !is_weight("scale", &[]));
        assert!(!is_weight("bias", &[1, 3]) && !is_weight("attention.bias", &[1, 3]));
    }
}
