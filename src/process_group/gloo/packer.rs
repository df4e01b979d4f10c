//! Each rank's work in an exchange: packing what goes out, and unpacking what has arrived.

use std::ops::Range;
use std::sync::Arc;
use std::{iter, ptr};

use tch::Tensor;

use super::super::call::Call;
use super::super::local::{CallSlot, Kinds, ReductionScratch, my_slice, reduce};
use super::super::network::{Buffers, Network, ProcessMap, SplitSizes};
use super::super::{ReduceOp, num_bytes};
use crate::operation::{CollectiveType, Holders, Operation};

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
        let (index, ranks) = (slot.rank(), process_map.here().len());
        let group_rank = process_map.here().start + index;
        let whole = |tensor: &Tensor| num_bytes(call.kind, tensor.numel());
        let partial = process_map.partial_kind(call);
        let local = match call.op() {
            ReduceOp::Avg => ReduceOp::Sum,
            // Unscaled: the receiver multiplies, without rounding in between.
            ReduceOp::PremulSum(_) if process_map.is_one_rank_each() => ReduceOp::Sum,
            op => op,
        };
        let scratch = &mut self.scratch;
        // Reduces the elements `range` of the tensor `input` of each rank. Each rank reduces its slice of them.
        let mut add = |input: usize, range: Range<usize>, to: &mut dyn Iterator<Item = *mut u8>| {
            let slice = my_slice(range.len(), index, ranks);
            let from = num_bytes(call.kind, range.start + slice.start);
            let offset = num_bytes(partial, slice.start);
            let inputs = slot.published().map(|call| &call.inputs[input]);
            scratch.list(
                inputs.map(|tensor| tensor.data.wrapping_add(from)),
                to.map(|address| address.wrapping_add(offset)),
            );
            if slice.is_empty() || scratch.outputs.is_empty() {
                return;
            }
            let kinds = Kinds { from: call.kind, to: partial };
            // SAFETY: the tensors stay valid and have these elements. The parts are as large, and only this rank writes
            // to this slice of them.
            unsafe { reduce(scratch.reduction(kinds, slice.len(), local)) };
        };
        // Copies the tensor to memory that only this rank writes.
        let copy = |tensor: &Tensor, to: *mut u8| {
            // SAFETY: there is room for the tensor, and no other rank writes there.
            unsafe { tensor.data_ptr().cast::<u8>().copy_to_nonoverlapping(to, whole(tensor)) };
        };
        let Some(collective) = call.operation.collective() else { return };
        let CollectiveType { inputs, outputs, .. } = collective;
        let root = process_map.process_of(call.root());
        let receivers = match outputs.holders {
            Holders::Root => root..root + 1,
            Holders::All | Holders::OthersThanRoot => 0..process_map.len(),
        };
        match call.operation {
            Operation::AllReduce if sliced => {
                for process in 0..process_map.len() {
                    let slice = my_slice(call.inputs[0].numel(), process, process_map.len());
                    add(0, slice, &mut [part(process, 0)].into_iter());
                }
            }
            Operation::AllReduce | Operation::Reduce => {
                let to = &mut receivers.map(|process| part(process, 0));
                add(0, 0..call.inputs[0].numel(), to);
            }
            Operation::ReduceScatter => {
                let numel = call.outputs[0].numel();
                for (process, receivers) in process_map.processes.iter().enumerate() {
                    for (offset, receiver) in receivers.clone().enumerate() {
                        let offset = offset * num_bytes(partial, numel);
                        add(receiver, 0..numel, &mut [part(process, offset)].into_iter());
                    }
                }
            }
            _ if collective.has_own_sizes => {
                for (process, receivers) in process_map.processes.iter().enumerate() {
                    let earlier = slot.published().take(index);
                    let mut offset: usize = earlier
                        .flat_map(|call| &call.inputs[receivers.clone()])
                        .map(|tensor| num_bytes(call.kind, tensor.numel))
                        .sum();
                    for input in &call.inputs[receivers.clone()] {
                        copy(input, part(process, offset));
                        offset += whole(input);
                    }
                }
            }
            // The other collectives copy.
            _ if !inputs.is_held_by(group_rank == call.root()) => {}
            _ if inputs.is_list() => {
                for (process, receivers) in process_map.processes.iter().enumerate() {
                    for (offset, receiver) in receivers.clone().enumerate() {
                        let input = &call.inputs[receiver];
                        copy(input, part(process, offset * whole(input)));
                    }
                }
            }
            _ => {
                let Some(input) = call.inputs.first() else { return };
                let offset = if outputs.is_list() { index * whole(input) } else { 0 };
                receivers.for_each(|process| copy(input, part(process, offset)));
            }
        }
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

    /// Multiplies the elements of `tensor` in place by the factor of [`ReduceOp::PremulSum`].
    ///
    /// # Safety
    /// No other thread touches `tensor`.
    pub(super) unsafe fn multiply(&mut self, call: &Call, tensor: &Tensor) {
        let data: *mut u8 = tensor.data_ptr().cast();
        self.scratch.list(iter::once(data), iter::once(data));
        let kinds = Kinds::same(call.kind);
        // SAFETY: as the caller promises; each element is computed from itself alone.
        unsafe { reduce(self.scratch.reduction(kinds, tensor.numel(), call.op())) };
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
        let (index, group_rank) = (slot.rank(), process_map.here().start + slot.rank());
        let whole = |tensor: &Tensor| num_bytes(call.kind, tensor.numel());
        let data = |tensor: &Tensor| tensor.data_ptr().cast::<u8>();
        let copy = |from: *mut u8, to: *mut u8, size: usize| {
            // SAFETY: both have `size` bytes, and `to` belongs to this rank.
            unsafe { from.copy_to_nonoverlapping(to, size) };
        };
        let Some(collective) = call.operation.collective() else { return };
        let CollectiveType { inputs, outputs, .. } = collective;
        match call.operation {
            Operation::AllReduce if sliced => {
                let output = data(&call.outputs[0]);
                for (process, source) in sources.iter().enumerate() {
                    let slice = my_slice(call.outputs[0].numel(), process, process_map.len());
                    let offset = num_bytes(call.kind, slice.start);
                    copy(*source, output.wrapping_add(offset), num_bytes(call.kind, slice.len()));
                }
            }
            Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter => {
                let Some(output) = call.outputs.first() else { return };
                let scattered = call.operation == Operation::ReduceScatter;
                let part = num_bytes(self.network.map.partial_kind(call), output.numel());
                let offset = if scattered { index * part } else { 0 };
                // SAFETY: the parts have these elements there, and the output belongs to this rank.
                unsafe {
                    self.add_up(call, sources, offset, output.numel(), [data(output)].into_iter())
                };
            }
            _ if collective.has_own_sizes => {
                for (source, senders) in sources.iter().zip(&process_map.processes) {
                    let mut offset = 0;
                    for from in senders.clone() {
                        for (other, announced) in slot.published().enumerate() {
                            let size = num_bytes(call.kind, announced.outputs[from].numel);
                            if process_map.here().start + other == group_rank {
                                copy(source.wrapping_add(offset), data(&call.outputs[from]), size);
                            }
                            offset += size;
                        }
                    }
                }
            }
            // The other collectives copy.
            _ if outputs.is_list() => {
                for (source, senders) in sources.iter().zip(&process_map.processes) {
                    for (offset, output) in
                        call.outputs.iter().skip(senders.start).take(senders.len()).enumerate()
                    {
                        let size = whole(output);
                        copy(source.wrapping_add(offset * size), data(output), size);
                    }
                }
            }
            _ => {
                let Some(output) = call.outputs.first() else { return };
                let offset = if inputs.is_list() { index * whole(output) } else { 0 };
                let root = sources[process_map.process_of(call.root())];
                copy(root.wrapping_add(offset), data(output), whole(output));
            }
        }
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
