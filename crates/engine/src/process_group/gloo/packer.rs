//! Each rank's work in an exchange: packing what goes out, and unpacking what has arrived.

use std::ops::Range;
use std::sync::Arc;
use std::{iter, ptr};

use tch::Tensor;

use super::super::call::Call;
use super::super::local::{CallSlot, Kinds, ReductionScratch, my_slice, reduce};
use super::super::network::{Buffers, Network, ProcessMap, SplitSizes, transfers};
use super::super::{ReduceOp, num_bytes};
use crate::operation::Operation;

/// The network and the lists with which a rank packs and unpacks.
pub(super) struct Packer {
    pub network: Arc<Network>,
    /// The buffers of the current call.
    pub buffers: Buffers,
    scratch: ReductionScratch,
}

impl Packer {
    pub(super) fn new(network: Arc<Network>) -> Self {
        let nowhere = Buffers { send: ptr::null_mut(), receive: ptr::null_mut() };
        Self { network, buffers: nowhere, scratch: ReductionScratch::default() }
    }

    /// Packs the send buffer (step 2). Every rank writes to its own part of it.
    ///
    /// # Safety
    /// The ranks of this process have exchanged this call and leave together. The send buffer has room for `parts`.
    pub(super) unsafe fn pack(
        &mut self,
        slot: &CallSlot,
        process_map: &ProcessMap,
        call: &Call,
        parts: &SplitSizes,
        sliced: bool,
    ) {
        let (begins, _) = SplitSizes::offsets(&parts.to, process_map.mine);
        let Buffers { send, .. } = self.buffers;
        let part = |process: usize, offset: usize| send.wrapping_add(begins[process] + offset);
        let here = process_map.here();
        let mut add = |input: usize, range: Range<usize>, to: &mut dyn Iterator<Item = *mut u8>| {
            // SAFETY: as the caller promises. The parts have room for these elements.
            unsafe { self.add(slot, process_map, call, input, range, to) };
        };
        match call.operation {
            Operation::AllReduce if sliced => {
                for process in 0..process_map.len() {
                    let slice = my_slice(call.inputs[0].numel(), process, process_map.len());
                    add(0, slice, &mut iter::once(part(process, 0)));
                }
            }
            Operation::AllReduce | Operation::Reduce => {
                // The parts of an all_reduce are equal: this process needs none of its own.
                let needs_own = call.operation == Operation::Reduce;
                let is_receiver = |&process: &usize| {
                    parts.to[process] > 0 && (needs_own || process != process_map.mine)
                };
                let receivers = (0..process_map.len()).filter(is_receiver);
                let to = &mut receivers.map(|process| part(process, 0));
                add(0, 0..call.inputs[0].numel(), to);
            }
            operation => {
                let size = size_between(slot, process_map, call);
                for (process, receivers) in process_map.processes.iter().enumerate() {
                    for one in transfers(call, &here, receivers, &size) {
                        let to = part(process, one.bytes.start);
                        if operation == Operation::ReduceScatter {
                            add(one.input, 0..call.outputs[0].numel(), &mut iter::once(to));
                        } else if one.from == here.start + slot.rank() {
                            let from: *mut u8 = call.inputs[one.input].data_ptr().cast();
                            // SAFETY: there is room for the tensor, and no other rank writes there.
                            unsafe { from.copy_to_nonoverlapping(to, one.bytes.len()) };
                        }
                    }
                }
            }
        }
    }

    /// Reduces the elements `range` of the tensor `input` of each rank of this process into each of `to`. Each rank reduces
    /// its slice of them.
    ///
    /// # Safety
    /// The ranks of this process have exchanged this call and leave together. Each of `to` has room for these elements.
    unsafe fn add(
        &mut self,
        slot: &CallSlot,
        process_map: &ProcessMap,
        call: &Call,
        input: usize,
        range: Range<usize>,
        to: &mut dyn Iterator<Item = *mut u8>,
    ) {
        let kinds = Kinds { from: call.kind, to: process_map.partial_kind(call) };
        let slice = my_slice(range.len(), slot.rank(), process_map.here().len());
        let from = num_bytes(kinds.from, range.start + slice.start);
        let offset = num_bytes(kinds.to, slice.start);
        let inputs = slot.published().map(|call| &call.inputs[input]);
        self.scratch.list(
            inputs.map(|tensor| tensor.data.wrapping_add(from)),
            to.map(|address| address.wrapping_add(offset)),
        );
        if slice.is_empty() || self.scratch.outputs.is_empty() {
            return;
        }
        let op = match call.op() {
            ReduceOp::Avg => ReduceOp::Sum,
            // Unscaled: the receiver multiplies, without rounding in between.
            ReduceOp::PremulSum(_) if process_map.is_one_rank_each() => ReduceOp::Sum,
            op => op,
        };
        // SAFETY: the tensors stay valid and have these elements. The parts are as large, and only this rank writes
        // to this slice of them.
        unsafe { reduce(self.scratch.reduction(kinds, slice.len(), op)) };
    }

    /// Reduces the parts of all processes into `to`: `len` elements, from byte `offset` of each part on.
    ///
    /// # Safety
    /// Each part has these elements, and no thread writes to them. No other thread touches those of `to`.
    pub(super) unsafe fn add_up(
        &mut self,
        call: &Call,
        sources: &[*mut u8],
        offset: usize,
        len: usize,
        to: impl Iterator<Item = *mut u8>,
    ) {
        let process_map = &self.network.map;
        let world_size = process_map.processes.iter().map(ExactSizeIterator::len).sum::<usize>();
        let op = match call.op() {
            op if process_map.is_one_rank_each() => op,
            // The processes have multiplied and added already.
            ReduceOp::PremulSum(_) => ReduceOp::Sum,
            ReduceOp::Avg => ReduceOp::PremulSum(1.0 / world_size as f64),
            op => op,
        };
        let kinds = Kinds { from: process_map.partial_kind(call), to: call.kind };
        let scratch = &mut self.scratch;
        scratch.list(sources.iter().map(|source| source.wrapping_add(offset)), to);
        if len == 0 || scratch.outputs.is_empty() {
            return;
        }
        // SAFETY: as the caller promises.
        unsafe { reduce(scratch.reduction(kinds, len, op)) };
    }

    /// Unpacks this rank's results (step 4).
    ///
    /// # Safety
    /// All parts of `sources` have arrived, no thread writes to them, and the ranks of this process leave together.
    pub(super) unsafe fn unpack(
        &mut self,
        slot: &CallSlot,
        process_map: &ProcessMap,
        call: &Call,
        sources: &[*mut u8],
        sliced: bool,
    ) {
        let here = process_map.here();
        let group_rank = here.start + slot.rank();
        let data = |tensor: &Tensor| tensor.data_ptr().cast::<u8>();
        let copy = |from: *mut u8, to: *mut u8, size: usize| {
            // SAFETY: both have `size` bytes, and `to` belongs to this rank.
            unsafe { from.copy_to_nonoverlapping(to, size) };
        };
        if sliced {
            for (process, source) in sources.iter().enumerate() {
                let slice = my_slice(call.outputs[0].numel(), process, process_map.len());
                let offset = num_bytes(call.kind, slice.start);
                let output = data(&call.outputs[0]).wrapping_add(offset);
                copy(*source, output, num_bytes(call.kind, slice.len()));
            }
            return;
        }
        let size = size_between(slot, process_map, call);
        let is_sum = call.operation.collective().is_some_and(|it| it.reduces);
        for (source, senders) in sources.iter().zip(&process_map.processes) {
            for one in transfers(call, senders, &here, &size) {
                // The root of a broadcast has the tensor, and no output.
                let output = call.outputs.get(one.output).filter(|_| one.to.contains(&group_rank));
                let Some(output) = output else { continue };
                if is_sum {
                    // The parts of all processes have their sums at the same offset.
                    let to = iter::once(data(output));
                    // SAFETY: all parts have these elements there, and the output belongs to this rank.
                    return unsafe {
                        self.add_up(call, sources, one.bytes.start, output.numel(), to)
                    };
                }
                copy(source.wrapping_add(one.bytes.start), data(output), one.bytes.len());
            }
        }
    }
}

/// Returns the bytes that a rank sends to another, of which one is in this process. In an all_to_all each pair has a size
/// of its own, which both have announced.
pub(super) fn size_between<'a>(
    slot: &'a CallSlot,
    process_map: &'a ProcessMap,
    call: &Call,
) -> impl Fn(usize, usize) -> usize + use<'a> {
    let tensor = call.inputs.first().or(call.outputs.first());
    let size = process_map.tensor_bytes(call, tensor.map_or(0, Tensor::numel));
    let (kind, has_own_sizes, here) =
        (call.kind, call.operation.has_own_sizes(), process_map.here());
    move |from, to| {
        if !has_own_sizes {
            return size;
        }
        let announced = |rank: usize| slot.published().nth(rank - here.start);
        let tensor = if here.contains(&from) {
            announced(from).and_then(|call| call.inputs.get(to))
        } else {
            announced(to).and_then(|call| call.outputs.get(from))
        };
        tensor.map_or(0, |tensor| num_bytes(kind, tensor.numel))
    }
}

/// Returns the address of the part of each process. It is in the receive buffer. Only the part of this process, `mine`,
/// is in the send buffer, in the parts that begin at byte `begin`.
pub(super) fn sources(
    buffers: Buffers,
    mine: usize,
    parts: &SplitSizes,
    begin: usize,
) -> Vec<*mut u8> {
    let Buffers { send, receive } = buffers;
    let (to, _) = SplitSizes::offsets(&parts.to, mine);
    let (from, _) = SplitSizes::offsets(&parts.from, mine);
    let source = |(process, offset): (usize, usize)| {
        if process == mine {
            send.wrapping_add(begin + to[mine])
        } else {
            receive.wrapping_add(offset)
        }
    };
    from.into_iter().enumerate().map(source).collect()
}
