//! Collectives of the threaded backend, against plain arithmetic in the order of the ranks.

use ddp_mp::{Error, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, try_ranks};

const FLOATS: [Kind; 4] = [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16];
const INTEGERS: [Kind; 5] = [Kind::Int64, Kind::Int, Kind::Int16, Kind::Int8, Kind::Uint8];

/// None, one, around the size of a slice's alignment, around that of a piece, and odd ones.
const LENGTHS: [i64; 11] = [0, 1, 3, 63, 64, 65, 129, 1000, 1024, 1025, 4099];

/// Small whole numbers, so that every kind holds every sum exactly.
fn numbers(rank: usize, len: i64, kind: Kind) -> Tensor {
    let base = Tensor::arange(len, (Kind::Int64, Device::Cpu)).remainder(5);
    ((base + 1) * (rank as i64 + 1)).to_kind(kind)
}

fn expected_sum(world_size: usize, len: i64) -> Tensor {
    let base = Tensor::arange(len, (Kind::Int64, Device::Cpu)).remainder(5);
    (base + 1) * (world_size * (world_size + 1) / 2) as i64
}

fn assert_equal(result: &Tensor, expected: &Tensor, what: &str) {
    let (result, expected) = (result.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    assert!(result.equal(&expected), "{what}: {result:?} is not {expected:?}");
}

#[test]
fn all_reduce_sums_every_kind_at_every_length() {
    for world_size in 1..=5 {
        ranks(world_size, move |rank, group| {
            for kind in FLOATS.into_iter().chain(INTEGERS) {
                for len in LENGTHS {
                    let mut tensor = numbers(rank.rank(), len, kind);
                    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
                    let what = format!("{world_size} ranks, {kind:?}, {len}");
                    assert_eq!(tensor.kind(), kind);
                    assert_equal(&tensor, &expected_sum(world_size, len), &what);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn all_reduce_averages_every_float_kind() {
    for world_size in 1..=5 {
        ranks(world_size, move |rank, group| {
            for kind in FLOATS {
                for len in LENGTHS {
                    // A multiple of the number of ranks on each, so that averages are exact as well.
                    let mut average =
                        (numbers(rank.rank(), len, kind) * world_size as i64).to_kind(kind);
                    group.all_reduce(&mut average, ReduceOp::Avg)?;
                    let what = format!("{world_size} ranks, {kind:?}, {len}");
                    assert_equal(&average, &expected_sum(world_size, len), &what);

                    let mut doubled = numbers(rank.rank(), len, kind);
                    group.all_reduce(&mut doubled, ReduceOp::PremulSum(2.))?;
                    assert_equal(&doubled, &(expected_sum(world_size, len) * 2), &what);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn sums_run_in_the_order_of_the_ranks() {
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
fn half_precision_is_summed_in_single_precision() {
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
fn integers_wrap_on_overflow() {
    let results = ranks(3, |_, group| {
        let mut tensor = Tensor::from_slice(&[100i8, -100, 1]);
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        Ok(Vec::<i8>::try_from(&tensor)?)
    });
    assert_eq!(results, [[44, -44, 3]; 3]);
}

#[test]
fn broadcast_copies_every_kind_from_every_rank() {
    let kinds = [Kind::Bool, Kind::ComplexFloat, Kind::ComplexDouble];
    for world_size in 1..=5 {
        ranks(world_size, move |rank, group| {
            for kind in FLOATS.into_iter().chain(INTEGERS).chain(kinds) {
                for len in LENGTHS {
                    for src in 0..world_size {
                        let mut tensor = numbers(rank.rank(), len, kind);
                        group.broadcast(&mut tensor, src)?;
                        assert!(tensor.equal(&numbers(src, len, kind)), "{kind:?} {len} {src}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn shapes_are_kept_and_gaps_are_left_alone() {
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

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static ARRIVED: AtomicUsize = AtomicUsize::new(0);
    ranks(4, |_, group| {
        for round in 1..=200 {
            ARRIVED.fetch_add(1, Ordering::SeqCst);
            group.barrier()?;
            assert!(ARRIVED.load(Ordering::SeqCst) >= 4 * round);
            group.barrier()?;
        }
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
            Err(Error::Mismatch { sequence: 1, calls, .. }) => Ok(calls),
            other => panic!("rank {} got {other:?}", rank.rank()),
        }
    })
}

#[test]
fn whatever_differs_is_an_error_on_every_rank_that_names_who_called_what() {
    let all_told = |messages: Vec<String>, expected: &str| {
        assert_eq!(messages, vec![expected.to_string(); messages.len()]);
    };
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));

    let shapes = mismatch(3, move |rank, group| {
        let shape: &[i64] = if rank == 1 { &[3, 2] } else { &[2, 3] };
        group.all_reduce(&mut float(shape), ReduceOp::Sum)
    });
    all_told(
        shapes,
        "ranks 0, 2 called all_reduce(sum) of float32 [2, 3]; \
         rank 1 called all_reduce(sum) of float32 [3, 2]",
    );

    let kinds = mismatch(2, |rank, group| {
        let kind = if rank == 1 { Kind::Double } else { Kind::BFloat16 };
        group.all_reduce(&mut Tensor::zeros([4], (kind, Device::Cpu)), ReduceOp::Sum)
    });
    all_told(
        kinds,
        "rank 0 called all_reduce(sum) of bfloat16 [4]; \
         rank 1 called all_reduce(sum) of float64 [4]",
    );

    let ops = mismatch(2, move |rank, group| {
        let op = if rank == 1 { ReduceOp::Avg } else { ReduceOp::Sum };
        group.all_reduce(&mut float(&[1]), op)
    });
    all_told(
        ops,
        "rank 0 called all_reduce(sum) of float32 [1]; \
         rank 1 called all_reduce(avg) of float32 [1]",
    );

    let sources = mismatch(2, move |rank, group| group.broadcast(&mut float(&[0]), rank));
    all_told(
        sources,
        "rank 0 called broadcast(src 0) of float32 [0]; \
         rank 1 called broadcast(src 1) of float32 [0]",
    );

    let operations = mismatch(4, move |rank, group| match rank {
        1 => group.barrier(),
        2 => group.broadcast(&mut float(&[]), 3),
        _ => group.all_reduce(&mut float(&[]), ReduceOp::Sum),
    });
    all_told(
        operations,
        "ranks 0, 3 called all_reduce(sum) of float32 []; rank 1 called barrier; \
         rank 2 called broadcast(src 3) of float32 []",
    );
}

#[test]
fn a_mismatch_ends_the_run_once() {
    let error = try_ranks(3, |rank, group| {
        let len = if rank.rank() == 2 { 5 } else { 4 };
        let mut tensor = Tensor::zeros([len], (Kind::Float, Device::Cpu));
        Ok(group.all_reduce(&mut tensor, ReduceOp::Sum)?)
    })
    .unwrap_err();
    assert!(error.failure.error.contains("collective #0 differs between ranks"), "{error}");
    assert_eq!(error.failure.rank, 2, "the odd one out");
    assert!(error.also_failed.is_empty(), "three ranks tell one story: {error}");
}

#[test]
fn one_memory_for_two_ranks_is_refused() {
    let shared = ddp_mp::torch::SharedTensor::new(Tensor::zeros([8], (Kind::Float, Device::Cpu)));
    let shared = std::sync::Arc::new(shared);
    let messages = ranks(3, move |rank, group| {
        // Ranks 1 and 2 overlap by half.
        let mut mine = match rank.rank() {
            0 => Tensor::zeros([4], (Kind::Float, Device::Cpu)),
            other => shared.get().narrow(0, 2 * (other as i64 - 1), 4),
        };
        Ok(group.all_reduce(&mut mine, ReduceOp::Sum).unwrap_err().to_string())
    });
    for message in messages {
        assert!(message.contains("ranks 1 and 2 passed the same memory"), "{message}");
    }
}

#[test]
fn a_call_that_fails_before_it_meets_the_others_can_be_made_again() {
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
fn lazily_conjugated_tensors_travel_as_what_they_are() {
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
fn what_an_operation_does_not_take_is_refused_before_anybody_waits() {
    ranks(1, |_, group| {
        let mut integers = Tensor::from_slice(&[1i64]);
        let error = group.all_reduce(&mut integers, ReduceOp::Avg).unwrap_err().to_string();
        assert!(error.contains("all_reduce(avg) does not take int64"), "{error}");
        let mut bools = Tensor::from_slice(&[true]);
        let error = group.all_reduce(&mut bools, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("all_reduce(sum) does not take bool"), "{error}");
        let error = group.broadcast(&mut bools, 1).unwrap_err().to_string();
        assert!(error.contains("src is rank 1, but the group has ranks 0 to 0"), "{error}");
        Ok(())
    });
}
