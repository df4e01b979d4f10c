//! Several tensors in one collective: the same bits as with a call for each.

use ddp_mp::{ProcessGroup, ReduceOp, Result};
use tch::{Device, Kind, Tensor};

const SHAPES: [&[i64]; 5] = [&[3, 5], &[0], &[], &[1000], &[2, 1, 7]];

/// Numbers whose sums round, each tensor not in one piece of memory where it can be.
pub(crate) fn tensors(group: &ProcessGroup, rows: i64, kind: Kind) -> Vec<Tensor> {
    let tensor = |(index, shape): (usize, &&[i64])| {
        let mut shape = shape.to_vec();
        if rows > 1 {
            shape.insert(0, rows);
        }
        let numel: i64 = shape.iter().product();
        let numbers = Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.37;
        let numbers = (numbers + group.rank() as f64 * 1.1 + index as f64).to_kind(kind);
        let numbers = numbers.to_device(group.device());
        let dimensions = shape.len() as i64;
        let tensor = numbers.reshape(shape);
        if dimensions < 2 {
            return tensor;
        }
        tensor.transpose(0, dimensions - 1).contiguous().transpose(0, dimensions - 1)
    };
    SHAPES.iter().enumerate().map(tensor).collect()
}

pub(crate) fn same(one: &[Tensor], other: &[Tensor]) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(other) {
        assert!(one.equal(other) && one.kind() == other.kind(), "{one:?} is not {other:?}");
    }
}

/// Compares all three calls with a call for each tensor.
pub(crate) fn compare(group: &ProcessGroup) -> Result<()> {
    let count = group.world_size() as i64;
    for kind in [Kind::Float, Kind::BFloat16, Kind::Int64] {
        let (mut one_by_one, mut together) = (tensors(group, 1, kind), tensors(group, 1, kind));
        for tensor in &mut one_by_one {
            group.all_reduce(tensor, ReduceOp::Sum)?;
        }
        group.all_reduce_coalesced(&mut together, ReduceOp::Sum)?;
        same(&together, &one_by_one);

        let zeros =
            |rows| tensors(group, rows, kind).iter().map(Tensor::zeros_like).collect::<Vec<_>>();
        // With a row for each rank, or as many elements where there is one rank.
        let (mut one_by_one, mut together) = (zeros(count), zeros(count));
        let inputs = tensors(group, 1, kind);
        for (output, input) in one_by_one.iter_mut().zip(&inputs) {
            group.all_gather_single(output, input)?;
        }
        group.all_gather_into_tensor_coalesced(&mut together, &inputs)?;
        same(&together, &one_by_one);

        let (mut one_by_one, mut together) = (zeros(1), zeros(1));
        let inputs = tensors(group, count, kind);
        for (output, input) in one_by_one.iter_mut().zip(&inputs) {
            group.reduce_scatter_single(output, input, ReduceOp::Max)?;
        }
        group.reduce_scatter_tensor_coalesced(&mut together, &inputs, ReduceOp::Max)?;
        same(&together, &one_by_one);
    }
    Ok(())
}
