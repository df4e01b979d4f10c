//! Sizes and offsets of the parts that processes exchange in a collective: arithmetic only, no memory.

use tch::Kind;

use super::process_map::ProcessMap;
use crate::operation::{CollectiveType, Holders, Operand, Tensors};
use crate::process_group::call::Call;
use crate::process_group::dtype::num_bytes;
use crate::process_group::local::my_slice;
use crate::process_group::traffic::Traffic;

/// Parts begin at cache lines, so that every dtype is aligned.
const LINE: usize = 64;

/// Bytes that this process sends to each process, itself included, and receives from each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitSizes {
    pub to: Vec<usize>,
    pub from: Vec<usize>,
    /// Size of the largest part that any process sends to another. `None` if not all processes know it.
    pub largest: Option<usize>,
}

impl SplitSizes {
    /// Returns the sizes of `call` in this process, whose tensors have `numel` elements each. For an all_reduce in
    /// slices they are those of the first exchange. Zeros if each pair of ranks has its own size: the parts then depend
    /// on all ranks of the process.
    pub(crate) fn of(call: &Call, numel: usize, process_map: &ProcessMap, sliced: bool) -> Self {
        let (count, mine) = (process_map.len(), process_map.mine);
        if sliced {
            let slices = slices(process_map.partial_kind(call), numel, count);
            let (from, largest) = (vec![slices[mine]; count], Some(slices[0]));
            return Self { to: slices, from, largest };
        }
        let ranks = |process: usize| process_map.processes[process].len();
        let root = process_map.process_of(call.root());
        let collective = call.operation.collective();
        let Some(collective) = collective.filter(|collective| !collective.has_own_sizes) else {
            return Self { to: vec![0; count], from: vec![0; count], largest: Some(0) };
        };
        // A process sends its ranks' tensors, or their sum. It also sends its part to itself.
        let CollectiveType { inputs, outputs, reduces, .. } = collective;
        let has =
            |operand: Operand, process: usize| operand.holders != Holders::Root || process == root;
        let unit = match (inputs.tensors, reduces) {
            (Tensors::Nothing, _) => 0,
            (_, true) => num_bytes(process_map.partial_kind(call), numel),
            (_, false) => num_bytes(call.kind, numel),
        };
        // The tensors in a part: one for each rank that receives it, or one from each that sends it.
        let tensors = |from: usize, to: usize| match (inputs.is_list(), outputs.is_list()) {
            (true, _) => ranks(to),
            (_, true) => ranks(from),
            _ => 1,
        };
        let part = |from: usize, to: usize| {
            if has(inputs, from) && has(outputs, to) { unit * tensors(from, to) } else { 0 }
        };
        let most = if collective.has_parts() { (0..count).map(ranks).max() } else { None };
        let to = (0..count).map(|process| part(mine, process)).collect();
        let from = (0..count).map(|process| part(process, mine)).collect();
        let largest = unit * most.unwrap_or(1);
        Self { to, from, largest: Some(largest) }
    }

    /// Returns the sizes of the second exchange of an all_reduce in slices: every process sends its result to all.
    pub(crate) fn results(call: &Call, numel: usize, process_map: &ProcessMap) -> Self {
        let slices = slices(call.kind, numel, process_map.len());
        let (mine, largest) = (slices[process_map.mine], slices[0]);
        Self { to: vec![mine; slices.len()], from: slices, largest: Some(largest) }
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

/// Returns the sizes in bytes of the slices that `count` processes reduce, of `numel` elements of an all_reduce.
fn slices(kind: Kind, numel: usize, count: usize) -> Vec<usize> {
    (0..count).map(|process| num_bytes(kind, my_slice(numel, process, count).len())).collect()
}

/// Returns the room that a part takes, in bytes.
pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(LINE)
}

#[cfg(test)]
mod tests {
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
            for (sliced, root, kind) in
                [(false, 0, Kind::Float), (false, 2, Kind::Half), (true, 5, Kind::Half)]
            {
                let call = Call {
                    operation,
                    root: Some(root),
                    kind,
                    reduce_op: Some(ReduceOp::Sum),
                    ..Call::bare(operation)
                };
                let layouts =
                    [0, 1, 2].map(|mine| ProcessMap { processes: processes.to_vec(), mine });
                let parts = layouts
                    .each_ref()
                    .map(|process_map| SplitSizes::of(&call, 1000, process_map, sliced));
                let results = layouts
                    .each_ref()
                    .map(|process_map| SplitSizes::results(&call, 1000, process_map));
                for (a, sender) in parts.iter().enumerate() {
                    for (b, receiver) in parts.iter().enumerate() {
                        assert_eq!(sender.to[b], receiver.from[a], "{operation} from {a} to {b}");
                        assert!(Some(sender.to[b]) <= sender.largest);
                        assert_eq!(results[a].to[b], results[b].from[a]);
                    }
                    assert_eq!(sender.largest, parts[0].largest);
                }
            }
        }
        assert_eq!(SplitSizes::offsets(&[4, 100, 0], 0), (vec![128, 0, 128], 192));
    }
}
