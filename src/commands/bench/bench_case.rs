//! One operation on tensors of one size, to measure it and to check its results.

use strum::{EnumString, IntoStaticStr, VariantNames};
use tch::{Kind, Tensor};

use super::BenchFlags;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::operation::Operation;
use crate::process_group::{P2POp, ProcessGroup, ReduceOp, num_bytes};

/// The operations that can be measured. The root is rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum BenchOp {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
    SendRecv,
}

impl BenchOp {
    /// Returns its name, such as `all_reduce`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns whether the operation combines elements.
    pub fn reduces(self) -> bool {
        matches!(self, BenchOp::AllReduce | BenchOp::Reduce | BenchOp::ReduceScatter)
    }

    pub(super) fn operation(self) -> Operation {
        match self {
            BenchOp::Reduce => Operation::Reduce,
            BenchOp::ReduceScatter => Operation::ReduceScatter,
            _ => Operation::AllReduce,
        }
    }

    /// Returns whether one side of the operation has a part for each rank.
    fn has_parts(self) -> bool {
        !matches!(
            self,
            BenchOp::AllReduce | BenchOp::Reduce | BenchOp::Broadcast | BenchOp::SendRecv
        )
    }

    /// Returns the count that nccl-tests shows for a size of `elements` elements; at least 1.
    pub(super) fn count(self, elements: u64, world_size: usize) -> u64 {
        let parts = if self.has_parts() { world_size as u64 } else { 1 };
        (elements / parts).max(1)
    }

    /// Returns nccl-tests' factor from the algorithm's bandwidth to that of the busiest link.
    pub(super) fn bus_factor(self, world_size: usize) -> f64 {
        let n = world_size as f64;
        match self {
            BenchOp::AllReduce => 2.0 * (n - 1.0) / n,
            BenchOp::Reduce | BenchOp::Broadcast | BenchOp::SendRecv => 1.0,
            _ => (n - 1.0) / n,
        }
    }

    /// Returns the number of inputs and of outputs that `rank` must read and write, and the bytes of each. All `n`
    /// ranks share the work on `bytes` bytes.
    pub(super) fn share(self, rank: usize, n: usize, bytes: usize) -> (usize, usize, usize) {
        let is_root = rank == 0;
        let part = bytes.div_ceil(n);
        match self {
            BenchOp::AllReduce => (n, n, part),
            BenchOp::Reduce => (n, 1, part),
            BenchOp::ReduceScatter => (n, 1, part),
            BenchOp::Broadcast => (1, 1, if is_root { 0 } else { bytes }),
            BenchOp::Gather => (1, 1, if is_root { bytes } else { 0 }),
            BenchOp::Scatter => (1, 1, part),
            BenchOp::AllGather | BenchOp::AllToAll | BenchOp::SendRecv => (1, 1, bytes),
        }
    }
}

/// An operation with its tensors on one rank.
pub(super) struct BenchCase {
    op: BenchOp,
    reduce_op: ReduceOp,
    rank: usize,
    world_size: usize,
    /// The elements of a part, or of the whole tensor where there are no parts.
    count: i64,
    input: Tensor,
    output: Tensor,
    /// The parts of `input` and `output`.
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

/// Numbers that repeat after three elements. Every dtype holds their sum, or other reduction, over the ranks exactly.
type Pattern = [f64; 3];

/// The elements of a chunk, a multiple of three.
const CHUNK: i64 = 3 << 15;

impl BenchCase {
    pub(super) fn new(flags: &BenchFlags, count: u64, group: &ProcessGroup) -> Result<Self> {
        let (op, world_size) = (flags.op, group.world_size());
        let count = count as i64;
        let whole = count * world_size as i64;
        let (has_input_parts, has_output_parts) = match op {
            BenchOp::AllGather | BenchOp::Gather => (false, true),
            BenchOp::ReduceScatter | BenchOp::Scatter => (true, false),
            BenchOp::AllToAll => (true, true),
            _ => (false, false),
        };
        let doing = "allocating the tensors to measure with";
        let tensor = |has_parts| {
            let len = if has_parts { whole } else { count };
            // Ones, so that the memory is really allocated.
            Tensor::f_ones([len], (flags.dtype, group.device())).doing(doing)
        };
        let parts = |tensor: &Tensor, has_parts| -> Result<Vec<Tensor>> {
            let starts = (0..if has_parts { world_size as i64 } else { 0 }).map(|i| i * count);
            starts.map(|start| tensor.f_narrow(0, start, count).doing(doing)).collect()
        };
        let in_place = matches!(op, BenchOp::AllReduce | BenchOp::Reduce | BenchOp::Broadcast);
        let input = tensor(has_input_parts)?;
        let output = if in_place { input.shallow_clone() } else { tensor(has_output_parts)? };
        Ok(Self {
            op,
            reduce_op: flags.reduce_op,
            rank: group.rank(),
            world_size,
            count,
            inputs: parts(&input, has_input_parts)?,
            outputs: parts(&output, has_output_parts)?,
            input,
            output,
        })
    }

    /// Returns the size in bytes, as nccl-tests counts it: that of the larger side.
    pub(super) fn bytes(&self) -> u64 {
        let numel = self.input.numel().max(self.output.numel());
        num_bytes(self.input.kind(), numel) as u64
    }

    /// Calls the operation once.
    pub(super) fn run(&mut self, group: &ProcessGroup) -> Result<()> {
        let is_root = self.rank == 0;
        match self.op {
            BenchOp::AllReduce => group.all_reduce(&mut self.input, self.reduce_op),
            BenchOp::Reduce => group.reduce(&mut self.input, 0, self.reduce_op),
            BenchOp::Broadcast => group.broadcast(&mut self.input, 0),
            BenchOp::AllGather => group.all_gather(&mut self.outputs, &self.input),
            BenchOp::ReduceScatter => {
                group.reduce_scatter(&mut self.output, &self.inputs, self.reduce_op)
            }
            BenchOp::Gather => {
                group.gather(&self.input, is_root.then_some(&mut self.outputs[..]), 0)
            }
            BenchOp::Scatter => {
                group.scatter(&mut self.output, is_root.then_some(&self.inputs[..]), 0)
            }
            BenchOp::AllToAll => group.all_to_all(&mut self.outputs, &self.inputs),
            BenchOp::SendRecv => {
                let (next, last) = ((self.rank + 1) % self.world_size, self.previous(self.rank));
                let ops = [
                    P2POp::isend(&self.input, next, 0),
                    P2POp::irecv(&mut self.output, Some(last), 0),
                ];
                group.batch_isend_irecv(&ops)?.into_iter().try_for_each(|work| work.wait())
            }
        }
    }

    fn previous(&self, rank: usize) -> usize {
        (rank + self.world_size - 1) % self.world_size
    }

    /// Runs the operation once more, on known numbers. Returns the number of wrong elements in this rank's result.
    pub(super) fn check(&mut self, group: &ProcessGroup) -> Result<i64> {
        let (me, count) = (self.rank, self.count);
        let pattern = |rank: usize, start: i64| self.pattern(rank, start);
        fill(&self.input, pattern(me, 0))?;
        if !matches!(self.op, BenchOp::AllReduce | BenchOp::Reduce | BenchOp::Broadcast) {
            fill(&self.output, [0.; 3])?;
        }
        self.run(group)?;
        group.synchronize()?;

        let part_of = |rank: usize| rank as i64 * count;
        let pattern = |rank: usize, start: i64| self.pattern(rank, start);
        let all_parts = |of: &dyn Fn(usize) -> Pattern| -> Result<i64> {
            let parts = self.outputs.iter().enumerate();
            parts.map(|(rank, part)| wrong(part, of(rank))).sum()
        };
        match self.op {
            BenchOp::AllReduce => wrong(&self.output, self.reduced(0)),
            BenchOp::Reduce if me == 0 => wrong(&self.output, self.reduced(0)),
            BenchOp::Reduce => wrong(&self.output, pattern(me, 0)),
            BenchOp::Broadcast => wrong(&self.output, pattern(0, 0)),
            BenchOp::SendRecv => wrong(&self.output, pattern(self.previous(me), 0)),
            BenchOp::ReduceScatter => wrong(&self.output, self.reduced(part_of(me))),
            BenchOp::Scatter => wrong(&self.output, pattern(0, part_of(me))),
            BenchOp::AllGather => all_parts(&|rank| pattern(rank, 0)),
            BenchOp::Gather if me == 0 => all_parts(&|rank| pattern(rank, 0)),
            BenchOp::Gather => Ok(0),
            BenchOp::AllToAll => all_parts(&|rank| pattern(rank, part_of(me))),
        }
    }

    /// Returns the pattern of `rank` from its element `start` on.
    fn pattern(&self, rank: usize, start: i64) -> Pattern {
        let least = f64::from(u8::from(self.input.kind() != Kind::Bool));
        // With multiples of the world size, the average is a whole number.
        let factor = if self.averages() { self.world_size as f64 } else { 1. };
        let number = |i: i64| {
            let higher = (rank as i64 + start + i) % 3 == 0;
            (least + f64::from(u8::from(higher))) * factor
        };
        [number(0), number(1), number(2)]
    }

    fn averages(&self) -> bool {
        self.op.reduces() && self.reduce_op == ReduceOp::Avg
    }

    /// Returns the patterns of all ranks from element `start` on, reduced.
    fn reduced(&self, start: i64) -> Pattern {
        let column = |i: usize| (0..self.world_size).map(move |rank| self.pattern(rank, start)[i]);
        let bits = |f: fn(i64, i64) -> i64| move |a: f64, b: f64| f(a as i64, b as i64) as f64;
        let reduce = |i: usize| {
            let numbers = column(i);
            let reduced = match self.reduce_op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => {
                    numbers.reduce(|a, b| a + b)
                }
                ReduceOp::Product => numbers.reduce(|a, b| a * b),
                ReduceOp::Min => numbers.reduce(f64::min),
                ReduceOp::Max => numbers.reduce(f64::max),
                ReduceOp::Band => numbers.reduce(bits(|a, b| a & b)),
                ReduceOp::Bor => numbers.reduce(bits(|a, b| a | b)),
                ReduceOp::Bxor => numbers.reduce(bits(|a, b| a ^ b)),
            };
            let factor = match self.reduce_op {
                ReduceOp::Avg => 1. / self.world_size as f64,
                ReduceOp::PremulSum(factor) => factor,
                _ => 1.,
            };
            reduced.unwrap_or(0.) * factor
        };
        [reduce(0), reduce(1), reduce(2)]
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

/// Calls `f` with each chunk of a tensor and its length.
fn in_chunks(
    tensor: &Tensor,
    mut f: impl FnMut(Tensor, i64) -> Result<(), tch::TchError>,
) -> Result<()> {
    let numel = tensor.numel() as i64;
    let mut starts = (0..numel).step_by(CHUNK as usize);
    starts
        .try_for_each(|start| {
            let len = CHUNK.min(numel - start);
            f(tensor.f_narrow(0, start, len)?, len)
        })
        .doing("checking a result")
}

fn fill(tensor: &Tensor, pattern: Pattern) -> Result<()> {
    let chunk = chunk(pattern, tensor)?;
    in_chunks(tensor, |mut part, len| part.f_copy_(&chunk.f_narrow(0, 0, len)?).map(drop))
}

/// Returns the number of elements that differ from the pattern.
fn wrong(tensor: &Tensor, pattern: Pattern) -> Result<i64> {
    let chunk = chunk(pattern, tensor)?;
    let mut wrong = 0;
    in_chunks(tensor, |part, len| {
        let differs = part.f_ne_tensor(&chunk.f_narrow(0, 0, len)?)?;
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
