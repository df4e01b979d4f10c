//! Collectives of the threaded backend, against plain arithmetic in the order of the ranks.

use ddp_mp::{Error, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, try_ranks, without_lines};
use crate::shared::kinds::{self, assert_equal, numbers};

fn expected_sum(world_size: usize, len: i64) -> Tensor {
    let base = Tensor::arange(len, (Kind::Int64, Device::Cpu)).remainder(5);
    (base + 1) * (world_size * (world_size + 1) / 2) as i64
}

#[test]
fn all_reduce_adds_in_rank_order() {
    // Numbers whose sum depends on its order.
    let value = |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 * 1.1e-3 + 0.1;
    for world_size in 1..=5 {
        let expected: Vec<f32> = (0..3000)
            .map(|i| (1..world_size).fold(value(0, i), |sum, rank| sum + value(rank, i)))
            .collect();
        let results = ranks(world_size, move |rank, group| {
            let mine: Vec<f32> = (0..3000).map(|i| value(rank.rank(), i)).collect();
            let mut tensor = Tensor::from_slice(&mine);
            group.all_reduce(&mut tensor, ReduceOp::Sum)?;
            Ok(Vec::<f32>::try_from(&tensor)?)
        });
        assert!(results.iter().all(|result| *result == expected), "{world_size} ranks");
    }
}

#[test]
fn all_reduce_of_float16_accumulates_in_float32() {
    // 2048 + 1 is 2048 in float16: summed there, the ones would be lost one by one.
    let results = ranks(5, |rank, group| {
        let mine = if rank.rank() == 0 { 2048. } else { 1. };
        let mut tensor = Tensor::from_slice(&[mine]).to_kind(Kind::Half);
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        Ok(tensor.double_value(&[0]))
    });
    assert_eq!(results, [2052.; 5]);
}

#[test]
fn all_reduce_of_integers_wraps_on_overflow() {
    let results = ranks(3, |_, group| {
        let mut tensor = Tensor::from_slice(&[100i8, -100, 1]);
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        Ok(Vec::<i8>::try_from(&tensor)?)
    });
    assert_eq!(results, [[44, -44, 3]; 3]);
}

#[test]
fn strided_tensors_keep_their_shape_and_gaps() {
    ranks(3, |rank, group| {
        // Every other column of a matrix: not contiguous.
        let whole = numbers(rank.rank(), 24, Kind::Float).view([4, 6]);
        let before = whole.copy();
        let mut columns = whole.slice(1, 0, 6, 2);
        assert!(!columns.is_contiguous());
        group.all_reduce(&mut columns, ReduceOp::Sum)?;
        let sum = expected_sum(3, 24).view([4, 6]);
        assert_equal(&whole.slice(1, 0, 6, 2), &sum.slice(1, 0, 6, 2), "reduced");
        assert_equal(&whole.slice(1, 1, 6, 2), &before.slice(1, 1, 6, 2), "left alone");

        let mut scalar = Tensor::from(rank.rank() as f64);
        group.all_reduce(&mut scalar, ReduceOp::Sum)?;
        assert_eq!((scalar.size(), scalar.double_value(&[])), (vec![], 3.));

        let mut transposed = numbers(rank.rank(), 6, Kind::Int).view([2, 3]).tr();
        group.broadcast(&mut transposed, 2)?;
        assert!(transposed.equal(&numbers(2, 6, Kind::Int).view([2, 3]).tr()));
        Ok(())
    });
}

/// What every rank got from a call that differs on rank 1.
fn mismatch(
    world_size: usize,
    call: impl Fn(usize, &ProcessGroup) -> ddp_mp::Result<()> + Send + Sync + 'static,
) -> Vec<String> {
    ranks(world_size, move |rank, group| {
        // One that fits before, so that the number of the call counts.
        group.barrier()?;
        match call(rank.rank(), &group) {
            Err(Error::Mismatch { sequence: 1, calls, .. }) => Ok(without_lines(&calls, file!())),
            other => panic!("rank {} got {other:?}", rank.rank()),
        }
    })
}

#[test]
fn mismatched_calls_fail_on_every_rank_with_all_calls_named() {
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let shapes = mismatch(3, move |rank, group| {
        let shape: &[i64] = if rank == 1 { &[3, 2] } else { &[2, 3] };
        group.all_reduce(&mut float(shape), ReduceOp::Sum)
    });
    let kinds = mismatch(2, |rank, group| {
        let kind = if rank == 1 { Kind::Double } else { Kind::BFloat16 };
        group.all_reduce(&mut Tensor::zeros([4], (kind, Device::Cpu)), ReduceOp::Sum)
    });
    let ops = mismatch(2, move |rank, group| {
        let op = if rank == 1 { ReduceOp::Avg } else { ReduceOp::Sum };
        group.all_reduce(&mut float(&[1]), op)
    });
    let sources = mismatch(2, move |rank, group| group.broadcast(&mut float(&[0]), rank));
    let operations = mismatch(4, move |rank, group| match rank {
        1 => group.barrier(),
        2 => group.broadcast(&mut float(&[]), 3),
        _ => group.all_reduce(&mut float(&[]), ReduceOp::Sum),
    });
    let splits = mismatch(2, move |rank, group| {
        let (mut output, expecting) = (float(&[2 + rank as i64]), [1 + rank as i64, 1]);
        group.all_to_all_single(&mut output, &float(&[3]), Some(&expecting), Some(&[1, 2]))
    });
    for (messages, expected) in [
        (splits, "in all_to_all rank 1 sends 2 elements to itself, but expects 1"),
        (
            shapes,
            "ranks 0, 2 called all_reduce(sum) of float32 [2, 3]; \
             rank 1 called all_reduce(sum) of float32 [3, 2]",
        ),
        (
            kinds,
            "rank 0 called all_reduce(sum) of bfloat16 [4]; \
             rank 1 called all_reduce(sum) of float64 [4]",
        ),
        (
            ops,
            "rank 0 called all_reduce(sum) of float32 [1]; \
             rank 1 called all_reduce(avg) of float32 [1]",
        ),
        (
            sources,
            "rank 0 called broadcast(src 0) of float32 [0]; \
             rank 1 called broadcast(src 1) of float32 [0]",
        ),
        (
            operations,
            "ranks 0, 3 called all_reduce(sum) of float32 []; rank 1 called barrier; \
             rank 2 called broadcast(src 3) of float32 []",
        ),
    ] {
        assert_eq!(messages, vec![expected; messages.len()]);
    }
}

#[test]
fn collective_can_be_repeated_after_a_refused_call() {
    // The ranks' counts of calls differ from then on; their announcements must not get mixed up.
    ranks(3, |rank, group| {
        for round in 0..20 {
            if rank.rank() == round % 3 {
                let mut undefined = Tensor::new();
                assert!(group.all_reduce(&mut undefined, ReduceOp::Sum).is_err());
                let mut elsewhere = Tensor::zeros([1], (Kind::Float, Device::Cpu));
                assert!(group.broadcast(&mut elsewhere, 3).is_err());
            }
            let mut tensor = numbers(rank.rank(), 100 + round as i64, Kind::Float);
            group.all_reduce(&mut tensor, ReduceOp::Sum)?;
            assert_equal(&tensor, &expected_sum(3, 100 + round as i64), "after a failure");
        }
        Ok(())
    });
}

#[test]
fn conjugated_and_negated_views_are_resolved() {
    ranks(2, |rank, group| {
        let (mine, zero) = (Tensor::from(rank.rank() as f64 + 1.), Tensor::from(5f64));
        let mut conjugate = Tensor::complex(&mine, &zero).conj();
        group.broadcast(&mut conjugate, 1)?;
        assert_eq!(conjugate.real().double_value(&[]), 2.);
        assert_eq!(conjugate.imag().double_value(&[]), -5.);
        let mut negative = Tensor::complex(&zero, &mine).conj().imag();
        assert!(negative.is_neg());
        group.all_reduce(&mut negative, ReduceOp::Sum)?;
        assert_eq!(negative.double_value(&[]), -3.);
        Ok(())
    });
}

#[test]
fn reductions_support_every_dtype_and_operation() {
    for world_size in 1..=5 {
        ranks(world_size, |_, group| Ok(kinds::are_reduced(&group)?));
    }
}

#[test]
fn nan_wins_min_and_max_on_any_rank() {
    for place in 0..3 {
        let results = ranks(3, move |rank, group| {
            let mine = if rank.rank() == place { f32::NAN } else { rank.rank() as f32 };
            let (mut low, mut high) = (Tensor::from(mine), Tensor::from(mine));
            group.all_reduce(&mut low, ReduceOp::Min)?;
            group.all_reduce(&mut high, ReduceOp::Max)?;
            Ok(low.double_value(&[]).is_nan() && high.double_value(&[]).is_nan())
        });
        assert_eq!(results, [true; 3]);
    }
}

#[test]
fn copies_of_every_dtype_reach_the_right_rank() {
    for world_size in 1..=5 {
        ranks(world_size, |_, group| Ok(kinds::go_where_they_should(&group)?));
    }
}

/// The elements of a sparse tensor have no addresses at which other ranks could read them.
#[test]
fn sparse_tensors_are_refused() {
    ranks(2, |_, group| {
        let dense = || Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
        let mut sparse = dense().to_sparse_sparse_dim(2);
        let mut list = [dense(), dense()];
        for result in [
            group.all_reduce(&mut sparse, ReduceOp::Sum),
            group.all_gather(&mut list, &sparse),
            group.broadcast(&mut sparse, 0),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("the tensor is not dense"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn all_gather_in_place_works_and_all_to_all_is_refused() {
    ranks(2, |rank, group| {
        let me = rank.rank();
        // all_gather into the very list that holds this rank's input: nothing to copy there.
        let mut all =
            [numbers(0, 8, Kind::Float).zeros_like(), numbers(0, 8, Kind::Float).zeros_like()];
        all[me].copy_(&numbers(me, 8, Kind::Float));
        let mine = all[me].shallow_clone();
        group.all_gather(&mut all, &mine)?;
        assert!((0..2).all(|r| all[r].equal(&numbers(r, 8, Kind::Float))));

        // all_to_all in place would overwrite what the other one is to read.
        let inputs = [numbers(0, 4, Kind::Float), numbers(1, 4, Kind::Float)];
        let mut outputs = [inputs[0].shallow_clone(), inputs[1].shallow_clone()];
        let error = group.all_to_all(&mut outputs, &inputs).unwrap_err().to_string();
        assert!(error.contains("passed overlapping memory to one collective"), "{error}");
        Ok(())
    });
}

#[test]
fn unsupported_dtypes_roots_and_lists_that_do_not_fit_are_refused_at_once() {
    ranks(1, |_, group| {
        let one = || Tensor::zeros([2], (Kind::Float, Device::Cpu));
        let mut two = Tensor::cat(&[one(), one()], 0);
        let mut integers = Tensor::from_slice(&[1i64]);
        let mut bools = Tensor::from_slice(&[true]);
        let mut double = [one().to_kind(Kind::Double)];
        for (result, told) in [
            (group.all_reduce(&mut integers, ReduceOp::Avg), "all_reduce(avg) does not take int64"),
            (group.all_reduce(&mut bools, ReduceOp::Sum), "all_reduce(sum) does not take bool"),
            (group.broadcast(&mut bools, 1), "src is rank 1, but the group has ranks 0 to 0"),
            (
                group.all_gather(&mut [one(), one()], &one()),
                "the list has 2 tensors, but there are 1 ranks",
            ),
            (group.all_gather(&mut [one().view([2, 1])], &one()), "shapes [2, 1] and [2]"),
            (group.gather(&one(), None, 0), "rank 0 (dst) must pass gather_list"),
            (group.scatter(&mut one(), None, 1), "src is rank 1, but the group has ranks 0 to 0"),
            (
                group.all_gather_single(&mut two, &one()),
                "output_tensor has 4 elements, but 2 are needed",
            ),
            (
                group.all_to_all_single(&mut one(), &one(), Some(&[3]), None),
                "has 2 rows for 1 ranks, and the splits [3]",
            ),
            (group.all_gather(&mut double, &one()), "the tensors have different dtypes"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(told), "{told}: {error}");
        }
        Ok(())
    });
}

#[test]
fn monitored_barrier_names_all_missing_ranks() {
    use std::time::Duration;
    let (gave_up, wait) = crossbeam::channel::bounded::<()>(4);
    let error = try_ranks(4, move |rank, group| {
        group.monitored_barrier(Duration::from_secs(60))?;
        if rank.rank() % 2 == 1 {
            let _ = wait.recv(); // until the others have given up
        } else {
            let result = group.monitored_barrier(Duration::from_millis(200));
            let _ = (gave_up.send(()), gave_up.send(()));
            return Ok(result?);
        }
        Ok(group.barrier()?)
    })
    .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("waited 200ms in barrier #1 for rank 1 (last seen: "), "{message}");
    assert!(message.contains(", rank 3 (last seen: "), "{message}");
    assert_eq!(error.failure.rank, 1);
}
