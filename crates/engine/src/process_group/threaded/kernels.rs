//! Each rank's work in a collective, after the exchange.

use std::iter;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::super::call::Call;
use super::super::local::{
    self, CollectiveFingerprint, Reduction, ReductionScratch, TensorMemory, my_slice, my_slices,
    wide_kind,
};
use super::super::traffic::{Traffic, split_traffic};
use super::super::{ReduceOp, num_bytes};
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::operation::Operation;

/// Runs the part of `rank` in the collective that all ranks have announced.
///
/// # Safety
/// All ranks have exchanged this call, and their announcements agree. No rank writes where another reads or writes. All
/// tensors stay valid until all ranks have left.
pub(super) unsafe fn run<'a>(
    call: &Call,
    rank: usize,
    calls: impl ExactSizeIterator<Item = &'a CollectiveFingerprint> + Clone,
    addresses: &mut ReductionScratch,
) -> Result<()> {
    let all = || calls.clone();
    let Some(mine) = calls.clone().nth(rank) else { return Ok(()) };
    // SAFETY: as the caller promises; sizes fit, because the announcements agree.
    let copy =
        |from: TensorMemory, to: TensorMemory| unsafe { copy(mine.kind, mine.device, from, to) };
    match call.operation {
        Operation::AllReduce | Operation::Reduce => {
            let lengths = mine.inputs.iter().map(|tensor| tensor.numel);
            for (index, slice) in my_slices(lengths, rank, all().len()) {
                addresses.list(
                    all().map(|other| other.inputs[index].data),
                    all().filter_map(|other| Some(other.outputs.get(index)?.data)),
                );
                // SAFETY: each rank writes to its own slices only.
                unsafe { reduce(mine, addresses, slice.start, slice, call.op()) }?;
            }
            Ok(())
        }
        Operation::ReduceScatter if call.on_piece.is_some() => {
            // SAFETY: each rank writes to its own scratch memory only.
            unsafe { reduce_pieces(call, mine, rank, all(), addresses) }
        }
        Operation::ReduceScatter => {
            addresses.list(
                all().map(|other| other.inputs[rank].data),
                mine.outputs.iter().map(|output| output.data),
            );
            // SAFETY: each rank writes to its own output only.
            unsafe { reduce(mine, addresses, 0, 0..mine.outputs[0].numel, call.op()) }
        }
        // The other collectives copy. A list of inputs has a tensor for each rank, a list of outputs a tensor from each.
        operation => {
            let Some(collective) = operation.collective() else { return Ok(()) };
            let input = if collective.inputs.is_list() { rank } else { 0 };
            if collective.outputs.is_list() {
                let mut pairs = all().zip(&mine.outputs);
                return pairs.try_for_each(|(other, &to)| copy(other.inputs[input], to));
            }
            match (all().nth(call.root()), mine.outputs.first()) {
                (Some(source), Some(&to)) => copy(source.inputs[input], to),
                _ => Ok(()),
            }
        }
    }
}

/// Reduces the elements that all ranks have announced into the tensors of this rank.
///
/// # Safety
/// All ranks have exchanged this call. Their announcements agree, and have contents. No other rank touches the tensors
/// of `mine`, this rank's announcement.
pub(super) unsafe fn reduce_contents<'a>(
    call: &Call,
    mine: &CollectiveFingerprint,
    calls: impl Iterator<Item = &'a CollectiveFingerprint> + Clone,
    addresses: &mut ReductionScratch,
) -> Result<()> {
    let mut offset = 0;
    mine.outputs.iter().try_for_each(|output| {
        let inputs = calls.clone().map(|other| other.contents(offset));
        addresses.list(inputs, iter::once(output.data));
        offset += num_bytes(mine.kind, output.numel);
        // SAFETY: no rank writes to announced elements before all ranks have announced their next calls; the rest as the
        // caller promises.
        unsafe { reduce(mine, addresses, 0, 0..output.numel, call.op()) }
    })
}

/// Returns the bytes that cross between `rank` and the others in the call that it has announced as `mine`. Received: what
/// it reads from their tensors and they write to its own. Sent: the reverse.
pub(super) fn traffic(
    call: &Call,
    mine: &CollectiveFingerprint,
    rank: usize,
    world_size: usize,
) -> Traffic {
    let others = world_size as u64 - 1;
    let is_root = rank == call.root();
    // Of a call in several pieces, `mine` is the last.
    let is_whole =
        mine.inputs.first().map(|input| input.numel) == call.inputs.first().map(Tensor::numel);
    let (sent, received) = match call.operation {
        Operation::ReduceScatter if call.on_piece.is_some() => {
            let (all, slice) = sizes(call, rank, world_size);
            if call.reduce_op.is_some() { (all - slice, slice * others) } else { (0, 0) }
        }
        Operation::AllReduce if mine.has_contents && is_whole => {
            let (all, _) = sizes(call, rank, world_size);
            (all * others, all * others)
        }
        Operation::AllReduce | Operation::Reduce => {
            let (all, slice) = sizes(call, rank, world_size);
            // Other ranks reduce the rest of its tensor, and its slice has results for them.
            let results_for = match call.operation {
                Operation::AllReduce => others,
                _ => u64::from(!is_root),
            };
            let results =
                if call.operation == Operation::AllReduce || is_root { all - slice } else { 0 };
            (all - slice + slice * results_for, slice * others + results)
        }
        _ => return split_traffic(call, rank, world_size),
    };
    Traffic { sent, received }
}

/// Returns the size of all inputs and of the slices that `rank` reduces, in bytes.
fn sizes(call: &Call, rank: usize, world_size: usize) -> (u64, u64) {
    let numel = call.inputs.iter().map(Tensor::numel).sum();
    let slice = my_slice(numel, rank, world_size).len();
    (num_bytes(call.kind, numel) as u64, num_bytes(call.kind, slice) as u64)
}

/// Reduces this rank's slices of the inputs piece by piece into its scratch memory, the call's output, and passes on
/// each piece. Without an operation it passes on the pieces of the rank's own inputs. A single rank does the same.
///
/// # Safety
/// The requirements of [`run`].
unsafe fn reduce_pieces<'a>(
    call: &Call,
    mine: &CollectiveFingerprint,
    rank: usize,
    calls: impl ExactSizeIterator<Item = &'a CollectiveFingerprint> + Clone,
    addresses: &mut ReductionScratch,
) -> Result<()> {
    let (Some(on_piece), Some(scratch)) = (call.on_piece, mine.outputs.first()) else {
        return Ok(());
    };
    let op = call.reduce_op.filter(|op| calls.len() > 1 || !keeps(*op));
    let lengths = mine.inputs.iter().map(|tensor| tensor.numel);
    for (index, slice) in my_slices(lengths, rank, calls.len()) {
        for start in slice.clone().step_by(scratch.numel) {
            let piece = start..slice.end.min(start + scratch.numel);
            if let Some(op) = op {
                let inputs = calls.clone().map(|other| other.inputs[index].data);
                addresses.list(inputs, iter::once(scratch.data));
                // SAFETY: as the caller promises; no other rank touches the scratch memory.
                unsafe { reduce(mine, addresses, 0, piece.clone(), op) }?;
            }
            on_piece(index, piece, op.is_some())?;
        }
    }
    Ok(())
}

/// Reduces the elements `slice` of the inputs into the outputs, from their element `to` on.
///
/// # Safety
/// The inputs of `addresses` have at least `slice.end` elements of `mine.kind`, on `mine.device`, and the outputs have
/// as many from `to` on. No other rank touches these elements of the outputs, or writes to those of the inputs.
unsafe fn reduce(
    mine: &CollectiveFingerprint,
    addresses: &mut ReductionScratch,
    to: usize,
    slice: Range<usize>,
    op: ReduceOp,
) -> Result<()> {
    if slice.is_empty() {
        return Ok(());
    }
    if addresses.inputs.len() == 1 && addresses.inputs == addresses.outputs && keeps(op) {
        return Ok(()); // a single rank already has its result
    }
    let add = |addresses: &mut [*mut u8], start| {
        let offset = num_bytes(mine.kind, start);
        addresses.iter_mut().for_each(|address| *address = address.wrapping_add(offset));
    };
    add(&mut addresses.inputs, slice.start);
    add(&mut addresses.outputs, to);
    let reduction = addresses.reduction(mine.kind, slice.len(), op);
    if mine.device == Device::Cpu {
        // SAFETY: as the caller promises, with pointers moved to the first elements.
        unsafe { local::reduce(reduction) };
        return Ok(());
    }
    // SAFETY: likewise.
    unsafe { reduce_by_kernels(reduction, mine.device) }.doing("a reduction")
}

/// Returns whether a single rank's result equals its input.
fn keeps(op: ReduceOp) -> bool {
    !matches!(op, ReduceOp::PremulSum(factor) if factor != 1.0)
}

/// Reduces like [`local::reduce`], but with libtorch's kernels, for GPUs. All ranks launch into one stream, so work
/// launched before a barrier is done before work launched after it.
///
/// # Safety
/// The requirements of [`local::reduce`], on `device`.
unsafe fn reduce_by_kernels(reduction: Reduction<'_>, device: Device) -> Result<(), tch::TchError> {
    let Reduction { kinds, inputs, outputs, len, op, .. } = reduction;
    let (kind, wide) = (kinds.from, wide_kind(kinds.from));
    let len = len as i64;
    // SAFETY: as the caller promises; the views end with this function.
    let view = |&data: &*mut u8| unsafe { Tensor::f_from_blob(data, &[len], &[1], kind, device) };
    let term = |rank: usize| {
        let term = view(&inputs[rank])?.f_to_kind(wide)?;
        if let ReduceOp::PremulSum(factor) = op { term.f_mul_scalar(factor) } else { Ok(term) }
    };
    let reduce = || {
        let mut reduced = Tensor::f_zeros([len], (wide, device))?;
        reduced.f_copy_(&term(0)?)?;
        for rank in 1..inputs.len() {
            let term = term(rank)?;
            reduced = match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => reduced.f_add_(&term)?,
                ReduceOp::Product => reduced.f_mul_(&term)?,
                ReduceOp::Min => reduced.f_minimum(&term)?,
                ReduceOp::Max => reduced.f_maximum(&term)?,
                ReduceOp::Band => reduced.f_bitwise_and_tensor_(&term)?,
                ReduceOp::Bor => reduced.f_bitwise_or_tensor_(&term)?,
                ReduceOp::Bxor => reduced.f_bitwise_xor_tensor_(&term)?,
            };
        }
        if op == ReduceOp::Avg {
            reduced = reduced.f_div_scalar_(inputs.len() as f64)?;
        }
        for output in outputs {
            view(output)?.f_copy_(&reduced)?;
        }
        Ok(())
    };
    tch::no_grad(reduce)
}

/// # Safety
/// Both are memory of `kind` on `device`, of equal size. They are the same, or do not overlap. No rank writes to
/// `from`, and no other rank touches `to`.
unsafe fn copy(kind: Kind, device: Device, from: TensorMemory, to: TensorMemory) -> Result<()> {
    if from.data == to.data || to.numel == 0 {
        return Ok(());
    }
    if device == Device::Cpu {
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, num_bytes(kind, to.numel)) };
        return Ok(());
    }
    let len = to.numel as i64;
    // SAFETY: as the caller promises; the views end with this function.
    let view = |tensor: TensorMemory| unsafe {
        Tensor::f_from_blob(tensor.data, &[len], &[1], kind, device)
    };
    tch::no_grad(|| view(to)?.f_copy_(&view(from)?)).doing("copying between ranks")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On CPU tensors, the GPU kernels and the CPU loops give the same bits: the same order, in the same precision.
    #[test]
    fn loops_and_kernels_reduce_to_the_same_bits() {
        use Kind::{BFloat16, Bool, Double, Float, Half, Int, Int8, Int16, Int64, Uint8};
        use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, PremulSum, Product, Sum};
        let kinds = [Double, Float, Half, BFloat16, Int64, Int, Int16, Int8, Uint8, Bool];
        let ops = [Sum, Avg, Product, Min, Max, Band, Bor, Bxor, PremulSum(1. / 3.)];
        let mut pairs = 0;
        for kind in kinds {
            for op in ops {
                if op.check_kind(Operation::AllReduce, kind).is_err() {
                    continue;
                }
                for len in [1, 63, 64, 65, 1000, 5000] {
                    let input = |rank: i64| {
                        let index = Tensor::arange(len, (Double, Device::Cpu));
                        (index * (0.37 + rank as f64)).remainder(7.).to_kind(kind)
                    };
                    let inputs: Vec<Tensor> = (0..3).map(input).collect();
                    let output = || Tensor::zeros([len], (kind, Device::Cpu));
                    let (by_loops, by_kernels) = (output(), output());
                    let from: Vec<*mut u8> = inputs.iter().map(|t| t.data_ptr().cast()).collect();
                    let (loops, kernels) =
                        ([by_loops.data_ptr().cast()], [by_kernels.data_ptr().cast()]);
                    let numel = len as usize;
                    let mut addresses = ReductionScratch::default();
                    addresses.list(from.into_iter(), loops.into_iter());
                    let one = addresses.reduction(kind, numel, op);
                    // SAFETY: tensors of `len` elements of `kind` that do not overlap, of this thread.
                    unsafe {
                        local::reduce(one);
                        let into_kernels = Reduction { outputs: &kernels, ..one };
                        reduce_by_kernels(into_kernels, Device::Cpu).unwrap();
                    }
                    assert!(by_loops.equal(&by_kernels), "{kind:?} {op} {len}");
                    pairs += 1;
                }
            }
        }
        assert_eq!(pairs, 6 * (4 * 6 + 5 * 7 + 5));
    }
}
