//! The map of a group: the ranks of each process.

use std::ops::Range;

use tch::Kind;

use crate::operation::Tensors;
use crate::process_group::call::Call;
use crate::process_group::dtype::num_bytes;
use crate::process_group::reduce_op::ReduceOp;

/// The processes of a group: the group ranks of each, and the index of this process. A map of hosts is one too: each host
/// whose processes share memory counts as one process there.
#[derive(Debug, Clone)]
pub(crate) struct ProcessMap {
    pub processes: Vec<Range<usize>>,
    pub mine: usize,
}

impl ProcessMap {
    /// Returns the map in which neighbours of the same host count as one process. `host_of` returns the host of a group
    /// rank.
    pub(crate) fn by_host(&self, host_of: impl Fn(usize) -> usize) -> Self {
        let same = |a: &Range<usize>, b: &Range<usize>| host_of(a.start) == host_of(b.start);
        let ranks = |all: &[Range<usize>]| all[0].start..all[all.len() - 1].end;
        let hosts: Vec<Range<usize>> = self.processes.chunk_by(same).map(ranks).collect();
        let group_rank = self.here().start;
        let mine = hosts.iter().position(|ranks| ranks.contains(&group_rank)).unwrap_or(0);
        Self { processes: hosts, mine }
    }

    /// Returns the number of processes.
    pub(crate) fn len(&self) -> usize {
        self.processes.len()
    }

    /// Returns the group ranks of this process.
    pub(crate) fn here(&self) -> Range<usize> {
        self.processes[self.mine].clone()
    }

    /// Returns the index of the process that has the group rank `group_rank`.
    pub(crate) fn process_of(&self, group_rank: usize) -> usize {
        self.processes.iter().position(|ranks| ranks.contains(&group_rank)).unwrap_or(0)
    }

    /// Returns whether every process has one rank. Each then sends its rank's tensor as it is, and the receiver does
    /// all of the arithmetic, as with `threaded`.
    pub(crate) fn is_one_rank_each(&self) -> bool {
        self.processes.iter().all(|ranks| ranks.len() == 1)
    }

    /// Returns the dtype in which a process sends its ranks' reduced tensors. If processes have several ranks, it is
    /// float32 for sums and products of half-precision numbers, which are narrowed once, at the end.
    pub(crate) fn partial_kind(&self, call: &Call) -> Kind {
        let is_half = matches!(call.kind, Kind::Half | Kind::BFloat16);
        let rounds = !matches!(call.reduce_op, None | Some(ReduceOp::Min | ReduceOp::Max));
        if is_half && rounds && !self.is_one_rank_each() { Kind::Float } else { call.kind }
    }
    /// Returns the bytes of a tensor of `numel` elements as it travels in `call`; 0 if the call moves none.
    pub(crate) fn tensor_bytes(&self, call: &Call, numel: usize) -> usize {
        match call.operation.collective() {
            Some(it) if it.reduces => num_bytes(self.partial_kind(call), numel),
            Some(it) if it.inputs.tensors != Tensors::Nothing => num_bytes(call.kind, numel),
            _ => 0,
        }
    }
}
