//! Properties that hold for whatever sizes: slices and splits of tensors.

use ddp_mp::ReduceOp;
use proptest::collection::vec;
use proptest::prelude::*;
use tch::{Kind, Tensor};

use crate::harness::ranks;

fn numbers(rank: usize, len: i64) -> Tensor {
    Tensor::arange(len, (Kind::Int64, tch::Device::Cpu)) * 7 + rank as i64 * 1000
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// all_reduce is reduce_scatter and then all_gather, and each rank's part is what arithmetic says.
    #[test]
    fn all_reduce_equals_reduce_scatter_and_all_gather(world_size in 1usize..5, part in 0i64..700) {
        let results = ranks(world_size, move |rank, group| {
            let whole = numbers(rank.rank(), part * world_size as i64);
            let mut mine = whole.narrow(0, 0, part).zeros_like();
            group.reduce_scatter_single(&mut mine, &whole, ReduceOp::Sum)?;
            let mut gathered = whole.zeros_like();
            group.all_gather_single(&mut gathered, &mine)?;
            let mut reduced = whole.copy();
            group.all_reduce(&mut reduced, ReduceOp::Sum)?;
            Ok((Vec::<i64>::try_from(gathered)?, Vec::<i64>::try_from(reduced)?))
        });
        let sum = |i: i64| (0..world_size as i64).map(|rank| i * 7 + rank * 1000).sum::<i64>();
        let expected: Vec<i64> = (0..part * world_size as i64).map(sum).collect();
        for (gathered, reduced) in results {
            prop_assert_eq!(&gathered, &expected);
            prop_assert_eq!(&reduced, &expected);
        }
    }

    /// Rows go where the splits say, whatever they are, and come in the order of the ranks.
    #[test]
    fn all_to_all_rows_follow_the_split_sizes(
        world_size in 1usize..5,
        splits in vec(0i64..20, 16),
        columns in 1i64..4,
    ) {
        let rows = move |from: usize, to: usize| splits[from * 4 + to];
        let expected = rows.clone();
        let results = ranks(world_size, move |rank, group| {
            let me = rank.rank();
            let sent: Vec<i64> = (0..world_size).map(|to| rows(me, to)).collect();
            let received: Vec<i64> = (0..world_size).map(|from| rows(from, me)).collect();
            let input = numbers(me, sent.iter().sum::<i64>() * columns).view([-1, columns]);
            let mut output = Tensor::zeros([received.iter().sum::<i64>(), columns], (Kind::Int64, input.device()));
            group.all_to_all_single(&mut output, &input, Some(&received), Some(&sent))?;
            Ok(Vec::<i64>::try_from(output.flatten(0, -1))?)
        });
        for (me, output) in results.iter().enumerate() {
            let from_each = (0..world_size).flat_map(|from| {
                let start: i64 = (0..me).map(|to| expected(from, to)).sum();
                let end = start + expected(from, me);
                (start * columns..end * columns).map(move |i| i * 7 + from as i64 * 1000)
            });
            prop_assert_eq!(output, &from_each.collect::<Vec<i64>>());
        }
    }
}
