//! Checks a collective's arguments and turns them into a call.

use std::panic::Location;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::gloo::InFlight;
use super::{Backend, Call, ProcessGroup, ReduceOp, device_name, weights};
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::runtime::{CallSite, FaultSite, SpanId};

/// A collective's arguments other than its tensors.
#[derive(Default, Clone, Copy)]
pub(super) struct Options {
    pub reduce_op: Option<ReduceOp>,
    pub root: Option<usize>,
    pub weight: Option<f64>,
    pub timeout: Option<Duration>,
}

impl ProcessGroup {
    /// Runs a collective. Checks what needs no other rank, makes every tensor contiguous, numbers the call, and
    /// records this rank's activity for the other ranks.
    #[track_caller]
    pub(super) fn collective(
        &self,
        operation: Operation,
        mut options: Options,
        shape: &[i64],
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<()> {
        let place = Location::caller();
        let in_place = std::ptr::eq(inputs, outputs);
        // In place, the inputs are the outputs: they are checked once.
        let further = if in_place { &[] } else { outputs };
        let kind = self.common_kind(operation, inputs, further)?;
        if let Some(op) = options.reduce_op {
            op.check_kind(operation, kind)?;
            let weight = options.weight.map(|it| weights::check(op, kind, it, self.global_rank()));
            options.weight = weight.transpose()?;
        }
        let as_they_are = |tensors: &[Tensor]| -> Result<bool> {
            tensors.iter().try_fold(true, |all, tensor| Ok(all && is_dense(tensor)?))
        };
        let run = |inputs: &[Tensor], outputs: &[Tensor]| {
            let Options { reduce_op, root, weight, timeout } = options;
            let call = |sequence| Call {
                operation,
                sequence,
                reduce_op,
                root,
                kind,
                shape,
                inputs,
                outputs,
                weight,
                timeout,
                place: None,
            };
            let ((), record) =
                self.enter(operation, call, place, |backend, call| backend.run(call))?;
            self.record_end(record);
            Ok(())
        };
        if as_they_are(inputs)? && as_they_are(further)? {
            return run(inputs, outputs);
        }
        outputs.iter().try_for_each(|output| self.check_output(operation, output))?;
        let dense = |tensors: &[Tensor]| {
            tensors.iter().map(|tensor| Dense::new(operation, tensor)).collect::<Result<Vec<_>>>()
        };
        let results = dense(outputs)?;
        let handles = |d: &[Dense]| d.iter().map(Dense::handle).collect::<Vec<_>>();
        // In place, the inputs must stay the outputs.
        let inputs = if in_place { handles(&results) } else { handles(&dense(inputs)?) };
        run(&inputs, &handles(&results))?;
        results.iter().zip(outputs).try_for_each(|(dense, output)| dense.write_back(output))
    }

    /// Starts an all_reduce of a contiguous tensor. If the operation continues in the background, returns it with
    /// the id of its record; `None` if it is done.
    pub(super) fn start_all_reduce(
        &self,
        tensor: &Tensor,
        op: ReduceOp,
        weight: Option<f64>,
    ) -> Result<Option<(InFlight, SpanId)>> {
        let tensors = std::slice::from_ref(tensor);
        let kind = self.common_kind(Operation::AllReduce, tensors, &[])?;
        op.check_kind(Operation::AllReduce, kind)?;
        let weight = weight.map(|it| weights::check(op, kind, it, self.global_rank()));
        let weight = weight.transpose()?;
        let shape = &tensor.size();
        let call = |sequence| Call {
            sequence,
            reduce_op: Some(op),
            kind,
            shape,
            inputs: tensors,
            outputs: tensors,
            weight,
            ..Call::bare(Operation::AllReduce)
        };
        let start = |backend: &mut dyn Backend, call: &Call| backend.start(call);
        let (left, record) = self.enter(Operation::AllReduce, call, Location::caller(), start)?;
        if left.is_none() {
            self.record_end(record);
        }
        Ok(left.map(|left| (left, record)))
    }

    /// Numbers the call, records this rank's activity, and runs the call on the backend. Returns the result and the
    /// id of the call's record, which is still open.
    fn enter<'a, T>(
        &self,
        operation: Operation,
        call: impl FnOnce(u64) -> Call<'a>,
        place: CallSite,
        run: impl FnOnce(&mut dyn Backend, &Call) -> Result<T>,
    ) -> Result<(T, SpanId)> {
        let mut side = self.side()?;
        let before = self.activity().enter(operation, side.sequence);
        let stage = match operation {
            Operation::Broadcast => Some(FaultSite::Broadcast),
            Operation::Barrier => Some(FaultSite::Barrier),
            _ => None,
        };
        if let Some(stage) = stage {
            self.run().fault_point(self.global_rank(), stage, 0)?;
        }
        let call = Call { place: Some(self.place_of(place)), ..call(side.sequence) };
        side.sequence += 1;
        let record = self.record_call(&call);
        let result = run(&mut *side.backend, &call)
            .inspect_err(|error| self.record_failure(record, error))?;
        self.traffic.add(side.backend.traffic(&call));
        self.activity().restore(before);
        Ok((result, record))
    }

    /// Returns the dtype of all tensors; `Uint8` if there are none. Checks that they are defined and on this rank's
    /// device.
    pub(super) fn common_kind(
        &self,
        operation: Operation,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<Kind> {
        let mut common = None;
        for tensor in inputs.iter().chain(outputs) {
            if !tensor.defined() {
                return undefined(operation);
            }
            if tensor.device() != self.device {
                return Err(Error::Input(format!(
                    "{operation}: the tensor is on {}, but rank {} works on {}; move it there first",
                    device_name(tensor.device()),
                    self.rank,
                    device_name(self.device)
                )));
            }
            let kind = tensor.f_kind().map_err(Error::torch("kind"))?;
            if common.is_some_and(|common| common != kind) {
                return Err(Error::Input(format!(
                    "{operation}: the tensors are of different kinds; convert them to one"
                )));
            }
            common = Some(kind);
        }
        Ok(common.unwrap_or(Kind::Uint8))
    }

    /// Returns a contiguous tensor for an output that is written in parts.
    pub(super) fn dense_output(&self, operation: Operation, output: &Tensor) -> Result<Dense> {
        let dense = Dense::new(operation, output)?;
        self.check_output(operation, output)?;
        Ok(dense)
    }

    /// Checks that each element of an output has its own memory. Otherwise the output could not hold the results.
    pub(super) fn check_output(&self, operation: Operation, output: &Tensor) -> Result<()> {
        if output.is_contiguous() {
            return Ok(());
        }
        let (shape, strides) = (output.size(), output.stride());
        if !overlaps_itself(&shape, &strides) {
            return Ok(());
        }
        refuse(
            operation,
            format!(
                "the output of rank {} has shape {shape:?} and strides {strides:?}, so several elements share \
                 memory and cannot hold different results; pass a tensor with memory of its own, such as \
                 `tensor.contiguous()`",
                self.global_rank()
            ),
        )
    }

    pub(super) fn check_rank(&self, operation: Operation, name: &str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        let last = self.world_size() - 1;
        // The ranks of a sub-group have its own numbers, unlike PyTorch's `src` and `dst`.
        let members = match self.ranks() {
            ranks if ranks.last() == Some(&last) => String::new(),
            ranks => format!(", which are ranks {ranks:?} of the whole"),
        };
        refuse(
            operation,
            format!("{name} is rank {rank}, but the group has ranks 0 to {last}{members}"),
        )
    }

    /// Checks that a list has one tensor for each rank, of this shape if there is one.
    pub(super) fn check_list(
        &self,
        operation: Operation,
        list: &[Tensor],
        shape: Option<&[i64]>,
    ) -> Result<()> {
        if list.len() != self.world_size() {
            return Err(Error::Input(format!(
                "{operation}: the list has {} tensors, but there are {} ranks; pass one for each",
                list.len(),
                self.world_size()
            )));
        }
        let Some(shape) = shape else { return Ok(()) };
        match list.iter().map(Tensor::size).find(|size| size != shape) {
            None => Ok(()),
            Some(size) => Err(Error::Input(format!(
                "{operation}: the list has a tensor of shape {size:?} beside one of {shape:?}; all must \
                 have one shape"
            ))),
        }
    }

    /// Returns the list that only the root passes; empty on the other ranks.
    pub(super) fn list_at<'a>(
        &self,
        operation: Operation,
        name: &str,
        list: Option<&'a [Tensor]>,
        (role, root): (&str, usize),
        shape: &[i64],
    ) -> Result<&'a [Tensor]> {
        self.check_rank(operation, role, root)?;
        match list {
            Some(list) if self.rank() == root => {
                self.check_list(operation, list, Some(shape))?;
                Ok(list)
            }
            None if self.rank() != root => Ok(&[]),
            _ => Err(Error::Input(format!(
                "{operation}: rank {root} ({role}) must pass {name}, and no other rank may; this is rank {}",
                self.rank()
            ))),
        }
    }

    /// Returns the number of elements to or from each rank when `tensor` is split by rows.
    pub(super) fn rows(
        &self,
        tensor: &Tensor,
        name: &str,
        splits: Option<&[i64]>,
    ) -> Result<Vec<i64>> {
        let world_size = self.world_size() as i64;
        let shape = tensor.size();
        let total = shape.first().copied().unwrap_or(1);
        let row: i64 = shape.iter().skip(1).product();
        let refuse = |why: String| Err(Error::Input(format!("all_to_all: {name} {why}")));
        let Some(splits) = splits else {
            if total % world_size != 0 {
                return refuse(format!(
                    "has {total} rows, which are not equal parts for {world_size} ranks; pass splits"
                ));
            }
            return Ok(vec![total / world_size * row; world_size as usize]);
        };
        let fits = splits.len() as i64 == world_size
            && splits.iter().all(|&split| split >= 0)
            && splits.iter().try_fold(0i64, |sum, &split| sum.checked_add(split)) == Some(total);
        if !fits {
            return refuse(format!(
                "has {total} rows for {world_size} ranks, and the splits {splits:?}; pass one for each \
                 rank that add up"
            ));
        }
        Ok(splits.iter().map(|split| split * row).collect())
    }
}

/// Returns an error in the arguments of `operation`.
pub(super) fn refuse<T>(operation: Operation, why: String) -> Result<T> {
    Err(Error::Input(format!("{operation}: {why}")))
}

fn undefined<T>(operation: Operation) -> Result<T> {
    refuse(operation, "the tensor is undefined; make one first".into())
}

/// A contiguous tensor: the original or a copy.
pub(super) struct Dense(Tensor);

/// Returns whether a tensor's memory holds its elements one after the other, with their values. (Lazily conjugated
/// and negated tensors differ from their memory by a flag bit.)
pub(super) fn is_dense(tensor: &Tensor) -> Result<bool> {
    let torch = || Error::torch("looking at a tensor");
    Ok(tensor.is_contiguous()
        && !tensor.f_is_conj().map_err(torch())?
        && !tensor.f_is_neg().map_err(torch())?)
}

/// Returns whether two elements of a tensor of this shape share memory. Strides are in elements, and not negative.
fn overlaps_itself(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return false;
    }
    let dimensions = shape.iter().zip(strides).filter(|(size, _)| **size > 1);
    let mut dimensions: Vec<(i64, i64)> = dimensions.map(|(&size, &by)| (by, size)).collect();
    dimensions.sort_unstable();
    if dimensions.iter().any(|&(stride, _)| stride == 0) {
        return true;
    }
    // For almost every tensor, each dimension steps past the reach of the smaller ones.
    let mut last = 0;
    let nested = dimensions.iter().all(|&(stride, size)| {
        let is_beyond = stride > last;
        last += stride * (size - 1);
        is_beyond
    });
    if nested {
        return false;
    }
    let mut places = vec![0];
    for (stride, size) in dimensions {
        places = (0..size).flat_map(|i| places.iter().map(move |it| it + i * stride)).collect();
    }
    places.sort_unstable();
    places.windows(2).any(|pair| pair[0] == pair[1])
}

impl Dense {
    pub(super) fn new(operation: Operation, tensor: &Tensor) -> Result<Self> {
        if !tensor.defined() {
            return undefined(operation);
        }
        let dense = || tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous();
        dense().map(Dense).map_err(Error::torch("contiguous"))
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
            return Err(Error::Input(format!(
                "{operation}: {name} has {total} elements, but {needed} are needed"
            )));
        }
        let torch = || Error::torch("cutting a tensor into parts");
        let flat = tch::no_grad(|| self.0.f_view([-1])).map_err(torch())?;
        let mut start = 0;
        let part = |&size: &i64| {
            let part = tch::no_grad(|| flat.f_narrow(0, start, size)).map_err(torch());
            start += size;
            part
        };
        sizes.iter().map(part).collect()
    }

    /// Copies the elements back into `original`, if this is a copy of it.
    pub(super) fn write_back(&self, original: &Tensor) -> Result<()> {
        if self.0.data_ptr() == original.data_ptr() && is_dense(original)? {
            return Ok(());
        }
        tch::no_grad(|| original.shallow_clone().f_copy_(&self.0)).map_err(Error::torch("copy_"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::overlaps_itself;

    #[test]
    fn tensors_that_overlap_themselves() {
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
            (&[3, 2], &[2, 3]), // 0 3 2 5 4 7: interleaved, but each has its own place
        ] {
            assert!(!overlaps_itself(shape, strides), "{shape:?} {strides:?}");
        }
    }

    proptest! {
        /// Compares with a check of every element.
        #[test]
        fn exactly_those_with_two_elements_in_one_place(
            dimensions in prop::collection::vec((1..4i64, 0..7i64), 0..4),
        ) {
            let (shape, strides): (Vec<i64>, Vec<i64>) = dimensions.into_iter().unzip();
            let numel: i64 = shape.iter().product();
            let mut seen = std::collections::BTreeSet::new();
            let mut overlaps = false;
            for element in 0..numel {
                let (mut rest, mut place) = (element, 0);
                for (size, stride) in shape.iter().zip(&strides) {
                    place += rest % size * stride;
                    rest /= size;
                }
                overlaps |= !seen.insert(place);
            }
            prop_assert_eq!(overlaps_itself(&shape, &strides), overlaps);
        }
    }
}
