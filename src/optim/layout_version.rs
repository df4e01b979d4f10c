//! The layout of a flat buffer at one time, and the parts of it that this rank steps.

use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Tensor};

use super::partitions::Partitions;
use super::{FlatBuffer, ParamSpan};
use crate::error::Result;
use crate::ffi::TorchResult;

/// A buffer's layout and its parameters without a gradient, at the time at which the groups were made.
#[derive(Debug)]
pub(super) struct LayoutVersion {
    pub places: Rc<[ParamSpan]>,
    pub unused: Rc<[usize]>,
    partitions: Option<Rc<Partitions>>,
}

impl LayoutVersion {
    pub(super) fn of(buffer: &FlatBuffer) -> Self {
        let FlatBuffer { places, .. } = buffer;
        Self { places: places.get(), unused: places.unused(), partitions: places.partitions() }
    }

    /// Returns the length of a slot: the elements of `buffer` that this rank updates.
    pub(super) fn slot_numel(&self, buffer: &FlatBuffer) -> usize {
        self.partitions.as_ref().map_or(buffer.parameters.numel(), |partitions| partitions.numel())
    }

    /// Returns whether this rank gets what [`each_section`](Self::each_section) gathers on one rank.
    pub(super) fn gathers_here(&self) -> bool {
        self.partitions.as_ref().is_none_or(|partitions| partitions.is_on_rank_0())
    }

    /// Returns the parts of `range` that this rank updates: ranges of the buffer, each with the offset of its first
    /// element in a slot.
    pub(super) fn owned(&self, range: Range<usize>) -> Vec<(Range<usize>, usize)> {
        match &self.partitions {
            Some(partitions) => partitions.owned(&range).collect(),
            None => vec![(range.clone(), range.start)],
        }
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
    pub(super) fn places_in(&self, section: &Range<usize>) -> impl Iterator<Item = &ParamSpan> {
        let is_in = |place: &&ParamSpan| {
            section.start <= place.start && place.start + place.numel() <= section.end
        };
        self.places.iter().filter(is_in)
    }

    /// Calls `f` with the values of a slot and their range in the buffer.
    ///
    /// With partitions this is a collective: it gathers one bucket at a time, and calls `f` for each on rank 0, or on
    /// all ranks with `on_all`. Without partitions every rank has the whole slot, and calls `f` once.
    pub(super) fn each_section(
        &self,
        slot: &Tensor,
        on_all: bool,
        mut f: impl FnMut(&Range<usize>, &Tensor) -> Result<()>,
    ) -> Result<()> {
        match &self.partitions {
            Some(partitions) => partitions.gather_slot(slot, on_all, f),
            None => f(&(0..slot.numel()), slot),
        }
    }
}

/// Returns a slot for the parts of a buffer that this rank steps.
pub(super) fn zeros_like(buffer: &FlatBuffer) -> Result<Tensor> {
    let numel = LayoutVersion::of(buffer).slot_numel(buffer) as i64;
    let options = (buffer.parameters.kind(), buffer.parameters.device());
    Tensor::f_zeros([numel], options).doing("making the optimizer's state")
}

/// Copies `len` elements of one-dimensional tensors from one place to another.
pub(super) fn copy_range(
    (to, to_start): (&Tensor, usize),
    (from, from_start): (&Tensor, usize),
    len: usize,
) -> Result<()> {
    let part = |tensor: &Tensor, start: usize| tensor.f_narrow(0, start as i64, len as i64);
    let copy = || part(to, to_start)?.f_copy_(&part(from, from_start)?).map(drop);
    tch::no_grad(copy).doing("copying the optimizer's state")
}
