//! Several tensors in one collective: the same bits as with a call for each.

use ddp_mp::{ProcessGroup, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, try_ranks};

const SHAPES: [&[i64]; 5] = [&[3, 5], &[0], &[], &[1000], &[2, 1, 7]];

/// Numbers whose sums round, each tensor not in one piece of memory where it can be.
fn tensors(rank: usize, rows: i64, kind: Kind) -> Vec<Tensor> {
    let tensor = |(index, shape): (usize, &&[i64])| {
        let mut shape = shape.to_vec();
        if rows > 1 {
            shape.insert(0, rows);
        }
        let numel: i64 = shape.iter().product();
        let numbers = Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.37;
        let numbers = (numbers + rank as f64 * 1.1 + index as f64).to_kind(kind);
        let dimensions = shape.len() as i64;
        let tensor = numbers.reshape(shape);
        if dimensions < 2 {
            return tensor;
        }
        tensor.transpose(0, dimensions - 1).contiguous().transpose(0, dimensions - 1)
    };
    SHAPES.iter().enumerate().map(tensor).collect()
}

fn same(one: &[Tensor], other: &[Tensor]) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(other) {
        assert!(one.equal(other) && one.kind() == other.kind(), "{one:?} is not {other:?}");
    }
}

/// Compares all three calls with a call for each tensor.
pub(crate) fn compare(group: &ProcessGroup) -> Result<()> {
    let (me, count) = (group.rank(), group.world_size() as i64);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Int64] {
        let (mut one_by_one, mut together) = (tensors(me, 1, kind), tensors(me, 1, kind));
        for tensor in &mut one_by_one {
            group.all_reduce(tensor, ReduceOp::Sum)?;
        }
        group.all_reduce_coalesced(&mut together, ReduceOp::Sum)?;
        same(&together, &one_by_one);

        let zeros =
            |rows| tensors(me, rows, kind).iter().map(Tensor::zeros_like).collect::<Vec<_>>();
        // With a row for each rank, or as many elements where there is one rank.
        let (mut one_by_one, mut together) = (zeros(count), zeros(count));
        let inputs = tensors(me, 1, kind);
        for (output, input) in one_by_one.iter_mut().zip(&inputs) {
            group.all_gather_into_tensor(output, input)?;
        }
        group.all_gather_into_tensor_coalesced(&mut together, &inputs)?;
        same(&together, &one_by_one);

        let (mut one_by_one, mut together) = (zeros(1), zeros(1));
        let inputs = tensors(me, count, kind);
        for (output, input) in one_by_one.iter_mut().zip(&inputs) {
            group.reduce_scatter_tensor(output, input, ReduceOp::Max)?;
        }
        group.reduce_scatter_tensor_coalesced(&mut together, &inputs, ReduceOp::Max)?;
        same(&together, &one_by_one);
    }
    Ok(())
}

#[test]
fn several_tensors_in_one_collective_have_the_bits_of_one_by_one() {
    for world_size in 1..=4 {
        ranks(world_size, |_, group| Ok(compare(&group)?));
    }
}

#[test]
fn it_is_one_collective_also_beside_the_rank() {
    ranks(2, |rank, group| {
        let all = || tensors(rank.rank(), 1, Kind::Float);
        let before = group.traffic();
        let mut alone = all();
        group.all_reduce_coalesced(&mut alone, ReduceOp::Sum)?;
        let bytes: usize = all().iter().map(|it| 4 * it.numel()).sum();
        // Each of two ranks adds up a part, and both parts cross.
        assert_eq!(group.traffic().received - before.received, bytes as u64);
        let beside = all();
        let mut same_memory: Vec<Tensor> = beside.iter().map(Tensor::shallow_clone).collect();
        let work = group
            .async_op(move |group| group.all_reduce_coalesced(&mut same_memory, ReduceOp::Sum))?;
        work.wait()?;
        same(&beside, &alone);
        Ok(())
    });
}

#[test]
fn shapes_that_differ_between_ranks_are_told_one_by_one() {
    // As many elements on both ranks.
    let error = try_ranks(2, |rank, group| {
        let len = rank.rank() as i64 + 1;
        let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let mut tensors = [zeros(&[len]), zeros(&[3 - len, 1])];
        Ok(group.all_reduce_coalesced(&mut tensors, ReduceOp::Sum)?)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 0 called all_reduce(sum) of float32 [1] [2, 1] at"), "{error}");
    assert!(error.contains("rank 1 called all_reduce(sum) of float32 [2] [1, 1] at"), "{error}");
}

#[test]
fn wrong_arguments_are_refused() {
    ranks(2, |_, group| {
        let one = |len: i64| Tensor::zeros([len], (Kind::Float, Device::Cpu));
        let told = |result: Result<()>| result.unwrap_err().to_string();
        let none = told(group.all_reduce_coalesced(&mut [], ReduceOp::Sum));
        assert!(none.contains("pass at least one input"), "{none}");
        let mut kinds = [one(1), Tensor::from_slice(&[1i64])];
        let kinds = told(group.all_reduce_coalesced(&mut kinds, ReduceOp::Sum));
        assert!(kinds.contains("different kinds"), "{kinds}");
        let sum = ReduceOp::Sum;
        let few =
            told(group.reduce_scatter_tensor_coalesced(&mut [one(1)], &[one(2), one(2)], sum));
        assert!(few.contains("2 input and 1 output tensors"), "{few}");
        let mut outputs = [one(2), one(3)];
        let size = told(group.all_gather_into_tensor_coalesced(&mut outputs, &[one(1), one(2)]));
        let expected = "all_gather: output 1 has 3 elements, but input 1 has 2, and there are 2 ranks; 4 are needed";
        assert_eq!(size, expected);
        let mut expanded = [one(1).expand([4], false)];
        let expanded = told(group.all_reduce_coalesced(&mut expanded, ReduceOp::Sum));
        assert!(expanded.contains("has shape [4] and strides [0]"), "{expanded}");
        Ok(())
    });
}
