//! Contiguous tensors, which backends can read and write as plain memory.

use tch::Tensor;

use super::ProcessGroup;
use super::call::undefined;
use crate::error::{Error, Result};
use crate::ffi::{TensorFacts, TorchResult};
use crate::operation::Operation;

/// A contiguous tensor: the original or a copy.
pub(super) struct Contiguous(Tensor);

impl Contiguous {
    /// Returns `tensor` itself if it is contiguous, otherwise a contiguous copy.
    pub(super) fn new(operation: Operation, tensor: &Tensor) -> Result<Self> {
        if !tensor.defined() {
            return undefined(operation);
        }
        let contiguous = || tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous();
        contiguous().map(Contiguous).doing("contiguous")
    }

    /// Returns another handle to the tensor.
    pub(super) fn handle(&self) -> Tensor {
        self.0.shallow_clone()
    }

    /// Splits the tensor into consecutive parts of `sizes` elements.
    pub(super) fn parts(
        &self,
        operation: Operation,
        name: &str,
        sizes: &[i64],
    ) -> Result<Vec<Tensor>> {
        let (total, needed) = (self.0.numel() as i64, sizes.iter().sum::<i64>());
        if total != needed {
            return Err(Error::usage(format!(
                "{operation}: {name} has {total} elements, but {needed} are needed"
            )));
        }
        let doing = "cutting a tensor into parts";
        let flat = tch::no_grad(|| self.0.f_view([-1])).doing(doing)?;
        let mut start = 0;
        let part = |&size: &i64| {
            let part = tch::no_grad(|| flat.f_narrow(0, start, size)).doing(doing);
            start += size;
            part
        };
        sizes.iter().map(part).collect()
    }

    /// Copies the elements back into `original`, if this is a copy of it.
    pub(super) fn write_back(&self, original: &Tensor) -> Result<()> {
        if self.0.data_ptr() == original.data_ptr() && is_plain_contiguous(original)? {
            return Ok(());
        }
        tch::no_grad(|| original.shallow_clone().f_copy_(&self.0)).doing("copy_")
    }
}

impl ProcessGroup {
    /// Returns zeros with one row for a tensor like `tensor` of each rank.
    pub(super) fn room_for_all(&self, tensor: &Tensor) -> Result<Tensor> {
        zeros(&[&[self.world_size() as i64], &tensor.size()[..]].concat(), tensor)
    }
}

/// Returns zeros of this shape, with the dtype and on the device of `like`.
pub(super) fn zeros(shape: &[i64], like: &Tensor) -> Result<Tensor> {
    Tensor::f_zeros(shape, (like.kind(), like.device())).doing("zeros")
}

/// Returns whether a tensor's memory holds its elements one after the other, with their values.
pub(super) fn is_plain_contiguous(tensor: &Tensor) -> Result<bool> {
    Ok(TensorFacts::of(tensor)?.is_plain)
}

/// Returns whether two elements of a tensor of this shape may share memory. Strides are in elements, and not negative.
pub(super) fn overlaps_itself(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return false;
    }
    let dimensions = shape.iter().zip(strides).filter(|(size, _)| **size > 1);
    let mut dimensions: Vec<(i64, i64)> = dimensions.map(|(&size, &by)| (by, size)).collect();
    dimensions.sort_unstable();
    // Each dimension must step past the reach of the smaller ones. Only hand-made strides can do without.
    let mut last = 0;
    dimensions.iter().any(|&(stride, size)| {
        let is_within = stride <= last;
        last += stride * (size - 1);
        is_within
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::overlaps_itself;

    #[test]
    fn overlap_check_of_known_strides() {
        for (shape, strides) in
            [(&[3][..], &[0][..]), (&[2, 3], &[0, 1]), (&[2, 2], &[1, 1]), (&[4, 2], &[1, 3])]
        {
            assert!(overlaps_itself(shape, strides), "{shape:?} {strides:?}");
        }
        for (shape, strides) in [
            (&[][..], &[][..]),
            (&[1, 1], &[0, 0]),
            (&[0, 3], &[0, 0]),
            (&[2, 3], &[3, 1]),
            (&[2, 3], &[1, 2]),
            (&[2, 3], &[100, 7]),
        ] {
            assert!(!overlaps_itself(shape, strides), "{shape:?} {strides:?}");
        }
    }

    proptest! {
        /// Compares with a check of every element. Interleaved dimensions are refused, too.
        #[test]
        fn no_overlap_is_missed(
            dimensions in prop::collection::vec((1..4i64, 0..7i64), 0..4),
        ) {
            let (shape, strides): (Vec<i64>, Vec<i64>) = dimensions.into_iter().unzip();
            let numel: i64 = shape.iter().product();
            let mut seen = std::collections::BTreeSet::new();
            let mut overlaps = false;
            for element in 0..numel {
                let (mut rest, mut offset) = (element, 0);
                for (size, stride) in shape.iter().zip(&strides) {
                    offset += rest % size * stride;
                    rest /= size;
                }
                overlaps |= !seen.insert(offset);
            }
            prop_assert!(overlaps_itself(&shape, &strides) || !overlaps);
        }
    }
}
