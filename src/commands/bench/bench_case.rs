//! The operations that `bench` measures, and the check of their results.

use strum::IntoEnumIterator;
use tch::{Kind, TchError, Tensor};

use crate::commands::comm_op::{CommOp, OpTensors};
use engine::error::Result;
use engine::ffi::TorchResult;
use engine::operation::{CollectiveType, Operation, Tensors};
use engine::process_group::{ReduceOp, num_bytes};

/// The operations that can be measured.
pub(super) fn ops() -> impl Iterator<Item = CommOp> {
    let moves = |operation: &Operation| {
        operation.collective().is_some_and(|moves| moves.inputs.tensors != Tensors::Nothing)
    };
    Operation::iter().filter(moves).map(CommOp::Collective).chain([CommOp::IsendIrecv])
}

/// Returns the name of an operation, as nccl-tests has it.
pub(super) fn name(op: CommOp) -> &'static str {
    if op == CommOp::IsendIrecv { "send_recv" } else { op.name() }
}

/// Returns the count that nccl-tests shows for a size of `elements` elements; at least 1.
pub(super) fn count(op: CommOp, elements: u64, world_size: usize) -> u64 {
    let parts = if op.moves().has_parts() { world_size as u64 } else { 1 };
    (elements / parts).max(1)
}

/// Returns nccl-tests' factor from the algorithm's bandwidth to that of the busiest link.
pub(in crate::commands) fn bus_factor(op: CommOp, world_size: usize) -> f64 {
    let n = world_size as f64;
    match op {
        CommOp::Collective(Operation::AllReduce) => 2.0 * (n - 1.0) / n,
        _ if op.moves().has_parts() => (n - 1.0) / n,
        _ => 1.0,
    }
}

/// Numbers that repeat after three elements. Every dtype holds their sum, or other reduction, over the ranks exactly.
type Pattern = [f64; 3];

/// The elements of a chunk, a multiple of three.
const CHUNK: i64 = 3 << 15;

impl OpTensors<'_> {
    /// Returns the size in bytes on rank 0, as nccl-tests counts it: that of the larger side.
    pub(in crate::commands) fn bytes(&self) -> u64 {
        let Self { input, output, .. } = self;
        num_bytes(input.kind(), input.numel().max(output.numel())) as u64
    }

    /// Runs the operation once more, on known numbers. Returns the number of wrong elements in this rank's result.
    pub(in crate::commands) fn check(&mut self) -> Result<i64> {
        let rank = self.group.rank();
        fill(&self.input, self.pattern(rank, 0))?;
        if !self.op.is_in_place() {
            fill(&self.output, [0.; 3])?;
        }
        self.run()?;
        self.group.synchronize()?;

        let CollectiveType { inputs, outputs, reduces, .. } = self.op.moves();
        let output = &self.output;
        if !outputs.is_held_by(rank == 0) {
            // In place, the rank keeps its own tensor.
            let keeps = self.op.is_in_place();
            return if keeps { wrong(output, self.pattern(rank, 0)) } else { Ok(0) };
        }
        // Where this rank's part begins in the input of another.
        let start = if inputs.is_list() { rank as i64 * self.numel } else { 0 };
        if let Some(list) = &self.output_list {
            let parts = list.iter().enumerate();
            return parts.map(|(from, part)| wrong(part, self.pattern(from, start))).sum();
        }
        let from = if self.op == CommOp::IsendIrecv { self.previous() } else { 0 };
        wrong(output, if reduces { self.reduced(start) } else { self.pattern(from, start) })
    }

    /// Returns the pattern of `rank` from its element `start` on.
    fn pattern(&self, rank: usize, start: i64) -> Pattern {
        let least = f64::from(u8::from(self.input.kind() != Kind::Bool));
        // With multiples of the world size, the average is a whole number.
        let averages = self.op.moves().reduces && self.reduce_op == ReduceOp::Avg;
        let factor = if averages { self.group.world_size() as f64 } else { 1. };
        [0, 1, 2].map(|i: i64| {
            let higher = (rank as i64 + start + i) % 3 == 0;
            (least + f64::from(u8::from(higher))) * factor
        })
    }

    /// Returns the patterns of all ranks from element `start` on, reduced.
    fn reduced(&self, start: i64) -> Pattern {
        let world_size = self.group.world_size();
        let bits = |f: fn(i64, i64) -> i64, a: f64, b: f64| f(a as i64, b as i64) as f64;
        let reduce = |a: f64, b: f64| match self.reduce_op {
            // No flag gives a factor.
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => a + b,
            ReduceOp::Product => a * b,
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::Band => bits(|a, b| a & b, a, b),
            ReduceOp::Bor => bits(|a, b| a | b, a, b),
            ReduceOp::Bxor => bits(|a, b| a ^ b, a, b),
        };
        let averages = self.reduce_op == ReduceOp::Avg;
        let factor = if averages { 1. / world_size as f64 } else { 1. };
        [0, 1, 2].map(|i: usize| {
            let numbers = (0..world_size).map(|rank| self.pattern(rank, start)[i]);
            numbers.reduce(reduce).unwrap_or(0.) * factor
        })
    }
}

/// Returns the pattern, repeated to the length of a chunk, in the dtype of `like`.
fn chunk(pattern: Pattern, like: &Tensor) -> Result<Tensor> {
    let len = CHUNK.min(like.numel() as i64 + 2) / 3 + 1;
    let make = || {
        let chunk = Tensor::from_slice(&pattern).f_repeat([len])?;
        // Converted through int64, so that a value too large for the dtype wraps as in a reduction.
        let chunk = if like.is_floating_point() { chunk } else { chunk.f_to_kind(Kind::Int64)? };
        chunk.f_to_kind(like.f_kind()?)?.f_to_device(like.device())
    };
    make().doing("making numbers to check with")
}

/// Calls `f` with each chunk of a tensor of one dimension.
fn in_chunks(tensor: &Tensor, f: impl FnMut(Tensor) -> Result<(), TchError>) -> Result<()> {
    let chunks = tensor.f_split(CHUNK, 0);
    chunks.and_then(|chunks| chunks.into_iter().try_for_each(f)).doing("checking a result")
}

/// Returns the first elements of `chunk`, as many as `part` has.
fn as_long_as(part: &Tensor, chunk: &Tensor) -> Result<Tensor, TchError> {
    chunk.f_narrow(0, 0, part.numel() as i64)
}

fn fill(tensor: &Tensor, pattern: Pattern) -> Result<()> {
    let chunk = chunk(pattern, tensor)?;
    in_chunks(tensor, |mut part| part.f_copy_(&as_long_as(&part, &chunk)?).map(drop))
}

/// Returns the number of elements that differ from the pattern.
fn wrong(tensor: &Tensor, pattern: Pattern) -> Result<i64> {
    let chunk = chunk(pattern, tensor)?;
    let mut wrong = 0;
    in_chunks(tensor, |part| {
        let differs = part.f_ne_tensor(&as_long_as(&part, &chunk)?)?;
        wrong += differs.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        Ok(())
    })?;
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn wrong_elements_are_counted_at_every_position() {
        for kind in [Kind::Float, Kind::Half, Kind::Int8, Kind::Bool] {
            for numel in [1, 2, 3, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5] {
                let tensor = Tensor::zeros([numel], (kind, Device::Cpu));
                fill(&tensor, [1., 0., 1.]).unwrap();
                assert_eq!(wrong(&tensor, [1., 0., 1.]).unwrap(), 0);
                let zeros = (numel + 1) / 3;
                assert_eq!(wrong(&tensor, [1., 1., 1.]).unwrap(), zeros, "{kind:?} {numel}");
                let _ = tensor.narrow(0, numel - 1, 1).fill_(i64::from((numel - 1) % 3 == 1));
                assert_eq!(wrong(&tensor, [1., 0., 1.]).unwrap(), 1, "{kind:?} {numel}");
            }
        }
    }
}
