//! Who sends what to whom in a collective between processes, and the sizes and offsets of it: arithmetic only, no memory.

use std::ops::Range;

use super::common::Room;
use super::process_map::ProcessMap;
use crate::operation::{Holders, Operand, Tensors};
use crate::process_group::call::Call;
use crate::process_group::dtype::num_bytes;
use crate::process_group::traffic::Traffic;

/// Parts begin at cache lines, so that every dtype is aligned.
const LINE: usize = 64;

/// A tensor on its way from one process to another.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The group rank that sends its tensor.
    pub from: usize,
    /// The group ranks that take it.
    pub to: Range<usize>,
    /// The index among the inputs of `from`.
    pub input: usize,
    /// The index among the outputs of `to`.
    pub output: usize,
    /// The bytes in the part that the process sends to the other.
    pub bytes: Range<usize>,
}

/// Returns what the ranks `from` of one process send to the ranks `to` of another in `call`, in the order of the part.
///
/// This is the table of who sends which range. The sizes of parts, packing and unpacking follow it. `size` returns the
/// bytes that a rank sends to another.
pub(crate) fn transfers(
    call: &Call,
    from: &Range<usize>,
    to: &Range<usize>,
    size: impl Fn(usize, usize) -> usize,
) -> impl Iterator<Item = Transfer> {
    let root = call.root();
    let holders = |operand: Operand, ranks: &Range<usize>| match operand.holders {
        _ if operand.tensors == Tensors::Nothing => 0..0,
        Holders::Root if ranks.contains(&root) => root..root + 1,
        Holders::Root => 0..0,
        Holders::All | Holders::OthersThanRoot => ranks.clone(),
    };
    let collective = call.operation.collective();
    let (senders, receivers) = match collective {
        Some(it) => (holders(it.inputs, from), holders(it.outputs, to)),
        None => (0..0, 0..0),
    };
    let has_input_for_each = collective.is_some_and(|it| it.inputs.is_list());
    let has_output_for_each = collective.is_some_and(|it| it.outputs.is_list());
    // All receivers take the same tensor, unless the sender has one for each.
    let receivers_of_one = if has_input_for_each { 1 } else { receivers.len().max(1) };
    let mut end = 0;
    senders
        .flat_map(move |from| receivers.clone().step_by(receivers_of_one).map(move |to| (from, to)))
        .map(move |(from, to)| {
            let begin = end;
            end += size(from, to);
            Transfer {
                from,
                to: to..to + receivers_of_one,
                input: if has_input_for_each { to } else { 0 },
                output: if has_output_for_each { from } else { 0 },
                bytes: begin..end,
            }
        })
}

/// Bytes that this process sends to each process, itself included, and receives from each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitSizes {
    pub to: Vec<usize>,
    pub from: Vec<usize>,
    /// Size of the largest part that any process sends to another. `None` if not all processes know it.
    pub largest: Option<usize>,
}

impl SplitSizes {
    /// Returns the sizes of `call` in this process, whose tensors have `numel` elements each. Not for a call in which each
    /// pair of ranks has its own size.
    pub(crate) fn of(call: &Call, numel: usize, process_map: &ProcessMap) -> Self {
        let size = num_bytes(call.kind, numel);
        let most = process_map.processes.iter().map(Range::len).max().unwrap_or(1);
        let held = |operand: Operand| if operand.holders == Holders::Root { 1 } else { most };
        let tensors = call.operation.collective().map_or(0, |it| {
            held(it.inputs) * if it.inputs.is_list() { held(it.outputs) } else { 1 }
        });
        let largest = Some(size * tensors);
        Self { largest, ..Self::of_transfers(call, process_map, |_, _| size) }
    }

    /// Returns the sizes of `call` if each rank sends `size` bytes to another.
    pub(crate) fn of_transfers(
        call: &Call,
        process_map: &ProcessMap,
        size: impl Fn(usize, usize) -> usize,
    ) -> Self {
        let here = process_map.here();
        let part = |from, to| transfers(call, from, to, &size).map(|it| it.bytes.len()).sum();
        let to = process_map.processes.iter().map(|other| part(&here, other)).collect();
        let from = process_map.processes.iter().map(|other| part(other, &here)).collect();
        Self { to, from, largest: None }
    }

    /// Returns the room for these parts.
    pub(crate) fn room(&self, process_map: &ProcessMap) -> Room {
        let end = |sizes: &[usize]| Self::offsets(sizes, process_map.mine).1;
        Room { send: end(&self.to), receive: end(&self.from) }
    }

    /// Returns the bytes that cross to and from other processes.
    pub(crate) fn traffic(&self, process_map: &ProcessMap) -> Traffic {
        let foreign =
            |sizes: &[usize]| (sizes.iter().sum::<usize>() - sizes[process_map.mine]) as u64;
        Traffic { sent: foreign(&self.to), received: foreign(&self.from) }
    }

    /// Returns the offset of each process's part, and the end of all parts. This process's own part is the last.
    pub(crate) fn offsets(sizes: &[usize], mine: usize) -> (Vec<usize>, usize) {
        let mut offsets = vec![0; sizes.len()];
        let mut end = 0;
        let others = (0..sizes.len()).filter(|&process| process != mine);
        for process in others.chain([mine]) {
            offsets[process] = end;
            end += padded(sizes[process]);
        }
        (offsets, end)
    }
}

/// Returns the room that a part takes, in bytes.
pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(LINE)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::operation::Operation;
    use crate::process_group::reduce_op::ReduceOp;

    #[test]
    fn split_sizes_of_sender_and_receiver_agree() {
        let processes = [0..2, 2..3, 3..6];
        for operation in [
            Operation::AllReduce,
            Operation::Reduce,
            Operation::Broadcast,
            Operation::AllGather,
            Operation::Gather,
            Operation::Scatter,
            Operation::ReduceScatter,
            Operation::Barrier,
        ] {
            for (root, kind) in [(0, Kind::Float), (2, Kind::Half), (5, Kind::Half)] {
                let call = Call {
                    operation,
                    root: Some(root),
                    kind,
                    reduce_op: Some(ReduceOp::Sum),
                    ..Call::bare(operation)
                };
                let layouts =
                    [0, 1, 2].map(|mine| ProcessMap { processes: processes.to_vec(), mine });
                let parts =
                    layouts.each_ref().map(|process_map| SplitSizes::of(&call, 1000, process_map));
                for (a, sender) in parts.iter().enumerate() {
                    for (b, receiver) in parts.iter().enumerate() {
                        assert_eq!(sender.to[b], receiver.from[a], "{operation} from {a} to {b}");
                        assert!(Some(sender.to[b]) <= sender.largest);
                    }
                    assert_eq!(sender.largest, parts[0].largest);
                }
            }
        }
        assert_eq!(SplitSizes::offsets(&[4, 100, 0], 0), (vec![128, 0, 128], 192));
    }
}
