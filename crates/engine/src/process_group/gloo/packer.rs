//! Each rank's work in an exchange: packing what goes out, and unpacking what has arrived.

use std::sync::Arc;
use std::{iter, ptr};

use tch::Tensor;

use super::super::call::Call;
use super::super::local::{CallSlot, ReductionScratch, in_tensors, my_slice, reduce};
use super::super::network::{Buffers, Chain, Network, ProcessMap, SplitSizes, transfers};
use super::super::num_bytes;
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

    /// Copies this rank's tensors into the send buffer (step 2). Every rank writes to its own part of it.
    ///
    /// # Safety
    /// The ranks of this process have exchanged this call and leave together. The send buffer has room for `parts`.
    pub(super) unsafe fn pack(
        &mut self,
        slot: &CallSlot,
        process_map: &ProcessMap,
        call: &Call,
        parts: &SplitSizes,
    ) {
        let (begins, _) = SplitSizes::offsets(&parts.to, process_map.mine);
        let here = process_map.here();
        let size = size_between(slot, process_map, call);
        for (process, receivers) in process_map.processes.iter().enumerate() {
            if process == process_map.mine && call.operation == Operation::AllReduce {
                continue; // the parts to all processes are equal
            }
            for one in transfers(call, &here, receivers, &size) {
                if one.from == here.start + slot.rank() {
                    let from: *mut u8 = call.inputs[one.input].data_ptr().cast();
                    let to = self.buffers.send.wrapping_add(begins[process] + one.bytes.start);
                    // SAFETY: there is room for the tensor, and no other rank writes there.
                    unsafe { from.copy_to_nonoverlapping(to, one.bytes.len()) };
                }
            }
        }
    }

    /// Adds this rank's share of a piece of the process's tensors to the partial result of the process before, and copies
    /// the results of another piece that are here.
    ///
    /// # Safety
    /// The ranks of this process have exchanged this call and leave together. The buffers have the room of `chain`, and what
    /// this `step` needs has arrived.
    pub(super) unsafe fn step_in_chain(
        &mut self,
        slot: &CallSlot,
        process_map: &ProcessMap,
        call: &Call,
        chain: &Chain,
        step: usize,
    ) {
        let piece = chain.added_in(step);
        let share = my_slice(piece.len(), slot.rank(), process_map.here().len());
        let share = piece.start + share.start..piece.start + share.end;
        let lengths = call.inputs.iter().map(Tensor::numel);
        let mut at = share.start;
        for (index, range) in in_tensors(lengths, share) {
            let from = num_bytes(call.kind, range.start);
            let inputs = slot.published().map(|call| call.inputs[index].data.wrapping_add(from));
            self.scratch.list(inputs, iter::once(chain.made(self.buffers, at)));
            let own = self.scratch.reduction(call.kind, range.len(), call.op());
            // SAFETY: the tensors and the partial result have these elements, and stay valid. Only this rank writes to
            // these elements of what the process makes.
            unsafe { reduce(chain.continued(own, self.buffers, at)) };
            at += range.len();
        }
        let group_rank = process_map.here().start + slot.rank();
        let Some(output) = call.outputs.first() else { return };
        let first = match call.operation {
            Operation::ReduceScatter => group_rank * output.numel(),
            _ => 0,
        };
        let here = chain.results_in(step);
        let mine = here.start.max(first)..here.end.min(first + output.numel());
        if !mine.is_empty() {
            let from = chain.result(self.buffers, mine.start);
            let to = output.data_ptr().cast::<u8>();
            let to = to.wrapping_add(num_bytes(call.kind, mine.start - first));
            // SAFETY: both have these elements. No other rank touches the output: all have added this piece.
            unsafe { from.copy_to_nonoverlapping(to, num_bytes(call.kind, mine.len())) };
        }
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
    ) {
        let here = process_map.here();
        let group_rank = here.start + slot.rank();
        let size = size_between(slot, process_map, call);
        let reduces = call.operation.collective().is_some_and(|it| it.reduces);
        self.scratch.list(iter::empty(), iter::empty());
        for (source, senders) in sources.iter().zip(&process_map.processes) {
            for one in transfers(call, senders, &here, &size) {
                // The root of a broadcast has the tensor, and no output.
                let output = call.outputs.get(one.output).filter(|_| one.to.contains(&group_rank));
                let Some(output) = output else { continue };
                let from = source.wrapping_add(one.bytes.start);
                if reduces {
                    self.scratch.inputs.push(from);
                    continue;
                }
                // SAFETY: both have these bytes, and the output belongs to this rank.
                unsafe { from.copy_to_nonoverlapping(output.data_ptr().cast(), one.bytes.len()) };
            }
        }
        if reduces && let Some(output) = call.outputs.first() {
            self.scratch.outputs.push(output.data_ptr().cast());
            // SAFETY: the tensors of all ranks have arrived, and the output belongs to this rank.
            unsafe { reduce(self.scratch.reduction(call.kind, output.numel(), call.op())) };
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
    let size = num_bytes(call.kind, tensor.map_or(0, Tensor::numel));
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
/// is in the send buffer.
pub(super) fn sources(buffers: Buffers, mine: usize, parts: &SplitSizes) -> Vec<*mut u8> {
    let Buffers { send, receive } = buffers;
    let (to, _) = SplitSizes::offsets(&parts.to, mine);
    let (from, _) = SplitSizes::offsets(&parts.from, mine);
    let source = |(process, offset): (usize, usize)| {
        if process == mine { send.wrapping_add(to[mine]) } else { receive.wrapping_add(offset) }
    };
    from.into_iter().enumerate().map(source).collect()
}
