//! Several tensors in one collective: the same bits as with a call for each.

use ddp_mp::ReduceOp;
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, try_ranks};
use crate::shared::coalesced::{compare, same, tensors};

#[test]
fn coalesced_tensors_have_the_bits_of_single_calls() {
    for world_size in 1..=4 {
        ranks(world_size, |_, group| Ok(compare(&group)?));
    }
}

#[test]
fn coalesced_call_is_one_collective_also_when_async() {
    ranks(2, |_, group| {
        let all = || tensors(&group, 1, Kind::Float);
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
fn shapes_that_differ_between_ranks_are_listed() {
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
fn invalid_arguments_are_refused() {
    ranks(2, |_, group| {
        let one = |len: i64| Tensor::zeros([len], (Kind::Float, Device::Cpu));
        let told = |result: ddp_mp::Result<()>| result.unwrap_err().to_string();
        let none = told(group.all_reduce_coalesced(&mut [], ReduceOp::Sum));
        assert!(none.contains("pass at least one input"), "{none}");
        let mut kinds = [one(1), Tensor::from_slice(&[1i64])];
        let kinds = told(group.all_reduce_coalesced(&mut kinds, ReduceOp::Sum));
        assert!(kinds.contains("different dtypes"), "{kinds}");
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
