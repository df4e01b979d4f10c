//! Every collective with every kind of numbers, every reduction and awkward lengths.

use ddp_mp::{ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::runs_every_case;

const FLOATS: [Kind; 4] = [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16];
const INTEGERS: [Kind; 5] = [Kind::Int64, Kind::Int, Kind::Int16, Kind::Int8, Kind::Uint8];

/// Returns awkward lengths; between processes these travel within a header, in one exchange, and in a chain.
fn lengths(group: &ProcessGroup) -> [i64; 4] {
    if group.backend() == "gloo" { [0, 7, 1000, 66_001] } else { [0, 1, 65, 1027] }
}

/// Returns small whole numbers, so that every kind holds every sum exactly.
pub(crate) fn numbers(rank: usize, len: i64, kind: Kind) -> Tensor {
    let base = Tensor::arange(len, (Kind::Int64, Device::Cpu)).remainder(5);
    ((base + 1) * (rank as i64 + 1)).to_kind(kind)
}

/// Compares numbers of any kind, on any device.
#[track_caller]
pub(crate) fn assert_equal(result: &Tensor, expected: &Tensor, what: &str) {
    let wide = |tensor: &Tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Double);
    let (result, expected) = (wide(result), wide(expected));
    assert!(result.equal(&expected), "{what}: {result:?} is not {expected:?}");
}

/// Returns a reduction of what all ranks have, by plain arithmetic on one thread.
fn reduced(world_size: usize, op: ReduceOp, input: impl Fn(usize) -> Tensor) -> Tensor {
    (1..world_size).fold(input(0), |so_far, rank| match op {
        ReduceOp::Product => so_far * input(rank),
        ReduceOp::Min => so_far.minimum(&input(rank)),
        ReduceOp::Max => so_far.maximum(&input(rank)),
        ReduceOp::Band => so_far.bitwise_and_tensor(&input(rank)),
        ReduceOp::Bor => so_far.bitwise_or_tensor(&input(rank)),
        ReduceOp::Bxor => so_far.bitwise_xor_tensor(&input(rank)),
        _ => so_far + input(rank),
    })
}

/// Returns the reductions that the backend has for a kind: NCCL has no int16 and no bits.
fn ops(group: &ProcessGroup, kind: Kind) -> Vec<ReduceOp> {
    let is_nccl = group.backend() == "nccl";
    if is_nccl && kind == Kind::Int16 {
        return Vec::new();
    }
    let mut ops = vec![ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max];
    if kind != Kind::BFloat16 {
        ops.push(ReduceOp::Product); // too large for its 8 bits
    }
    if INTEGERS.contains(&kind) && !is_nccl {
        ops.extend([ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor]);
    }
    ops
}

/// Reduces every kind with every operation, and compares with plain arithmetic.
pub(crate) fn are_reduced(group: &ProcessGroup) -> ddp_mp::Result<()> {
    let (me, world_size) = (group.rank(), group.world_size());
    for kind in FLOATS.into_iter().chain(INTEGERS) {
        for op in ops(group, kind) {
            // Between processes `make test` tries the longest, which takes long, with one operation.
            let is_short = group.backend() == "gloo" && op != ReduceOp::Sum && !runs_every_case();
            for &len in &lengths(group)[..if is_short { 3 } else { 4 }] {
                let mine = || numbers(me, len, kind).to_device(group.device());
                let expected = reduced(world_size, op, |rank| numbers(rank, len, kind));
                let what = format!("{world_size} ranks, {kind:?}, {op}, {len}");

                let mut tensor = mine();
                group.all_reduce(&mut tensor, op)?;
                assert_equal(&tensor, &expected, &format!("all_reduce, {what}"));

                let dst = len as usize % world_size;
                let mut tensor = mine();
                group.reduce(&mut tensor, dst, op)?;
                let expected_here = if me == dst { expected } else { mine() };
                assert_equal(&tensor, &expected_here, &format!("reduce, {what}"));

                // Rank r gets the r-th of the parts that all ranks have the same of.
                let parts: Vec<Tensor> = (0..world_size).map(|part| mine() + part as i64).collect();
                let mut output = mine().zeros_like();
                group.reduce_scatter(&mut output, &parts, op)?;
                let expected = reduced(world_size, op, |rank| numbers(rank, len, kind) + me as i64);
                let inexact = kind == Kind::Half && op == ReduceOp::Product;
                if !inexact {
                    assert_equal(&output, &expected, &format!("reduce_scatter, {what}"));
                }
                let mut single = output.zeros_like();
                let whole = Tensor::cat(&parts, 0);
                group.reduce_scatter_single(&mut single, &whole, op)?;
                assert_equal(&single, &output, &format!("reduce_scatter_single, {what}"));
            }
        }
    }
    Ok(())
}

/// Moves every kind with every collective that does not reduce.
pub(crate) fn go_where_they_should(group: &ProcessGroup) -> ddp_mp::Result<()> {
    let (me, world_size) = (group.rank(), group.world_size());
    let on = |tensor: Tensor| tensor.to_device(group.device());
    let same = |found: &Tensor, expected: &Tensor| found.to_device(Device::Cpu).equal(expected);
    for kind in FLOATS.into_iter().chain(INTEGERS).chain([Kind::Bool, Kind::ComplexFloat]) {
        for len in lengths(group) {
            let what = format!("{world_size} ranks, {kind:?}, {len}");
            let of = |rank| numbers(rank, len, kind);
            let mine = on(of(me));
            let empty = || on(of(0).zeros_like());
            let list = || (0..world_size).map(|_| empty()).collect::<Vec<_>>();

            let mut all = list();
            group.all_gather(&mut all, &mine)?;
            assert!((0..world_size).all(|r| same(&all[r], &of(r))), "all_gather, {what}");

            let mut whole = Tensor::zeros([world_size as i64, len], (kind, group.device()));
            group.all_gather_single(&mut whole, &mine)?;
            let stacked = Tensor::stack(&(0..world_size).map(of).collect::<Vec<_>>(), 0);
            assert!(same(&whole, &stacked), "all_gather_single, {what}");

            for root in 0..world_size {
                let mut sent = on(of(me));
                group.broadcast(&mut sent, root)?;
                assert!(same(&sent, &of(root)), "broadcast, {what}");

                let mut all = list();
                group.gather(&mine, (me == root).then_some(&mut all[..]), root)?;
                let expected = |r| if me == root { of(r) } else { of(0).zeros_like() };
                assert!((0..world_size).all(|r| same(&all[r], &expected(r))), "gather, {what}");

                let parts: Vec<Tensor> = (0..world_size).map(|r| on(of(r + root))).collect();
                let mut part = empty();
                group.scatter(&mut part, (me == root).then_some(&parts[..]), root)?;
                assert!(same(&part, &of(me + root)), "scatter, {what}");
            }

            // From i to j goes what i has, i + j times as long.
            let part = |from: usize, to: usize| of(from).repeat([(from + to) as i64]);
            let inputs: Vec<Tensor> = (0..world_size).map(|to| part(me, to)).collect();
            let expected: Vec<Tensor> = (0..world_size).map(|from| part(from, me)).collect();
            let inputs_here: Vec<Tensor> = inputs.iter().map(|it| on(it.copy())).collect();
            let mut outputs: Vec<Tensor> = expected.iter().map(|it| on(it.zeros_like())).collect();
            group.all_to_all(&mut outputs, &inputs_here)?;
            assert!((0..world_size).all(|r| same(&outputs[r], &expected[r])), "all_to_all, {what}");

            let rows = |parts: &[Tensor]| parts.iter().map(|it| it.size()[0]).collect::<Vec<i64>>();
            let mut output = on(Tensor::cat(&expected, 0).zeros_like());
            group.all_to_all_single(
                &mut output,
                &on(Tensor::cat(&inputs, 0)),
                Some(&rows(&expected)),
                Some(&rows(&inputs)),
            )?;
            assert!(same(&output, &Tensor::cat(&expected, 0)), "all_to_all_single, {what}");
        }
    }
    Ok(())
}
