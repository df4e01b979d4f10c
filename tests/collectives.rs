//! Collectives of the threaded backend, against plain arithmetic in the order of the ranks.

use ddp_mp::{Error, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, try_ranks, without_lines};
use crate::shared::kinds::{self, FLOATS, INTEGERS, assert_equal, numbers};

/// None, one, around the size of a slice's alignment, around that of a piece, and odd ones.
const LENGTHS: [i64; 11] = [0, 1, 3, 63, 64, 65, 129, 1000, 1024, 1025, 4099];

fn expected_sum(world_size: usize, len: i64) -> Tensor {
    let base = Tensor::arange(len, (Kind::Int64, Device::Cpu)).remainder(5);
    (base + 1) * (world_size * (world_size + 1) / 2) as i64
}

#[test]
fn all_reduce_sums_every_dtype_and_averages_floats_at_every_length() {
    for world_size in 1..=5 {
        ranks(world_size, move |rank, group| {
            for kind in FLOATS.into_iter().chain(INTEGERS) {
                for len in LENGTHS {
                    let expected = expected_sum(world_size, len);
                    let what = format!("{world_size} ranks, {kind:?}, {len}");
                    let mut tensor = numbers(rank.rank(), len, kind);
                    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
                    assert_eq!(tensor.kind(), kind);
                    assert_equal(&tensor, &expected, &what);
                    if INTEGERS.contains(&kind) {
                        continue;
                    }
                    // A multiple of the number of ranks on each, so that averages are exact as well.
                    let mut average =
                        (numbers(rank.rank(), len, kind) * world_size as i64).to_kind(kind);
                    group.all_reduce(&mut average, ReduceOp::Avg)?;
                    assert_equal(&average, &expected, &what);

                    let mut doubled = numbers(rank.rank(), len, kind);
                    group.all_reduce(&mut doubled, ReduceOp::PremulSum(2.))?;
                    assert_equal(&doubled, &(expected * 2), &what);
                }
            }
            Ok(())
        });
    }
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
fn broadcast_copies_every_dtype_from_every_rank() {
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

#[test]
fn barrier_holds_until_all_ranks_have_arrived() {
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
    for (messages, expected) in [
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
fn mismatch_is_one_failure_of_the_run() {
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
fn overlapping_memory_of_two_ranks_is_refused() {
    let shared = ddp_mp::ffi::SharedTensor::new(Tensor::zeros([8], (Kind::Float, Device::Cpu)));
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
        assert!(message.contains("ranks 1 and 2 passed overlapping memory"), "{message}");
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
fn bool_reductions_are_bitwise() {
    let results = ranks(3, |rank, group| {
        let mine = [true, false, rank.rank() == 1];
        let reduce = |op| -> anyhow::Result<Vec<bool>> {
            let mut tensor = Tensor::from_slice(&mine);
            group.all_reduce(&mut tensor, op)?;
            Ok(Vec::<bool>::try_from(&tensor)?)
        };
        let ops = [ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor, ReduceOp::Min, ReduceOp::Max];
        ops.into_iter().map(reduce).collect::<anyhow::Result<Vec<_>>>()
    });
    let (and, or) = ([true, false, false], [true, false, true]);
    for result in results {
        assert_eq!(result, [and, or, [true, false, true], and, or]);
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

#[test]
fn split_sizes_of_a_matrix_count_rows() {
    ranks(3, |rank, group| {
        let me = rank.rank() as i64;
        // Two rows of four columns for each rank, in a transposed, hence scattered, tensor.
        let input = (Tensor::arange(24, (Kind::Int64, Device::Cpu)) + 100 * me).view([4, 6]).tr();
        let mut output = Tensor::zeros([4, 6], (Kind::Int64, Device::Cpu)).tr();
        assert!(!input.is_contiguous() && !output.is_contiguous());
        group.all_to_all_single(&mut output, &input, None, None)?;
        let from = |r: i64| (&input - 100 * me + 100 * r).narrow(0, 2 * me, 2);
        assert!(output.equal(&Tensor::cat(&[from(0), from(1), from(2)], 0)));
        Ok(())
    });
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
fn split_size_mismatch_is_reported_to_both_ranks() {
    let messages = mismatch(2, |rank, group| {
        let input = Tensor::zeros([3], (Kind::Float, Device::Cpu));
        let mut output = Tensor::zeros([2 + rank as i64], (Kind::Float, Device::Cpu));
        let expecting: &[i64] = if rank == 0 { &[1, 1] } else { &[2, 1] };
        group.all_to_all_single(&mut output, &input, Some(expecting), Some(&[1, 2]))
    });
    let expected = "in all_to_all rank 1 sends 2 elements to itself, but expects 1";
    // Rank 1 sends 1 element to rank 0, as expected there; and rank 0's 2 are expected by rank 1, but
    // rank 1 sends itself 2 and expects 1.
    assert_eq!(messages, [expected, expected]);
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

/// Numbers that look random, the same for the same seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn random_collectives_with_random_delays_are_right() {
    for world_size in [2usize, 3, 5] {
        ranks(world_size, move |rank, group| {
            let me = rank.rank();
            let mut draw = Draw(world_size as u64); // the same on all ranks
            let mut delay = Draw(1000 + me as u64); // and this is not
            for round in 0..1500 {
                for _ in 0..delay.below(2000) {
                    std::hint::spin_loop();
                }
                let len = draw.below(200) as i64;
                let root = draw.below(world_size as u64) as usize;
                let of = |rank: usize| numbers(rank, len, Kind::Float) + round % 7;
                let sum = || (1..world_size).fold(of(0), |sum, r| sum + of(r));
                let list = || (0..world_size).map(|_| of(0).zeros_like()).collect::<Vec<_>>();
                let mut mine = of(me);
                let right = match draw.below(7) {
                    0 => {
                        group.all_reduce(&mut mine, ReduceOp::Sum)?;
                        mine.equal(&sum())
                    }
                    1 => {
                        group.reduce(&mut mine, root, ReduceOp::Sum)?;
                        mine.equal(&if me == root { sum() } else { of(me) })
                    }
                    2 => {
                        group.broadcast(&mut mine, root)?;
                        mine.equal(&of(root))
                    }
                    3 => {
                        let mut all = list();
                        group.all_gather(&mut all, &mine)?;
                        (0..world_size).all(|r| all[r].equal(&of(r)))
                    }
                    4 => {
                        let parts: Vec<Tensor> =
                            (0..world_size).map(|r| of(r + root + 1)).collect();
                        group.scatter(&mut mine, (me == root).then_some(&parts[..]), root)?;
                        mine.equal(&of(me + root + 1))
                    }
                    5 => {
                        let parts: Vec<Tensor> = (0..world_size).map(|r| of(r + me)).collect();
                        let mut all = list();
                        group.all_to_all(&mut all, &parts)?;
                        (0..world_size).all(|r| all[r].equal(&of(r + me)))
                    }
                    _ => {
                        group.barrier()?;
                        true
                    }
                };
                assert!(right, "round {round} of {world_size} ranks");
            }
            Ok(())
        });
    }
}
